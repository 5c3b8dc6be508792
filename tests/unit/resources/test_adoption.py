"""An engine that takes over what an earlier one left: the guarantees of adoption.py. Time is virtual.

The first engine is killed, its members live on in the runner, and what each daemon says of itself is found.
"""

import asyncio
from dataclasses import replace

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import LeaseLost, ResourceError
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import LeaseInfo
from agentfly.resources.note import read_note
from agentfly.resources.runners.base import Finder, Found, Member
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.engines import SETTLE, SPEC, crash, now, pool, recovered, shape
from tests.unit.resources.harness import FakeRunner, virtual


async def first_engine(runner: FakeRunner, *pools: PoolSpec) -> ResourceEngine:
    engine = ResourceEngine([runner], pools)
    await engine.__aenter__()
    await asyncio.sleep(1)
    return engine


async def ended(engine: ResourceEngine, runner: FakeRunner) -> None:
    await engine.close()
    assert runner.faults == []
    assert runner.existing == set()


def found_free(runner: FakeRunner, name: str, **fields: object) -> Found:
    """A member that nobody of this test started."""
    member = Member(name, SPEC, 1, f"unix:///{name}")
    runner.existing.add(name)
    runner.started[name] = member
    return replace(Found("swe", member, "free"), **fields)  # type: ignore[arg-type]


def test_a_runner_that_finds_is_known_as_such():
    assert isinstance(FakeRunner(), Finder)


# 1. Free and dirty members.


@virtual
async def test_free_members_are_free_again_and_none_is_started_beside_them():
    runner = FakeRunner()
    await crash(await first_engine(runner, pool(min=3, max=4)))
    engine = await recovered(runner, pool(min=3, max=4))
    assert shape(engine.pool_status()["swe"]) == {"ready": 3}
    await asyncio.sleep(SETTLE)
    assert (runner.starts, runner.stops, runner.resets) == (3, 0, 0)
    leases = [await engine.acquire("swe", f"r{i}") for i in range(4)]
    assert runner.starts == 4, "and they count"
    assert len({lease.info.member_id for lease in leases}) == 4, "no name is given twice"
    await ended(engine, runner)


@virtual
async def test_dirty_member_is_reset_before_anybody_has_it():
    runner = FakeRunner()
    first = await first_engine(runner, pool(max=1))
    lease = await first.acquire("swe", "a")
    runner.reset_s = 500
    await lease.release()
    await asyncio.sleep(0.1)
    await crash(first)
    runner.holders.clear()
    runner.reset_s = 0.001
    engine = await recovered(runner, pool(max=1))
    again = await engine.acquire("swe", "b")
    assert again.info.member_id == lease.info.member_id
    assert again.info.incarnation == 2
    await ended(engine, runner)


@virtual
async def test_member_without_a_note_that_is_not_free_is_reset():
    runner = FakeRunner()
    engine = ResourceEngine([runner], [pool(max=1)])
    assert engine.adopt(found_free(runner, "swe-a0b1-1", state="dirty", note="no note"))
    await engine.acquire("swe", "a")
    assert (runner.starts, runner.resets) == (0, 1)
    await ended(engine, runner)


# 2. Leased members.


async def leased(runner: FakeRunner, spec: PoolSpec, **fields: object) -> tuple[ResourceEngine, LeaseInfo]:
    first = await first_engine(runner, spec)
    info = (await first.acquire("swe", "run/7", **fields)).info  # type: ignore[arg-type]
    await crash(first)
    return await recovered(runner, spec), info


@virtual
async def test_holder_notices_nothing():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1, lease_ttl_s=30), key="box", share="train", attempt=3)
    for _ in range(9):
        assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
        await asyncio.sleep(10)
    assert (await engine.acquire("swe", "run/7", key="box", attempt=3)).info == info
    (status,) = engine.leases()
    assert (status.owner, status.key, status.share, status.member_id) == (
        "run/7",
        "box",
        "train",
        info.member_id,
    )
    assert (runner.starts, runner.resets) == (1, 0)
    await ended(engine, runner)


@virtual
async def test_lease_of_an_image_is_one_of_that_image_again():
    runner = FakeRunner()
    spec = pool(max=2, per_image=True)
    engine, info = await leased(runner, spec, image="a")
    assert info.image == "a"
    assert (await engine.acquire("swe", "run/7", image="a")).info == info
    await engine.release(info.lease_id)
    await asyncio.sleep(1)
    assert (await engine.acquire("swe", "b", image="a")).info.member_id == info.member_id
    assert (await engine.acquire("swe", "b")).info.member_id != info.member_id
    await ended(engine, runner)


