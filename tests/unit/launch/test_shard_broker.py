"""Shards at a real broker: servers of a shared pool, and what becomes of the leases."""

import asyncio
from pathlib import Path

import pytest

from agentfly.api import Rollout
from agentfly.broker.server import BrokerServer
from agentfly.errors import AgentflyError
from agentfly.launch import shard
from agentfly.launch.tasks import tasks_file
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import PoolSpec
from agentfly.roles.launch import ShardLaunch
from agentfly.roles.worker import RolloutWorkerConfig
from tests.unit.launch.test_shard import AGENT, TOKENIZER
from tests.unit.resources.engines import MODEL, engine_of
from tests.unit.resources.harness import FakeRunner

POLICY = PoolSpec(name="job-policy", resource=MODEL, shared=True, min=2, max=2, lease_ttl_s=0.6)


def launch_in(folder: Path, broker: str) -> ShardLaunch:
    (folder / "agent.py").write_text(AGENT)
    tasks_file(folder).write_text('{"good": 1.0}\n' * 4)
    config = RolloutWorkerConfig(  # type: ignore[call-arg]
        run_dir=folder, model_path=folder, agent_entrypoint="agent.py:agent", base_dir=folder,
        rollout=Rollout(group_size=1), failure_budget=1.0,
    )  # fmt: skip
    return ShardLaunch(
        worker=config, job="job", broker=broker, policy="job-policy", servers=2, servers_deadline_s=5,
        tasks_per_shard=2,
    )  # fmt: skip


async def serving(engine: ResourceEngine, servers: int) -> None:
    for _ in range(500):
        if engine.pool_status()["job-policy"].ready == servers:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(engine.pool_status())


async def test_every_pod_has_all_servers_and_none_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = FakeRunner(MODEL.runner, shared=True)
    urls: list[list[str]] = []
    together = asyncio.Barrier(2)

    async def play(
        config: object, rows: object, tokenizer: object, servers: list[str], *_: object, **__: object
    ) -> None:
        urls.append(servers)
        async with asyncio.timeout(10):
            await together.wait()
        raise AgentflyError("played enough")

    monkeypatch.setattr(shard.worker, "play", play)
    async with engine_of(runner, POLICY) as engine, BrokerServer(engine, tmp_path / "broker") as server:
        await serving(engine, 2)
        launch = launch_in(tmp_path, server.address)
        parts = [shard.read_shard(launch, index) for index in range(2)]
        pods = [
            shard._play(
                launch,
                part,
                TOKENIZER,
                f"pod-{part.index}",
                tmp_path / "part",
                shard.Counts(),
                asyncio.Event(),
            )
            for part in parts
        ]
        ended = await asyncio.gather(*pods, return_exceptions=True)
        assert [str(each) for each in ended] == ["played enough"] * 2
        assert [sorted(each) for each in urls] == [sorted(urls[0])] * 2
        assert len(urls[0]) == 2
        assert engine.leases() == []


async def test_server_that_dies_ends_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(MODEL.runner, shared=True)
    monkeypatch.setattr(shard, "LOOK_S", 0.05)

    async def play(*_: object, **__: object) -> None:
        runner.kill(next(iter(runner.existing)))
        await asyncio.sleep(60)

    monkeypatch.setattr(shard.worker, "play", play)
    async with engine_of(runner, POLICY) as engine, BrokerServer(engine, tmp_path / "broker") as server:
        launch = launch_in(tmp_path, server.address)
        part = shard.read_shard(launch, 0)
        playing = shard._play(
            launch, part, TOKENIZER, "pod-0", tmp_path / "part", shard.Counts(), asyncio.Event()
        )
        with pytest.raises(AgentflyError, match=r"policy: its server .* is gone"):
            async with asyncio.timeout(20):
                await playing
        assert engine.leases() == []
