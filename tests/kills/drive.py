"""Drives runs and a job through their cells.

Guarantees:
1. Every cell ends: right, wrong, or not struck with the reason. A work that does not come back is replaced by
   another one, for the cells that are left; after `TRIES` of them they are not struck.
2. Works go on beside each other, and each as `course` says.
3. At its end the steps of a run are continuous, a job's results have each rollout once, and what belonged to
   them is gone.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

from agentfly.roles.launch import STORAGE
from tests.cluster.processes import Process
from tests.e2e.objects import apply
from tests.e2e.runs import KINDS, Obj, example
from tests.e2e.runs import Work as Manifest
from tests.e2e.world import World
from tests.kills import strike, verdict
from tests.kills.course import Here, Move, next_of, phase_of_job, phase_of_run
from tests.kills.look import Eyes
from tests.kills.matrix import CONTROL, Cell, Part, Phase, Strike, Work
from tests.kills.table import Row, row, row_of_end, row_of_none
from tests.kills.verdict import Seen, Struck

TICK_S = 0.25
TRIES = 3
IDLE_S = 900.0  # in which a work that is well comes to another phase
GONE_S = 120.0
PLURALS = {Work.RUN: "trainingruns", Work.CYCLE: "trainingruns", Work.JOB: "rolloutjobs"}
TASKS, GROUP, SHARD = 80, 4, 40

MODEL = "model"
"""Folder of the claim: each run and job would need a minute to make the same."""

Say = Callable[[str], None]


def manifest(work: Work, name: str) -> Obj:
    """What is applied: the quickstart's, small, with short times after which something is taken for hung."""
    if work is Work.JOB:
        found = example(
            "rolloutjob.yaml",
            pools=["play"],
            limit=TASKS,
            rollout={"groupSize": GROUP, "concurrency": 1},
            workers={"count": 1, "tasksPerShard": SHARD},  # nothing is finished while that one starts
        )
    else:
        found = example(
            "training.yaml",
            steps=2000,  # more than there is time for
            tasksPerStep=4,
            rollout={
                "groupSize": GROUP,
                "maxInfraRetries": 1,
                "timeouts": {"callSeconds": 5, "turnSeconds": 15, "rolloutSeconds": 20},
            },
            trainer={"nodes": 2},
            checkpoint={"everySteps": 1},
            runPolicy={
                # Less than the time after which a head that does not answer has twice as long.
                "stallTimeoutSeconds": 45,
                "startupDeadlineSeconds": 600,
                "backoffLimit": 100,
            },
        )
    found["metadata"]["name"] = name
    found["spec"]["model"] = {"path": str(STORAGE / MODEL)}
    return found


