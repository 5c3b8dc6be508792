"""What is true of a RolloutJob's children now, what can be done for it, and what `plan.job` makes of that."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from agentfly.api import RolloutJobStatus
from agentfly_operator.plan.children import JobOf, PoolOf
from agentfly_operator.plan.queue_seen import QueueSeen
from agentfly_operator.plan.queue_steps import SwitchWorkload
from agentfly_operator.plan.run_seen import Child, PodOf, PolicyOf, PrepareOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from agentfly_operator.plan.turns import Event


@dataclass(frozen=True, slots=True)
class JobObserved:
    """What is true of one job now.

    Attributes:
        workers: the Job of its shards; None: there is none.
        pods: of that Job, as long as they are there.
        others: its ConfigMaps.
        missing, conflicts, refused, leaving: as of a `RunObserved`.
        pools: that its spec names, those that are there.
        queue: Kueue, as far as it is about the Job of the workers.
        unread_since: since when this process has known of finished shards whose counts nobody can read any
            more; None: it knows of none.
    """

    prepare: PrepareOf = field(default_factory=PrepareOf)
    policy: PolicyOf = field(default_factory=PolicyOf)
    workers: JobOf | None = None
    pods: tuple[PodOf, ...] = ()
    others: tuple[Child, ...] = ()
    missing: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    refused: str = ""
    leaving: str = ""
    pools: Mapping[str, PoolOf] = field(default_factory=dict)
    queue: QueueSeen = field(default_factory=QueueSeen)
    unread_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class MakeWorkers:
    """Create the Job of so many shards, with its ConfigMap."""

    shards: int


@dataclass(frozen=True, slots=True)
class SetWorkers:
    """Have the Job run so many pods at a time, or none while it is suspended; None leaves that to Kueue."""

    name: str
    uid: str
    parallelism: int
    suspend: bool | None


JobStep = MakePrepare | MakePolicy | MakeWorkers | SetWorkers | SwitchWorkload | Remove


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What to write, what to do then, whom to tell, and when time alone will change it.

    The steps follow from the status that is stored already; they are right before and after this one is.

    Attributes:
        status: None: nothing is to be written.
        wake_at: when to look again if nothing is heard before; None: never.
    """

    status: RolloutJobStatus | None
    steps: tuple[JobStep, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: datetime | None = None
