"""Faults of a node's insides: killed containers, killed shims, a node that nobody hears of.

Guarantees:
1. Only processes in the cluster's own groups are ever signalled.
2. What was not found is an error: a test never passes because its fault did not happen.
"""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster.groups import Groups, hierarchies
from tests.cluster.machine import ClusterError
from tests.cluster.space import CONTROL

if TYPE_CHECKING:
    from tests.cluster.cluster import Cluster


def container_pids(cluster: "Cluster", namespace: str, pod: str, container: str = "") -> set[int]:
    """The processes of a pod's container, by default of all of its containers, as this machine sees them."""
    status = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"]
    wanted = {
        one["containerID"].partition("://")[2]
        for one in status.get("containerStatuses", ())
        if container in ("", one["name"]) and one.get("containerID")
    }
    return {pid for name in wanted for pid in _pids_of(cluster, name)}


def kill_container(cluster: "Cluster", namespace: str, pod: str, container: str = "") -> None:
    """Kills every process of a container, as when the machine runs out of memory; the kubelet starts it anew.

    Raises:
        ClusterError: it has none.
    """
    pids = container_pids(cluster, namespace, pod, container)
    if not pids:
        raise ClusterError(f"container: {namespace}/{pod}/{container} has no process")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_shim(cluster: "Cluster", namespace: str, pod: str) -> None:
    """Kills the containerd shim of a pod; its containers are killed with it, or are left without a parent.

    Raises:
        ClusterError: there is none.
    """
    found: dict[str, Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    containers = _containers(cluster, found["metadata"]["uid"])
    shims = [pid for pid in Groups(cluster.group).pids() if _shim_of(pid) in containers]
    if not shims:
        raise ClusterError(f"shim: {namespace}/{pod} has none")
    for pid in shims:
        os.kill(pid, signal.SIGKILL)


def unplug(cluster: "Cluster", node: str) -> None:
    """Takes a node off the network: no packet comes or goes until `plug`."""
    cluster.x("ip", "link", "set", node, "down")


def plug(cluster: "Cluster", node: str) -> None:
    """Ends `unplug`."""
    cluster.x("ip", "link", "set", node, "up")


def cut_pod(cluster: "Cluster", namespace: str, pod: str, other: str = CONTROL) -> None:
    """Resets connections of a pod with an address, by default the API server's, until `mend_pod`."""
    _reject(cluster, "-I", namespace, pod, other)


def mend_pod(cluster: "Cluster", namespace: str, pod: str, other: str = CONTROL) -> None:
    """Ends `cut_pod`."""
    _reject(cluster, "-D", namespace, pod, other)


def _reject(cluster: "Cluster", how: str, namespace: str, pod: str, other: str) -> None:
    found: dict[str, Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    address, node = found["status"]["podIP"], found["spec"]["nodeName"]
    reset = ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
    for source, target in ((address, other), (other, address)):
        cluster.x("iptables", "-w", how, "FORWARD", "-s", source, "-d", target, *reset, where=node)


def _containers(cluster: "Cluster", uid: str) -> set[str]:
    """Ids of the containers of a pod, of the one that holds its namespaces too."""
    return {path.name for pod in _find(cluster, f"pod{uid}") for path in pod.iterdir() if path.is_dir()}


def _pids_of(cluster: "Cluster", container: str) -> set[int]:
    return {
        int(line)
        for path in _find(cluster, container)
        for file in path.rglob("cgroup.procs")
        for line in file.read_text().split()
    }


def _find(cluster: "Cluster", name: str) -> list[Path]:
    return [path for root in hierarchies() for path in (root / cluster.group).glob(f"**/{name}")]


def _shim_of(pid: int) -> str:
    """The container that a shim was started for; nothing if the process is no shim."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "containerd-shim" not in words[0] or "-id" not in words:
        return ""
    return words[words.index("-id") + 1]
