"""Pools that come, change and go while an engine runs: the guarantees of registry.py. Time is virtual."""

import asyncio

import pytest

from agentfly.resources.engine import CLOSE_S
from agentfly.resources.errors import Infra, LeaseLost, PoolNotFound, ResourceError
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import Request
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.engines import SPEC, engine_of, now, pool, shape
from tests.unit.resources.harness import FakeRunner, virtual

NEW = ContainerSpec(pids=9)

# Setting.


@virtual
async def test_pool_that_is_set_is_there_and_warm():
    async with engine_of(FakeRunner()) as engine:
        engine.set_pool(pool(min=2, max=2))
        await asyncio.sleep(1)
        assert shape(engine.pool_status()["swe"]) == {"ready": 2}
        engine.set_pool(pool(min=2, max=2))
        await asyncio.sleep(1)
        assert engine.pool_status()["swe"].starts == 2, "setting an equal one again changes nothing"


@virtual
async def test_change_of_the_resource_replaces_idle_members_and_no_held_one():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=3, max=4)) as engine:
        lease = await engine.acquire("swe", "a")
        await asyncio.sleep(1)
        engine.set_pool(pool(min=3, max=4, resource=NEW))
        assert engine.pool_status()["swe"].outdated == 3
        await asyncio.sleep(5)
        assert engine.pool_status()["swe"].outdated == 1
        assert runner.started[lease.info.member_id].spec == SPEC
        assert await engine.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: True}
        assert (await engine.acquire("swe", "a")).info == lease.info, "the same owner and key: the same lease"
        other = await engine.acquire("swe", "b")
        assert runner.started[other.info.member_id].spec == NEW
        await lease.release()
        await asyncio.sleep(1)
        assert engine.pool_status()["swe"].outdated == 0
        assert all(runner.started[name].spec == NEW for name in runner.existing)
        assert runner.peak <= 4


@virtual
async def test_acquire_by_spec_follows_the_pool_of_that_spec():
    async with engine_of(FakeRunner(), pool(max=2)) as engine:
        assert (await engine.acquire(SPEC, "a")).info.pool == "swe"
        engine.set_pool(pool(max=2, resource=NEW))
        assert (await engine.acquire(NEW, "b")).info.pool == "swe"
        assert (await engine.acquire(SPEC, "c")).info.pool == f"spec-{SPEC.identity()}"


# Removing.


@virtual
async def test_removed_pool_is_gone_with_all_that_it_had():
    events: list[Event] = []
    runner = FakeRunner()
    async with engine_of(runner, pool(max=3), pool("other")) as engine:
        engine.observe(events.append)
        lease = await engine.acquire("swe", "a", key="box")
        await (await engine.acquire("swe", "b")).release()
        await asyncio.sleep(1)
        runner.start_s = 500
        waiters = [asyncio.create_task(engine.acquire("swe", f"w{i}")) for i in range(2)]
        both = asyncio.create_task(engine.acquire_many([Request("other"), Request("swe")], "w"))
        await asyncio.sleep(1)
        assert shape(engine.pool_status()["swe"]) == {"leased": 2, "starting": 1, "queued": 2}
        began = now()
        await engine.remove_pool("swe")
        assert now() - began < 1, "a start on its way is not waited for"
        for waiter in (waiters[1], both):
            with pytest.raises(PoolNotFound, match=r"^pool swe: was deleted$"):
                await waiter
        assert runner.existing == set()
        assert lease.lost
        assert await engine.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: False}
        assert set(engine.pool_status()) == {"other"}
        lost = [event for event in events if event.kind is EventKind.LEASE_LOST]
        assert {(event.reason, event.detail) for event in lost} == {("PoolDeleted", "pool swe was deleted")}
        with pytest.raises(PoolNotFound, match=r"^pool swe: does not exist$"):
            await engine.acquire("swe", "c")
        with pytest.raises(PoolNotFound):
            await engine.remove_pool("swe")
        await lease.release()


@virtual
async def test_name_is_free_again_and_a_lost_lease_is_still_lost():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        old = await engine.acquire("swe", "a")
        await engine.remove_pool("swe")
        engine.set_pool(pool(max=1, resource=NEW))
        with pytest.raises(LeaseLost, match="pool swe was deleted"):
            await engine.acquire("swe", "a")
        new = await engine.acquire("swe", "b")
        assert new.info.member_id != old.info.member_id
        assert runner.started[new.info.member_id].spec == NEW
        await old.release()
        await new.release()
        assert (await engine.acquire("swe", "a")).info.pool == "swe"


@virtual
async def test_name_is_taken_until_everything_has_stopped():
    runner = FakeRunner()
    runner.stop_s = 9
    async with engine_of(runner, pool(min=2, max=2)) as engine:
        await asyncio.sleep(1)
        removal = asyncio.create_task(engine.remove_pool("swe"))
        await asyncio.sleep(1)
        with pytest.raises(ResourceError, match="pool swe: is being deleted, 2 of its members still have to"):
            engine.set_pool(pool(max=2))
        with pytest.raises(PoolNotFound, match="pool swe: was deleted"):
            await engine.acquire("swe", "a")
        await removal
        engine.set_pool(pool(max=2))
        await engine.acquire("swe", "a")
        assert runner.peak == 2


@virtual
async def test_removal_that_is_cancelled_goes_on():
    runner = FakeRunner()
    runner.stop_s = 9
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(1)
        removal = asyncio.create_task(engine.remove_pool("swe"))
        await asyncio.sleep(1)
        removal.cancel()
        await asyncio.gather(removal, return_exceptions=True)
        await asyncio.sleep(9)
        assert runner.existing == set()
        engine.set_pool(pool(max=1))


@virtual
async def test_members_that_do_not_stop_are_named_and_tried_again():
    runner = FakeRunner()
    runner.fail_stops = 6
    async with engine_of(runner, pool(min=1, max=1)) as engine:
        await asyncio.sleep(1)
        began = now()
        (name,) = runner.existing
        with pytest.raises(Infra, match=rf"pool swe: members {name}: not stopped in {CLOSE_S:g} s"):
            await engine.remove_pool("swe")
        assert now() - began == pytest.approx(CLOSE_S)
        await asyncio.sleep(60)
        assert runner.existing == set()


@virtual
async def test_demand_of_a_removed_pool_is_forgotten():
    async with engine_of(FakeRunner(), pool(max=4, per_image=True)) as engine:
        await engine.demand("swe", {"a": 2}, "job")
        await asyncio.sleep(1)
        await engine.remove_pool("swe")
        await engine.release_owner("job")
        engine.set_pool(pool(max=4, per_image=True))
        await asyncio.sleep(600)
        assert shape(engine.pool_status()["swe"]) == {}


@virtual
async def test_holder_whose_member_is_being_reset_is_told():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=1)) as engine:
        lease = await engine.acquire("swe", "a")
        runner.reset_s = 50
        reset = asyncio.create_task(engine.reset(lease.info.lease_id))
        await asyncio.sleep(1)
        await engine.remove_pool("swe")
        with pytest.raises(LeaseLost, match="pool swe was deleted"):
            await reset
