"""Engines over fake runners, for the tests of the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import PoolStatus
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner

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


async def crash(engine: ResourceEngine) -> None:
    """The process of the engine is killed: what it was doing is not done, and nobody is told."""
    engine._turns._carry_out = lambda pool, action: None
    engine._turns.cancel()
    if engine._demands_end is not None:
        engine._demands_end.cancel()
    tasks = set(engine._members._tasks) | {
        task for task in asyncio.all_tasks() if task.get_name() == "agentfly-heartbeat"
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def recovered(runner: FakeRunner, *pools: PoolSpec) -> ResourceEngine:
    """The engine of the next process."""
    found = await runner.find()
    engine = ResourceEngine([runner])
    for each in pools:
        engine.set_pool(each)
    for member in found:
        engine.adopt(member)
    return engine


def shape(status: PoolStatus) -> dict[str, int]:
    """What a pool has now, without the zeros."""
    names = ("ready", "leased", "starting", "resetting", "stopping", "queued")
    return {name: count for name in names if (count := getattr(status, name))}


def now() -> float:
    return asyncio.get_running_loop().time()