class Lane:
    """The cells of one kind of work, and the run or job that comes to them."""

    def __init__(self, world: World, eyes: Eyes, work: Work, cells: Sequence[Cell], say: Say) -> None:
        self.work, self.left = work, list(cells)
        self.struck: list[Struck] = []
        self.over = not cells
        self._world, self._eyes, self._say = world, eyes, say
        self._made, self._fruitless = 0, True
        self._still: list[tuple[float, frozenset[Process]]] = []
        self._suspended_at: int | None = None
        self._moved_in: Phase | None = None
        self._wrongs: list[str] = []
        self._told: Phase | str | None = ""
        self._since = time.monotonic()

    @property
    def away(self) -> bool:
        """Whether a cell has the operator or the broker away."""
        return any(each.cell.part in CONTROL for each in self.struck)

    @property
    def name(self) -> str:
        """Of the run or job."""
        return f"{self.work}-{self._made}"

    def look(self, wrongs: Sequence[str], away: bool) -> Iterator[Row]:
        """One look, what follows from it, and the rows of cells that have ended.

        Args:
            wrongs: what was seen of it since the last look and must never be.
            away: whether a cell of another lane has the operator or the broker away.
        """
        if not self._made:
            self._make()
        self._go_on()
        self._wrongs += wrongs
        now = self._eyes.seen(self.work, self.name)
        phase = self._phase(now)
        if phase != self._told:
            self._say(f"{self.name}: {phase or now.phase or 'no phase'}, attempt {now.attempt}")
            self._told, self._since = phase, now.at
        came_back = True
        for struck, settled in list(self._ended(now)):
            came_back = came_back and settled
            yield self._row(struck, now, settled)
        idle = now.at - self._since > IDLE_S and not self.struck
        if now.phase == "Failed" or not came_back or idle:
            yield from self._another(f"it is {now.phase or 'nowhere'} and does not go on")
        else:
            yield from self._act(now, phase, away)

    def give_up(self, why: str) -> Iterator[Row]:
        """The rows of the cells that are left."""
        for cell in [*(each.cell for each in self.struck), *self.left]:
            yield row_of_none(cell, why)
        self.struck, self.left, self.over = [], [], True

    @property
    def _manifest(self) -> Manifest:
        return Manifest(self._world, PLURALS[self.work], self.name)

    def _make(self) -> None:
        self._made += 1
        self._suspended_at = self._moved_in = None
        self._fruitless = True
        self._since = time.monotonic()
        apply(self._world, manifest(self.work, self.name))
        self._say(f"{self.name}: applied")

    def _phase(self, now: Seen) -> Phase | None:
        if self.work is Work.JOB:
            return phase_of_job(now.phase, now.shards, now.done, len(now.finished))
        phase = phase_of_run(now.phase, now.attempt, self._suspended_at)
        if phase is not self._moved_in:
            self._moved_in = None
        return None if self._moved_in is not None else phase

    # What was struck ------------------------------------------------------------------------------------

    def _ended(self, now: Seen) -> Iterator[tuple[Struck, bool]]:
        """Cells that have settled, or that had time enough to."""
        last = max((each.at for each in self.struck if each.at != math.inf), default=now.at)
        for each in list(self.struck):
            struck = self._followed(each, now)
            late = now.at - max(last, struck.at) > verdict.expected(struck.cell, struck.before).within_s
            settled = verdict.is_settled(struck, now)
            if settled or late or now.phase == "Failed":
                self.struck.remove(struck)
                self._since = now.at
                yield struck, settled

    def _row(self, struck: Struck, now: Seen, settled: bool) -> Row:
        wrongs, self._wrongs = self._wrongs, []
        if self.work is not Work.JOB:
            wrongs += filter(None, [verdict.wrong_steps(self._eyes.steps(self.work, self.name))])
        return row(struck, now, verdict.judge(struck, now, wrongs, settled))

    def _followed(self, struck: Struck, now: Seen) -> Struck:
        new = struck
        if struck.turned is None and verdict.has_turned(struck, now):
            new = dataclasses.replace(new, turned=now)
        if struck.back is None and struck.cell.part in CONTROL and verdict.is_back(struck, now):
            new = dataclasses.replace(new, back=now)
        self.struck[self.struck.index(struck)] = new
        return new

    def _go_on(self) -> None:
        """Ends stops whose time is over."""
        for until, processes in list(self._still):
            if time.monotonic() >= until:
                strike.go_on(processes)
                self._still.remove((until, processes))
                self.struck = [
                    dataclasses.replace(each, at=time.monotonic(), wall=time.time())
                    if each.at == math.inf
                    else each
                    for each in self.struck
                ]

    # What is done ---------------------------------------------------------------------------------------

    def _act(self, now: Seen, phase: Phase | None, away: bool) -> Iterator[Row]:
        here = Here(
            phase,
            counting=any(each.turned is None or verdict.is_alone(each.cell) for each in self.struck),
            open=bool(self.struck),
            away=away or self.away,
            over=now.phase == "Succeeded",
        )
        found = next_of(self.work, self.left, here)
        if isinstance(found, tuple):
            next((cell for cell in found if self._strike(cell, now)), None)
        elif found is Move.END:
            yield self._end()
            self.over = True
        elif found is Move.AGAIN:
            yield self._end()
            if self._fruitless:
                yield from self.give_up(f"no {self.work} comes to it")
            else:
                self._make()
        elif found is not Move.WAIT:
            self._move(found, now)

    def _strike(self, cell: Cell, now: Seen) -> bool:
        victim = self._eyes.victim(self.work, self.name, cell.part)
        if victim is None:
            return False
        namespace, pod, shard = victim
        still = strike.struck(self._world.cluster, namespace, pod, cell.part, cell.strike)
        if still is None:
            return False
        self._say(f"{self.name}: {cell.strike} {pod}")
        at, wall = time.monotonic(), time.time()
        if cell.strike is Strike.STOP and cell.part in strike.STILL_S:
            self._still.append((at + strike.STILL_S[cell.part], still))
            at = wall = math.inf
        self.struck.append(Struck(cell, now, at, wall, shard))
        self.left.remove(cell)
        self._fruitless = False
        return True

    def _move(self, move: Move, now: Seen) -> None:
        self._say(f"{self.name}: {move.value}")
        self._moved_in = {Move.RESUME: Phase.SUSPENDED}.get(move, Phase.RUNNING)
        if move is Move.RENEW:
            victim = self._eyes.victim(self.work, self.name, Part.HEAD)
            if victim is not None:
                strike.struck(self._world.cluster, victim[0], victim[1], Part.HEAD, Strike.DELETE)
            return
        if move is Move.RESUME:
            self._suspended_at = now.attempt
        self._manifest.patch(suspend=move is Move.SUSPEND)

    def _another(self, why: str) -> Iterator[Row]:
        """Goes on with another run or job, or not at all."""
        for struck in self.struck:
            yield row_of_none(struck.cell, f"its run was given up: {why}")
        self.struck = []
        self._say(f"{self.name}: {why or 'is not well'}; {self._manifest.told()}")
        yield row_of_end(f"{self.name} was given up", why or "it is not well after a cell")
        self._delete()
        if self._made >= TRIES:
            yield from self.give_up(f"{TRIES} {self.work}s were given up")
        elif self.left:
            self._make()
        else:
            self.over = True

    def _end(self) -> Row:
        """The row of the run or job as a whole; it is deleted."""
        wrong, self._wrongs = self._wrongs, []
        if self.work is Work.JOB:
            wrong.append(verdict.wrong_results(self._eyes.results(self.name), TASKS * GROUP))
            counts = self._manifest.status.get("tasks")
            if counts != {"total": TASKS * GROUP, "scored": TASKS * GROUP, "masked": 0, "failed": 0}:
                wrong.append(f"its status counts {counts}")
        else:
            wrong.append(verdict.wrong_steps(self._eyes.steps(self.work, self.name)))
        self._delete()
        end = time.monotonic() + GONE_S
        while (left := self._eyes.left(self.work, self.name)) and time.monotonic() < end:
            time.sleep(TICK_S)
        wrong.append(f"is gone, and left {', '.join(left)}" if left else "")
        what = "each rollout once" if self.work is Work.JOB else "steps one by one"
        return row_of_end(f"{self.name} at its end: {what}, nothing left", "; ".join(filter(None, wrong)))

    def _delete(self) -> None:
        path = f"{KINDS.format(self._world.namespace, PLURALS[self.work])}/{self.name}"
        self._world.cluster.api.call("DELETE", path)
