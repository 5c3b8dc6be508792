"""What an engine does, as Prometheus metrics.

Guarantees:
1. Gauges are read from the engine when they are asked for; histograms and counters grow with its events.
2. Labels are pools, states and constants: never an owner, a lease or a member, of which there is no end.

Not here: where they are served (``server``).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import PoolStatus

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "agentfly_"
# Seconds: from a warm acquire in this process to a queue that lasts for the whole of a rollout.
WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LIVES = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
STATES = ("ready", "leased", "starting", "resetting", "stopping")


def metrics_of(engine: ResourceEngine) -> "Metrics | None":
    """Metrics that follow this engine from now on; None if prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401 -- an optional dependency
    except ModuleNotFoundError:
        return None
    metrics = Metrics(engine.pool_status)
    engine.observe(metrics.note)
    return metrics


class Metrics:
    """The metrics of one engine. ``pools`` says how its pools are doing now."""

    def __init__(self, pools: Callable[[], Mapping[str, PoolStatus]]) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(pools))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            names = ("pool", *labels)
            return Histogram(PREFIX + name, text, names, registry=self._registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, ("pool", *labels), registry=self._registry)

        self._acquires = histogram("acquire_seconds", "From an acquire to its lease.", WAITS, "warm")
        self._seconds: dict[EventKind, Histogram] = {
            EventKind.LEASE_RELEASED: histogram("hold_seconds", "From a lease to its release.", LIVES),
            EventKind.MEMBER_STARTED: histogram("start_seconds", "Starts that ended well.", WAITS),
            EventKind.MEMBER_RESET: histogram("reset_seconds", "Resets that were verified.", WAITS),
        }
        self._counts: dict[EventKind, Counter] = {
            EventKind.START_FAILED: counter("starts_failed", "Starts that failed."),
            EventKind.RESET_FAILED: counter("resets_failed", "Resets that were not verified."),
            EventKind.MEMBER_LOST: counter("members_lost", "Members that died or were not what they should."),
        }
        self._counts_by_reason: dict[EventKind, Counter] = {
            EventKind.MEMBER_STOPPED: counter("members_stopped", "Members that were stopped.", "reason"),
            EventKind.LEASE_LOST: counter("leases_lost", "Leases that their holders lost.", "reason"),
            EventKind.ACQUIRE_FAILED: counter("acquires_failed", "Acquires that failed.", "error"),
        }

    def note(self, event: Event) -> None:
        """Count an event."""
        kind = event.kind
        if kind is EventKind.LEASE_GRANTED:
            self._acquires.labels(event.pool, str(bool(event.warm)).lower()).observe(event.seconds or 0.0)
        elif (seconds := self._seconds.get(kind)) is not None:
            seconds.labels(event.pool).observe(event.seconds or 0.0)
        elif (count := self._counts.get(kind)) is not None:
            count.labels(event.pool).inc()
        elif (by_reason := self._counts_by_reason.get(kind)) is not None:
            by_reason.labels(event.pool, event.reason).inc()

    @property
    def content_type(self) -> str:
        """Of ``text``."""
        from prometheus_client import CONTENT_TYPE_LATEST

        return CONTENT_TYPE_LATEST

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class _Gauges:
    """A collector of what is true of the pools now."""

    def __init__(self, pools: Callable[[], Mapping[str, PoolStatus]]) -> None:
        self._pools = pools

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import GaugeMetricFamily

        members = GaugeMetricFamily(
            PREFIX + "pool_members", "Members of a pool by state.", labels=["pool", "state"]
        )
        bounds = {
            "max": GaugeMetricFamily(PREFIX + "pool_max", "Members that a pool may have.", labels=["pool"]),
            "min": GaugeMetricFamily(PREFIX + "pool_min", "Members that a pool keeps.", labels=["pool"]),
            "queued": GaugeMetricFamily(PREFIX + "pool_queued", "Acquires that wait.", labels=["pool"]),
        }
        for name, status in self._pools().items():
            for state in STATES:
                members.add_metric([name, state], getattr(status, state))
            members.add_metric([name, "quarantined"], len(status.quarantined))
            for field, gauge in bounds.items():
                gauge.add_metric([name], getattr(status, field))
        yield members
        yield from bounds.values()
