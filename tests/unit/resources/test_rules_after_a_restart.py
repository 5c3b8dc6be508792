"""The rules of the engine that a restart must not break, each by its number. Time is virtual."""

import asyncio

import pytest

from agentfly.resources.errors import LeaseLost
from tests.unit.resources.engines import crash, engine_of, now, pool, recovered, shape
from tests.unit.resources.harness import FakeRunner, virtual


@virtual
async def test_rule_1_same_owner_and_key_is_the_same_live_member():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=2)) as first:
        info = (await first.acquire("swe", "o", key="box")).info
        await crash(first)
        engine = await recovered(runner, pool(max=2))
        assert (await engine.acquire("swe", "o", key="box")).info == info
        runner.kill(info.member_id)
        with pytest.raises(LeaseLost):
            await engine.acquire("swe", "o", key="box")
        await engine.close()
        runner.existing.clear()


@virtual
async def test_rule_3_max_is_not_exceeded_by_a_start():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=2, max=2)) as first:
        await asyncio.sleep(1)
        await crash(first)
        engine = await recovered(runner, pool(min=2, max=2))
        await asyncio.gather(*(engine.acquire("swe", f"r{i}") for i in range(2)))
        waiter = asyncio.create_task(engine.acquire("swe", "w", deadline=5))
        await asyncio.sleep(1)
        assert (runner.starts, runner.peak, waiter.done()) == (2, 2, False)
        await engine.close()
        await asyncio.gather(waiter, return_exceptions=True)


@virtual
async def test_rule_4_free_means_verified():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as first:
        lease = await first.acquire("swe", "a")
        await crash(first)
        runner.holders.clear()  # its lease ended, and nobody reset it
        engine = await recovered(runner, pool(max=1))
        assert (await engine.acquire("swe", "b")).info.incarnation == lease.info.incarnation + 1
        await engine.close()


@virtual
async def test_rule_6_no_heartbeat_no_lease():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1, lease_ttl_s=30)) as first:
        await first.acquire("swe", "a")
        await crash(first)
        engine = await recovered(runner, pool(max=1, lease_ttl_s=30))
        began = now()
        await engine.acquire("swe", "b")
        assert 29 < now() - began < 31
        assert shape(engine.pool_status()["swe"]) == {"leased": 1}
        await engine.close()
