"""Section numbers are the guarantees of engine.py.

Time is virtual: every number of seconds is exact, and every await is bounded by the harness.
"""

import asyncio

import pytest

from agentfly.resources.errors import (
    LeaseLost,
    ResourceError,
    Saturated,
    Timeout,
)
from agentfly.resources.lease import Lease, Request
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.engines import SETTLE, engine_of, now, pool, shape
from tests.unit.resources.harness import FakeRunner, run, virtual

# 1. The same name is the same lease.


@virtual
async def test_concurrent_acquires_of_one_key_share_one_lease():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=4)) as engine:
        leases = await asyncio.gather(*(engine.acquire("swe", "a") for _ in range(5)))
        assert {id(lease) for lease in leases} == {id(leases[0])}
        assert (runner.starts, shape(engine.pool_status()["swe"])) == (1, {"leased": 1})


@virtual
async def test_one_of_two_waiters_of_a_key_may_leave():
    async with engine_of(FakeRunner(start_s=1), pool(max=1)) as engine:
        one, two = (asyncio.create_task(engine.acquire("swe", "a")) for _ in range(2))
        await asyncio.sleep(0.1)
        one.cancel()
        lease = await two
        assert now() == pytest.approx(1.001)
        assert shape(engine.pool_status()["swe"]) == {"leased": 1}
        await lease.release()


@virtual
async def test_different_keys_of_one_owner_are_different_members():
    async with engine_of(FakeRunner(), pool(max=2)) as engine:
        a, b = await engine.acquire("swe", "o", key="a"), await engine.acquire("swe", "o", key="b")
        assert a.info.member_id != b.info.member_id


@virtual
async def test_spec_is_served_by_the_pool_that_has_it():
    async with engine_of(FakeRunner(), pool(max=1)) as engine:
        lease = await engine.acquire(ContainerSpec(), "a")
        assert lease.info.pool == "swe"
        assert await engine.acquire("swe", "a") is lease


# 2. Lost stays lost; attempts are fenced.


@virtual
async def test_member_that_died_under_its_lease_is_lease_lost():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2)) as engine:
        lease = await engine.acquire("swe", "a")
        runner.kill(lease.info.member_id)
        for _ in range(2):
            with pytest.raises(LeaseLost) as lost:
                await engine.acquire("swe", "a", deadline=3)
            assert lost.value.incarnation == 1
        await lease.release()
        fresh = await engine.acquire("swe", "a", deadline=3)
        assert fresh.info.member_id != lease.info.member_id


@virtual
async def test_next_attempt_gets_a_fresh_member_after_a_loss():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2)) as engine:
        lease = await engine.acquire("swe", "a", attempt=0)
        runner.kill(lease.info.member_id)
        assert await engine.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: False}
        fresh = await engine.acquire("swe", "a", attempt=1, deadline=3)
        assert fresh.info.member_id != lease.info.member_id


@virtual
async def test_late_release_of_an_old_attempt_leaves_the_new_holder_alone():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        old = await engine.acquire("swe", "a", attempt=0)
        new = await engine.acquire("swe", "a", attempt=1, deadline=3)
        assert (new.info.member_id, new.info.incarnation) == (old.info.member_id, 2)
        await old.release()
        await engine.release_owner("a", attempt=0)
        assert await engine.heartbeat([old.info.lease_id, new.info.lease_id]) == {
            old.info.lease_id: False,
            new.info.lease_id: True,
        }
        with pytest.raises(LeaseLost, match="attempt 0 is over, attempt 1 has begun"):
            await engine.acquire("swe", "a", attempt=0, deadline=3)


@virtual
async def test_member_of_an_old_attempt_is_reset_though_the_new_one_is_refused():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1, max_pending=0, min=1)) as engine:
        await asyncio.sleep(0.1)
        await engine.acquire("swe", "a", attempt=0)
        with pytest.raises(Saturated):
            await engine.acquire("swe", "a", attempt=1)
        await asyncio.sleep(0.1)
        assert (shape(engine.pool_status()["swe"]), runner.resets) == ({"ready": 1}, 1)


@virtual
async def test_waiting_acquire_of_an_old_attempt_gives_way():
    async with engine_of(FakeRunner(start_s=1), pool(max=1)) as engine:
        old = asyncio.create_task(engine.acquire("swe", "a", attempt=0))
        await asyncio.sleep(0.1)
        new = await engine.acquire("swe", "a", attempt=1)
        with pytest.raises(LeaseLost, match="attempt 1 has begun"):
            await old
        assert new.info.owner == "a"


