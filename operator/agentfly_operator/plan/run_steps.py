"""What can be done for a TrainingRun or RolloutJob: data that `plan` makes and `cluster` carries out.

Guarantees:
1. Every step may be carried out again: what exists stays as it is, what is gone is no error.
"""

from dataclasses import dataclass
from datetime import datetime

from agentfly.api import TrainingRunStatus
from agentfly_operator.plan.queue_steps import QueueStep
from agentfly_operator.plan.turns import Event


@dataclass(frozen=True, slots=True)
class MakePrepare:
    """Create the prepare Job."""


@dataclass(frozen=True, slots=True)
class MakePolicy:
    """Create the ResourcePool of the policy's servers."""


@dataclass(frozen=True, slots=True)
class MakeAttempt:
    """Create those objects of the attempt that are not there, its pods or its RayCluster last.

    Attributes:
        kuberay: a RayCluster has the pods.
    """

    attempt: int
    kuberay: bool = False


@dataclass(frozen=True, slots=True)
class MakeNetwork:
    """Create those objects that the pods of all attempts find each other by, and no pods."""


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an object, if it still has this uid; what it owns goes with it, and a RayCluster after its pods.

    Attributes:
        grace_s: seconds that a pod has to end; None: its own.
    """

    kind: str
    name: str
    uid: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class AskSuspend:
    """Annotate the head's pod, if it still has this uid: it writes a checkpoint and ends."""

    name: str
    uid: str


Step = MakePrepare | MakePolicy | MakeAttempt | MakeNetwork | Remove | AskSuspend | QueueStep


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to write, what to do, whom to tell, and when time alone will change it.

    The steps follow from the status that is stored already as well as from the new one. So they may be
    carried out before or after it is written, and whoever wrote a status plans again at once.

    Attributes:
        status: None: nothing is to be written.
        wake_at: when to look again if nothing is heard before; None: never.
    """

    status: TrainingRunStatus | None
    steps: tuple[Step, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: datetime | None = None