@virtual
async def test_rest_of_the_ttl_goes_on():
    runner = FakeRunner()
    first = await first_engine(runner, pool(max=1, lease_ttl_s=30))
    info = (await first.acquire("swe", "a")).info
    granted = now()
    await crash(first)
    await asyncio.sleep(12)
    engine = await recovered(runner, pool(max=1, lease_ttl_s=30))
    (status,) = engine.leases()
    assert status.expires_in_s == pytest.approx(granted + 30 - now(), abs=0.01)
    other = await engine.acquire("swe", "b")
    assert other.info.member_id == info.member_id
    assert now() == pytest.approx(granted + 30, abs=0.1)
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}
    await ended(engine, runner)


@virtual
async def test_release_after_the_restart_gives_the_member_back():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1))
    await engine.release(info.lease_id)
    await asyncio.sleep(1)
    assert shape(engine.pool_status()["swe"]) == {"ready": 1}
    await ended(engine, runner)


@virtual
async def test_holder_can_have_it_reset():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1))
    clean = await engine.reset(info.lease_id)
    assert (clean.lease_id, clean.member_id, clean.incarnation) == (info.lease_id, info.member_id, 2)
    assert clean.token != info.token
    note = read_note(runner.notes[info.member_id][0])
    assert note is not None
    assert note.token == clean.token, "and the next process would know the new token"
    await ended(engine, runner)


@virtual
async def test_acquire_that_is_cancelled_does_not_end_what_its_owner_had_before():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1))
    again = asyncio.create_task(engine.acquire("swe", "run/7"))
    await asyncio.sleep(0)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
    await ended(engine, runner)


@virtual
async def test_later_attempt_ends_it():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1), attempt=1)
    with pytest.raises(LeaseLost, match="attempt 0 is over"):
        await engine.acquire("swe", "run/7", attempt=0)
    assert (await engine.acquire("swe", "run/7", attempt=2)).info.lease_id != info.lease_id
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}
    await ended(engine, runner)


# 3. A lease that ended meanwhile.


@virtual
async def test_lease_that_ran_out_meanwhile_is_lost_for_its_owner():
    runner = FakeRunner()
    first = await first_engine(runner, pool(max=1, lease_ttl_s=30))
    info = (await first.acquire("swe", "a")).info
    await crash(first)
    await asyncio.sleep(31)
    runner.holders.clear()
    engine = await recovered(runner, pool(max=1, lease_ttl_s=30))
    await asyncio.sleep(1)
    with pytest.raises(LeaseLost) as lost:
        await engine.acquire("swe", "a")
    assert lost.value.incarnation == info.incarnation
    assert (await engine.acquire("swe", "b")).info.incarnation == 2, "the member is as good as new"
    await engine.release_owner("a")
    await ended(engine, runner)


# 4. Two leases under one name.


async def twice(runner: FakeRunner, attempts: tuple[int, int], ends: tuple[float, float]) -> list[Found]:
    """The same owner in two members."""
    first = await first_engine(runner, pool(max=2))
    for name in ("a", "b"):
        await first.acquire("swe", name)
    await crash(first)
    found = []
    for each, attempt, left in zip(await runner.find(), attempts, ends, strict=True):
        note = read_note(each.note)
        assert note is not None
        text = note.model_copy(update={"owner": "a", "attempt": attempt}).text()
        runner.holders[each.member.id] = ("a", attempt, note.token)
        found.append(replace(each, note=text, ttl_left_s=left))
    return found


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("attempts", "ends", "kept"),
    [((0, 1), (9.0, 5.0), 1), ((1, 0), (5.0, 9.0), 0), ((0, 0), (5.0, 9.0), 1)],
)
def test_of_two_the_later_stays(attempts, ends, kept, order):
    @virtual
    async def scenario() -> None:
        runner = FakeRunner()
        found = await twice(runner, attempts, ends)
        engine = ResourceEngine([runner], [pool(max=2)])
        for each in found[::order]:
            engine.adopt(each)
        await asyncio.sleep(1)
        assert runner.existing == {found[kept].member.id}
        (lease,) = engine.leases()
        assert lease.member_id == found[kept].member.id
        await ended(engine, runner)

    scenario()


@virtual
async def test_what_this_process_gave_stays():
    runner = FakeRunner()
    found = await twice(runner, (5, 5), (9.0, 9.0))
    engine = ResourceEngine([runner], [pool(max=3)])
    lease = await engine.acquire("swe", "a")
    assert not engine.adopt(found[0])
    await asyncio.sleep(1)
    assert found[0].member.id not in runner.existing
    assert await engine.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: True}
    await engine.close()


# 5. What is of no use.


