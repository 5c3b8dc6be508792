"""Which cell is struck next, or what else brings a work to where cells are: pure rules.

Guarantees:
1. A cell is struck only in its phase, and while nothing before it is still to be counted.
2. At most one of operator and broker is away at a time, whatever work its cell is of.
3. A run is not suspended, and no job ends unasked for, before the cells of the phases before that are struck,
   nor while a cell waits for a run to be back.
4. A work without cells is over.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from tests.kills.matrix import CONTROL, Cell, Phase, Work


class Move(Enum):
    """What a person would do."""

    WAIT = "wait"
    SUSPEND = "suspend"
    RESUME = "resume"
    RENEW = "begin a new attempt"
    AGAIN = "make another one"
    END = "end"


@dataclass(frozen=True, slots=True)
class Here:
    """Where a work is.

    Attributes:
        phase: None: between phases that cells are of.
        counting: a cell is struck, and its counters still move, or it has to be alone.
        open: a cell is struck, and its work is not back.
        away: whether a cell of any work has the operator or the broker away.
        over: the work has come to its end.
    """

    phase: Phase | None
    counting: bool = False
    open: bool = False
    away: bool = False
    over: bool = False


def phase_of_run(phase: str, attempt: int, suspended_at: int | None) -> Phase | None:
    """The phase of a run.

    Args:
        suspended_at: the attempt before its last suspension.
    """
    if phase == "Starting":
        if attempt == 0:
            return Phase.PREPARING
        return Phase.RESUMING if suspended_at is not None and attempt == suspended_at + 1 else Phase.STARTING
    known = {"Running": Phase.RUNNING, "Suspending": Phase.SUSPENDING, "Suspended": Phase.SUSPENDED}
    return known.get(phase)


def phase_of_job(phase: str, shards: int, done: int, finished: int) -> Phase | None:
    """The phase of a job, whose workers start after its status says Running.

    Args:
        finished: rollouts that have an outcome.
    """
    if shards and done == shards - 1:
        return Phase.LAST
    if (phase == "Starting" and shards) or (phase == "Running" and not finished):
        return Phase.STARTING
    return Phase.RUNNING if phase == "Running" else None


def next_of(work: Work, cells: Sequence[Cell], here: Here) -> tuple[Cell, ...] | Move:
    """What is done next: the first of these cells of which there is something to strike, or a move.

    Args:
        cells: of this work, that are not struck.
    """
    if work is Work.JOB and here.over and not here.open:
        return Move.AGAIN if cells else Move.END
    if not cells:
        return Move.WAIT if here.open or work is Work.JOB else Move.END
    if here.counting or here.phase is None:
        return Move.WAIT
    ready = _ready(work, [cell for cell in cells if cell.phase is here.phase], here)
    if ready:
        return ready
    return Move.WAIT if work is Work.JOB else _way(cells, here)


def _ready(work: Work, cells: Collection[Cell], here: Here) -> tuple[Cell, ...]:
    """Trainers first where a start is struck, because it has cost little then; workers first in the last
    shard, which they do not bring to its end. Else first what costs no start."""
    if here.away or (here.open and work is Work.JOB):
        return ()
    begins = here.phase in (Phase.STARTING, Phase.RESUMING)
    others = () if here.open and not begins else tuple(cell for cell in cells if cell.part not in CONTROL)
    control = tuple(cell for cell in cells if cell.part in CONTROL)
    return (*others, *control) if begins or here.phase is Phase.LAST else (*control, *others)


def _way(cells: Collection[Cell], here: Here) -> Move:
    """How a run comes to the phases of cells."""
    phases = {cell.phase for cell in cells}
    if here.open or here.away or here.phase in phases:
        return Move.WAIT
    if here.phase is Phase.SUSPENDED:
        return Move.RESUME
    if here.phase is not Phase.RUNNING:
        return Move.WAIT
    if phases & {Phase.SUSPENDING, Phase.SUSPENDED, Phase.RESUMING}:
        return Move.SUSPEND
    return Move.RENEW if Phase.STARTING in phases else Move.AGAIN
