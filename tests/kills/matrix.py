"""The kill matrix as data: which part is struck how, in which phase of what.

Guarantees:
1. A cell has a name of four words, ``work/phase/part/strike``, and no other cell has it.
2. A part is struck in those phases only in which it exists.
3. Cells are in the order in which a run and a job come to them.

Not here: what must be so after a strike (`verdict`), when which one is struck (`course`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class Work(StrEnum):
    """Whose phases are meant."""

    RUN = "run"
    """A TrainingRun with two trainer pods and one server."""
    CYCLE = "cycle"
    """Another one, which is suspended and resumed again and again."""
    JOB = "job"
    """A RolloutJob."""


class Phase(StrEnum):
    """Where a run or a job is, as a reader of its status tells it."""

    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    LAST = "last-shard"


class Part(StrEnum):
    """What is struck."""

    HEAD = "head"
    """The trainer pod in which verl runs."""
    NODE = "ray-worker"
    """The second trainer pod."""
    SERVER = "server"
    """The main process of the pod that serves the policy."""
    ENGINE = "engine"
    """Its child that computes."""
    WORKER = "rollout-worker"
    OPERATOR = "operator"
    BROKER = "broker"


class Strike(StrEnum):
    """How."""

    DELETE = "delete"
    """Its pod is deleted, with the grace that it has. First: the kubelet's pause before it starts a container
    again grows with each that was killed, and a new pod has none."""
    STOP = "stop"
    """SIGSTOP."""
    KILL = "kill"
    """SIGKILL."""


CONTROL = frozenset({Part.OPERATOR, Part.BROKER})
"""Parts that no attempt is made of: a run outlives them."""
TRAINERS = frozenset({Part.HEAD, Part.NODE})
SERVERS = frozenset({Part.SERVER, Part.ENGINE})
_ALIVE = (Part.HEAD, Part.NODE, Part.SERVER, Part.ENGINE, Part.OPERATOR, Part.BROKER)
_OF_JOB = (Part.WORKER, Part.SERVER, Part.ENGINE, Part.BROKER, Part.OPERATOR)  # who is soon back first
EXIST: dict[Work, dict[Phase, tuple[Part, ...]]] = {
    Work.RUN: {Phase.PREPARING: (Part.OPERATOR,), Phase.STARTING: _ALIVE, Phase.RUNNING: _ALIVE},
    Work.CYCLE: {
        Phase.PREPARING: (Part.BROKER,),
        Phase.SUSPENDING: _ALIVE,
        Phase.SUSPENDED: (Part.OPERATOR, Part.BROKER),
        Phase.RESUMING: _ALIVE,
    },
    Work.JOB: {Phase.STARTING: _OF_JOB, Phase.RUNNING: _OF_JOB, Phase.LAST: _OF_JOB},
}


@dataclass(frozen=True, order=True)
class Cell:
    """One strike."""

    work: Work
    phase: Phase
    part: Part
    strike: Strike

    @property
    def name(self) -> str:
        """By which it is asked for."""
        return f"{self.work}/{self.phase}/{self.part}/{self.strike}"


def every() -> Iterator[Cell]:
    """All cells that there are."""
    for work, phases in EXIST.items():
        for phase, parts in phases.items():
            for part in parts:
                for strike in Strike:
                    if (part, strike) != (Part.ENGINE, Strike.DELETE):  # a process has no pod of its own
                        yield Cell(work, phase, part, strike)


USUAL = (
    "run/*/operator/*",
    "run/*/broker/*",
    "run/starting/head/[kd]*",
    "run/starting/ray-worker/kill",
    "run/starting/server/kill",
    "run/running/head/*",
    "run/running/ray-worker/*",
    "run/running/server/*",
    "run/running/engine/*",
    "cycle/preparing/*",
    "cycle/suspending/head/[kd]*",
    "cycle/suspending/ray-worker/kill",
    "cycle/suspending/operator/kill",
    "cycle/suspending/broker/kill",
    "cycle/suspended/*",
    "cycle/resuming/head/kill",
    "cycle/resuming/ray-worker/kill",
    "cycle/resuming/server/kill",
    "cycle/resuming/operator/[kd]*",
    "cycle/resuming/broker/kill",
    "job/*/rollout-worker/*",
    "job/starting/server/kill",
    "job/running/server/kill",
    "job/running/operator/kill",
    "job/running/broker/kill",
    "job/last-shard/operator/kill",
    "job/last-shard/broker/kill",
)
"""What half an hour on two cores has room for; every start of a trainer costs one minute of it."""


def chosen(patterns: Sequence[str]) -> tuple[Cell, ...]:
    """The cells that a shell pattern names."""
    return tuple(cell for cell in every() if any(fnmatchcase(cell.name, pattern) for pattern in patterns))
