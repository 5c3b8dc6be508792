"""The faults that the test cluster can cause do happen, and the cluster works again afterwards."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import faults, images
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.cluster import running as running_cluster
from tests.cluster.groups import Groups
from tests.cluster.machine import ClusterError
from tests.cluster.traces import NOTHING, traces

PODS = "/api/v1/namespaces/default/pods"


def create(cluster: Cluster, name: str, node: str = "node1", **spec: Any) -> None:
    container = {"name": "c", "image": "agentfly-test/busybox:1", "command": ["sleep", "100000"]}
    cluster.api.create(
        PODS, {"metadata": {"name": name}, "spec": {"containers": [container], "nodeName": node, **spec}}
    )
    wait(f"pod {name}", lambda: running(cluster, name), 30.0)


def running(cluster: Cluster, name: str, restarts: int = 0) -> bool:
    found = cluster.api.get(f"{PODS}/{name}")["status"].get("containerStatuses", ())
    return any("running" in one["state"] and one["restartCount"] >= restarts for one in found)


def remove(cluster: Cluster, name: str) -> None:
    cluster.api.call("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 1})
    wait(f"{name} gone", lambda: not cluster.api.exists(f"{PODS}/{name}"), 60.0)


def ready(cluster: Cluster, node: str) -> str:
    conditions = cluster.api.get(f"/api/v1/nodes/{node}")["status"]["conditions"]
    return str(next(one["status"] for one in conditions if one["type"] == "Ready"))


def test_a_killed_container_is_started_anew_by_the_kubelet(node: Cluster) -> None:
    create(node, "killed")
    faults.kill_container(node, "default", "killed", "c")
    wait("restarted", lambda: running(node, "killed", restarts=1), 30.0)
    remove(node, "killed")


def test_a_killed_shim_is_noticed_and_the_pod_runs_again(node: Cluster) -> None:
    create(node, "shimless")
    before = faults.container_pids(node, "default", "shimless")
    faults.kill_shim(node, "default", "shimless")
    wait("restarted", lambda: running(node, "shimless", restarts=1), 60.0)
    assert not before & faults.container_pids(node, "default", "shimless")
    remove(node, "shimless")


def test_the_connections_of_a_pod_are_cut_and_mended(node: Cluster) -> None:
    create(node, "cut")

    def connects() -> bool:
        script = "nc -w 2 10.96.0.1 443 </dev/null && echo yes"
        return node.kubectl("exec", "cut", "--", "sh", "-c", script, check=False) == "yes\n"

    assert connects()
    faults.cut_pod(node, "default", "cut")
    assert not connects()
    faults.mend_pod(node, "default", "cut")
    assert connects()
    remove(node, "cut")


def test_a_fault_that_finds_nothing_is_an_error(node: Cluster) -> None:
    create(node, "whole")
    with pytest.raises(ClusterError, match="container: default/whole/other has no process"):
        faults.kill_container(node, "default", "whole", "other")
    remove(node, "whole")


def test_pods_outlive_a_killed_kubelet_which_finds_them_again(node: Cluster) -> None:
    create(node, "survivor")
    before = faults.container_pids(node, "default", "survivor")
    node.kill("node1-kubelet")
    assert node.names()["node1-kubelet"] is False
    assert faults.container_pids(node, "default", "survivor") == before
    assert node.restart("node1-kubelet") < 60.0
    assert node.kubectl("exec", "survivor", "--", "echo", "here") == "here\n"
    assert faults.container_pids(node, "default", "survivor") == before
    remove(node, "survivor")


def test_pods_outlive_a_killed_containerd(node: Cluster) -> None:
    create(node, "orphan")
    before = faults.container_pids(node, "default", "orphan")
    node.kill("node1-containerd")
    assert faults.container_pids(node, "default", "orphan") == before
    assert node.restart("node1-containerd") < 60.0
    wait("exec", lambda: node.kubectl("exec", "orphan", "--", "echo", "here", check=False) == "here\n", 30.0)
    assert faults.container_pids(node, "default", "orphan") == before
    remove(node, "orphan")


def test_pods_outlive_a_killed_api_server(node: Cluster) -> None:
    create(node, "quiet")
    before = faults.container_pids(node, "default", "quiet")
    node.kill("kube-apiserver")
    assert before <= Groups(node.group).pids()
    assert node.restart("kube-apiserver") < 60.0
    wait("running", lambda: running(node, "quiet"), 30.0)
    assert faults.container_pids(node, "default", "quiet") == before
    remove(node, "quiet")


def test_nothing_of_a_cluster_with_pods_is_left_after_it(node: Cluster, tmp_path: Path) -> None:
    """`node` says that this machine can. What a kubelet writes to fixed places must not be there either."""
    fixed = [
        Path(place) for place in ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/run/containerd")
    ]
    before = [path.exists() for path in fixed]
    folder = tmp_path / "c"
    with running_cluster(folder, nodes=["containerd2"]) as second:
        second.import_image(images.busybox())
        create(second, "mine", hostUsers=False)
        assert faults.container_pids(second, "default", "mine")
        assert traces(folder)["mounts"] == []
    assert traces(folder) == NOTHING
    assert [path.exists() for path in fixed] == before


def test_a_second_node_of_the_other_kind_runs_pods_that_reach_those_of_the_first(two_nodes: Cluster) -> None:
    found = two_nodes.api.get("/api/v1/nodes/node2")["status"]
    assert found["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://1.")
    handlers = found.get("runtimeHandlers", ())
    assert not any(one.get("features", {}).get("userNamespaces") for one in handlers)
    create(two_nodes, "first", "node1")
    create(two_nodes, "second", "node2")
    address = two_nodes.api.get(f"{PODS}/first")["status"]["podIP"]
    other = two_nodes.api.get(f"{PODS}/second")["status"]["podIP"]
    assert (address.split(".")[2], other.split(".")[2]) == ("1", "2")
    assert "1 packets received" in two_nodes.kubectl("exec", "second", "--", "ping", "-c", "1", address)
    remove(two_nodes, "first")
    remove(two_nodes, "second")


def test_an_unplugged_node_is_missed_and_comes_back(two_nodes: Cluster) -> None:
    faults.unplug(two_nodes, "node2")
    try:
        wait("node2 missed", lambda: ready(two_nodes, "node2") == "Unknown", 90.0, every_s=1.0)
        assert ready(two_nodes, "node1") == "True"
    finally:
        faults.plug(two_nodes, "node2")
    wait("node2 back", lambda: ready(two_nodes, "node2") == "True", 60.0, every_s=1.0)
    begun = time.monotonic()
    create(two_nodes, "after", "node2")
    assert time.monotonic() - begun < 30.0
    remove(two_nodes, "after")
