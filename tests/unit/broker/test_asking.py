"""What an acquire may say beside its pool reaches the engine of another process; C6 is that of client.py."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.broker.server import BrokerServer
from agentfly.resources import errors
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import CallRaised, PoolNotFound, ResourceError
from agentfly.resources.lease import Request
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner


@asynccontextmanager
async def broker(path: Path) -> AsyncIterator[tuple[ResourceEngine, BrokerClient]]:
    pool = PoolSpec(name="swe", resource=ContainerSpec(), max=4, per_image=True)
    async with (
        asyncio.timeout(20),
        ResourceEngine([FakeRunner(start_s=0.002)], [pool]) as engine,
        BrokerServer(engine, path / "b") as server,
        BrokerClient(server.address, share="job") as client,
    ):
        yield engine, client


# C6. Shares.


async def test_acquire_counts_to_the_share_of_its_client_unless_it_names_one(tmp_path):
    async with broker(tmp_path) as (engine, client):
        await client.acquire("swe", "a")
        await client.acquire("swe", "b", share="verifier")
        await client.acquire_many([Request("swe", "x"), Request("swe", "y", share="verifier")], "c")
        assert {(lease.owner, lease.key): lease.share for lease in engine.leases()} == {
            ("a", "default"): "job",
            ("b", "default"): "verifier",
            ("c", "x"): "job",
            ("c", "y"): "verifier",
        }


# Images and demand.


async def test_image_reaches_the_pool_and_comes_back_with_the_lease(tmp_path):
    async with broker(tmp_path) as (_, client):
        lease = await client.acquire("swe", "a", image="task-7")
        assert lease.info.image == "task-7"
        (other,) = await client.acquire_many([Request("swe", image="task-8")], "b")
        assert other.info.image == "task-8"


async def test_demand_warms_at_the_broker(tmp_path):
    async with broker(tmp_path) as (engine, client):
        await client.demand("swe", ["a", "b", "a"], "job")
        while engine.pool_status()["swe"].ready < 3:  # noqa: ASYNC110 -- of an engine that tells nobody
            await asyncio.sleep(0.005)
        with pytest.raises(ResourceError, match="is not a number of members"):
            await client.demand("swe", {"a": 0}, "job")
        with pytest.raises(PoolNotFound):
            await client.demand("sew", {"a": 1}, "job")


# The wire.


def test_every_error_that_an_engine_raises_crosses_the_wire():
    raised = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ResourceError) and kind is not CallRaised
    }
    own = {wire.NotReady, wire.Unauthorized}
    assert set(wire.STATUS_OF) - own == raised, "CallRaised comes from a member, not from the engine"
