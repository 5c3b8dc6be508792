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


def shape(status: PoolStatus) -> dict[str, int]:
    """What a pool has now, without the zeros."""
    names = ("ready", "leased", "starting", "resetting", "stopping", "queued")
    return {name: count for name in names if (count := getattr(status, name))}


def now() -> float:
    return asyncio.get_running_loop().time()
