"""Section numbers are the guarantees of members.py. A stub pool records the news; time is virtual."""

import asyncio
from typing import Any

import pytest

from agentfly.resources.actions import Reason, State
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import StartFailed, Timeout
from agentfly.resources.events import Event
from agentfly.resources.members import CALL_S, RESET_S, START_S, STOP_S, Members, describe
from agentfly.resources.pool import Pool
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner, virtual

HOUR = 3600.0


def now() -> float:
    return asyncio.get_running_loop().time()


class Rig:
    """Members of one real pool, whose decisions are carried out by hand."""

    def __init__(self, runner: FakeRunner, **fields: Any) -> None:
        self.runner = runner
        self.pool = Pool(PoolSpec(name="p", resource=ContainerSpec(), **fields))
        self.turns = 0
        self.events: list[Event] = []
        self.members = Members(self.turned, self.events.append)

    def turned(self, pool: Pool) -> None:
        assert pool is self.pool
        self.turns += 1

    def begin(self) -> str:
        self.pool.ask()
        (start,) = self.pool.decide(now())
        self.members.start(self.pool, self.runner, start.member, start.image)
        return start.member

    async def grown(self) -> str:
        """A member that is held, and whose ticket is 1."""
        name = self.begin()
        await asyncio.sleep(self.runner.start_s)
        await asyncio.sleep(0)
        self.pool.decide(now())
        self.pool.leased(1, now())
        return name

    def withdraw(self, *, dirty: bool = False) -> list[Any]:
        self.pool.withdraw(1, now(), dirty=dirty)
        return self.pool.decide(now())

    async def closed(self) -> list[str]:
        return await self.members.close(HOUR)


# 1. Work belongs to the members, not to who began it.


@virtual
async def test_start_outlives_the_task_that_began_it():
    rig = Rig(FakeRunner(start_s=5))

    async def caller() -> None:
        rig.begin()
        await asyncio.sleep(HOUR)

    task = asyncio.create_task(caller())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(5)
    assert rig.pool.count(State.FREE) == 1
    assert rig.turns == 1
    assert await rig.closed() == []
    assert rig.runner.existing == set(), "4: what nobody asked to stop, too"


# 2. Every call to a runner has a deadline.


@virtual
async def test_start_that_hangs_fails_at_its_deadline_and_is_cancelled():
    rig = Rig(FakeRunner(start_s=HOUR * 10))
    rig.begin()
    await asyncio.sleep(START_S - 1)
    assert rig.pool.count(State.STARTING) == 1
    await asyncio.sleep(2)
    assert (rig.pool.count(State.STARTING), rig.pool.last_failure) == (0, "TimeoutError")
    assert rig.runner.existing == set()


@virtual
async def test_reset_that_hangs_condemns_its_member_at_its_deadline():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.reset_s = HOUR
    rig.withdraw()
    rig.members.reset(name)
    await asyncio.sleep(RESET_S + 1)
    (stop,) = rig.pool.decide(now())
    assert stop.reason is Reason.RESET_FAILED
    rig.members.stop(name, stop.reason)
    assert await rig.closed() == []


@virtual
async def test_lease_that_hangs_ends_at_its_deadline():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.lease_s = HOUR
    began = now()
    with pytest.raises(TimeoutError):
        await rig.members.lease(name, "o", 0, "t", "")
    assert now() - began == pytest.approx(CALL_S)
    assert (await rig.members.vitals(name)).alive, "no answer in time is not a death"
    assert now() - began == pytest.approx(2 * CALL_S)


@virtual
async def test_probe_that_raises_is_a_death():
    class Broken(FakeRunner):
        async def probe(self, member: Member) -> Vitals:
            raise OSError("no such socket")

    rig = Rig(Broken())
    assert not (await rig.members.vitals(await rig.grown())).alive


@virtual
async def test_stop_that_hangs_is_tried_again_and_keeps_its_place():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.stop_s = HOUR
    rig.members.stop(name, rig.withdraw(dirty=True)[0].reason)
    await asyncio.sleep(STOP_S + 0.5)
    assert (rig.runner.stops, rig.pool.count(State.STOPPING)) == (1, 1)
    rig.runner.stop_s = 0
    await asyncio.sleep(1)
    assert (rig.runner.stops, rig.pool.count(State.STOPPING), rig.runner.existing) == (2, 0, set())


@virtual
async def test_cancellation_inside_a_runner_is_a_failed_start_and_costs_no_place():
    class Sharing(FakeRunner):
        async def start(self, spec, member_id):
            pull = asyncio.get_running_loop().create_future()
            pull.cancel()
            return await pull

    rig = Rig(Sharing())
    rig.begin()
    await asyncio.sleep(1)
    assert (rig.pool.failures, rig.pool.count(*State), rig.turns) == (1, 0, 1)


@virtual
async def test_cancellation_inside_a_runner_does_not_end_the_tries_to_stop():
    class Sharing(FakeRunner):
        async def stop(self, member):
            if not self.stops:
                self.stops += 1
                raise asyncio.CancelledError
            await super().stop(member)

    rig = Rig(Sharing())
    name = await rig.grown()
    rig.members.stop(name, Reason.DIRTY)
    await asyncio.sleep(5)
    assert rig.runner.existing == set()


