"""A cluster that is played: runs and jobs that do by the rules what a strike makes them do, on a clock that
goes as fast as it is looked at."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.kills import drive
from tests.kills.matrix import CONTROL, SERVERS, Part, Strike, Work
from tests.kills.verdict import Process, Seen

RATE = 2  # rollouts a second
STEP_S = 4.0


class Clock:
    """Time goes by when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = end

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._number), action))


@dataclass
class Played:
    """One run or job. ``born`` counts up with all that makes what was to come void."""

    work: Work
    phase: str = ""
    attempt: int = 0
    restarts: int = 0
    failures: int = 0
    step: int = 0
    resumed: int = 0
    server: str = ""
    worker: int = 0
    plays: bool = True
    done: int = 0
    born: int = 0
    suspended: bool = False


class Play:
    """All of it; in the place of a world, of eyes, of strikes and of kubectl.

    Args:
        broken: parts of whose strikes no run recovers.
    """

    def __init__(self, broken: frozenset[Part] = frozenset()) -> None:
        self.clock, self._broken = Clock(), broken
        self.works: dict[str, Played] = {}
        self.processes = {Part.OPERATOR: Process("o0", 0, True), Part.BROKER: Process("b0", 0, True)}
        self.still: set[Part] = set()
        self.strikes: list[tuple[str, Part, Strike, str]] = []
        self._uids = itertools.count(1)

    # In the place of eyes -----------------------------------------------------------------------------------

    def seen(self, work: Work, name: str) -> Seen:
        played = self.works[name]
        operator = self.processes[Part.OPERATOR]
        if operator.ready and Part.OPERATOR not in self.still:
            operator = replace(operator, renewed=self.clock.now)
        runs = played.attempt > 0 and played.phase in ("Starting", "Running", "Suspending")
        shards = drive.TASKS // drive.SHARD
        return Seen(
            at=self.clock.now,
            phase=played.phase,
            attempt=played.attempt,
            restarts=played.restarts,
            failures=played.failures,
            checkpoint=played.step,
            on_disk=played.step,
            resumed=played.resumed,
            step=played.step,
            server=played.server,
            trainers=frozenset({f"t{played.attempt}"} if runs else ()),
            pool=played.phase not in ("Suspended", ""),
            workers={played.done // (drive.SHARD * drive.GROUP): f"w{played.worker}"} if played.plays else {},
            shards=shards if work is Work.JOB and played.phase else 0,
            done=played.done // (drive.SHARD * drive.GROUP),
            finished=frozenset(self._ids(played)),
            operator=operator,
            broker=self.processes[Part.BROKER],
        )

    def victim(self, work: Work, name: str, part: Part) -> tuple[str, str, int | None] | None:
        played = self.works[name]
        if part is Part.WORKER and not (played.phase == "Running" and played.plays):
            return None
        return "n", f"{name}/{part}", played.done // (drive.SHARD * drive.GROUP)

    def steps(self, work: Work, name: str) -> list[Any]:
        return [{"attempt": 1, "step": number + 1} for number in range(self.works[name].step)]

    def results(self, name: str) -> list[str]:
        return list(self._ids(self.works[name]))

    def left(self, work: Work, name: str) -> list[str]:
        return []

    # In the place of a strike, of kubectl and of a manifest -------------------------------------------------

    def struck(self, _: object, __: str, pod: str, part: Part, strike: Strike) -> frozenset[Any] | None:
        name = pod.split("/", maxsplit=1)[0]
        played = self.works[name]
        self.strikes.append((name, part, strike, played.phase))
        if part in CONTROL:
            self._control(part, strike)
            return frozenset({part}) if strike is Strike.STOP else frozenset()
        if part in self._broken:
            played.born += 1
            return frozenset()
        if played.work is Work.JOB:
            self._of_job(played, part, strike)
        else:
            self._of_run(played, part, strike)
        return frozenset({part}) if strike is Strike.STOP else frozenset()

    def go_on(self, parts: frozenset[Any]) -> None:
        self.still -= parts

    def apply(self, _: object, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        played = self.works[name] = Played(Work(name.rsplit("-", 1)[0]))
        if played.work is Work.JOB:
            self._later(2, played, lambda: self._phase(played, "Starting"))
            self._later(30, played, lambda: self._serves(played))
            self._later(40, played, lambda: self._phase(played, "Running"))
            self._later(
                90, played, lambda: self._rollouts(played)
            )  # long enough to strike three of them before
        else:
            self._later(1, played, lambda: self._phase(played, "Starting"))
            self._later(90, played, lambda: self._attempt(played))

    def patch(self, name: str, *, suspend: bool) -> None:
        played = self.works[name]
        played.suspended = suspend
        played.born += 1
        if suspend:
            self._later(1, played, lambda: self._phase(played, "Suspending"))
            self._later(7, played, lambda: self._ends(played, 0))
        else:
            self._later(1, played, lambda: self._phase(played, "Restarting"))
            self._later(3, played, lambda: self._attempt(played))

    def tasks(self, name: str) -> dict[str, int]:
        number = self.works[name].done
        return {"total": number, "scored": number, "masked": 0, "failed": 0}

    # What follows -------------------------------------------------------------------------------------------

    def _ids(self, played: Played) -> list[str]:
        return [f"r{number}" for number in range(played.done)]

    def _later(self, seconds: float, played: Played, action: Callable[[], object]) -> None:
        born = played.born
        self.clock.after(seconds, lambda: action() if played.born == born else None)

    def _phase(self, played: Played, phase: str) -> None:
        played.phase = phase

    def _serves(self, played: Played) -> None:
        played.server = f"s{next(self._uids)}"

    def _control(self, part: Part, strike: Strike) -> None:
        before = self.processes[part]
        if strike is Strike.STOP:
            self.still.add(part)
            return
        self.processes[part] = replace(before, ready=False)
        uid = f"p{next(self._uids)}" if strike is Strike.DELETE else before.uid
        count = 0 if strike is Strike.DELETE else before.restarts + 1
        self.clock.after(6, lambda: self.processes.update({part: Process(uid, count, True)}))

    def _attempt(self, played: Played) -> None:
        played.phase, played.resumed = "Starting", played.step
        played.attempt += 1
        self._later(20, played, lambda: self._serves(played))
        self._later(50, played, lambda: (self._phase(played, "Running"), self._step(played)))

    def _step(self, played: Played) -> None:
        played.step += 1
        self._later(STEP_S, played, lambda: self._step(played))

    def _of_run(self, played: Played, part: Part, strike: Strike) -> None:
        asked = strike is Strike.DELETE and part not in SERVERS
        if part in SERVERS and played.phase == "Starting":
            played.server = ""
            self._later(20, played, lambda: self._serves(played))
            return
        played.born += 1
        self._later(5, played, lambda: self._ends(played, 0 if asked else 1))

    def _ends(self, played: Played, failed: int) -> None:
        """The attempt; ``failed`` is 1 if that was no wish."""
        played.restarts += failed
        played.failures += failed * (played.step == played.resumed)
        played.server, played.phase = "", "Suspended" if played.suspended else "Restarting"
        if not played.suspended:
            self._later(10, played, lambda: self._attempt(played))

    def _rollouts(self, played: Played) -> None:
        played.done += RATE if played.plays and played.server else 0
        if played.done >= drive.TASKS * drive.GROUP:
            played.phase = "Succeeded"
            return
        self._later(1, played, lambda: self._rollouts(played))

    def _of_job(self, played: Played, part: Part, strike: Strike) -> None:
        if part in SERVERS:
            played.server = ""
            self.clock.after(25, lambda: self._serves(played))
        elif strike is not Strike.STOP:
            played.plays = False
            played.worker += 1
            self.clock.after(3, lambda: setattr(played, "plays", True))


@dataclass
class Manifest:
    """In the place of `tests.e2e.runs.Work`."""

    world: Any
    plural: str
    name: str

    @property
    def status(self) -> dict[str, Any]:
        return {"tasks": self.world.play.tasks(self.name)}

    def patch(self, *, suspend: bool) -> None:
        self.world.play.patch(self.name, suspend=suspend)

    def told(self) -> str:
        return ""
