"""Engines that are killed at any moment, and what their successors make of it: random schedules.

Holders live on, as workers do when their broker restarts: they know their leases, renew them with whoever
answers, and ask again under the same name. Nothing else is wrong here, so no lease may be lost but with its
pool. Time is virtual.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import PoolNotFound, ResourceError
from agentfly.resources.lease import LeaseInfo, Request
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.engines import crash, recovered
from tests.unit.resources.harness import run
from tests.unit.resources.test_engine_schedules import Unsteady

T = TypeVar("T")

MOST, TTL_S, DOWN_S = 3, 30.0, 4.0
BLOCKS, RUNS_EACH = 6, 4


class Away(Exception):
    """The engine died during a call."""


class World:
    """The engine that answers now, if one does, and the calls that it answers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.runner = Unsteady(rng)
        self.runner.trouble = 0.0
        self.spec = self.any_spec()
        self.engine: ResourceEngine | None = None
        self.calls: set[asyncio.Task[object]] = set()
        self.pools = 0  # how many there were under this name
        self.restarts = 0

    def any_spec(self) -> PoolSpec:
        rng = self.rng
        resource = ContainerSpec(pids=rng.choice([8, 8, 9]))
        least, buffer = rng.randint(0, MOST), rng.choice([0, 1])
        most = rng.randint(max(1, least), MOST)
        return PoolSpec(
            name="a", resource=resource, min=least, max=most, buffer=buffer, lease_ttl_s=TTL_S, per_image=True
        )

    async def call(self, ask: Callable[[ResourceEngine], Awaitable[T]]) -> T:
        if self.engine is None:
            await asyncio.sleep(0.1)
            raise Away
        task: asyncio.Task[T] = asyncio.ensure_future(ask(self.engine))
        self.calls.add(task)  # type: ignore[arg-type]
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise Away
            return task.result()
        finally:
            task.cancel()
            self.calls.discard(task)  # type: ignore[arg-type]

    async def begin(self) -> None:
        self.engine = await recovered(self.runner, self.spec)

    async def die(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        engine._turns._carry_out = lambda pool, action: None
        for task in list(self.calls):
            task.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)
        await crash(engine)
        self.restarts += 1

    async def disturb(self) -> None:
        """Kill, change and remove, until cancelled."""
        rng = self.rng
        while True:
            await asyncio.sleep(rng.choice([0.05, 0.5, 3.0]))
            assert self.engine is not None
            what = rng.random()
            if what < 0.5:
                await self.die()
                await asyncio.sleep(rng.choice([0, 0.3, DOWN_S]))
                if rng.random() < 0.3:
                    self.spec = self.any_spec()  # written while nobody watched
                await self.begin()
            elif what < 0.9:
                self.spec = self.any_spec()
                self.engine.set_pool(self.spec)
            else:
                self.pools += 1
                await self.engine.remove_pool("a")
                self.engine.set_pool(self.spec)


async def asked(world: World, owner: str, image: str | None, attempt: int) -> LeaseInfo:
    request = Request("a", share=owner[:2], image=image)

    async def claim(engine: ResourceEngine) -> LeaseInfo:
        return (await engine.claim_many([request], owner, attempt=attempt, deadline=100))[0]

    while True:
        try:
            return await world.call(claim)
        except (Away, PoolNotFound):
            await asyncio.sleep(0.1)
        except ResourceError:
            attempt += 1  # its lease was lost with the pool
            await asyncio.sleep(0.1)


async def worker(world: World, owner: str, held: dict[str, str]) -> None:
    rng = world.rng
    for attempt in range(0, 40, 10):
        await asyncio.sleep(rng.choice([0, 0.1, 2.0]))
        image = rng.choice([None, "x"])
        info = await asked(world, owner, image, attempt)
        pools = world.pools
        assert info.member_id not in held, "one holder at a time"
        held[info.member_id] = owner
        for _ in range(rng.randint(0, 12)):
            await asyncio.sleep(1.0)
            try:
                alive = await world.call(lambda e, lease=info.lease_id: e.heartbeat([lease]))  # type: ignore[misc]
            except Away:
                continue
            if world.pools != pools:
                break
            assert alive == {info.lease_id: True}, "no lease that lives is lost"
        if world.pools == pools:
            assert info.member_id in world.runner.existing
        del held[info.member_id]
        while True:
            try:
                await world.call(lambda e, lease=info.lease_id: e.release(lease))  # type: ignore[misc]
                break
            except Away:
                continue


async def schedule(seed: int) -> int:
    world = World(random.Random(seed))
    held: dict[str, str] = {}
    await world.begin()
    trouble = asyncio.create_task(world.disturb())
    await asyncio.gather(*(worker(world, f"r{i}", held) for i in range(5)))
    trouble.cancel()
    await asyncio.gather(trouble, return_exceptions=True)
    assert trouble.cancelled(), trouble
    if world.engine is None or world.engine.pool_status() == {}:
        if world.engine is not None:
            await world.die()
        await world.begin()
    assert world.engine is not None
    await asyncio.sleep(TTL_S + 5)
    status = world.engine.pool_status()["a"]
    assert (status.leased, status.queued, status.resetting) == (0, 0, 0), status
    await world.engine.close()
    assert world.runner.faults == []
    assert world.runner.existing == set(), "no member is leaked"
    assert world.runner.peak <= MOST, "max is never exceeded"
    return world.restarts


@pytest.mark.parametrize("block", range(BLOCKS))
def test_restarts_lose_no_lease_and_leak_no_member(block):
    restarts = 0
    for seed in range(block * RUNS_EACH, (block + 1) * RUNS_EACH):
        try:
            restarts += run(schedule(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert restarts > RUNS_EACH
