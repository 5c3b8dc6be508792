"""docs/install.md and docs/gitops.md say what is so: files, ports, rights and examples."""

import re
from pathlib import Path

import pytest
import yaml

from agentfly.resources.runners.kubernetes.pod import UNPRIVILEGED
from agentfly.roles.launch import STATE_PORT
from agentfly_operator import names
from agentfly_operator.config import Config
from tests.unit.manifests.kstatus import kstatus
from tests.unit.manifests.rendered import MANIFESTS, ROOT, objects
from tests.unit.manifests.test_health import an_object, argo
from tests.unit.manifests.test_kustomizations import overlay
from tests.unit.manifests.test_rights import BASE, RULES

INSTALL = (ROOT / "docs/install.md").read_text()
GITOPS = (ROOT / "docs/gitops.md").read_text()
EXAMPLES = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", INSTALL, re.S)


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of a table."""
    table = text.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("page", [INSTALL, GITOPS], ids=["install", "gitops"])
def test_every_file_that_is_named_is_there(page):
    for name in re.findall(r"(?:manifests|crds)(?:/[\w.-]+)*", page):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_renders(tmp_path, number):
    assert len(EXAMPLES) == 3
    found = objects(overlay(tmp_path, EXAMPLES[number]))
    (container,) = found["Deployment", "agentfly-operator"]["spec"]["template"]["spec"]["containers"]
    if number == 2:
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert container["image"] == variables["AGENTFLY_IMAGE"] == "registry.example.com/agentfly:0.1"
        assert variables["AGENTFLY_SANDBOXD_IMAGE"] == "registry.example.com/sandboxd:0.1"
        assert variables["AGENTFLY_TRAINER_IMAGE"] == "registry.example.com/trainer:0.1"
        assert variables["AGENTFLY_INFERENCE_IMAGE"] == "registry.example.com/inference:0.1"
        assert variables["AGENTFLY_COLOCATED_IMAGE"] == "registry.example.com/colocated:0.1"
        assert "POD_NAME" in variables
    else:
        named = container["args"][1::2]
        assert named == [["$(POD_NAMESPACE)"], ["agents", "more"]][number]
        assert found["Deployment", "agentfly-operator"]["metadata"]["namespace"] == "agents"


def test_the_table_of_rights_is_the_role():
    told = set()
    for resources, verbs, _ in rows(INSTALL, "resources | verbs | for"):
        listed, _, named = resources.partition(" named ")
        for resource in re.findall(r"`([^`]+)`", listed):
            told.add((resource, frozenset(verbs.split(", ")), frozenset(re.findall(r"`([^`]+)`", named))))
    granted: dict[tuple[str, frozenset[str]], set[str]] = {}
    for rule in [*RULES, *BASE["Role", "agentfly-operator-leader"]["rules"]]:
        for resource in rule["resources"]:
            key = (resource, frozenset(rule.get("resourceNames", ())))
            granted.setdefault(key, set()).update(rule["verbs"])
    leases = granted.pop(("leases", frozenset()))  # `create` cannot be limited by name: one row says both
    granted["leases", frozenset({"agentfly-operator"})] |= leases
    assert told == {(resource, frozenset(verbs), named) for (resource, named), verbs in granted.items()}


def test_ports_are_those_that_are_listened_on():
    told = {(target, port) for _, target, port, _ in rows(INSTALL, "from | to | port | why")}
    (container,) = BASE["Deployment", "agentfly-operator"]["spec"]["template"]["spec"]["containers"]
    assert told == {
        ("API server", "443, 6443"),
        ("broker", str(names.BROKER_PORT)),
        ("member", str(names.SANDBOXD_PORT)),
        ("member with a model", str(names.MODEL_PORT)),
        ("operator", str(container["ports"][0]["containerPort"])),
        ("head of the trainers", str(STATE_PORT)),
        ("trainer of the same run", "all"),
    }


def test_variables_are_those_that_the_operator_reads():
    for variable in set(re.findall(r"AGENTFLY_[A-Z_]+", INSTALL)):
        assert variable in Path(Config.from_environment.__code__.co_filename).read_text()


def test_the_labels_that_it_names_are_those_of_the_operator():
    assert f"{names.COMPONENT}: worker" in INSTALL
    assert f"{names.PART_OF}: {names.AGENTFLY}" in INSTALL
    assert names.CLIENT_SECRET in INSTALL


def test_the_user_is_the_one_that_pods_have():
    told = " ".join(INSTALL.split())
    assert f"user and group {UNPRIVILEGED}" in told
    assert f"as user {UNPRIVILEGED} on a read-only root" in told


STATES = {
    "is new, or has a generation that nobody has looked at": ({}, 2),
    "starts its first members, or replaces those of an older spec": (
        {"Reconciling": "True", "Ready": "False"},
        3,
    ),
    "serves": ({"Reconciling": "False", "Ready": "True"}, 3),
    "has no capacity, or its broker does not answer, for now": ({"Reconciling": "True", "Ready": "False"}, 3),
    "will not get there without a person (`Stalled`)": ({"Stalled": "True", "Ready": "False"}, 3),
}


def test_the_table_of_states_is_what_the_tools_say():
    table = rows(GITOPS, "the pool | Flux, kstatus | Argo CD")
    assert [row[0] for row in table] == list(STATES)
    for state, flux, argo_cd in table:
        conditions, observed = STATES[state]
        pool = an_object("ResourcePool", conditions, observed=observed)
        assert (kstatus(pool), argo(pool)[0]) == (flux, argo_cd), state


def test_options_that_it_speaks_of_are_in_the_application():
    application = yaml.safe_load((MANIFESTS / "gitops/argocd/application.yaml").read_text())
    for option in re.findall(r"`(\w+=true)`", GITOPS):
        assert option in application["spec"]["syncPolicy"]["syncOptions"]
