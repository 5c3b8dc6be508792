"""Builders of what the operator's planners decide on."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from agentfly.api import Condition
from agentfly_operator.config import Config
from agentfly_operator.plan.facts import PodFacts
from agentfly_operator.plan.seen import BrokerSeen, PoolReport, PoolSeen
from agentfly_operator.plan.wanted import Wanted, read_pool

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
CONFIG = Config(
    image="registry.example/agentfly:1",
    sandboxd_image="registry.example/sandboxd:1",
    pull_policy="IfNotPresent",
    namespace="agentfly-system",
    identity="operator-0",
)


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def pool(name: str = "shell", *, generation: int = 1, namespace: str = "team", **spec: Any) -> dict[str, Any]:
    """A ResourcePool as the API server returns it."""
    whole = {"type": "Container", "container": {"image": "busybox"}, "capacity": {"max": 8}, **spec}
    meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": generation}
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {**meta, "resourceVersion": "1", "creationTimestamp": "2026-11-30T11:00:00Z"},
        "spec": whole,
        "status": {"observedGeneration": -1},
    }


def wanted(**capacity: int) -> Wanted:
    """What a pool of up to 8 members asks for; ``max_pending`` is the queue's."""
    queue = {"maxPending": capacity.pop("max_pending", 100)}
    generation = capacity.pop("generation", 1)
    return read_pool(pool(capacity={"max": 8, **capacity}, queue=queue, generation=generation))


def report(**counts: Any) -> PoolReport:
    """What a broker says of the pool."""
    numbers = dict.fromkeys(
        (
            *("ready", "leased", "starting", "resetting", "stopping"),
            *("queued", "starts", "resets", "failures"),
        ),
        0,
    )
    return PoolReport.model_validate(
        {"kind": "container", "max": 8, "min": 0, "quarantined": {}, "reason": "Ready", **numbers, **counts}
    )


def answers(**counts: Any) -> BrokerSeen:
    """A broker that knows the pool and answers."""
    return BrokerSeen(since=ago(300), answered=ago(1), pools={"shell": report(**counts)})


def silent(
    seconds: float, *, ever: bool = True, error: str = "connection refused", **counts: Any
) -> BrokerSeen:
    """A broker that answered before, or never, and now has not for so long."""
    pools = {"shell": report(**counts)} if ever else {}
    return BrokerSeen(since=ago(seconds), answered=ago(seconds) if ever else None, error=error, pools=pools)


def seen(
    broker: BrokerSeen,
    *,
    pods: PodFacts | None = None,
    before: Mapping[str, tuple[str, str, float]] | None = None,
    fresh: bool = True,
    low: float | None = None,
    generation: int = 1,
) -> PoolSeen:
    """What is true of a pool.

    Args:
        before: of each condition its status, its reason, and how many seconds ago it became so.
        low: for how many seconds members have been missing.
    """
    conditions = [
        Condition(
            type=kind,
            status=status,  # type: ignore[arg-type]
            observed_generation=generation,
            last_transition_time=ago(since),
            reason=reason,
            message="",
        )
        for kind, (status, reason, since) in (before or {}).items()
    ]
    return PoolSeen(
        broker=broker,
        pods=pods or PodFacts(),
        conditions=tuple(conditions),
        fresh=fresh,
        low_since=None if low is None else ago(low),
    )


SETTLED = {"Ready": ("True", "MinAvailable", 100.0), "Reconciling": ("False", "AllReady", 100.0)}
"""Conditions of a pool that served so far."""