@virtual
async def test_member_that_takes_no_lease_is_replaced_behind_the_scenes():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(0.1)
        runner.kill(next(iter(runner.existing)))
        lease = await engine.acquire("swe", "a", deadline=5)
        assert lease.info.member_id.endswith("-2")
        assert runner.peak == 1


# 3. An acquire ends with its lease or without a trace: both orders of each race.


@pytest.mark.parametrize("steps", range(12))
def test_cancel_at_any_step_of_an_acquire_leaves_no_trace(steps):
    async def scenario() -> None:
        runner = FakeRunner(start_s=0, shared=False)
        runner.lease_s = runner.reset_s = runner.stop_s = 0
        async with engine_of(runner, pool(max=1)) as engine:
            task = asyncio.create_task(engine.acquire("swe", "a", deadline=3))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            got = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(got, Lease):
                await got.release()
            await asyncio.sleep(SETTLE)
            assert shape(engine.pool_status()["swe"]) in ({}, {"ready": 1})
            assert runner.holders == {}
            await engine.acquire("swe", "b", deadline=3)

    run(scenario())


@pytest.mark.parametrize("order", ["cancel first", "release first"])
def test_grant_and_cancel_in_both_orders(order):
    async def scenario() -> None:
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1)) as engine:
            held = await engine.acquire("swe", "a")
            first = asyncio.create_task(engine.acquire("swe", "b"))
            second = asyncio.create_task(engine.acquire("swe", "c"))
            await asyncio.sleep(0.1)
            if order == "cancel first":
                first.cancel()
                await held.release()
            else:
                await held.release()
                first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert (await second).info.owner == "c"
            assert runner.starts == 1

    run(scenario())


@virtual
async def test_deadline_during_the_hand_over_gives_the_member_to_the_next():
    runner = FakeRunner()
    runner.lease_s = 1.0
    async with engine_of(runner, pool(max=1)) as engine:
        slow = asyncio.create_task(engine.acquire("swe", "a", deadline=0.5))
        await asyncio.sleep(0)
        lease = await engine.acquire("swe", "b", deadline=10)
        with pytest.raises(Timeout):
            await slow
        assert (lease.info.owner, lease.info.incarnation) == ("b", 2)


@virtual
async def test_refused_acquire_of_several_leaves_no_trace():
    async with engine_of(FakeRunner(start_s=1), pool(max=1, max_pending=1), pool("web")) as engine:
        waiting = asyncio.create_task(engine.acquire("web", "a"))
        crowd = asyncio.create_task(engine.acquire("swe", "z"))
        await asyncio.sleep(0)
        with pytest.raises(Saturated) as full:
            await engine.acquire_many([Request("swe"), Request("web", key="k")], "b")
        assert 1 <= full.value.retry_after <= 60
        assert engine.pool_status()["web"].queued == 1
        await waiting
        await crowd


@virtual
async def test_released_while_it_is_reset_by_its_holder():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        resetting = asyncio.create_task(lease.reset())
        await asyncio.sleep(0)
        await lease.release()
        with pytest.raises(LeaseLost):
            await resetting
        await asyncio.sleep(SETTLE)
        assert (shape(engine.pool_status()["swe"]), runner.resets) == ({"ready": 1}, 1)


# 4. All or nothing, and never waiting for each other.


@virtual
async def test_two_pairs_from_a_pool_of_two_do_not_deadlock():
    async with engine_of(FakeRunner(), pool(max=2)) as engine:

        async def pair(owner: str) -> float:
            leases = await engine.acquire_many([Request("swe", "x"), Request("swe", "y")], owner, deadline=10)
            assert len({lease.info.member_id for lease in leases}) == 2
            await asyncio.sleep(0.1)
            for lease in leases:
                await lease.release()
            return now()

        await asyncio.gather(*(pair(f"r{i}") for i in range(6)))


@virtual
async def test_opposite_orders_over_two_pools_do_not_deadlock():
    async with engine_of(FakeRunner(), pool("a"), pool("b", resource=ContainerSpec(pids=9))) as engine:

        async def both(owner: str, names: tuple[str, str]) -> None:
            leases = await engine.acquire_many([Request(name) for name in names], owner, deadline=10)
            assert tuple(lease.info.pool for lease in leases) == names
            await asyncio.sleep(0.1)
            await engine.release_owner(owner)

        await asyncio.gather(*(both(f"r{i}", ("a", "b") if i % 2 else ("b", "a")) for i in range(8)))