@virtual
async def test_member_of_no_pool_is_stopped_and_told():
    events: list[Event] = []
    runner = FakeRunner()
    engine = ResourceEngine([runner], [pool(max=1)], observer=events.append)
    assert not engine.adopt(found_free(runner, "gone-a0b1-1", pool="gone"))
    await asyncio.sleep(1)
    assert runner.existing == set()
    (stopped,) = (event for event in events if event.kind is EventKind.MEMBER_STOPPED)
    assert (stopped.pool, stopped.member, stopped.reason) == ("gone", "gone-a0b1-1", "Unknown")
    assert stopped.detail == "pool gone does not exist"
    await ended(engine, runner)


@pytest.mark.parametrize("note", ["", "what?", "{}"])
def test_leased_member_whose_lease_cannot_be_read_is_stopped(note):
    @virtual
    async def scenario() -> None:
        runner = FakeRunner()
        engine = ResourceEngine([runner], [pool(max=1)])
        found = found_free(runner, "swe-a0b1-1", state="leased", note=note, ttl_left_s=9.0)
        assert not engine.adopt(found)
        await asyncio.sleep(1)
        assert runner.existing == set()
        await ended(engine, runner)

    scenario()


@virtual
async def test_lease_of_another_pool_is_no_lease_of_this_one():
    runner = FakeRunner()
    first = await first_engine(runner, pool(max=1))
    await first.acquire("swe", "a")
    await crash(first)
    (found,) = await runner.find()
    engine = ResourceEngine([runner], [pool("other", max=1)])
    assert not engine.adopt(replace(found, pool="other"))
    await asyncio.sleep(1)
    await ended(engine, runner)


# 7. Members that do not answer yet.


async def silent(runner: FakeRunner, spec: PoolSpec) -> tuple[ResourceEngine, LeaseInfo, asyncio.Event]:
    """An engine whose predecessor gave out a member that says nothing for now."""
    first = await first_engine(runner, spec)
    info = (await first.acquire("swe", "a")).info
    await crash(first)
    heard = runner.silent[info.member_id] = asyncio.Event()
    return await recovered(runner, spec), info, heard


@virtual
async def test_member_that_is_silent_counts_and_keeps_its_lease():
    runner = FakeRunner()
    engine, info, heard = await silent(runner, pool(min=1, max=1, lease_ttl_s=30))
    await asyncio.sleep(15)
    assert shape(engine.pool_status()["swe"]) == {"starting": 1}
    assert await engine.heartbeat([info.lease_id]) == {}, "nobody can say yet that it is over"
    heard.set()
    await asyncio.sleep(1)
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
    assert (await engine.acquire("swe", "a")).info == info
    assert await engine.heartbeat(["another"]) == {"another": False}
    assert (runner.starts, runner.resets, runner.stops) == (1, 0, 0)
    await ended(engine, runner)


@pytest.mark.parametrize("how", ["dies", "stays silent"])
@virtual
async def test_member_that_is_silent_for_good_is_replaced(how: str):
    runner = FakeRunner()
    engine, info, heard = await silent(runner, pool(min=1, max=1, lease_ttl_s=30))
    if how == "dies":
        runner.dead.add(info.member_id)
        heard.set()
        await asyncio.sleep(SETTLE)
    else:
        await asyncio.sleep(29)
        assert runner.stops == 0, "its lease may live"
        await asyncio.sleep(SETTLE)
    assert runner.stops == 1
    assert info.member_id not in runner.existing
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}
    assert (await engine.acquire("swe", "b")).info.member_id != info.member_id
    await ended(engine, runner)


@virtual
async def test_start_of_an_earlier_engine_goes_on():
    runner = FakeRunner()
    runner.silent["swe-a0b1-1"] = heard = asyncio.Event()
    found = found_free(runner, "swe-a0b1-1", state="unknown")
    engine = ResourceEngine([runner], [pool(max=1, lease_ttl_s=600)])
    assert engine.adopt(found)
    waiting = asyncio.create_task(engine.acquire("swe", "a"))
    await asyncio.sleep(500)
    heard.set()
    assert (await waiting).info.member_id == "swe-a0b1-1"
    assert runner.starts == 0
    await ended(engine, runner)


@pytest.mark.parametrize("end", ["close", "remove", "detach"])
@virtual
async def test_member_that_is_silent_ends_with_its_pool_alone(end: str):
    runner = FakeRunner()
    engine, info, _ = await silent(runner, pool(max=1, lease_ttl_s=600))
    await asyncio.sleep(1)
    if end == "remove":
        await engine.remove_pool("swe")
    await (engine.detach() if end == "detach" else engine.close())
    assert runner.existing == ({info.member_id} if end == "detach" else set())


@virtual
async def test_known_member_is_left_as_it_is():
    runner = FakeRunner()
    engine, info = await leased(runner, pool(max=1))
    for found in await runner.find():
        assert engine.adopt(found)
    await asyncio.sleep(1)
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
    assert (runner.stops, runner.resets) == (0, 0)
    await ended(engine, runner)