# 3. Order.


@virtual
async def test_reset_begins_when_the_calls_are_through():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.lease_s = 5
    rig.members.call(name, rig.members.lease(name, "o", 0, "t", ""))
    rig.withdraw()
    rig.members.reset(name)
    await asyncio.sleep(4.9)
    assert rig.runner.resets == 0
    await asyncio.sleep(0.2)
    assert rig.runner.resets == 1
    assert rig.pool.count(State.FREE) == 1
    assert rig.members.member(name).incarnation == 2
    assert rig.runner.faults == []


@virtual
async def test_stop_begins_when_the_calls_are_through():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.lease_s = 5
    rig.members.call(name, rig.members.lease(name, "o", 0, "t", ""))
    rig.members.stop(name, rig.withdraw(dirty=True)[0].reason)
    await asyncio.sleep(4.9)
    assert rig.runner.stops == 0
    assert await rig.closed() == []


@virtual
async def test_stop_cancels_a_start():
    rig = Rig(FakeRunner(start_s=HOUR))
    name = rig.begin()
    await asyncio.sleep(1)
    (stop,) = rig.withdraw()
    rig.members.stop(name, stop.reason)
    await asyncio.sleep(0.1)
    assert (rig.pool.count(*State), rig.runner.existing, rig.runner.stops) == (0, set(), 0)


@virtual
async def test_start_that_ends_well_in_spite_of_its_cancellation_is_stopped():
    class Stubborn(FakeRunner):
        async def start(self, spec, member_id):
            self.existing.add(member_id)
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
            return Member(member_id, spec, 1, f"unix:///{member_id}")

    rig = Rig(Stubborn())
    name = rig.begin()
    await asyncio.sleep(1)
    (stop,) = rig.withdraw()
    rig.members.stop(name, stop.reason)
    await asyncio.sleep(0.5)
    assert rig.pool.count(State.STOPPING) == 1, "it is still there, so it still counts"
    await asyncio.sleep(1)
    assert (rig.pool.count(*State), rig.runner.existing, rig.runner.stops) == (0, set(), 1)


@virtual
async def test_stop_cancels_a_reset():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.reset_s = 50
    rig.withdraw()
    rig.members.reset(name)
    await asyncio.sleep(1)
    rig.pool.lost(name, "gone", now())
    (stop,) = rig.pool.decide(now())
    rig.members.stop(name, stop.reason)
    await asyncio.sleep(0.1)
    assert (rig.pool.count(*State), rig.runner.existing) == (0, set())


@virtual
async def test_failed_start_leaves_no_member():
    runner = FakeRunner()
    runner.fail_starts = {1}
    rig = Rig(runner)
    rig.begin()
    await asyncio.sleep(1)
    assert (rig.pool.last_failure, rig.turns, await rig.closed()) == ("image is broken", 1, [])


# 4. Stops are tried until they succeed.


@virtual
async def test_pauses_between_stops_double_up_to_their_bound():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.fail_stops = 8
    rig.members.stop(name, rig.withdraw(dirty=True)[0].reason)
    began = now()
    assert await rig.closed() == []
    assert now() - began == pytest.approx(1 + 2 + 4 + 8 + 16 + 30 + 30 + 30, abs=0.1)
    assert rig.runner.stops == 9


@virtual
async def test_closing_names_what_is_left_and_leaves_no_task():
    rig = Rig(FakeRunner())
    name = await rig.grown()
    rig.runner.fail_stops = 10**6
    rig.members.stop(name, Reason.CLOSED)
    assert await rig.members.close(10) == [name]
    assert now() < 25


def test_error_without_a_text_is_named_by_its_type():
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(StartFailed("member m: broken")) == "member m: broken"


# The same through an engine.


@virtual
async def test_hanging_daemon_costs_a_waiter_one_call_not_its_deadline():
    class Mute(FakeRunner):
        async def lease(self, member, owner, attempt, token, ttl_s, note=""):
            self.lease_s = HOUR if member.id.endswith("-1") else 0.001
            await super().lease(member, owner, attempt, token, ttl_s, note)

    runner = Mute()
    async with ResourceEngine([runner], [PoolSpec(name="p", resource=ContainerSpec())]) as engine:
        lease = await engine.acquire("p", "a", deadline=60)
        assert lease.info.member_id.endswith("-2")
        assert CALL_S < now() < CALL_S + 2


@virtual
async def test_start_that_ignores_its_cancellation_never_lets_the_pool_exceed_max():
    class Stubborn(FakeRunner):
        async def start(self, spec, member_id):
            try:
                return await super().start(spec, member_id)
            except asyncio.CancelledError:
                self.existing.add(member_id)
                await asyncio.sleep(3)
                self.existing.discard(member_id)
                raise

    runner = Stubborn(start_s=5)
    async with ResourceEngine([runner], [PoolSpec(name="p", resource=ContainerSpec())]) as engine:
        with pytest.raises(Timeout):
            await engine.acquire("p", "a", deadline=1)
        await asyncio.sleep(0)  # otherwise the start would be kept for the next waiter
        await engine.acquire("p", "b", deadline=60)
        assert now() == pytest.approx(1 + 3 + 5, abs=0.1)
        assert runner.peak == 1
