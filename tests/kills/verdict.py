"""What must be so after a strike: pure rules over what was seen before and after it.

Guarantees:
1. A cell is right if its work came back to where the rules say within its time, its counters went up by what
   the rules say, nothing was there twice meanwhile, and nothing that was finished is lost.
2. Operator and broker cost no attempt. A trainer pod or a server that is lost costs one; it is a restart
   unless somebody deleted a trainer's pod, and a failure only if the attempt had made no checkpoint.
3. What is wrong is told in sentences with the numbers.

Counters of a cell that ends an attempt are those of the moment at which its run has turned: a new attempt is
numbered, or the run is suspended. So another cell may strike the new attempt before its first step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kills.matrix import CONTROL, SERVERS, TRAINERS, Cell, Part, Phase, Strike, Work

Span = tuple[int, int]
START_S = (
    480.0  # of a server and a trainer, after the pauses before it, on a machine that may have other work
)
SEEN_S = 3.0  # for which what must stay as it is is looked at
MORE = 2  # steps, or rollouts: one may have been on its way


@dataclass(frozen=True, slots=True)
class Process:
    """The operator's or the broker's.

    Attributes:
        uid: of its pod.
        restarts: of its container.
        renewed: Unix time at which the operator said last that it leads; 0 for a broker.
    """

    uid: str = ""
    restarts: int = 0
    ready: bool = False
    renewed: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A work and what it depends on, at a time.

    Attributes:
        at: seconds of this machine's monotonic clock.
        phase: as its status has it.
        checkpoint: as the status has it; ``on_disk`` as the claim has it, which the operator may not know.
        step: of a run, the newest that is written down.
        server: uid of the pod that serves its policy and answers; "" if none does.
        trainers: uids of its trainer pods, also of those that are on their way out.
        pool: whether the policy's pool is there.
        workers: of a job, the pods that play, by shard.
        done: shards that are complete.
        finished: rollouts that have an outcome which stays.
    """

    at: float = 0.0
    phase: str = ""
    attempt: int = 0
    restarts: int = 0
    failures: int = 0
    failed_rollouts: int = 0
    checkpoint: int = 0
    on_disk: int = 0
    resumed: int = 0
    step: int = 0
    server: str = ""
    trainers: frozenset[str] = frozenset()
    pool: bool = False
    workers: Mapping[int, str] = field(default_factory=dict)
    shards: int = 0
    done: int = 0
    finished: frozenset[str] = frozenset()
    operator: Process = Process()
    broker: Process = Process()

    def process(self, part: Part) -> Process:
        """That of the operator or the broker."""
        return self.operator if part is Part.OPERATOR else self.broker


@dataclass(frozen=True, slots=True)
class Expected:
    """By how much counters may go up, and how long the way back may take."""

    attempts: Span = (0, 0)
    restarts: Span = (0, 0)
    failures: Span = (0, 0)
    within_s: float = 240.0


@dataclass(frozen=True, slots=True)
class Struck:
    """A cell whose strike was carried out.

    Attributes:
        at: seconds of the monotonic clock, and ``wall`` the Unix time, when it was over; infinite for a part
            that is to go on and stands still yet.
        shard: of a job, the one whose pod was struck.
        turned: see the module.
        back: the first look at which a part that no attempt is made of was there again.
    """

    cell: Cell
    before: Seen
    at: float
    wall: float
    shard: int | None = None
    turned: Seen | None = None
    back: Seen | None = None


def expected(cell: Cell, before: Seen) -> Expected:
    """The rules for a cell."""
    if cell.work is Work.JOB or cell.part in CONTROL:
        # What is prepared goes on to its first attempt, also meanwhile.
        first = (0, 1) if cell.phase is Phase.PREPARING else (0, 0)
        return Expected(first, within_s=480.0 if cell.part in SERVERS else 240.0)
    saved = before.checkpoint > before.resumed
    fails = (0, 0) if saved else (1 - (before.on_disk > before.resumed), 1)
    deleted = cell.strike is Strike.DELETE and cell.part in TRAINERS
    if cell.phase is Phase.SUSPENDING:
        # The step may have ended, and its checkpoint be complete, before the strike takes effect.
        late = (0, 0) if deleted else (0, 1)
        return Expected((0, 0), late, (0, 0) if saved or deleted else (0, 1), 300.0)
    if deleted:
        return Expected((1, 1), within_s=START_S)
    if cell.phase is Phase.RUNNING:
        return Expected((1, 1), (1, 1), fails, 1.5 * START_S if cell.strike is Strike.STOP else START_S)
    if cell.part in SERVERS:  # it may be leased already, or not yet
        return Expected((0, 1), (0, 1), (0, 1), START_S)
    return Expected((1, 1), (1, 1), (1, 1), START_S)


def is_alone(cell: Cell) -> bool:
    """Whether no other cell can be told from this one while its work is not back.

    A server that stands still looks well, and may take more attempts with it until that is seen.
    """
    return cell.part in SERVERS and cell.strike is Strike.STOP


