"""Random schedules of the engine: cancels, deadlines, deaths, failing starts, leases and resets, shares,
images, demand and resizing, all seeded.

After each schedule: nobody was served out of turn, no member was handed out unverified or with another image
than was asked for, no pool ever had more than its largest ``max``, every member that started was told to have
ended, and nothing is left: no lease, no member, no task, no error that nobody awaited.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import LeaseLost, ResourceError
from agentfly.resources.events import Event, EventKind
from agentfly.resources.lease import Lease, Request
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner, run

SCHEDULES = 12
RUNS_EACH = 6
OTHER = ContainerSpec(pids=9)


class Unsteady(FakeRunner):
    """Does everything with a random duration and fails at random."""

    def __init__(self, rng: random.Random, name: str = "bubblewrap", *, shared: bool = False) -> None:
        super().__init__(name, shared=shared)
        self.rng = rng
        self.trouble = rng.choice([0.0, 0.05, 0.3])
        self.fail_starts = lambda _: rng.random() < self.trouble

    async def start(self, spec, member_id):
        self.start_s = self.rng.choice([0, 0.01, 0.2, 1.0])
        return await super().start(spec, member_id)

    async def lease(self, member, owner, attempt, token, ttl_s, note=""):
        self.lease_s = self.rng.choice([0, 0.001, 0.05])
        if self.rng.random() < self.trouble / 3:
            self.kill(member.id)
        await super().lease(member, owner, attempt, token, ttl_s, note)

    async def reset(self, member):
        self.reset_s = self.rng.choice([0, 0.001, 0.3])
        if self.rng.random() < self.trouble:
            self.unclean.add(member.id)
        return await super().reset(member)

    async def stop(self, member):
        self.stop_s = self.rng.choice([0, 0.01, 0.2])
        if self.rng.random() < self.trouble:
            self.fail_stops = 1
        await super().stop(member)


async def use(rng: random.Random, engine: ResourceEngine, leases: list[Lease]) -> None:
    await asyncio.sleep(rng.choice([0, 0, 0.01, 0.3, 2.0]))
    if rng.random() < 0.2:
        await rng.choice(leases).reset()
    if rng.random() < 0.1:
        await engine.acquire(rng.choice(leases).info.pool, leases[0].info.owner, deadline=1)


async def rollout(rng: random.Random, engine: ResourceEngine, owner: str) -> None:
    await asyncio.sleep(rng.choice([0, 0, 0.01, 0.5]))
    pools = rng.choice([["a"], ["a"], ["b"], ["c"], ["judge"], ["a", "b"], ["c", "a"], ["b", "a", "judge"]])
    share = rng.choice(["", "job", "verifier"])
    requests = [
        Request(name, share=share, image=rng.choice(["x", "y", None]) if name == "c" else None)
        for name in pools
    ]
    if rng.random() < 0.2:
        requests.append(Request("a", key="second"))
    leases: list[Lease] = []
    try:
        for attempt in range(rng.choice([1, 1, 2])):
            deadline = rng.choice([0.0, 0.02, 1.0, 30.0])
            leases = await engine.acquire_many(requests, owner, attempt=attempt, deadline=deadline)
            assert [lease.info.image for lease in leases] == [r.image or "" for r in requests]
            await use(rng, engine, leases)
    except ResourceError:
        pass  # all of them are legitimate here: what must hold is checked at the end
    finally:
        if rng.random() < 0.5:
            for lease in leases:
                await lease.release(dirty=rng.random() < 0.2)
        await engine.release_owner(owner)


async def disturb(rng: random.Random, engine: ResourceEngine, pools: Sequence[PoolSpec]) -> None:
    await asyncio.sleep(rng.choice([0, 0.1, 1.0]))
    if rng.random() < 0.5:
        await engine.demand("c", rng.choice([["x", "y", "x"], {"y": 1}, {}]), rng.choice(["r0", "job"]))
    if rng.random() < 0.5:
        pool = rng.choice(pools)
        engine.set_pool(pool.model_copy(update={"min": 0, "max": rng.randint(2, pool.max)}))
    if rng.random() < 0.3:
        engine.leases()
        await engine.release_owner(f"r{rng.randint(0, 5)}")


async def schedule(seed: int) -> None:
    rng = random.Random(seed)
    runner, model = Unsteady(rng), Unsteady(rng, "model-service", shared=True)
    reuses = rng.choice([None, 0, 3])
    pools = [
        PoolSpec(
            name="a",
            resource=ContainerSpec(),
            min=rng.randint(0, 2),
            max=rng.randint(2, 3),
            max_reuses=reuses,
            reserved=rng.choice([{}, {"verifier": 1}]),
            weights={"job": 2},
            quarantine=rng.choice([0, 1]),
        ),
        PoolSpec(name="b", resource=OTHER, max=1, lease_ttl_s=3, max_pending=rng.choice([3, 1024])),
        PoolSpec(
            name="c",
            resource=ContainerSpec(),
            max=3,
            per_image=True,
            buffer=rng.choice([0, 1]),
            starts_per_s=rng.choice([None, 2]),
        ),
        PoolSpec(
            name="judge", shared=True, resource=ModelServiceSpec(model="m", max_model_len=8), max_lifetime_s=5
        ),
    ]
    events: list[Event] = []
    async with ResourceEngine([runner, model], pools, observer=events.append) as engine:
        tasks = [asyncio.create_task(disturb(rng, engine, [pools[0], pools[2]]))]
        tasks += [asyncio.create_task(rollout(rng, engine, f"r{i}")) for i in range(rng.randint(3, 14))]
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.1, 0.7]))
            rng.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)], (
            results
        )
        for status in (await engine.status()).values():
            assert status.queued == 0
        await asyncio.sleep(40)
        for name, status in (await engine.status()).items():
            assert (status.leased, status.queued, status.resetting) == (0, 0, 0), (name, status)
        runner.trouble = model.trouble = 0.0
        lease = await engine.acquire("a", "last", deadline=100)
        await lease.release()
    for each in (runner, model):
        assert each.faults == []
        assert each.existing == set()
    born = {event.member for event in events if event.kind is EventKind.MEMBER_STARTED}
    gone = Counter(event.member for event in events if event.kind is EventKind.MEMBER_STOPPED)
    assert born <= gone.keys()
    assert max(gone.values(), default=1) == 1
    granted = Counter(event.lease for event in events if event.kind is EventKind.LEASE_GRANTED)
    ended = Counter(
        event.lease for event in events if event.kind in (EventKind.LEASE_RELEASED, EventKind.LEASE_LOST)
    )
    assert granted == ended
    for pool in pools:
        assert max(runner.peaks[pool.name], model.peaks[pool.name]) <= pool.max


@pytest.mark.parametrize("block", range(SCHEDULES))
def test_random_schedules_leave_nothing_behind(block):
    for seed in range(block * RUNS_EACH, (block + 1) * RUNS_EACH):
        try:
            run(schedule(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def queue(seed: int) -> None:
    """One pool, one key for each owner: who is served is compared with who asked, in order."""
    rng = random.Random(seed)
    runner = Unsteady(rng)
    pool = PoolSpec(name="a", resource=ContainerSpec(), max=rng.randint(1, 3))
    asked: list[str] = []
    leased: list[str] = []
    lease = runner.lease

    async def watched(member, owner, attempt, token, ttl_s, note=""):
        if owner not in leased:
            leased.append(owner)
        await lease(member, owner, attempt, token, ttl_s, note)

    runner.lease = watched  # type: ignore[method-assign]
    async with ResourceEngine([runner], [pool]) as engine:

        async def one(owner: str) -> None:
            await asyncio.sleep(rng.random())
            asked.append(owner)
            try:
                async with await engine.acquire("a", owner, deadline=rng.choice([0.5, 600])):
                    await asyncio.sleep(rng.random())
            except ResourceError:
                pass

        tasks = [asyncio.create_task(one(f"r{i}")) for i in range(20)]
        for _ in range(5):
            await asyncio.sleep(rng.random())
            rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        runner.trouble = 0.0  # closing gives up on a stop that fails for a minute
    assert leased
    assert leased == [owner for owner in asked if owner in leased]
    assert runner.faults == []


@pytest.mark.parametrize("seed", range(30))
def test_random_queues_are_served_in_order(seed):
    run(queue(seed))


def test_lease_lost_is_what_a_killed_member_leaves():
    async def scenario() -> None:
        rng = random.Random(7)
        runner = FakeRunner()
        async with ResourceEngine([runner], [PoolSpec(name="a", resource=ContainerSpec(), max=4)]) as engine:
            for round_ in range(20):
                lease = await engine.acquire("a", f"r{round_}", deadline=5)
                if rng.random() < 0.5:
                    runner.kill(lease.info.member_id)
                    with pytest.raises(LeaseLost):
                        await engine.acquire("a", f"r{round_}", deadline=5)
                await lease.release()
        assert runner.existing == set()

    run(scenario())