@virtual
async def test_stop_of_what_is_of_no_use_is_tried_again_and_awaited_by_close():
    runner = FakeRunner()
    runner.fail_stops = 2
    engine = ResourceEngine([runner])
    engine.adopt(found_free(runner, "gone-a0b1-1", pool="gone"))
    engine.adopt(found_free(runner, "gone-a0b1-1", pool="gone"))
    await ended(engine, runner)
    assert runner.stops == 3


@virtual
async def test_closed_engine_takes_nothing_over():
    runner = FakeRunner()
    engine = ResourceEngine([runner])
    await engine.close()
    with pytest.raises(ResourceError, match="member swe-a0b1-1: the engine is closed"):
        engine.adopt(found_free(runner, "swe-a0b1-1"))


# 6. More than max, and other specs.


@virtual
async def test_above_max_free_members_go_and_held_ones_stay_until_they_come_back():
    runner = FakeRunner()
    first = await first_engine(runner, pool(min=4, max=4))
    infos = [(await first.acquire("swe", f"r{i}")).info for i in range(2)]
    await crash(first)
    engine = await recovered(runner, pool(max=1))
    await asyncio.sleep(1)
    assert runner.existing == {info.member_id for info in infos}
    waiter = asyncio.create_task(engine.acquire("swe", "w", deadline=60))
    assert await engine.heartbeat([infos[0].lease_id]) == {infos[0].lease_id: True}
    await engine.release(infos[0].lease_id)
    await asyncio.sleep(1)
    assert (runner.existing, runner.starts, waiter.done()) == ({infos[1].member_id}, 4, False)
    await engine.release(infos[1].lease_id)
    assert (await waiter).info.member_id == infos[1].member_id
    await ended(engine, runner)


@virtual
async def test_members_of_an_older_spec_are_replaced_and_held_ones_kept():
    runner = FakeRunner()
    first = await first_engine(runner, pool(min=2, max=4))
    info = (await first.acquire("swe", "a")).info
    await crash(first)
    newer = pool(min=2, max=4, resource=ContainerSpec(pids=9))
    engine = await recovered(runner, newer)
    assert engine.pool_status()["swe"].outdated == 2
    await asyncio.sleep(1)
    status = engine.pool_status()["swe"]
    assert (status.outdated, shape(status)) == (1, {"ready": 1, "leased": 1})
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: True}
    await engine.release(info.lease_id)
    await asyncio.sleep(1)
    assert engine.pool_status()["swe"].outdated == 0
    assert all(runner.started[name].spec == newer.resource for name in runner.existing)
    await ended(engine, runner)


@virtual
async def test_each_member_counts_by_its_own_spec_in_whatever_order_they_are_found():
    runner = FakeRunner()
    old, new, image = ContainerSpec(pids=9), ContainerSpec(), ContainerSpec(image="x")
    engine = ResourceEngine([runner], [pool(max=9, per_image=True, resource=new)])
    await engine.__aenter__()
    for number, spec in enumerate([old, old, new, old, image, image, new]):
        found = found_free(runner, f"swe-{number}")
        engine.adopt(replace(found, member=replace(found.member, spec=spec)))
    assert engine.pool_status()["swe"].outdated == 3
    engine.set_pool(pool(max=9, per_image=True, resource=old))  # another is the pool's own
    found = found_free(runner, "swe-7")
    engine.adopt(replace(found, member=replace(found.member, spec=new)))
    assert engine.pool_status()["swe"].outdated == 5
    await ended(engine, runner)


@virtual
async def test_image_of_an_acquire_is_not_another_spec():
    runner = FakeRunner()
    spec = pool(max=2, per_image=True)
    first = await first_engine(runner, spec)
    await (await first.acquire("swe", "a", image="x")).release()
    await asyncio.sleep(1)
    await crash(first)
    engine = await recovered(runner, spec)
    await engine.acquire("swe", "a", image="x")
    assert (engine.pool_status()["swe"].outdated, runner.starts) == (0, 1)
    await ended(engine, runner)


@virtual
async def test_reuses_are_counted_on():
    runner = FakeRunner()
    spec = pool(max=1, max_reuses=1)
    first = await first_engine(runner, spec)
    await (await first.acquire("swe", "a")).release()
    await asyncio.sleep(1)
    await crash(first)
    engine = await recovered(runner, spec)
    lease = await engine.acquire("swe", "b")
    assert lease.info.incarnation == 2
    await lease.release()
    await asyncio.sleep(1)
    assert runner.existing == set(), "two leases are all that it may have"
    await ended(engine, runner)
