"""What the demo shows, in figures: from the audit log, the broker's metrics and the last line of the worker.

Guarantees:
1. A request counts against the figure whoever's name it bears: a worker's by its identity, its user agent or
   the address of its pod.
2. Every figure that breaks its bound is named, with its value and the bound.

Nothing here asks anybody; see ``stage``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.resources.errors import ResourceError
from agentfly.resources.names import pool_of
from tests.cluster.audit import WRITES

WORKER_AGENT = "agentfly-worker/"
BROKER_AGENT = "agentfly-broker/"
INTO_PODS = frozenset({"exec", "attach", "portforward", "proxy"})
"""Subresources of pods by which a command could be run through the API server."""
FOLLOWING = frozenset({"list", "watch"})
"""How a broker follows pods and pools: as often with rollouts as without."""

Event = Mapping[str, Any]
"""A line of the audit log, of a request that ended."""
_SUMMARY = re.compile(
    r"^(?P<name>\S+): (?P<phase>\w+) rollouts=(?P<total>\d+) scored=(?P<scored>\d+) "
    r"masked=(?P<masked>\d+) failed=(?P<failed>\d+)(?: reward=(?P<reward>[\d.]+))?$",
    re.M,
)


@dataclass(frozen=True)
class Bounds:
    """What must hold: ``rollouts`` are scored, by at most ``pods`` sandboxes."""

    rollouts: int
    pods: int


@dataclass(frozen=True)
class Figures:
    """What was counted.

    ``tool_requests``: requests to the API server while rollouts ran that a tool call could have made: any of
    a worker, any of the broker that does not follow objects, any into a pod. ``writes``: those of the
    broker that change something: with sandboxes that run all the time, no acquire has an excuse for one.
    """

    rollouts: int
    scored: int
    reward: float | None
    pods: int
    acquires: int
    warm: int
    resets: int
    verified: int
    tool_requests: int
    writes: int

    def line(self) -> str:
        """The last line of the demo."""
        reward = "" if self.reward is None else f", reward {self.reward:.3f}"
        return (
            f"cluster-demo: {self.scored}/{self.rollouts} rollouts scored{reward}; "
            f"{self.pods} sandbox pods created; {self.verified}/{self.resets} resets verified; "
            f"API server: {self.tool_requests} requests for tool calls, "
            f"{self.writes} writes for {self.acquires} acquires ({self.warm} warm)"
        )

    def broken(self, bounds: Bounds) -> list[str]:
        """A sentence for each figure that is not what it must be."""
        rules = (
            (self.rollouts == bounds.rollouts, f"rollouts: {self.rollouts} is not {bounds.rollouts}"),
            (self.scored == bounds.rollouts, f"rollouts scored: {self.scored} is not {bounds.rollouts}"),
            (0 < self.pods <= bounds.pods, f"sandbox pods created: {self.pods} is not 1 to {bounds.pods}"),
            (self.warm > 0, "warm acquires: there was none, and their cost is to be shown"),
            (self.acquires >= bounds.rollouts, f"acquires: {self.acquires} is less than {bounds.rollouts}"),
            (
                self.resets == self.acquires,
                f"resets: {self.resets} is not one for each of {self.acquires} acquires",
            ),
            (self.verified == self.resets, f"resets verified: {self.verified} is not {self.resets}"),
            (self.tool_requests == 0, f"API-server requests for tool calls: {self.tool_requests} is not 0"),
            (self.writes == 0, f"API-server writes for acquires: {self.writes} is not 0"),
        )
        return [text for holds, text in rules if not holds]


def pods_created(events: Iterable[Event], pool: str, namespace: str) -> int:
    """Pods of a pool that the broker of a namespace was given."""
    return sum(
        event["verb"] == "create"
        and _resource(event) == ("pods", "")
        and event.get("responseStatus", {}).get("code") == 201
        and event["user"].get("username") == broker_user(namespace)
        and _pool(event) == pool
        for event in events
    )


def tool_requests(events: Iterable[Event], namespace: str, workers: Sequence[str]) -> list[Event]:
    """Requests that tool calls could have made.

    Args:
        workers: addresses of worker pods.
    """
    found = {}
    for event in events:
        kind, sub = _resource(event)
        of_worker = event.get("userAgent", "").startswith(WORKER_AGENT) or any(
            address in event.get("sourceIPs", ()) for address in workers
        )
        of_broker = is_broker(event, namespace) and event["verb"] not in FOLLOWING
        if of_worker or of_broker or (kind == "pods" and sub in INTO_PODS):
            found[event["auditID"]] = event  # one that streams is logged when it starts and when it ends
    return list(found.values())


def broker_writes(events: Iterable[Event], namespace: str) -> list[Event]:
    """Requests of a namespace's broker that change something."""
    return [event for event in events if is_broker(event, namespace) and event["verb"] in WRITES]


def broker_user(namespace: str) -> str:
    """As whom the broker of a namespace asks the API server."""
    return f"system:serviceaccount:{namespace}:agentfly-broker"


def is_broker(event: Event, namespace: str) -> bool:
    """Whether a request is that of a namespace's broker."""
    agent: str = event.get("userAgent", "")
    here = (event.get("objectRef") or {}).get("namespace") == namespace
    return (here and agent.startswith(BROKER_AGENT)) or event["user"].get("username") == broker_user(
        namespace
    )


def metric(text: str, name: str, **labels: str) -> int:
    """The sum of a metric's values over all labels that are not given; 0 if it has none."""
    total = 0.0
    for line in text.splitlines():
        found = re.match(r"^(\w+)(?:\{(.*)\})? (\S+)", line)
        if found is None or found[1] != name:
            continue
        has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
        if labels.items() <= has.items():
            total += float(found[3])
    return round(total)


def summary(log: str) -> tuple[int, int, float | None]:
    """Rollouts, how many of them are scored, and their mean reward, from the last line of a worker.

    Raises:
        ValueError: there is none.
    """
    lines = list(_SUMMARY.finditer(log))
    if not lines:
        raise ValueError(f"worker: its log has no summary: {log[-500:]}")
    last = lines[-1]
    reward = float(last["reward"]) if last["reward"] else None
    return int(last["total"]), int(last["scored"]), reward


def _pool(event: Event) -> str:
    try:
        return pool_of(event["objectRef"].get("name", ""))
    except ResourceError:
        return ""


def _resource(event: Event) -> tuple[str, str]:
    ref = event.get("objectRef") or {}
    return ref.get("resource", ""), ref.get("subresource", "")
