"""Install and uninstall on a real API server: everything is accepted, and nothing is left, operator or not.

A control plane of its own: deleting the kinds would take other tests' pools along.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfly_operator.names import labels
from agentfly_operator.render.broker import broker_rights, credential_rights
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster, running
from tests.cluster.machine import ClusterError, Unavailable

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "manifests/base")
CRDS = str(ROOT / "crds")
KINDS = ("resourcepools", "rolloutjobs", "trainingruns")
NAMESPACED = str(ROOT / "manifests/overlays/namespaced")
SYSTEM = "agentfly-system"
TEAM = "team"
AS_OPERATOR = f"--as=system:serviceaccount:{SYSTEM}:agentfly-operator"
GONE_S = 90.0
SLOW_S = 240.0  # the end of a namespace takes the controller manager some seconds, on a busy machine more

Object = dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="afi-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            with running(Path(folder) / "c") as found:
                found.kubectl("create", "namespace", TEAM)
                yield found
        except Unavailable as error:
            pytest.skip(f"test cluster: {error.render()}")


@pytest.fixture
def installed(cluster: Cluster) -> Cluster:
    """With everything of base in it, whatever the test before has deleted."""
    cluster.kubectl("apply", "-k", BASE, timeout_s=SLOW_S)
    cluster.kubectl("wait", "--for=condition=Established", "crd", "-l", "app.kubernetes.io/part-of=agentfly")
    return cluster


def ours(cluster: Cluster) -> set[str]:
    """Everything of the product that there is, of every kind, in every namespace."""
    api = cluster.api
    groups = [group["preferredVersion"]["groupVersion"] for group in api.get("/apis")["groups"]]
    found: set[str] = set()
    for root in ("/api/v1", *(f"/apis/{group}" for group in groups)):
        for resource in listed(cluster, root, "resources"):
            if not {"list", "delete"} <= set(resource["verbs"]) or resource["name"] == "events":
                continue
            for each in listed(cluster, f"{root}/{resource['name']}", "items"):
                marks = each["metadata"].get("labels", {})
                if "agentfly" in {
                    marks.get(f"app.kubernetes.io/{mark}") for mark in ("part-of", "managed-by")
                }:
                    found.add(f"{resource['name']}/{each['metadata']['name']}")
    return found


def listed(cluster: Cluster, path: str, field: str) -> list[Object]:
    """A group or kind that is gone, perhaps since a moment ago, has nothing."""
    answers: list[tuple[int, Any]] = []

    def answered() -> bool:  # a kind that was just made is told to come back
        answers.append(cluster.api.call("GET", path))
        return answers[-1][0] != 429

    wait(path, answered, 20.0, every_s=0.5)
    status, body = answers[-1]
    assert status in {200, 404}, (path, status, body)
    return body[field] if status == 200 else []


def pool(name: str) -> Object:
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name, "namespace": TEAM},
        "spec": {"type": "Container", "container": {"image": "python:3.12"}, "capacity": {"max": 2}},
    }


def children(uids: dict[str, str]) -> list[Object]:
    """What operator and broker make for pools: one of each kind that they write."""
    owners = [
        {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "name": name, "uid": uid}
        for name, uid in uids.items()
    ]
    containers = [{"name": "c", "image": "agentfly-test/none:1"}]
    selected = {"matchLabels": {"agentfly.dev/component": "broker"}}
    template = {"metadata": {"labels": labels("broker")}, "spec": {"containers": containers}}
    made = [
        *broker_rights(TEAM),
        {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None", "ports": [{"port": 7080}]}},
        {"apiVersion": "v1", "kind": "Secret", "immutable": True, "data": {"signing-key": "AAAA"}},
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"selector": selected}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"selector": selected, "template": template}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {"podSelector": selected}},
    ]
    named: Object = {"name": "agentfly-broker", "namespace": TEAM, "labels": labels("broker")}
    found = [{**each, "metadata": {**named, "ownerReferences": owners}} for each in made]
    for owner in owners:
        name = f"{owner['name']}-1f0c-1"
        metadata = {"name": name, "namespace": TEAM, "labels": labels("member"), "ownerReferences": [owner]}
        found.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
        )
    return found


def with_pools(cluster: Cluster, *names: str) -> None:
    """Pools as they are in use, with no operator that could clean up."""
    apply(cluster, *(pool(name) for name in names))
    listed = json.loads(cluster.kubectl("get", "rpool", "-n", TEAM, "-o", "json"))["items"]
    made = children({each["metadata"]["name"]: each["metadata"]["uid"] for each in listed})
    apply(cluster, *made)
    assert {f"pods/{name}-1f0c-1" for name in names} <= ours(cluster)


def known_to_the_collector(cluster: Cluster) -> None:
    """Kubernetes' garbage collector hears of new kinds every 30 s; from then on it deletes what pools own."""
    apply(cluster, pool("probe"))
    uid = cluster.kubectl("get", "rpool", "probe", "-n", TEAM, "-o", "jsonpath={.metadata.uid}")
    owner = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "name": "probe", "uid": uid}
    metadata = {"name": "probe", "namespace": TEAM, "ownerReferences": [owner]}
    apply(cluster, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    cluster.kubectl("delete", "rpool", "probe", "-n", TEAM)
    probe = ("get", "configmap", "probe", "-n", TEAM, "--ignore-not-found", "-o", "name")
    wait("the collector to know our kinds", lambda: not cluster.kubectl(*probe), GONE_S, every_s=1.0)


def apply(cluster: Cluster, *objects: Object, flags: Sequence[str] = ("--server-side",)) -> str:
    return cluster.kubectl("apply", *flags, "-f", "-", stdin=yaml.safe_dump_all(objects))


def can(cluster: Cluster, who: str, verb: str, what: str, namespace: str = TEAM) -> bool:
    answer = cluster.kubectl("auth", "can-i", verb, what, "-n", namespace, who, check=False)
    return answer.strip() == "yes"


# Install


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_applying_again_changes_nothing(installed: Cluster, flags: tuple[str, ...]) -> None:
    def versions() -> dict[str, str]:
        listed = json.loads(installed.kubectl("get", "-k", BASE, "-o", "json"))["items"]
        return {
            f"{each['kind']} {each['metadata']['name']}": each["metadata"]["resourceVersion"]
            for each in listed
            if each["kind"] not in {"Deployment", "PodDisruptionBudget"}  # their status moves
        }

    installed.kubectl("apply", "-k", BASE, *flags)
    before = versions()
    for _ in range(3):
        installed.kubectl("apply", "-k", BASE, *flags)
    assert versions() == before
    assert len(before) == 16


def test_the_operators_pod_is_admitted_as_restricted(installed: Cluster) -> None:
    def pods() -> list[Object]:
        return json.loads(installed.kubectl("get", "pods", "-n", SYSTEM, "-o", "json"))["items"]

    wait("the pod of the operator", lambda: len(pods()) == 1, 20.0)


@pytest.mark.parametrize("folder", ["manifests/overlays/cluster-wide", "manifests/overlays/namespaced"])
def test_every_object_passes_a_dry_run(installed: Cluster, folder: str) -> None:
    installed.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(ROOT / folder)
    )