def is_back(struck: Struck, now: Seen) -> bool:
    """Whether the operator or broker that was struck works again."""
    part, before = now.process(struck.cell.part), struck.before.process(struck.cell.part)
    if struck.at > now.at:
        return False
    other = (part.uid, part.restarts) != (before.uid, before.restarts)
    leads = struck.cell.part is Part.BROKER or part.renewed > struck.wall
    return part.ready and leads and (other or struck.cell.strike is Strike.STOP)


def has_turned(struck: Struck, now: Seen) -> bool:
    """Whether the counters say all that they will say of the strike."""
    cell, before = struck.cell, struck.before
    if cell.phase is Phase.SUSPENDING:
        return now.phase == "Suspended"
    if cell.work is Work.JOB or cell.part in CONTROL:
        return True
    replaced = cell.part in SERVERS and now.server not in ("", before.server)
    return now.attempt > before.attempt or (expected(cell, before).attempts[0] == 0 and replaced)


def is_settled(struck: Struck, now: Seen) -> bool:
    """Whether the work is where it has to come to."""
    cell = struck.cell
    if struck.turned is None or struck.at > now.at or (cell.part in CONTROL and struck.back is None):
        return False
    if cell.work is Work.JOB:
        return _job_goes_on(struck, now)
    if cell.phase is Phase.SUSPENDING:
        return now.phase == "Suspended" and not now.trainers and not now.pool
    if struck.back is None:
        return now.phase == "Running" and now.step > now.resumed
    if cell.phase is Phase.RUNNING:
        return now.step >= struck.back.step + MORE
    return now.at >= struck.back.at + SEEN_S


def _job_goes_on(struck: Struck, now: Seen) -> bool:
    cell, before = struck.cell, struck.before
    if now.phase == "Succeeded":
        return True
    since = before if struck.back is None else struck.back
    if cell.part in SERVERS and now.server in ("", before.server):
        return False
    if cell.part is Part.WORKER and cell.strike is not Strike.STOP:
        assert struck.shard is not None
        again = now.workers.get(struck.shard) not in (None, before.workers.get(struck.shard))
        if not again and now.done <= before.done:
            return False
    if cell.phase is Phase.STARTING:  # that it plays is seen in the phases after this one
        return now.at >= max(since.at, struck.at) + SEEN_S
    return len(now.finished) >= len(since.finished) + MORE


def judge(struck: Struck, now: Seen, wrongs: Iterable[str], in_time: bool) -> str:
    """What is wrong, in sentences; "" if all is right.

    Args:
        now: the last look.
        wrongs: what was seen meanwhile and must never be.
        in_time: whether the work has settled within its time.
    """
    return "; ".join([*_late(struck, now, in_time), *_counters(struck, now), *_kept(struck, now), *wrongs])


def _late(struck: Struck, now: Seen, in_time: bool) -> Iterable[str]:
    if in_time:
        return
    where = f"{now.phase or 'no phase'}, attempt {now.attempt}, step {now.step}, {len(now.finished)} rollouts"
    if struck.cell.part in CONTROL and struck.back is None:
        where = f"the {struck.cell.part} is not back"
    yield f"not where it must be after {now.at - struck.at:.0f} s: {where}"


def counted(struck: Struck, now: Seen) -> Seen:
    """The look whose counters are those of the cell."""
    if struck.cell.part in CONTROL or struck.turned is None:
        return now
    return struck.turned


def _counters(struck: Struck, now: Seen) -> Iterable[str]:
    before, after = struck.before, counted(struck, now)
    rules = expected(struck.cell, before)
    for name, span in (
        ("attempt", rules.attempts),
        ("restarts", rules.restarts),
        ("failures", rules.failures),
    ):
        old, new = getattr(before, name), getattr(after, name)
        if not span[0] <= new - old <= span[1]:
            wanted = str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
            yield f"{name}: {old} became {new}, by the rules it goes up by {wanted}"
    if now.failed_rollouts > before.failed_rollouts:
        yield f"{now.failed_rollouts - before.failed_rollouts} rollouts failed"


def _kept(struck: Struck, now: Seen) -> Iterable[str]:
    if now.checkpoint < struck.before.checkpoint:
        yield f"the checkpoint is of step {now.checkpoint}, it was of {struck.before.checkpoint}"
    if lost := struck.before.finished - now.finished:
        yield f"{len(lost)} finished rollouts are lost, such as {min(lost)}"


def wrong_steps(lines: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the steps that a run has written down, in order; "" if nothing is.

    Every step follows on the one before it; a later attempt may begin again after any checkpoint.
    """
    step = attempt = 0
    for line in lines:
        if line["attempt"] < attempt:
            return f"step {line['step']} of attempt {line['attempt']} stands after attempt {attempt}"
        again = line["attempt"] > attempt and 1 <= line["step"] <= step
        if not again and line["step"] != step + 1:
            return f"step {line['step']} of attempt {line['attempt']} stands after step {step}"
        step, attempt = line["step"], line["attempt"]
    return ""


def wrong_results(ids: Sequence[str], wanted: int) -> str:
    """What is wrong with the ids of the rollouts that a job has published; "" if nothing is."""
    if len(set(ids)) != len(ids):
        return f"{len(ids) - len(set(ids))} rollouts stand in the results more than once"
    return "" if len(ids) == wanted else f"the results have {len(ids)} rollouts, not {wanted}"
