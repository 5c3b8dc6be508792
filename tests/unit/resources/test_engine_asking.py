"""What an acquire may say beside its pool: share and image; demand; resizing. Time is virtual."""

import asyncio
from typing import Any

import pytest

from agentfly.resources.demand import DEMAND_S
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import PoolNotFound, ResourceError, SpecMismatch, StartFailed, Timeout
from agentfly.resources.lease import Request
from agentfly.resources.pool import Pool
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.engines import MODEL, SETTLE, engine_of, pool, shape
from tests.unit.resources.harness import FakeRunner, virtual


class Imaged(FakeRunner):
    """Remembers which image each member was started with."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.images: dict[str, str] = {}

    async def start(self, spec, member_id):
        self.images[member_id] = spec.image
        return await super().start(spec, member_id)


def of_pool(engine: ResourceEngine, name: str = "swe") -> Pool:
    return engine._pools.named(name)


# Images.


@virtual
async def test_member_is_started_from_the_image_that_was_asked_for():
    runner = Imaged()
    async with engine_of(runner, pool(max=3, per_image=True)) as engine:
        leases = [await engine.acquire("swe", "o", image=image) for image in ("a", "b", None)]
        assert [runner.images[lease.info.member_id] for lease in leases] == ["a", "b", "host"]
        assert [lease.info.image for lease in leases] == ["a", "b", ""]
        assert await engine.acquire("swe", "o", image="host") is leases[2], "the pool's own, by its name"
        assert await engine.acquire("swe", "o", image="a") is leases[0]


@virtual
async def test_named_key_stands_for_one_image():
    async with engine_of(Imaged(), pool(max=3, per_image=True)) as engine:
        await engine.acquire("swe", "o", key="box", image="a")
        with pytest.raises(
            SpecMismatch, match=r"key box stands for pool swe .*image a\), not for .*image b\)"
        ):
            await engine.acquire("swe", "o", key="box", image="b")


@virtual
async def test_released_member_of_one_image_is_not_given_to_who_wants_another():
    runner = Imaged()
    async with engine_of(runner, pool(max=1, per_image=True)) as engine:
        await (await engine.acquire("swe", "x", image="a")).release()
        lease = await engine.acquire("swe", "y", image="b", deadline=5)
        assert runner.images[lease.info.member_id] == "b"


@virtual
async def test_image_that_a_pool_cannot_give_is_refused_and_leaves_no_trace():
    model = FakeRunner("model-service", shared=True)
    async with engine_of(
        FakeRunner(), pool(), pool("m", resource=MODEL, shared=True), others=[model]
    ) as engine:
        for name in ("swe", "m"):
            with pytest.raises(ResourceError, match=f"pool {name}: .*image"):
                await engine.acquire(name, "o", image="other")
            assert shape(engine.pool_status()[name]) == {}
        assert await engine.acquire("swe", "o", image="host"), "it is what the pool has"


@virtual
async def test_deadline_speaks_of_the_starts_of_the_image_alone():
    class Broken(Imaged):
        async def start(self, spec, member_id):
            self.fail_starts = [self.starts + 1] if spec.image == "broken" else []
            self.start_s = 9 if spec.image == "slow" else 0.01
            return await super().start(spec, member_id)

    async with engine_of(Broken(), pool(max=9, per_image=True)) as engine:
        slow = asyncio.create_task(engine.acquire("swe", "a", image="slow", deadline=4))
        broken = asyncio.create_task(engine.acquire("swe", "b", image="broken", deadline=4))
        with pytest.raises(Timeout, match="gave no member in 4 s: 0 of 9 leased, 1 starting"):
            await slow
        with pytest.raises(StartFailed, match="image is broken"):
            await broken
        await engine.acquire("swe", "c", image="good")
        with pytest.raises(StartFailed, match="image is broken"):
            await engine.acquire("swe", "d", image="broken", deadline=4)


# Shares.


@virtual
async def test_share_reaches_the_queue_of_the_pool():
    async with engine_of(FakeRunner(), pool(max=2, reserved={"verifier": 1})) as engine:
        held = await engine.acquire("swe", "a", share="rollouts")
        waiting = asyncio.create_task(engine.acquire("swe", "b", share="rollouts"))
        await asyncio.sleep(SETTLE)
        assert not waiting.done(), "one member is kept for verifiers"
        reward = await engine.acquire("swe", "c", share="verifier", deadline=1)
        assert (reward.info.share, held.info.share) == ("verifier", "rollouts")
        await held.release()
        await waiting


@virtual
async def test_shares_of_several_are_their_own():
    async with engine_of(FakeRunner(), pool(max=2, reserved={"verifier": 1})) as engine:
        one, two = await engine.acquire_many(
            [Request("swe", "x", share="rollouts"), Request("swe", "y", share="verifier")], "o", deadline=1
        )
        assert (one.info.share, two.info.share) == ("rollouts", "verifier")


@virtual
async def test_more_together_than_a_share_can_ever_have_is_refused_at_once():
    model = FakeRunner("model-service", shared=True)
    judge = pool("judge", resource=MODEL, shared=True, max=2)
    async with engine_of(
        FakeRunner(), pool(max=3, reserved={"verifier": 1}), judge, others=[model]
    ) as engine:
        with pytest.raises(ResourceError) as refused:
            await engine.acquire_many([Request("swe", key) for key in "abc"], "r")
        assert refused.value.render() == (
            "pool swe: 3 members were asked for together, max is 3, of which 1 are reserved for others\n"
            "  hint: raise max to 4, or acquire fewer together"
        )
        assert len(await engine.acquire_many([Request("judge", key) for key in "abcde"], "j")) == 5
        requests = [Request("swe", "a"), Request("swe", "b"), Request("swe", "c", share="verifier")]
        assert len(await engine.acquire_many(requests, "r", deadline=1)) == 3


# Demand.


@virtual
async def test_demanded_images_are_warm_when_they_are_asked_for():
    runner = Imaged(start_s=2)
    async with engine_of(runner, pool(max=4, per_image=True)) as engine:
        await engine.demand("swe", ["a", "b", "a"], "job")
        await asyncio.sleep(3)
        assert sorted(runner.images.values()) == ["a", "a", "b"]
        await engine.acquire("swe", "o", image="b", deadline=0.1)
        assert runner.starts == 3


@virtual
async def test_member_that_takes_no_lease_uses_up_no_demand():
    runner = FakeRunner()
    runner.fail_leases = {1}
    async with engine_of(runner, pool(max=4)) as engine:
        await engine.demand("swe", {"": 3}, "job")
        await engine.acquire("swe", "o")
        assert runner.leases >= 2
        assert engine._demands.total("swe") == {"": 2}


@virtual
async def test_pool_of_one_image_is_warmed_by_a_number():
    runner = FakeRunner()
    async with engine_of(runner, pool(max=4)) as engine:
        await engine.demand("swe", {"": 3}, "job")
        await asyncio.sleep(1)
        assert shape(engine.pool_status()["swe"]) == {"ready": 3}


@virtual
async def test_what_was_granted_is_not_warmed_again_when_another_owner_wants_something():
    runner = Imaged()
    async with engine_of(runner, pool(max=4, per_image=True)) as engine:
        await engine.demand("swe", ["a"], "one")
        await asyncio.sleep(1)
        await engine.acquire("swe", "o", image="a")
        await engine.demand("swe", ["b"], "two")
        await asyncio.sleep(1)
        assert sorted(runner.images.values()) == ["a", "b"]


@pytest.mark.parametrize("end", ["its release", "its time"])
def test_demand_ends_with(end):
    @virtual
    async def scenario() -> None:
        async with engine_of(Imaged(), pool(max=4, per_image=True)) as engine:
            told: list[dict[str, int]] = []
            of_pool(engine).demand = told.append  # type: ignore[method-assign, assignment]
            await engine.demand("swe", {"a": 2}, "one")
            await asyncio.sleep(10)
            await engine.demand("swe", {"b": 1, "host": 1, "": 1}, "two")
            if end == "its release":
                await engine.release_owner("one", attempt=3)
                await engine.release_owner("one")
            else:
                await asyncio.sleep(DEMAND_S - 9)
            assert told == [{"a": 2}, {"a": 2, "b": 1, "": 2}, {"b": 1, "": 2}]

    scenario()


@virtual
async def test_demand_of_what_a_pool_has_not_is_refused():
    async with engine_of(FakeRunner(), pool()) as engine:
        with pytest.raises(PoolNotFound):
            await engine.demand("sew", {"a": 1}, "o")
        with pytest.raises(ResourceError, match=r"pool swe: .*image"):
            await engine.demand("swe", {"a": 1}, "o")
        await engine.demand("swe", {"": 1}, "another, who is not to blame")
        await engine.acquire("swe", "o", deadline=1)


# Resizing.


@virtual
async def test_raised_max_serves_those_who_wait():
    async with engine_of(FakeRunner(), pool(max=1)) as engine:
        await engine.acquire("swe", "a")
        waiting = asyncio.create_task(engine.acquire("swe", "b"))
        await asyncio.sleep(1)
        engine.set_pool(pool(max=2))
        assert (await waiting).info.owner == "b"
        assert engine.pool_status()["swe"].max == 2


@virtual
async def test_lowered_max_waits_for_holders_and_stops_the_rest():
    runner = FakeRunner()
    async with engine_of(runner, pool(min=3, max=3)) as engine:
        lease = await engine.acquire("swe", "a")
        await asyncio.sleep(1)
        engine.set_pool(pool(max=1))
        await asyncio.sleep(1)
        assert shape(engine.pool_status()["swe"]) == {"leased": 1}
        assert not lease.lost


@virtual
async def test_change_of_what_a_pool_is_is_refused_with_the_field():
    model = FakeRunner("model-service", shared=True)
    async with engine_of(FakeRunner(), pool(max=1), others=[model]) as engine:
        with pytest.raises(ResourceError, match=r"^pool swe: kind: of pool swe cannot change"):
            engine.set_pool(pool(resource=MODEL, max=2))
        with pytest.raises(ResourceError, match=r"^pool swe: shared: of pool swe cannot change"):
            engine.set_pool(pool(shared=True, max=2))
        with pytest.raises(ResourceError, match="runner enroot cannot work here: there is no such runner"):
            engine.set_pool(pool(resource=ContainerSpec(runtime="enroot")))
        assert engine.pool_status()["swe"].max == 1


@virtual
async def test_specs_that_were_asked_for_before_cost_nothing_when_another_is(monkeypatch):
    async with engine_of(FakeRunner()) as engine:
        for pids in range(1, 20):
            await (await engine.acquire(ContainerSpec(pids=pids), "o")).release()
        hashed = 0

        def counted(self: ContainerSpec) -> str:
            nonlocal hashed
            hashed += 1
            return identity(self)

        identity = ContainerSpec.identity
        monkeypatch.setattr(ContainerSpec, "identity", counted)
        await (await engine.acquire(ContainerSpec(pids=19), "o")).release()
        assert hashed <= 2