# Rights


def test_the_operator_may_do_what_it_is_for_and_no_more(installed: Cluster) -> None:
    for verb, what in (
        ("watch", "resourcepools"),
        ("patch", "resourcepools/agentfly --subresource=status"),
        ("patch", "deployments/agentfly-broker"),
        ("create", "networkpolicies"),
        ("patch", "trainingruns/first --subresource=status"),
        ("patch", "rolloutjobs/first --subresource=status"),
        ("create", "jobs"),
        ("delete", "resourcepools/first-policy"),
        ("get", "persistentvolumeclaims/runs"),
    ):
        resource, *more = what.split()
        answer = installed.kubectl(
            "auth", "can-i", verb, resource, *more, "-n", TEAM, AS_OPERATOR, check=False
        )
        assert answer.strip() == "yes", (verb, what)
    for verb, what in (
        ("patch", "resourcepools"),
        ("patch", "trainingruns"),
        ("delete", "rolloutjobs"),
        ("create", "persistentvolumeclaims"),
        ("delete", "persistentvolumeclaims"),
        ("list", "configmaps"),
        ("patch", "configmaps"),
        ("list", "secrets"),
        ("patch", "secrets/other"),
        ("patch", "deployments/other"),
        ("bind", "clusterroles"),
        ("escalate", "roles"),
        ("list", "namespaces"),
        ("get", "leases/agentfly-operator"),
        ("delete", "secrets/agentfly-broker"),
    ):
        assert not can(installed, AS_OPERATOR, verb, what), (verb, what)
    assert can(installed, AS_OPERATOR, "update", "leases/agentfly-operator", SYSTEM)


GRANT = ("--server-side", "--field-manager=agentfly", AS_OPERATOR)
CREDENTIALS = ("openai-key",)


def test_the_operator_can_grant_the_broker_its_rights(installed: Cluster) -> None:
    apply(installed, *broker_rights(TEAM), *credential_rights(TEAM, CREDENTIALS), flags=GRANT)
    who = f"--as=system:serviceaccount:{TEAM}:agentfly-broker"
    assert can(installed, who, "get", "secrets/openai-key")
    assert not can(installed, who, "get", "secrets/agentfly-broker")
    assert can(installed, who, "create", "pods")
    assert not can(installed, who, "create", "pods", "default")


