"""From nothing to a pool that serves and back, on a real node, with the images that the Dockerfiles make."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import images, product
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.machine import Unavailable

BASE = str(Path(__file__).parents[2] / "manifests/base")
SYSTEM = "agentfly-system"
TEAM = "install"
POOL = {
    "apiVersion": "agentfly.dev/v1alpha1",
    "kind": "ResourcePool",
    "metadata": {"name": "shell", "namespace": TEAM},
    "spec": {
        "type": "Container",
        "container": {"image": images.PYTHON, "cpu": "100m", "memory": "256Mi"},
        "capacity": {"min": 1, "max": 2},
    },
}
STARTED_S = 120.0
GONE_S = 120.0


@pytest.fixture
def installed(node: Cluster) -> Iterator[Cluster]:
    try:
        node.import_image(product.agentfly_image(), product.sandboxd_image())
    except Unavailable as error:
        pytest.skip(error.render())
    node.kubectl("create", "namespace", TEAM)
    node.kubectl("apply", "-k", BASE)
    try:
        yield node
    finally:
        node.kubectl("delete", "-k", BASE, "--ignore-not-found", timeout_s=GONE_S)
        node.kubectl("delete", "namespace", TEAM, timeout_s=GONE_S)


def items(cluster: Cluster, what: str, *where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cluster.kubectl("get", what, *where, "-o", "json"))["items"]
    return found


def ready(cluster: Cluster, deployment: str, namespace: str) -> Callable[[], bool]:
    def look() -> bool:
        (found,) = [
            *(
                each
                for each in items(cluster, "deployments", "-n", namespace)
                if each["metadata"]["name"] == deployment
            ),
            {},
        ][:1]
        return bool(found.get("status", {}).get("readyReplicas"))

    return look


def serves(cluster: Cluster) -> bool:
    (pool,) = items(cluster, "rpool", "-n", TEAM)
    conditions = {each["type"]: each["status"] for each in pool.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and pool["status"]["members"]["ready"] == 1


@pytest.mark.timeout(900)
def test_from_nothing_to_a_pool_that_serves_and_back(installed: Cluster) -> None:
    wait("the operator", ready(installed, "agentfly-operator", SYSTEM), STARTED_S, every_s=0.5)
    installed.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(POOL))
    wait("the pool", lambda: serves(installed), STARTED_S, every_s=0.5)
    kinds = "pods,deployments,services,secrets,roles,rolebindings,networkpolicies,poddisruptionbudgets"
    marked = ("-n", TEAM, "-l", "app.kubernetes.io/managed-by=agentfly")
    assert {each["kind"] for each in items(installed, kinds, *marked)} == {
        *("Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget"),
        *("Role", "RoleBinding", "Secret", "Service"),
    }
    metrics = installed.kubectl(
        "get", "--raw", f"/api/v1/namespaces/{SYSTEM}/services/agentfly-operator:http/proxy/metrics"
    )
    assert "agentfly_operator_leader 1.0" in metrics
    # The operator is there and must not bring back what is deleted.
    installed.kubectl("delete", "rpool", "--all", "--all-namespaces")
    wait("nothing left", lambda: not items(installed, kinds, *marked), GONE_S, every_s=0.5)
    installed.kubectl("delete", "-k", BASE, timeout_s=GONE_S)
    assert not items(installed, kinds, *marked)
    assert SYSTEM not in {each["metadata"]["name"] for each in items(installed, "namespaces")}
