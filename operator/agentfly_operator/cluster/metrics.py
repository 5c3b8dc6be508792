"""What monitors may know of the operator.

Guarantees:
1. Names follow Prometheus: base units, `_total` for counters, prefix `agentfly_operator_`.
2. No label of the operator's own figures grows with the number of objects; those of runs and jobs go with
   them.

Not here: what monitors want to know of pools; brokers tell that themselves.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentfly_operator.cluster.figures import JobFigures, RunFigures

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One registry for one operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.runs = RunFigures()
        self.registry.register(self.runs)
        self.jobs = JobFigures()
        self.registry.register(self.jobs)
        self.reconcile_seconds = Histogram(
            "agentfly_operator_reconcile_duration_seconds",
            "Duration of one pass over one object.",
            ("kind",),
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.reconciles = Counter(
            "agentfly_operator_reconcile",
            "Passes by kind and result: ok, error.",
            ("kind", "result"),
            registry=self.registry,
        )
        self.writes = Counter(
            "agentfly_operator_writes",
            "Writes to the API server: status, apply, create, patch, delete, event.",
            ("what",),
            registry=self.registry,
        )
        self.objects = Gauge(
            "agentfly_operator_objects",
            "Objects that have a loop, by kind.",
            ("kind",),
            registry=self.registry,
        )
        self.members = Gauge(
            "agentfly_operator_member_pods", "Member pods that are known.", registry=self.registry
        )
        self.polls = Counter(
            "agentfly_operator_broker_polls",
            "Questions to brokers by result: ok, error.",
            ("result",),
            registry=self.registry,
        )
        self.head_polls = Counter(
            "agentfly_operator_head_polls",
            "Questions to heads of trainers by result: ok, error.",
            ("result",),
            registry=self.registry,
        )
        self.optional = Gauge(
            "agentfly_operator_optional_api_available",
            "1 while a kind is there that another operator defines, else 0.",
            ("api",),
            registry=self.registry,
        )
        self.leader = Gauge(
            "agentfly_operator_leader", "1 while this process leads, else 0.", registry=self.registry
        )

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
