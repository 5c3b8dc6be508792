"""Strikes at processes of pods, and at pods.

Guarantees:
1. Only processes of the cluster's own pods are signalled; a process that is not there is no strike.
2. Of a server that serves a policy the main process or the engine is struck, of every other part all
   processes of its container: a machine that loses memory or stands still does no less.
3. Operator, broker and rollout worker that were stopped go on after a while: the operator after longer than
   its Lease lasts. Trainers and servers stand still until somebody ends them.
"""

import signal
from pathlib import Path

from tests.cluster import faults
from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError
from tests.cluster.processes import Process
from tests.kills.matrix import Part, Strike

STILL_S = {Part.OPERATOR: 20.0, Part.BROKER: 10.0, Part.WORKER: 20.0}
_ENGINE = "EngineCore"
_CONTAINERS = {
    Part.HEAD: "trainer",
    Part.NODE: "trainer",
    Part.SERVER: "model",
    Part.ENGINE: "model",
    Part.WORKER: "worker",
    Part.OPERATOR: "operator",
    Part.BROKER: "broker",
}


def struck(
    cluster: Cluster, namespace: str, pod: str, part: Part, strike: Strike
) -> frozenset[Process] | None:
    """Strikes; the processes that stand still until `go_on`. None: there is nothing to strike."""
    if strike is Strike.DELETE:
        status, _ = cluster.api.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        return frozenset() if status == 200 else None
    victims = _victims(cluster, namespace, pod, part)
    if not victims:
        return None
    for victim in victims:
        victim.signal(signal.SIGKILL if strike is Strike.KILL else signal.SIGSTOP)
    return victims if strike is Strike.STOP else frozenset()


def go_on(processes: frozenset[Process]) -> None:
    """Ends a stop."""
    for process in processes:
        process.signal(signal.SIGCONT)


def _victims(cluster: Cluster, namespace: str, pod: str, part: Part) -> frozenset[Process]:
    try:
        found = faults.container_pids(cluster, namespace, pod, _CONTAINERS[part])
    except (ClusterError, OSError):  # the pod, or a group of it, has just gone
        return frozenset()
    if part is Part.SERVER:
        found = {pid for pid in found if _number_inside(pid) == 1}
    if part is Part.ENGINE:
        found = {pid for pid in found if _ENGINE in _title(pid)}
    return frozenset(process for pid in found if (process := Process.of(pid)) is not None)


def _number_inside(pid: int) -> int:
    """The pid of a process in its own container; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
