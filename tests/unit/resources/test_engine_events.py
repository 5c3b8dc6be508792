"""Guarantee 3 of leasing.py and 5 of members.py: what happens is told, where it is known. Time is virtual."""

import asyncio

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import LeaseLost, Saturated, StartFailed, Timeout
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import Request
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.engines import SETTLE, pool
from tests.unit.resources.harness import FakeRunner, virtual


class Watched:
    """An engine and what it told, as (kind, what matters)."""

    def __init__(self, runner: FakeRunner, *pools: PoolSpec) -> None:
        self.events: list[Event] = []
        self.engine = ResourceEngine([runner], pools, observer=self.events.append)

    async def __aenter__(self) -> "Watched":
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    def told(self, *kinds: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def one(self, kind: EventKind) -> Event:
        (event,) = self.told(kind)
        return event


@virtual
async def test_life_of_a_lease_is_told_with_its_seconds():
    runner = FakeRunner(start_s=2)
    runner.lease_s, runner.reset_s = 0.5, 0.25
    async with Watched(runner, pool(max=1)) as seen:
        lease = await seen.engine.acquire("swe", "o", share="eval")
        await asyncio.sleep(7)
        await lease.release()
        await asyncio.sleep(1)
        assert [(e.kind, e.seconds) for e in seen.events] == [
            (EventKind.MEMBER_STARTED, 2.0),
            (EventKind.LEASE_GRANTED, 2.5),
            (EventKind.LEASE_RELEASED, 7.0),
            (EventKind.MEMBER_RESET, pytest.approx(0.25)),
        ]
        for event in seen.events:
            assert (event.pool, event.member) == ("swe", lease.info.member_id)
        for event in seen.told(EventKind.LEASE_GRANTED, EventKind.LEASE_RELEASED):
            assert (event.lease, event.owner, event.share) == (lease.info.lease_id, "o", "eval")
    stopped = seen.one(EventKind.MEMBER_STOPPED)
    assert (stopped.reason, stopped.seconds) == ("Closed", pytest.approx(10.5, abs=0.1))


@virtual
async def test_grant_says_whether_a_member_was_free_when_it_was_asked_for():
    async with Watched(FakeRunner(), pool(max=1)) as seen:
        for owner in ("cold", "warm"):
            lease = await seen.engine.acquire("swe", owner)
            waiting = asyncio.create_task(seen.engine.acquire("swe", f"behind {owner}"))
            await asyncio.sleep(1)
            await lease.release()
            await (await waiting).release()
            await asyncio.sleep(1)
        grants = {event.owner: event.warm for event in seen.told(EventKind.LEASE_GRANTED)}
        assert grants == {"cold": False, "behind cold": False, "warm": True, "behind warm": False}


@virtual
async def test_one_lease_of_many_callers_or_of_a_reset_is_one_grant():
    async with Watched(FakeRunner(), pool(max=1)) as seen:
        leases = await asyncio.gather(*(seen.engine.acquire("swe", "o") for _ in range(3)))
        await leases[0].reset()
        await seen.engine.acquire("swe", "o")
        assert len(seen.told(EventKind.LEASE_GRANTED)) == 1
        await leases[0].release()
        assert len(seen.told(EventKind.LEASE_RELEASED)) == 1


@virtual
async def test_lease_that_ends_while_its_rest_is_waited_for_is_released_once():
    async with Watched(FakeRunner(), pool(max=1), pool("other", resource=ContainerSpec(pids=9))) as seen:
        await seen.engine.acquire("other", "in the way")
        both = asyncio.create_task(seen.engine.acquire_many([Request("swe"), Request("other")], "o"))
        await asyncio.sleep(1)
        await seen.engine.release_owner("o")
        with pytest.raises(LeaseLost):
            await both
        assert len(seen.told(EventKind.LEASE_RELEASED)) == 1


@virtual
async def test_dirty_release_says_so():
    async with Watched(FakeRunner(), pool(max=1)) as seen:
        await (await seen.engine.acquire("swe", "o")).release(dirty=True)
        await asyncio.sleep(SETTLE)
        assert seen.one(EventKind.LEASE_RELEASED).reason == "Dirty"
        assert seen.one(EventKind.MEMBER_STOPPED).reason == "Dirty"


@virtual
async def test_lost_member_and_its_lost_lease_are_told():
    runner = FakeRunner()
    async with Watched(runner, pool(max=1)) as seen:
        lease = await seen.engine.acquire("swe", "o")
        await asyncio.sleep(5)
        runner.kill(lease.info.member_id)
        await seen.engine.heartbeat([lease.info.lease_id])
        await lease.release()
        gone = f"it is gone: member {lease.info.member_id}: does not answer"
        assert seen.one(EventKind.MEMBER_LOST).detail == gone
        lost = seen.one(EventKind.LEASE_LOST)
        assert (lost.reason, lost.detail) == ("MemberLost", gone)
        assert lost.seconds == pytest.approx(5, abs=0.1)
        assert seen.told(EventKind.LEASE_RELEASED) == [], "it was lost: that is told once"


@virtual
async def test_lease_without_heartbeat_is_told_as_that():
    async with Watched(FakeRunner(), pool(max=1, lease_ttl_s=3)) as seen:
        await seen.engine.claim_many([Request("swe")], "o")
        await asyncio.sleep(5)
        lost = seen.one(EventKind.LEASE_LOST)
        assert (lost.reason, lost.detail) == ("NoHeartbeat", "no heartbeat for 3 s")
        assert lost.seconds == pytest.approx(3, abs=0.1)


@virtual
async def test_member_found_dead_by_a_probe_is_told():
    runner = FakeRunner()
    async with Watched(runner, pool(min=1, max=1)) as seen:
        await asyncio.sleep(1)
        runner.kill(next(iter(runner.existing)))
        await asyncio.sleep(15)
        assert seen.one(EventKind.MEMBER_LOST).detail == "the probe found it gone"
        assert seen.one(EventKind.MEMBER_STOPPED).reason == "Lost"


@virtual
async def test_failed_start_and_failed_reset_are_told():
    runner = FakeRunner(start_s=2)
    runner.fail_starts = {1}
    async with Watched(runner, pool(max=1)) as seen:
        lease = await seen.engine.acquire("swe", "o")
        failed = seen.one(EventKind.START_FAILED)
        assert (failed.detail, failed.seconds) == ("image is broken", 2.0)
        runner.unclean.add(lease.info.member_id)
        await lease.release()
        await asyncio.sleep(SETTLE)
        assert seen.one(EventKind.RESET_FAILED).member == lease.info.member_id
        assert seen.told(EventKind.MEMBER_RESET) == []
        assert seen.one(EventKind.MEMBER_STOPPED).reason == "ResetFailed"


@virtual
async def test_start_that_nobody_needs_any_more_is_no_failure():
    async with Watched(FakeRunner(start_s=5), pool(max=1)) as seen:
        waiting = asyncio.create_task(seen.engine.acquire("swe", "o", share="s"))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(1)
        assert [event.kind for event in seen.events] == [EventKind.ACQUIRE_FAILED, EventKind.MEMBER_STOPPED]
        failed = seen.one(EventKind.ACQUIRE_FAILED)
        assert (failed.reason, failed.owner, failed.share, failed.seconds) == ("CancelledError", "o", "s", 1)
        assert seen.one(EventKind.MEMBER_STOPPED).reason == "NotNeeded"


@virtual
async def test_failed_acquire_is_told_with_the_type_of_its_error():
    runner = FakeRunner()
    async with Watched(
        runner, pool(max=1, max_pending=1), pool("other", resource=ContainerSpec(pids=9))
    ) as seen:
        held = await seen.engine.acquire("swe", "a")
        with pytest.raises(Timeout):
            await seen.engine.acquire_many([Request("other"), Request("swe")], "b", deadline=2)
        late = seen.one(EventKind.ACQUIRE_FAILED)
        assert (late.pool, late.owner, late.reason, late.seconds) == ("swe", "b", "Timeout", 2)
        assert late.detail.startswith("pool swe: gave no member in 2 s")
        seen.events.clear()
        waiting = asyncio.create_task(seen.engine.acquire("swe", "c"))
        await asyncio.sleep(0.1)
        with pytest.raises(Saturated):
            await seen.engine.acquire_many([Request("other"), Request("swe")], "d")
        refused = seen.one(EventKind.ACQUIRE_FAILED)
        assert (refused.pool, refused.reason, refused.seconds) == ("swe", "Saturated", 0)
        seen.events.clear()
        runner.kill(held.info.member_id)
        await seen.engine.heartbeat([held.info.lease_id])
        with pytest.raises(LeaseLost):
            await seen.engine.acquire("swe", "a")
        assert seen.one(EventKind.ACQUIRE_FAILED).reason == "LeaseLost"
        await (await waiting).release()
        runner.fail_starts = lambda _: True
        await (await seen.engine.acquire("swe", "e")).release(dirty=True)
        seen.events.clear()
        with pytest.raises(StartFailed):
            await seen.engine.acquire("swe", "f", deadline=2)
        assert seen.one(EventKind.ACQUIRE_FAILED).reason == "StartFailed"


@virtual
async def test_engine_goes_on_under_an_observer_that_raises():
    def broken(event: Event) -> None:
        raise ValueError("full")

    async with ResourceEngine([FakeRunner()], [pool(max=1)], observer=broken) as engine:
        for owner in "abc":
            await (await engine.acquire("swe", owner, deadline=3)).release()
