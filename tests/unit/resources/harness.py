"""A loop whose time is virtual, and a runner that counts what it is asked to do.

The loop runs in debug mode. A test fails if a task is left over, if an error of any task was awaited by
nobody, or if nothing would ever happen again (a deadlock is an error at once, not a hang).
"""

import asyncio
import functools
import gc
import math
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar

from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.names import pool_of
from agentfly.resources.runners.base import Found, Member, Unclean, Vitals
from agentfly.resources.spec import ResourceSpec

P = ParamSpec("P")
T = TypeVar("T")


TICK = 1e-9  # time never stands still: what wakes a rounding error too early must not wake for ever


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nobody can wake anybody")
        if timeout > 0:
            self.now += max(timeout, TICK)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeping costs nothing and is exact."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, T], *, within: float = 10_000.0) -> T:
    """Run to the end in virtual time (``within`` is in virtual seconds) and see that nothing is left."""
    loop = VirtualLoop()
    loop.set_debug(True)
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(repr(context)))
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(asyncio.wait_for(main, within))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left over: {left}"
        loop.run_until_complete(asyncio.sleep(0))
        gc.collect()
        assert not faults, faults
        return result
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make an async test run in a loop of its own with virtual time."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapper


class FakeRunner:
    """Counts, blocks and fails as told.

    ``existing`` holds what a machine would really hold: members from the first moment of their start to the
    end of their stop. ``faults`` collects what must never happen: a member handed out that was not reset, a
    call on a member that is being reset, a second start under one id.
    """

    def __init__(self, name: str = "bubblewrap", *, start_s: float = 0.01, shared: bool = False) -> None:
        self.name = name
        self.shared = shared
        self.start_s, self.reset_s, self.stop_s, self.lease_s = start_s, 0.001, 0.001, 0.001
        self.fail_starts: Iterable[int] | Callable[[int], bool] = ()
        self.fail_leases: set[int] = set()
        self.unclean: set[str] = set()
        self.fail_stops = 0
        self.starts = self.resets = self.stops = self.leases = self.probes = 0
        self.existing: set[str] = set()
        self.peak = 0
        self.peaks: Counter[str] = Counter()  # by pool
        self.dead: set[str] = set()
        self.hung: set[str] = set()
        self.silent: dict[str, asyncio.Event] = {}  # members that a later process does not hear of until then
        self.leaving = False
        self.holders: dict[str, tuple[str, int, str]] = {}
        self.used: set[str] = set()
        self.busy: set[str] = set()
        self.faults: list[str] = []
        self.reason: str | None = None
        self.started: dict[str, Member] = {}
        self.notes: dict[str, tuple[str, float]] = {}  # by leased member: its note, and when its lease ends

    def check(self) -> str | None:
        return self.reason

    def hang(self, member_id: str) -> None:
        """The member lives, but answers no lease and no probe."""
        self.hung.add(member_id)

    def kill(self, member_id: str) -> None:
        """The member dies, and nobody is told."""
        self.dead.add(member_id)

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        self.starts += 1
        number = self.starts
        if member_id in self.existing:
            self.faults.append(f"{member_id} was started twice")
        self.existing.add(member_id)
        self.peak = max(self.peak, len(self.existing))
        pool = member_id.split("-", maxsplit=1)[0]
        self.peaks[pool] = max(self.peaks[pool], sum(name.startswith(f"{pool}-") for name in self.existing))
        try:
            await asyncio.sleep(self.start_s)
            fails = self.fail_starts
            if fails(number) if callable(fails) else number in fails:
                raise StartFailed(
                    f"member {member_id}: image is broken", reason="image is broken", hints=["mend it"]
                )
        except BaseException:
            if not self.leaving:
                self.existing.discard(member_id)
            raise
        self.started[member_id] = Member(member_id, spec, 1, f"unix:///{member_id}")
        return self.started[member_id]

    async def find(self) -> list[Found]:
        """What a daemon in each member would tell a process that comes later."""
        return [self._found(each) for each in self.started.values() if each.id in self.existing - self.dead]

    async def resume(self, found: Found, patience_s: float) -> Found:
        name = found.member.id
        await asyncio.wait_for(self.silent.pop(name).wait(), patience_s)
        if name in self.dead:
            raise StartFailed(f"member {name}: it died", reason="it died")
        return self._found(self.started[name])

    def leave(self) -> None:
        self.leaving = True

    def _found(self, member: Member) -> Found:
        name, now = member.id, asyncio.get_running_loop().time()
        if name in self.silent:
            return Found(pool_of(name), replace(member, address=""), "unknown")
        note, ends = self.notes.get(name, ("", now))
        state: Literal["free", "leased", "dirty"] = "dirty" if name in self.used else "free"
        if name in self.holders and ends > now:
            state = "leased"
        return Found(pool_of(name), member, state, note, max(0.0, ends - now))

    async def probe(self, member: Member) -> Vitals:
        self.probes += 1
        await asyncio.sleep(math.inf if member.id in self.hung else self.lease_s)
        return Vitals(alive=member.id in self.existing and member.id not in self.dead)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        self.leases += 1
        number = self.leases
        if member.id in self.busy:
            self.faults.append(f"{member.id} was leased during its reset or stop")
        await asyncio.sleep(math.inf if member.id in self.hung else self.lease_s)
        if member.id not in self.existing - self.dead or number in self.fail_leases:
            raise Infra(f"member {member.id}: does not answer")
        if self.shared:
            return
        holder = self.holders.get(member.id)
        if holder is None:
            if member.id in self.used:
                self.faults.append(f"{member.id} was handed out without a reset")
            self.holders[member.id] = (owner, attempt, token)
            self.used.add(member.id)
            self.notes[member.id] = (note, asyncio.get_running_loop().time() + ttl_s)
        elif holder != (owner, attempt, token):
            raise LeaseLost(f"member {member.id}: is leased to another", incarnation=member.incarnation)
        else:
            self.notes[member.id] = (note, asyncio.get_running_loop().time() + ttl_s)

    async def reset(self, member: Member) -> Member | None:
        self.resets += 1
        self.busy.add(member.id)
        try:
            await asyncio.sleep(self.reset_s)
        finally:
            self.busy.discard(member.id)
        if member.id in self.unclean and member.keep_unclean:
            raise Unclean(f"member {member.id}: a file is left")
        if member.id not in self.existing - self.dead or member.id in self.unclean:
            return None
        self.holders.pop(member.id, None)
        self.used.discard(member.id)
        self.notes.pop(member.id, None)
        again = Member(member.id, member.spec, member.incarnation + 1, member.address)
        self.started[member.id] = again
        return again

    async def stop(self, member: Member) -> None:
        self.stops += 1
        if self.fail_stops > 0:
            self.fail_stops -= 1
            raise RuntimeError("the kernel is busy")
        await asyncio.sleep(self.stop_s)
        self.existing.discard(member.id)
        self.holders.pop(member.id, None)