@virtual
async def test_one_missing_gives_back_all_but_what_was_held_before():
    async with engine_of(FakeRunner(), pool("a", max=2), pool("b", resource=ContainerSpec(pids=9))) as engine:
        before = await engine.acquire("a", "r", key="old")
        await engine.acquire("b", "other")
        with pytest.raises(Timeout, match="pool b: gave no member"):
            await engine.acquire_many(
                [Request("a", "old"), Request("a", "new"), Request("b")], "r", deadline=2
            )
        await asyncio.sleep(SETTLE)
        assert shape(engine.pool_status()["a"]) == {"leased": 1, "ready": 1}
        assert await engine.heartbeat([before.info.lease_id]) == {before.info.lease_id: True}


@virtual
async def test_what_came_early_outlives_the_wait_for_the_rest():
    async with engine_of(
        FakeRunner(), pool("a", lease_ttl_s=3), pool("b", resource=ContainerSpec(pids=9))
    ) as engine:
        other = await engine.acquire("b", "other")
        both = asyncio.create_task(engine.acquire_many([Request("a"), Request("b")], "r"))
        await asyncio.sleep(20)
        await other.release()
        leases = await both
        assert [lease.info.pool for lease in leases] == ["a", "b"]
        assert leases[0].info.incarnation == 1, "it never expired"


@virtual
async def test_early_lease_that_dies_fails_the_whole():
    runner = FakeRunner()
    async with engine_of(
        runner, pool("a", lease_ttl_s=3), pool("b", resource=ContainerSpec(pids=9))
    ) as engine:
        await engine.acquire("b", "other")
        both = asyncio.create_task(engine.acquire_many([Request("a"), Request("b")], "r"))
        await asyncio.sleep(0.5)
        runner.kill(next(name for name in runner.existing if name.startswith("a-")))
        with pytest.raises(LeaseLost):
            await both
        assert engine.pool_status()["b"].queued == 0


@virtual
async def test_more_together_than_max_is_refused_at_once():
    async with engine_of(FakeRunner(), pool(max=2)) as engine:
        with pytest.raises(ResourceError, match="3 members were asked for together, max is 2") as refused:
            await engine.acquire_many([Request("swe", key) for key in "abc"], "r")
        assert refused.value.hints == ("raise max to 3, or acquire fewer together",)
        assert await engine.acquire_many([], "r") == []


# 5. TTL and heartbeats.


@virtual
async def test_held_lease_outlives_many_ttls():
    runner = FakeRunner()
    async with engine_of(runner, pool(lease_ttl_s=3)) as engine:
        lease = await engine.acquire("swe", "a")
        await asyncio.sleep(100)
        assert not lease.lost
        assert 99 <= runner.leases <= 102, "one renewal a second"


@virtual
async def test_lease_without_heartbeat_expires_and_its_member_comes_back_clean():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1, lease_ttl_s=3)) as engine:
        (info,) = await engine.claim_many([Request("swe")], "a")
        lease = await engine.acquire("swe", "b", deadline=10)
        assert now() == pytest.approx(3.0, abs=0.1)
        assert (lease.info.member_id, lease.info.incarnation) == (info.member_id, 2)
        assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}
        with pytest.raises(LeaseLost, match="no heartbeat for 3 s"):
            await engine.acquire("swe", "a", deadline=1)


@virtual
async def test_member_that_does_not_answer_has_until_its_ttl():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1, lease_ttl_s=3)) as engine:
        lease = await engine.acquire("swe", "a")
        runner.fail_leases = {2}
        await asyncio.sleep(10)
        assert not lease.lost, "one failed renewal of a member that the probe finds alive"
        runner.fail_leases = set(range(1000))
        await asyncio.sleep(4)
        assert lease.lost


@virtual
async def test_one_hung_member_costs_the_others_nothing():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2, lease_ttl_s=9)) as engine:
        healthy, hung = await engine.acquire("swe", "a"), await engine.acquire("swe", "b")
        runner.hang(hung.info.member_id)
        ids = [healthy.info.lease_id, hung.info.lease_id]
        assert await engine.heartbeat(ids) == dict.fromkeys(ids, True)
        assert now() == pytest.approx(3, abs=0.1), "it answers in time for the next heartbeat"
        await asyncio.sleep(60)
        assert (healthy.lost, hung.lost) == (False, True)
        with pytest.raises(LeaseLost, match="no heartbeat for 9 s"):
            await engine.acquire("swe", "b", deadline=1)
        assert await engine.acquire("swe", "a", deadline=1) is healthy
        assert healthy.info.incarnation == 1


@virtual
async def test_renewal_in_flight_at_release_does_not_reach_the_next_holder():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        runner.lease_s = 0.5
        beat = asyncio.create_task(engine.heartbeat([lease.info.lease_id]))
        await asyncio.sleep(0.1)
        await lease.release()
        await engine.acquire("swe", "b", deadline=5)
        assert await beat == {lease.info.lease_id: True}
