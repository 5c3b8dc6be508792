"""T1-T9: the executed defects of an earlier engine, each under its number. Time is virtual."""

import asyncio

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import (
    LeaseLost,
    ResourceError,
    SpecMismatch,
    Timeout,
)
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.engines import MODEL, SETTLE, SPEC, engine_of, now, pool, shape
from tests.unit.resources.harness import FakeRunner, run, virtual


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
    async with engine_of(runner) as engine:
        a = await engine.acquire(MODEL, "a", scope="global")
        b = await engine.acquire(MODEL, "b", scope="global")
        assert a.info.member_id == b.info.member_id
        await a.release()
        c = await engine.acquire(MODEL, "c", scope="global", deadline=3)
        assert c.info.member_id == b.info.member_id
        await b.release()
        await asyncio.sleep(SETTLE)
        assert (runner.stops, shape(engine.pool_status()[c.info.pool])) == (0, {"leased": 1})
        await c.release()
        await asyncio.sleep(SETTLE)
        assert (runner.stops, shape(engine.pool_status()[c.info.pool])) == (1, {})


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