def test_without_the_role_for_credentials_no_secret_is_granted_and_all_else_is(installed: Cluster) -> None:
    objects = (*broker_rights(TEAM), *credential_rights(TEAM, CREDENTIALS))
    for each in objects:
        installed.kubectl("delete", each["kind"], each["metadata"]["name"], "-n", TEAM, "--ignore-not-found")
    installed.kubectl("delete", "clusterrolebinding", "agentfly-operator-credentials")
    apply(installed, *broker_rights(TEAM), flags=GRANT)
    with pytest.raises(ClusterError, match="attempting to grant RBAC permissions not currently held"):
        apply(installed, *credential_rights(TEAM, CREDENTIALS), flags=GRANT)


def test_users_have_our_kinds_by_kubernetes_own_roles(installed: Cluster) -> None:
    for role in ("view", "edit"):
        installed.kubectl(
            "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}r", "-n", TEAM
        )
    try:
        wait("aggregated", lambda: can(installed, "--as=viewr", "list", "resourcepools"), 10.0)
        assert not can(installed, "--as=viewr", "create", "resourcepools")
        assert can(installed, "--as=editr", "create", "trainingruns")
        assert can(installed, "--as=editr", "list", "resourcepools")
        cannot = installed.kubectl(
            *("auth", "can-i", "patch", "resourcepools", "--subresource=status", "-n", TEAM, "--as=editr"),
            check=False,
        )
        assert cannot.strip() == "no"
    finally:
        installed.kubectl("delete", "rolebinding", "view", "edit", "-n", TEAM)


# Uninstall: nothing runs here but the control plane, so whatever ends, ends without the operator.

STEPS = {
    "pools": ("delete", "rpool", "--all", "-n", TEAM),
    "foreground": ("delete", "rpool", "--all", "-n", TEAM, "--cascade=foreground"),
    "operator": ("delete", "namespace", SYSTEM),
    "kinds": ("delete", "crd", "-l", "app.kubernetes.io/part-of=agentfly"),
    "rights": ("delete", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/part-of=agentfly"),
    "base": ("delete", "-k", BASE, "--ignore-not-found"),
}
ORDERS = [("base",), ("foreground", "base"), ("kinds", "base"), ("operator", "rights", "pools", "kinds")]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_nothing_is_left_in_whatever_order_it_is_deleted(installed: Cluster, order: tuple[str, ...]) -> None:
    known_to_the_collector(installed)
    with_pools(installed, "one", "two")
    for step in order:
        installed.kubectl(*STEPS[step], timeout_s=SLOW_S)
    wait("nothing of ours left", lambda: not ours(installed), GONE_S, every_s=1.0)


def test_what_kinds_left_that_went_too_soon_goes_when_they_are_back(installed: Cluster) -> None:
    with_pools(installed, "one")
    installed.kubectl(*STEPS["base"], timeout_s=SLOW_S)
    installed.kubectl("apply", "-k", CRDS)
    kinds = {f"customresourcedefinitions/{name}.agentfly.dev" for name in KINDS}
    wait("nothing but kinds", lambda: ours(installed) == kinds, GONE_S, every_s=1.0)
    installed.kubectl("delete", "-k", CRDS)
    wait("nothing of ours left", lambda: not ours(installed), GONE_S, every_s=1.0)


def test_a_namespace_of_pools_ends_with_nothing_of_ours_in_its_way(installed: Cluster) -> None:
    with_pools(installed, "one")
    installed.kubectl("delete", "namespace", TEAM, timeout_s=SLOW_S)
    try:
        assert not ours(installed) & {"pods/one-1f0c-1", "deployments/agentfly-broker", "resourcepools/one"}
    finally:
        installed.kubectl("create", "namespace", TEAM)


def test_one_pool_of_two_takes_only_its_own_along(installed: Cluster) -> None:
    with_pools(installed, "one", "two")
    installed.kubectl("delete", "rpool", "one", "-n", TEAM)
    wait("its member gone", lambda: "pods/one-1f0c-1" not in ours(installed), GONE_S)
    assert {"pods/two-1f0c-1", "deployments/agentfly-broker"} <= ours(installed)
    installed.kubectl("delete", "rpool", "two", "-n", TEAM)
    wait("all gone", lambda: "deployments/agentfly-broker" not in ours(installed), GONE_S)


def test_a_namespaced_install_reaches_its_namespace_only_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.kubectl("delete", "-k", BASE, "--ignore-not-found", timeout_s=SLOW_S)
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.kubectl("apply", "-k", NAMESPACED)
    assert can(cluster, AS_OPERATOR, "delete", "pods", SYSTEM)
    assert not can(cluster, AS_OPERATOR, "list", "pods", TEAM)
    cluster.kubectl("delete", "-k", NAMESPACED)
    wait("uninstalled", lambda: not ours(cluster), GONE_S)
