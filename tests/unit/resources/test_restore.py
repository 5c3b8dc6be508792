"""Leases that no member keeps, brought back by their holders: guarantee 7 of adoption.py. Time is virtual."""

import asyncio

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import LeaseInfo
from agentfly.resources.note import LeaseNote
from agentfly.resources.spec import ExternalAPISpec, ModelServiceSpec, PoolSpec
from tests.unit.resources.engines import crash, recovered
from tests.unit.resources.harness import FakeRunner, virtual

MODEL = ModelServiceSpec(model="m", max_model_len=8)
API = ExternalAPISpec(base_url="http://api/v1")
TTL = 30.0


def models(**fields: object) -> PoolSpec:
    return PoolSpec.model_validate({"name": "judge", "resource": MODEL, "shared": True, "max": 2, **fields})


def api(**fields: object) -> PoolSpec:
    return PoolSpec.model_validate({"name": "judge", "resource": API, "shared": True, **fields})


def note_of(info: LeaseInfo, attempt: int = 0) -> LeaseNote:
    kept = info.model_dump(include={"lease_id", "pool", "owner", "key", "share", "image", "token", "ttl_s"})
    return LeaseNote(attempt=attempt, **kept)


def back(engine: ResourceEngine, info: LeaseInfo, **changes: int) -> bool:
    return engine.restore(note_of(info), info.member_id, changes.get("incarnation", info.incarnation))


class SharedRunner(FakeRunner):
    """Its members keep no lease, and are found as nobody's."""

    def __init__(self) -> None:
        super().__init__(MODEL.runner, shared=True)


@virtual
async def test_holders_of_a_shared_member_have_it_on_and_nobody_notices() -> None:
    runner = SharedRunner()
    first = ResourceEngine([runner], [models(slots=4)])
    infos = [(await first.acquire("judge", owner, key="k")).info for owner in "abc"]
    await crash(first)
    engine = await recovered(runner, models(slots=4))
    assert [back(engine, info) for info in infos[:2]] == [True, True]
    assert await engine.heartbeat([info.lease_id for info in infos]) == {
        infos[0].lease_id: True,
        infos[1].lease_id: True,
        infos[2].lease_id: False,
    }
    again = await engine.acquire("judge", "a", key="k")
    assert again.info == infos[0], "the owner's own lease under its id, token and key"
    assert [back(engine, info) for info in infos] == [True, True, True], "and once more changes nothing"
    assert (engine.pool_status()["judge"].leased, runner.starts) == (1, 1)
    assert {lease.lease_id for lease in engine.leases()} == {info.lease_id for info in infos}
    await engine.close()


@virtual
async def test_restored_lease_ends_like_any_other() -> None:
    runner = SharedRunner()
    first = ResourceEngine([runner], [models()])
    infos = [(await first.acquire("judge", owner)).info for owner in "ab"]
    await crash(first)
    engine = await recovered(runner, models())
    assert all(back(engine, info) for info in infos)
    await engine.release(infos[0].lease_id)
    await asyncio.sleep(TTL + 1)
    assert await engine.heartbeat([info.lease_id for info in infos]) == dict.fromkeys(
        (info.lease_id for info in infos), False
    )
    assert engine.leases() == []
    await engine.close()


@virtual
async def test_lease_of_a_member_that_is_gone_or_another_is_over() -> None:
    runner = SharedRunner()
    first = ResourceEngine([runner], [models()])
    info = (await first.acquire("judge", "a")).info
    await crash(first)
    engine = await recovered(runner, models())
    assert not back(engine, info, incarnation=info.incarnation + 1)
    assert not engine.restore(note_of(info), "judge-0000-9", 1)
    assert not engine.restore(note_of(info.model_copy(update={"pool": "other"})), info.member_id, 1)
    await engine.close()


@virtual
async def test_lease_whose_name_was_given_again_is_over() -> None:
    runner = SharedRunner()
    first = ResourceEngine([runner], [models()])
    info = (await first.acquire("judge", "a")).info
    await crash(first)
    engine = await recovered(runner, models())
    newer = await engine.acquire("judge", "a")
    assert newer.info.lease_id != info.lease_id
    assert not back(engine, info)
    assert [lease.lease_id for lease in engine.leases()] == [newer.info.lease_id]
    await engine.close()


@virtual
async def test_exclusive_member_is_had_on_unless_somebody_else_has_it() -> None:
    runner = SharedRunner()
    first = ResourceEngine([runner], [models(shared=False, max=2)])
    infos = [(await first.acquire("judge", owner)).info for owner in "ab"]
    await crash(first)
    engine = await recovered(runner, models(shared=False, max=2))
    assert back(engine, infos[0])
    other = await engine.acquire("judge", "c")
    assert other.info.member_id == infos[1].member_id
    assert not back(engine, infos[1])
    await engine.close()


@virtual
async def test_gateway_is_started_anew_for_those_who_had_one() -> None:
    gone = FakeRunner(API.runner, shared=True)
    first = ResourceEngine([gone], [api()])
    infos = [(await first.acquire("judge", owner)).info for owner in "ab"]
    await first.close()
    runner = FakeRunner(API.runner, shared=True)
    engine = ResourceEngine([runner], [api()])
    assert all(back(engine, info) for info in infos)
    assert all((await engine.heartbeat([info.lease_id for info in infos])).values()), "also while it starts"
    await asyncio.sleep(1)
    assert runner.starts == 1
    again = (await engine.acquire("judge", "a")).info
    assert (again.lease_id, again.token) == (infos[0].lease_id, infos[0].token)
    assert len(engine.leases()) == 2
    await engine.close()


@virtual
async def test_gateway_that_cannot_be_started_loses_them() -> None:
    gone = FakeRunner(API.runner, shared=True)
    first = ResourceEngine([gone], [api()])
    info = (await first.acquire("judge", "a")).info
    await first.close()
    runner = FakeRunner(API.runner, shared=True)
    runner.fail_starts = range(100)
    engine = ResourceEngine([runner], [api()])
    assert back(engine, info)
    await asyncio.sleep(300)
    assert await engine.heartbeat([info.lease_id]) == {info.lease_id: False}
    await engine.close()
