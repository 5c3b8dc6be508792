"""Section numbers are the guarantees of engine.py; T1-T9 are the executed defects of an earlier engine.

Time is virtual: every number of seconds is exact, and every await is bounded by the harness.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from agentfly.resources.engine import CLOSE_S, ResourceEngine
from agentfly.resources.errors import (
    Infra,
    LeaseLost,
    PoolNotFound,
    ResourceError,
    Saturated,
    SpecMismatch,
    StartFailed,
    Timeout,
)
from agentfly.resources.lease import Lease, PoolStatus, Request
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner, run, virtual

SPEC = ContainerSpec()
MODEL = ModelServiceSpec(model="m", max_model_len=128)
SETTLE = 5.0  # longer than any start, reset or stop of the fake runner, shorter than a probe or a TTL


def pool(name: str = "swe", **fields: object) -> PoolSpec:
    return PoolSpec.model_validate({"name": name, "resource": SPEC, **fields})


@asynccontextmanager
async def engine_of(
    runner: FakeRunner, *pools: PoolSpec, others: Sequence[FakeRunner] = ()
) -> AsyncIterator[ResourceEngine]:
    async with ResourceEngine([runner, *others], pools) as engine:
        yield engine
    for each in (runner, *others):
        assert each.faults == []
        assert each.existing == set(), "closing left members behind"


def shape(status: PoolStatus) -> dict[str, int]:
    """What a pool has now, without the zeros."""
    names = ("ready", "leased", "starting", "resetting", "stopping", "queued")
    return {name: count for name in names if (count := getattr(status, name))}


def now() -> float:
    return asyncio.get_running_loop().time()


# T1-T9.


@virtual
async def test_t1_every_waiter_is_woken_when_members_end():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2, max_reuses=0)) as engine:

        async def rollout(name: str) -> None:
            async with await engine.acquire("swe", name, deadline=3):
                await asyncio.sleep(0.05)

        await asyncio.gather(*(rollout(f"r{i}") for i in range(4)))
        assert runner.starts == 4, "max_reuses 0: each rollout had a member of its own"
        assert runner.peak == 2


@virtual
async def test_t2_two_specs_under_the_default_key_are_two_resources():
    async with engine_of(FakeRunner(), pool("python"), pool("web", resource=ContainerSpec(pids=9))) as engine:
        python = await engine.acquire("python", "r")
        web = await engine.acquire("web", "r")
        assert (python.info.pool, web.info.pool) == ("python", "web")
        assert python.info.member_id != web.info.member_id


@virtual
async def test_t2_another_spec_under_a_named_key_is_an_error():
    async with engine_of(FakeRunner(), pool("python"), pool("web", resource=ContainerSpec(pids=9))) as engine:
        await engine.acquire("python", "r", key="box")
        with pytest.raises(SpecMismatch) as mismatch:
            await engine.acquire("web", "r", key="box")
        assert mismatch.value.message == (
            f"owner r: key box stands for pool python (spec {SPEC.identity()}), "
            f"not for pool web (spec {ContainerSpec(pids=9).identity()})"
        )
        assert shape(engine.pool_status()["web"]) == {}


@virtual
async def test_t3_environment_and_limits_are_part_of_identity():
    async with engine_of(FakeRunner()) as engine:
        plain = await engine.acquire(ContainerSpec(), "r")
        other = await engine.acquire(ContainerSpec(env={"A": "1"}), "r")
        again = await engine.acquire(ContainerSpec(), "r")
        assert other.info.member_id != plain.info.member_id
        assert again is plain
        await engine.acquire(ContainerSpec(), "q", key="k")
        with pytest.raises(SpecMismatch):
            await engine.acquire(ContainerSpec(memory_mb=512), "q", key="k")


@virtual
async def test_t4_dead_member_is_never_handed_out_again():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        first = await engine.acquire("swe", "a")
        runner.kill(first.info.member_id)
        await first.release()
        second = await engine.acquire("swe", "b", deadline=3)
        assert second.info.member_id != first.info.member_id
        assert (runner.resets, runner.starts, runner.peak) == (1, 2, 1)


@virtual
async def test_t4_live_member_is_reset_before_the_next_holder():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        first = await engine.acquire("swe", "a")
        await first.release()
        second = await engine.acquire("swe", "b", deadline=3)
        assert second.info.member_id == first.info.member_id
        assert (runner.resets, second.info.incarnation) == (1, 2)


@virtual
async def test_t5_shared_member_stays_until_its_last_holder_leaves():
    runner = FakeRunner("model-service", shared=True)
    async with engine_of(runner, pool("judge", shared=True, resource=MODEL, max=1)) as engine:
        a = await engine.acquire("judge", "a", scope="global")
        b = await engine.acquire("judge", "b", scope="global")
        assert a.info.member_id == b.info.member_id
        await a.release()
        c = await engine.acquire("judge", "c", scope="global", deadline=3)
        assert c.info.member_id == b.info.member_id
        await b.release()
        await asyncio.sleep(SETTLE)
        assert (runner.stops, shape(engine.pool_status()["judge"])) == (0, {"leased": 1})
        await c.release()
        await asyncio.sleep(SETTLE)
        assert (runner.stops, shape(engine.pool_status()["judge"])) == (1, {})


@virtual
async def test_t5_servers_of_a_pool_that_is_not_shared_have_one_holder_each_and_are_reset_after_it():
    runner = FakeRunner("model-service")
    async with engine_of(runner, pool("policy", resource=MODEL, min=2, max=2)) as engine:
        one = await engine.acquire("policy", "run", key="server-0")
        two = await engine.acquire("policy", "run", key="server-1")
        assert one.base_url != two.base_url
        with pytest.raises(Timeout):
            await engine.acquire("policy", "other", deadline=3)
        await engine.release_owner("run")
        other = [await engine.acquire("policy", owner, deadline=3) for owner in ("a", "b")]
        assert {lease.base_url for lease in other} == {one.info.address, two.info.address}
        assert [lease.info.incarnation for lease in other] == [2, 2]
        assert (runner.starts, runner.resets) == (2, 2)


@virtual
async def test_t5_exclusive_member_is_not_given_to_a_second_owner():
    async with engine_of(FakeRunner(), pool(max=1)) as engine:
        await engine.acquire("swe", "a", key="judge")
        with pytest.raises(Timeout):
            await engine.acquire("swe", "b", key="judge", deadline=3)
        with pytest.raises(ResourceError, match="is not shared, as scope global needs"):
            await engine.acquire("swe", "b", key="judge", scope="global", deadline=3)


@virtual
async def test_t6_cancelled_start_leaves_no_slot_and_no_member():
    runner = FakeRunner(start_s=0.2)
    async with engine_of(runner, pool(max=1)) as engine:
        waiting = asyncio.create_task(engine.acquire("swe", "a"))
        await asyncio.sleep(0.05)
        assert shape(engine.pool_status()["swe"]) == {"starting": 1, "queued": 1}
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(SETTLE)
        assert shape(engine.pool_status()["swe"]) == {}
        assert runner.existing == set()
        await engine.acquire("swe", "b", deadline=1)


@virtual
async def test_t6_timed_out_start_leaves_no_slot_and_no_member():
    runner = FakeRunner(start_s=10)
    async with engine_of(runner, pool(max=1)) as engine:
        with pytest.raises(Timeout, match=r"pool swe: gave no member in 2 s: 0 of 1 leased, 1 starting, 0"):
            await engine.acquire("swe", "a", deadline=2)
        assert now() == 2
        await asyncio.sleep(0.1)
        assert (shape(engine.pool_status()["swe"]), runner.existing) == ({}, set())


def test_t7_engine_works_in_a_second_loop():
    runner = FakeRunner()
    engine = ResourceEngine([runner], [pool(max=1)])

    async def contended() -> None:
        async def rollout(name: str) -> None:
            async with await engine.acquire("swe", name, deadline=3):
                await asyncio.sleep(0.05)

        await asyncio.gather(*(rollout(f"r{i}") for i in range(3)))
        await asyncio.sleep(SETTLE)

    async def last() -> None:
        await contended()
        await engine.close()

    run(contended())
    run(last())
    assert (runner.existing, runner.faults, runner.leases) == (set(), [], 6)


@virtual
async def test_t8_failed_warm_up_keeps_what_started_and_no_placeholder():
    runner = FakeRunner()
    runner.fail_starts = {2}
    async with engine_of(runner, pool(min=4, max=4)) as engine:
        await asyncio.sleep(0.5)
        assert shape(engine.pool_status()["swe"]) == {"ready": 3}
        await asyncio.sleep(1.0)
        assert shape(engine.pool_status()["swe"]) == {"ready": 4}, "tried again after its pause"
        assert (runner.starts, runner.peak) == (5, 4)


@virtual
async def test_t9_release_of_the_owner_wins_over_a_pending_start():
    runner = FakeRunner(start_s=0.2)
    async with engine_of(runner, pool(max=1)) as engine:
        waiting = asyncio.create_task(engine.acquire("swe", "a"))
        await asyncio.sleep(0.05)
        await engine.release_owner("a")
        with pytest.raises(LeaseLost, match="owner a: released all"):
            await waiting
        await asyncio.sleep(SETTLE)
        assert (shape(engine.pool_status()["swe"]), runner.existing) == ({}, set())


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


# Reset for the holder.


@virtual
async def test_reset_gives_the_same_holder_a_pristine_member():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        other = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(0.1)
        before = lease.info
        await lease.reset()
        assert lease.info.member_id == before.member_id
        assert lease.info.incarnation == 2
        assert lease.info.token != before.token
        assert not other.done(), "the member never left its holder"
        await lease.release()
        await other


@pytest.mark.parametrize("order", ["heartbeat first", "reset first"])
def test_heartbeat_and_reset_in_both_orders(order):
    async def scenario() -> None:
        runner = FakeRunner()
        async with engine_of(runner, pool(max=1)) as engine:
            lease = await engine.acquire("swe", "a")
            before = lease.info
            calls = [engine.heartbeat([before.lease_id]), lease.reset()]
            if order == "reset first":
                calls.reverse()
            # The first step of each call, in this order: a renewal is sent only after both.
            answers = await asyncio.gather(*calls)
            assert {before.lease_id: True} in answers
            assert (lease.info.member_id, lease.info.incarnation) == (before.member_id, 2)
            assert runner.starts == 1, "a good member was not condemned"

    run(scenario())


@virtual
async def test_refused_renewal_of_a_lease_that_is_being_reset_condemns_nothing():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        before = lease.info
        runner.lease_s = 0.5
        beat = asyncio.create_task(engine.heartbeat([before.lease_id]))
        await asyncio.sleep(0.1)
        runner.holders[before.member_id] = ("nobody", 0, "")  # what a daemon says once a lease ran out
        await lease.reset()
        assert await beat == {before.lease_id: True}
        assert (lease.info.member_id, lease.info.incarnation) == (before.member_id, 2)


@virtual
async def test_failed_reset_gives_the_holder_another_member_before_all_waiters():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        other = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(0.1)
        runner.unclean.add(lease.info.member_id)
        old = lease.info
        await lease.reset()
        assert lease.info.member_id != old.member_id
        assert lease.info.lease_id == old.lease_id
        assert not other.done()
        assert runner.peak == 1
        await lease.release()
        await other


@virtual
async def test_reset_of_what_cannot_be_reset_is_refused():
    model = FakeRunner("model-service", shared=True)
    runner = FakeRunner()
    async with engine_of(
        runner, pool(), pool("judge", shared=True, resource=MODEL), others=[model]
    ) as engine:
        judge = await engine.acquire("judge", "a")
        with pytest.raises(ResourceError, match="a shared member is not reset for one holder"):
            await judge.reset()
        lease = await engine.acquire("swe", "a")
        runner.kill(lease.info.member_id)
        await engine.heartbeat([lease.info.lease_id])
        with pytest.raises(LeaseLost):
            await lease.reset()
        await lease.release()
        with pytest.raises(LeaseLost, match="is over"):
            await engine.reset(lease.info.lease_id)


# Failing starts.


@virtual
async def test_permanent_failure_rejects_the_first_waiter_with_the_reason():
    runner = FakeRunner()
    runner.fail_starts = lambda number: True
    async with engine_of(runner, pool(max=4)) as engine:
        first = asyncio.create_task(engine.acquire("swe", "a"))
        second = asyncio.create_task(engine.acquire("swe", "b"))
        with pytest.raises(StartFailed) as failed:
            await first
        assert failed.value.message == "pool swe: no member could be started: image is broken"
        assert failed.value.reason == "image is broken"
        assert now() == pytest.approx(1 + 2 + 4 + 8, abs=0.1)
        assert not second.done()
        assert engine.pool_status()["swe"].reason == "StartFailing"
        assert engine.pool_status()["swe"].message == "image is broken"
        assert runner.starts <= 6, "it does not spin"
        with pytest.raises(StartFailed):
            await second


@virtual
async def test_deadline_while_starts_fail_tells_why():
    runner = FakeRunner()
    runner.fail_starts = lambda number: True
    async with engine_of(runner, pool()) as engine:
        with pytest.raises(StartFailed, match="image is broken"):
            await engine.acquire("swe", "a", deadline=2)
        assert now() == 2


@virtual
async def test_start_that_fails_once_is_tried_again_for_the_same_waiter():
    runner = FakeRunner()
    runner.fail_starts = {1}
    async with engine_of(runner, pool()) as engine:
        await engine.acquire("swe", "a", deadline=5)
        assert now() == pytest.approx(1.021)


@virtual
async def test_several_waiters_start_several_members_at_once():
    runner = FakeRunner(start_s=1)
    async with engine_of(runner, pool(max=8)) as engine:
        await asyncio.gather(*(engine.acquire("swe", f"r{i}") for i in range(6)))
        assert now() == pytest.approx(1.001)
        assert runner.starts == 6


@virtual
async def test_a_hundred_waiters_are_served_in_order():
    served: list[int] = []
    async with engine_of(FakeRunner(), pool(max=1)) as engine:

        async def rollout(number: int) -> None:
            async with await engine.acquire("swe", f"r{number}"):
                served.append(number)
                await asyncio.sleep(0.01)

        await asyncio.gather(*(rollout(i) for i in range(100)))
    assert served == list(range(100))


# 6. Closing.


@virtual
async def test_close_ends_waiters_starts_resets_and_leases():
    runner = FakeRunner(start_s=1)
    engine = ResourceEngine([runner], [pool(max=3)])
    one = await engine.acquire("swe", "a")
    two = await engine.acquire("swe", "b")
    runner.start_s, runner.reset_s = 500, 500
    waiting = [asyncio.create_task(engine.acquire("swe", f"w{i}")) for i in range(3)]
    await asyncio.sleep(0.1)
    await one.release()
    await asyncio.sleep(0.1)
    assert shape(engine.pool_status()["swe"]) == {"leased": 1, "resetting": 1, "starting": 1, "queued": 3}
    began = now()
    await engine.close()
    assert now() - began < 1
    for task in waiting:
        with pytest.raises(ResourceError, match="the engine was closed"):
            await task
    assert runner.existing == set()
    with pytest.raises(ResourceError, match="is closed"):
        await engine.acquire("swe", "c")
    with pytest.raises(ResourceError, match="is closed"):
        engine.add_pool(pool("late"))
    await two.release()
    await engine.close()


@virtual
async def test_close_cancelled_twice_still_stops_everything():
    runner = FakeRunner()
    runner.stop_s = 1
    engine = ResourceEngine([runner], [pool(min=2, max=2)])
    await engine.acquire("swe", "a")
    closing = asyncio.create_task(engine.close())
    for _ in range(2):
        await asyncio.sleep(0.1)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert runner.existing == set()


@virtual
async def test_failing_stop_is_tried_again_and_keeps_its_place():
    runner = FakeRunner()
    runner.fail_stops = 2
    async with engine_of(runner, pool(max=1, max_reuses=0)) as engine:
        await (await engine.acquire("swe", "a")).release()
        waiting = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(2.5)
        assert shape(engine.pool_status()["swe"]) == {"stopping": 1, "queued": 1}
        await waiting
        assert now() == pytest.approx(3.0, abs=0.1)
        assert runner.peak == 1


@virtual
async def test_close_reports_members_that_do_not_stop():
    runner = FakeRunner()
    runner.fail_stops = 10**9
    engine = ResourceEngine([runner], [pool(min=1, max=1)])
    lease = await engine.acquire("swe", "a")
    began = now()
    with pytest.raises(Infra, match=rf"members {lease.info.member_id}: not stopped in 60 s"):
        await engine.close()
    assert now() - began <= CLOSE_S + 10


# What cannot work is refused when it is configured.


def test_kind_that_cannot_run_here_is_refused_with_the_reason():
    runner = FakeRunner()
    runner.reason = "bwrap: not found"
    with pytest.raises(ResourceError, match="pool swe: kind container cannot run here: bwrap: not found"):
        ResourceEngine([runner], [pool()])
    with pytest.raises(ResourceError, match="kind model-service cannot run here: no runner serves it"):
        ResourceEngine([FakeRunner()], [pool(resource=MODEL)])


def test_pool_with_a_conflicting_cap_is_refused():
    engine = ResourceEngine([FakeRunner()], [pool(max=2)])
    engine.add_pool(pool(max=2))
    with pytest.raises(ResourceError, match="pool swe: exists already"):
        engine.add_pool(pool(max=3))


@virtual
async def test_unknown_pool_names_those_that_exist():
    async with engine_of(FakeRunner(), pool()) as engine:
        with pytest.raises(PoolNotFound) as missing:
            await engine.acquire("sew", "a")
        assert missing.value.render() == "pool sew: does not exist\n  hint: pools that do: swe"


@virtual
async def test_pool_added_later_is_warmed_at_once():
    async with engine_of(FakeRunner()) as engine:
        engine.add_pool(pool(min=2, max=2))
        await asyncio.sleep(0.1)
        assert (await engine.status())["swe"] == PoolStatus(
            max=2,
            min=2,
            ready=2,
            leased=0,
            starting=0,
            resetting=0,
            stopping=0,
            queued=0,
            starts=2,
            resets=0,
            failures=0,
            reason="Ready",
        )


@virtual
async def test_dead_warm_member_is_found_and_replaced():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(0.1)
        runner.kill(next(iter(runner.existing)))
        await asyncio.sleep(15)
        assert (runner.starts, shape(engine.pool_status()["swe"])) == (2, {"ready": 1})


@virtual
async def test_dirty_member_is_not_used_again():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        await lease.release(dirty=True)
        second = await engine.acquire("swe", "b", deadline=3)
        assert second.info.member_id != lease.info.member_id
        assert runner.resets == 0


@virtual
async def test_dead_shared_member_is_lost_for_every_holder():
    runner = FakeRunner("model-service", shared=True)
    async with engine_of(runner, pool("judge", shared=True, resource=MODEL)) as engine:
        a, b = await engine.acquire("judge", "a"), await engine.acquire("judge", "b")
        runner.kill(a.info.member_id)
        await asyncio.sleep(20)
        assert (a.lost, b.lost) == (True, True)
        with pytest.raises(LeaseLost):
            _ = a.base_url
        assert (await engine.acquire("judge", "c", deadline=3)).base_url.startswith("unix://")
