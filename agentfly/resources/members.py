"""The members of an engine as tasks: what is being done to each, and that nothing of it is lost.

Guarantees:
1. Starts, resets and stops are tasks of the engine. No caller's cancellation reaches them.
2. Every call to a runner has a deadline. A cancellation that comes out of one, and that nobody asked for, is
   a failure like any other: no member is forgotten by it.
3. A reset or a stop of a member begins only when no lease, renewal or probe of it is on its way; a stop
   cancels a start or reset of it and waits until that has ended. A start that ends well all the same is
   stopped.
4. A stop that fails is tried again until it succeeds; until then the member counts. ``close`` stops also
   what nobody asked it to stop.
5. ``detach`` cuts off what is done to members that outlive this process, and leaves them as they are.
6. Each start, reset, loss and end of a member is an event, with its seconds.

Not here: which member is started, reset or stopped, and why (``pool``); who holds it (``leasing``).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.resources.actions import Reason
from agentfly.resources.errors import Infra, StartFailed
from agentfly.resources.events import Event, EventKind
from agentfly.resources.pool import Pool
from agentfly.resources.runners.base import Finder, Found, Member, Runner, Vitals
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

CALL_S = 10.0  # lease, renewal, probe: an answer of a few bytes from a daemon that has nothing else to do
START_S = 900.0  # a large model on a slow disk; runners with shorter starts have their own, shorter bounds
RESET_S = 60.0  # a reset that takes longer than the start of a container is no use
STOP_S = 30.0  # a graceful end and the kill after it
STOP_RETRY_S = (1.0, 30.0)  # first and longest pause before a failed stop is tried again


@dataclass(eq=False, slots=True)
class _Slot:
    """One member: what it is, once it has started, and what is being done to it."""

    id: str
    pool: Pool
    runner: Runner
    spec: ResourceSpec
    began: float
    member: Member | None = None
    lost: bool = False
    work: "asyncio.Task[None] | None" = None  # its start or its reset
    calls: "set[asyncio.Task[None]]" = field(default_factory=set)
    stopping: bool = False
    end: "asyncio.Task[None] | None" = None  # its stop

    def started(self) -> Member:
        """The member of a slot that has one."""
        if self.member is None:
            raise RuntimeError(f"member {self.id}: was used before it started")
        return self.member


class Members:
    """All members of one engine. ``due`` is called after every piece of news of a pool."""

    def __init__(self, due: Callable[[Pool], None], emit: Callable[[Event], None]) -> None:
        self._due = due
        self._emit = emit
        self._slots: dict[str, _Slot] = {}
        self._strays: set[str] = set()  # of an earlier process, of no use and being stopped
        self._unknown: set[str] = set()  # of an earlier process, which do not answer yet
        self._tasks: set[asyncio.Task[None]] = set()

    def member(self, member_id: str) -> Member:
        """The member of this id, which has started."""
        return self._slots[member_id].started()

    def start(self, pool: Pool, runner: Runner, member_id: str, image: str) -> None:
        """Begin the start of a new member; ``image`` is "" for the pool's own."""
        spec: ResourceSpec = pool.spec.resource
        if image:
            spec = spec.model_copy(update={"image": image})
        slot = self._slots[member_id] = _Slot(member_id, pool, runner, spec, _now())
        slot.work = self._spawn(self._start(slot), f"start {member_id}")

    def knows(self, member_id: str) -> bool:
        """True of a member that is one of these, or is being stopped."""
        return member_id in self._slots or member_id in self._strays

    def adopt(self, pool: Pool, runner: Runner, member: Member) -> None:
        """A member that was started before is one of these from now on."""
        slot = self._slots[member.id] = _Slot(member.id, pool, runner, member.spec, _now(), member)
        pool.reset_method, pool.reset_reason = member.reset_method, member.reset_reason
        self._tell(EventKind.MEMBER_ADOPTED, slot)

    def resume(self, pool: Pool, runner: Runner, found: Found, adopt: Callable[[Found], None]) -> None:
        """Wait until a member that was started before says how it is, and have it adopted then."""
        member = found.member
        slot = self._slots[member.id] = _Slot(member.id, pool, runner, member.spec, _now(), member)
        self._unknown.add(member.id)
        slot.work = self._spawn(self._resume(slot, found, adopt), f"resume {member.id}")

    @property
    def unknown(self) -> bool:
        """Whether somebody may hold a member of which nothing is known yet."""
        return bool(self._unknown)

    def discard(self, pool: str, runner: Runner, member: Member, why: str) -> None:
        """Stop a member that was started before and is of no use."""
        self._strays.add(member.id)
        self._spawn(self._discard(pool, runner, member, why), f"stop {member.id}")

    async def gone(self, pool: Pool, within: float) -> list[str]:
        """Wait until nothing is left of a closed pool's members; those of which something is."""
        ends = {slot.end for slot in self._slots.values() if slot.pool is pool and slot.end is not None}
        if ends:
            await asyncio.wait(ends, timeout=within)
        return sorted(slot.id for slot in self._slots.values() if slot.pool is pool)

    def reset(self, member_id: str) -> None:
        """Begin the reset of a member."""
        slot = self._slots[member_id]
        slot.work = self._spawn(self._reset(slot), f"reset {member_id}")

    def stop(self, member_id: str, reason: Reason) -> None:
        """Begin the end of a member, whatever is being done to it."""
        slot = self._slots[member_id]
        slot.stopping = True
        slot.end = self._spawn(self._stop(slot, reason), f"stop {member_id}")

    def quarantine(self, member_id: str, why: str) -> None:
        """Leave a member as it is, for a look."""
        slot = self._slots[member_id]
        self._tell(EventKind.MEMBER_QUARANTINED, slot, reason=Reason.RESET_FAILED, detail=why)

    def probe(self, member_id: str) -> None:
        """Ask a member whether it lives."""
        self.call(member_id, self._probe(self._slots[member_id]))

    def lost(self, member_id: str, why: str) -> None:
        """The member is gone, or is not what it should be."""
        slot = self._slots[member_id]
        if slot.pool.lost(member_id, why, _now()):
            self._lost(slot, why)

    def is_lost(self, member_id: str) -> bool:
        """True of a member that was lost and still has to be stopped."""
        slot = self._slots.get(member_id)
        return slot is not None and slot.lost

    def call(self, member_id: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a short exchange with a member, for which its reset and its stop wait."""
        slot = self._slots[member_id]
        task = self._spawn(work, f"call {member_id}")
        slot.calls.add(task)
        task.add_done_callback(slot.calls.discard)
        return task

    async def lease(self, member_id: str, owner: str, attempt: int, token: str, note: str) -> None:
        """Lease a member, or renew its lease, for the TTL of its pool."""
        slot = self._slots[member_id]
        ttl_s = slot.pool.spec.lease_ttl_s
        async with _bounded(CALL_S):
            await slot.runner.lease(slot.started(), owner, attempt, token, ttl_s, note)

    async def vitals(self, member_id: str) -> Vitals:
        """What the runner's probe says; no answer in time is not a death."""
        slot = self._slots[member_id]
        try:
            async with _bounded(CALL_S):
                return await slot.runner.probe(slot.started())
        except TimeoutError:
            return Vitals(alive=True)
        except Exception as error:
            logger.warning("member %s: probe failed: %s", member_id, describe(error))
            return Vitals(alive=False)

    async def close(self, within: float) -> list[str]:
        """Stop what is left, wait for all tasks, cancel those that last longer, and name what they left."""
        for slot in list(self._slots.values()):
            if not slot.stopping:  # its pool failed, and could not say so
                self.stop(slot.id, Reason.CLOSED)
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        while self._tasks and loop.time() < end:
            await asyncio.wait(self._tasks, timeout=end - loop.time())
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CALL_S)
        return sorted([*self._slots, *self._strays])

    async def detach(self, within: float) -> None:
        """End all tasks. Members of a ``Finder`` stay for whoever finds them; others are stopped."""
        lasting = {slot.id for slot in self._slots.values() if isinstance(slot.runner, Finder)}
        before = set(self._tasks)
        for runner in {slot.runner for slot in self._slots.values()}:
            if isinstance(runner, Finder):
                runner.leave()
        for slot in list(self._slots.values()):
            if slot.id not in lasting and not slot.stopping:
                self.stop(slot.id, Reason.CLOSED)
        ends = {slot.end for slot in self._slots.values() if slot.end is not None and slot.id not in lasting}
        for task in before - ends:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, name=f"agentfly {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, slot: _Slot) -> None:
        try:
            async with _bounded(START_S):
                slot.member = await slot.runner.start(slot.spec, slot.id)
        except Exception as error:
            reason = error.reason if isinstance(error, StartFailed) else describe(error)
            hints = error.hints if isinstance(error, AgentflyError) else ()
            if slot.pool.start_failed(slot.id, reason, _now(), hints):
                del self._slots[slot.id]
                self._tell(EventKind.START_FAILED, slot, detail=reason, seconds=_now() - slot.began)
        else:
            member = slot.member
            slot.pool.reset_method, slot.pool.reset_reason = member.reset_method, member.reset_reason
            if slot.pool.started(slot.id, _now()):  # else it is being stopped, and that waits for this to end
                self._tell(EventKind.MEMBER_STARTED, slot, seconds=_now() - slot.began)
        self._due(slot.pool)

    async def _resume(self, slot: _Slot, found: Found, adopt: Callable[[Found], None]) -> None:
        reason, later = "", None
        try:
            async with _bounded(START_S):
                assert isinstance(slot.runner, Finder), "a member that nobody can have found"
                later = await slot.runner.resume(found, slot.pool.spec.lease_ttl_s)
        except Exception as error:
            reason = error.reason if isinstance(error, StartFailed) else describe(error)
        finally:
            self._unknown.discard(slot.id)
        if later is not None:
            slot.member = later.member
        if slot.stopping:
            return  # whoever stops it waits for this to end
        del self._slots[slot.id]
        if later is not None:
            slot.pool.known(slot.id)
            adopt(later)
        elif slot.pool.start_failed(slot.id, reason, _now()):
            self._tell(EventKind.START_FAILED, slot, detail=reason, seconds=_now() - slot.began)
            self.discard(slot.pool.spec.name, slot.runner, found.member, reason)
        self._due(slot.pool)

    async def _reset(self, slot: _Slot) -> None:
        await self._quiet(slot)
        began, member, memory_mb = _now(), None, None
        found = "it is not pristine, and no fresh one could be started"
        try:
            async with _bounded(RESET_S):
                before = replace(slot.started(), keep_unclean=slot.pool.spec.quarantine > 0)
                member = await slot.runner.reset(before)
        except Exception as error:
            found = describe(error)
        seconds = _now() - began
        if member is not None:
            slot.member = member
            self._tell(EventKind.MEMBER_RESET, slot, seconds=seconds)
            if slot.pool.spec.max_memory_mb is not None:
                memory_mb = (await self.vitals(slot.id)).memory_mb  # a dead one is found by its next holder
        else:
            self._tell(EventKind.RESET_FAILED, slot, detail=found, seconds=seconds)
        clean = member is not None
        slot.pool.reset_done(slot.id, clean, _now(), why="" if clean else found, memory_mb=memory_mb)
        self._due(slot.pool)

    async def _stop(self, slot: _Slot, reason: Reason) -> None:
        while slot.work is not None and not slot.work.done():
            slot.work.cancel()
            await asyncio.wait({slot.work}, timeout=STOP_S)
        await self._quiet(slot)
        if slot.member is not None:
            await _stopped(slot.runner, slot.member)
        del self._slots[slot.id]
        slot.pool.stopped(slot.id)
        self._tell(EventKind.MEMBER_STOPPED, slot, reason=reason, seconds=_now() - slot.began)
        self._due(slot.pool)

    async def _discard(self, pool: str, runner: Runner, member: Member, why: str) -> None:
        began = _now()
        await _stopped(runner, member)
        self._strays.discard(member.id)
        seconds, reason = _now() - began, Reason.UNKNOWN
        self._emit(
            Event(
                EventKind.MEMBER_STOPPED, pool, member=member.id, reason=reason, detail=why, seconds=seconds
            )
        )

    async def _probe(self, slot: _Slot) -> None:
        vitals = await self.vitals(slot.id)
        known = slot.pool.probed(slot.id, vitals.alive, _now(), memory_mb=vitals.memory_mb)
        if known and not vitals.alive:
            self._lost(slot, "the probe found it gone")
        self._due(slot.pool)

    def _lost(self, slot: _Slot, why: str) -> None:
        slot.lost = True
        self._tell(EventKind.MEMBER_LOST, slot, detail=why)

    def _tell(
        self,
        kind: EventKind,
        slot: _Slot,
        *,
        reason: str = "",
        detail: str = "",
        seconds: float | None = None,
    ) -> None:
        pool = slot.pool.spec.name
        self._emit(Event(kind, pool, member=slot.id, reason=reason, detail=detail, seconds=seconds))

    async def _quiet(self, slot: _Slot) -> None:
        while slot.calls:
            await asyncio.wait(set(slot.calls), timeout=CALL_S)


async def _stopped(runner: Runner, member: Member) -> None:
    """Stop a member, however often that has to be tried."""
    pause, longest = STOP_RETRY_S
    while True:
        try:
            async with _bounded(STOP_S):
                await runner.stop(member)
            return
        except Exception as error:
            logger.error("member %s: stop failed, next try in %g s: %s", member.id, pause, describe(error))
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


@asynccontextmanager
async def _bounded(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Infra("runner: what it waited for was cancelled by somebody else") from error


def describe(error: BaseException) -> str:
    """The text of an error, or its type where it has none (a deadline)."""
    return str(error) or type(error).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
