"""Rights: each with its reason, none for everything, and enough to grant the broker its own."""

import re
from collections.abc import Iterable, Iterator

import pytest

from agentfly.api import crd
from agentfly_operator.render.broker import broker_rights, credential_rights
from tests.unit.manifests.rendered import MANIFESTS, Object, objects
from tests.unit.operator.make_work import children

BASE = objects(MANIFESTS / "base")
RULES = BASE["ClusterRole", "agentfly-operator"]["rules"]
CREDENTIALS = BASE["ClusterRole", "agentfly-operator-credentials"]["rules"]
NAMED = ("agentfly-broker", "agentfly-broker-client")
WRITES = {"create", "delete", "deletecollection", "patch", "update"}
ROLES = [key for key in BASE if key[0] in {"ClusterRole", "Role"}]


def single(rules: Iterable[Object]) -> Iterator[tuple[str, str, str, str]]:
    """Each right by itself: group, resource, verb, name ("" is any)."""
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    for name in rule.get("resourceNames", [""]):
                        yield group, resource, verb, name


def covers(held: set[tuple[str, str, str, str]], right: tuple[str, str, str, str]) -> bool:
    return right in held or (*right[:3], "") in held


@pytest.mark.parametrize("key", ROLES, ids=lambda key: key[1])
def test_nothing_is_granted_by_a_wildcard(key):
    for rule in BASE[key]["rules"]:
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
        assert rule.keys() <= {"apiGroups", "resources", "resourceNames", "verbs"}


def test_the_operator_escalates_nothing_and_reads_no_secret_without_its_name():
    rights = set(single(RULES))
    assert not {verb for _, _, verb, _ in rights} & {"bind", "escalate", "impersonate", "update"}
    assert {name for _, resource, _, name in rights if resource == "secrets"} == set(NAMED)
    assert set(single(CREDENTIALS)) == {("", "secrets", "get", "")}


def test_the_operator_writes_only_what_is_named_or_has_no_fixed_name():
    nameless = {(r, v) for _, r, v, name in single(RULES) if v in WRITES and not name}
    assert nameless == {
        *((resource, verb) for resource in ("pods", "jobs") for verb in ("create", "delete", "patch")),
        *(
            (resource, verb)
            for resource in ("configmaps", "services", "resourcepools", "rayclusters")
            for verb in ("create", "delete")
        ),
        *((f"{kind.plural}/status", "patch") for kind in crd.KINDS),
        *(("networkpolicies", verb) for verb in ("create", "delete", "patch")),
        *(("workloads", verb) for verb in ("create", "delete", "patch")),
        ("workloads/status", "patch"),
        ("events", "create"),
        ("events", "patch"),
    }


def test_the_operator_may_grant_what_it_grants_brokers():
    granted = [
        *(each for each in broker_rights("team") if each["kind"] == "Role"),
        *(each for each in credential_rights("team", ["openai-key"]) if each["kind"] == "Role"),
    ]
    assert len(granted) == 2
    for role, needed in zip(granted, (RULES, [*RULES, *CREDENTIALS]), strict=True):
        held = set(single(needed))
        assert [right for right in single(role["rules"]) if not covers(held, right)] == []


def test_the_operator_may_write_every_object_of_a_broker_by_its_name():
    held = set(single(RULES))
    objects_of_a_broker = (*broker_rights("team"), *credential_rights("team", ["openai-key"]))
    for each in objects_of_a_broker:
        group = each["apiVersion"].rpartition("/")[0]
        for verb in ("get", "create", "patch"):
            assert covers(held, (group, f"{each['kind'].lower()}s", verb, each["metadata"]["name"])), each[
                "kind"
            ]


@pytest.mark.parametrize("child", children(), ids=lambda each: each["kind"] + each["metadata"]["name"])
def test_the_operator_may_make_and_end_what_belongs_to_runs_and_jobs(child):
    group = child["apiVersion"].rpartition("/")[0]
    resource = {"NetworkPolicy": "networkpolicies"}.get(child["kind"], f"{child['kind'].lower()}s")
    held = set(single(RULES))
    for verb in ("get", "create", "delete"):
        assert covers(held, (group, resource, verb, child["metadata"]["name"]))


def test_the_operator_keeps_its_hands_off_claims_and_specs_of_users():
    held = {(resource, verb) for _, resource, verb, _ in single(RULES)}
    assert {verb for resource, verb in held if resource == "persistentvolumeclaims"} == {"get"}
    for kind in ("trainingruns", "rolloutjobs"):
        assert {verb for resource, verb in held if resource == kind} == {"get", "list", "watch"}
    assert ("resourcepools", "patch") not in held


@pytest.mark.parametrize(
    "file",
    [
        "base/rights.yaml",
        "overlays/namespaced/watched/rights.yaml",
        "operator/leader.yaml",
        "queues/rights.yaml",
    ],
)
def test_a_comment_says_what_each_rule_is_for(file):
    text = (MANIFESTS / file).read_text()
    # Rules that follow each other without one share the comment above them.
    for rules in re.findall(r"^rules:\n(.*?)^---", text, re.M | re.S):
        assert rules.startswith("# ")
    assert text.count("- apiGroups") >= len(re.findall(r"\n(?:# .*\n)+", text))


def test_of_kueue_the_operator_only_reads_what_is_not_a_workload():
    queues = set(single(BASE["ClusterRole", "agentfly-operator-queues"]["rules"]))
    kueue = {right for right in {*single(RULES), *queues} if right[0] == "kueue.x-k8s.io"}
    others = {(resource, verb) for _, resource, verb, _ in kueue if not resource.startswith("workloads")}
    assert others == {(each, "get") for each in ("localqueues", "resourceflavors", "workloadpriorityclasses")}


def test_users_get_all_kinds_by_the_roles_that_they_have():
    view, edit = BASE["ClusterRole", "agentfly-view"], BASE["ClusterRole", "agentfly-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    plurals = {kind.plural for kind in crd.KINDS}
    assert {resource for _, resource, verb, _ in single(view["rules"]) if verb == "watch"} == plurals
    assert {resource for _, resource, verb, _ in single(edit["rules"]) if verb == "create"} == plurals
    assert not {verb for _, _, verb, _ in single(view["rules"])} & WRITES
    scaled = {f"{kind.plural}/scale" for kind in crd.KINDS if kind.scale is not None}
    assert {resource for _, resource, _, _ in single(edit["rules"]) if "/" in resource} == scaled
    assert scaled < {resource for _, resource, verb, _ in single(view["rules"]) if verb == "get"}
    # Nobody but the operator writes what was done.
    assert not [right for right in single(edit["rules"]) if right[1].endswith("/status")]
