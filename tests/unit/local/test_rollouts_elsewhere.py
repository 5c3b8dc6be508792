"""A job whose resources are at a broker: guarantee 4 of `agentfly.local.rollouts`. The worker is a script."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.api import RolloutJob
from agentfly.broker.access import TOKEN_FILE
from agentfly.errors import AgentflyError
from agentfly.local import rollouts
from agentfly.local.rollouts import Elsewhere, RolloutRunner
from agentfly.local.rundir import RunDir
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from tests.unit.broker.test_tcp import TOKEN, free_port, up
from tests.unit.resources.harness import FakeRunner

PYTHON = sys.executable
MODEL = ModelServiceSpec(model="m", max_model_len=8)
WORKER = """#!{python}
import json, os, sys
config = json.loads(open(sys.argv[sys.argv.index("--config") + 1]).read())
names = ("AGENTFLY_BROKER", "AGENTFLY_INFERENCE_URLS", "AGENTFLY_BROKER_TOKEN_FILE", "AGENTFLY_JOB")
said = {{name: os.environ.get(name) for name in names}}
open({said!r}, "w").write(json.dumps(said))
report = {{"total": 2, "scored": 2, "reward_mean": 1.0, "reward_min": 1.0, "reward_max": 1.0}}
open(os.path.join(config["run_dir"], "report.json"), "w").write(json.dumps(report))
{more}
"""


pytestmark = pytest.mark.timeout(40)


class World:
    """A job, and what its worker was told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.said = folder, folder / "said.json"
        (folder / "model").mkdir()
        (folder / "token").write_text(TOKEN)
        monkeypatch.setenv(TOKEN_FILE, str(folder / "token"))
        monkeypatch.setattr(rollouts, "ASK_S", 0.05)
        self._monkeypatch = monkeypatch
        self.shown: list[str] = []
        self.worker()

    def worker(self, more: str = "") -> None:
        script = self.folder / "python"
        script.write_text(WORKER.format(python=PYTHON, said=str(self.said), more=more))
        script.chmod(0o755)
        self._monkeypatch.setattr(rollouts.sys, "executable", str(script))

    def runner(self, elsewhere: Elsewhere, start_timeout: int = 20) -> RolloutRunner:
        spec: dict[str, Any] = {
            "agent": {"entrypoint": "agent.py:agent"},
            "tasks": {"path": "tasks.jsonl"},
            "model": {"path": "model"},
            "pools": ["shell"],
            "inference": {"startTimeoutSeconds": start_timeout},
        }
        job = RolloutJob.model_validate({"metadata": {"name": "job"}, "spec": spec})
        folder = RunDir(self.folder / "runs" / "job")
        return RolloutRunner(job, [], self.folder, folder, self._show, elsewhere)

    def _show(self, job: RolloutJob) -> None:
        self.shown += [condition.message for condition in job.status.conditions]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def engine() -> ResourceEngine:
    shell = PoolSpec(name="shell", resource=ContainerSpec(), max=2)
    judge = PoolSpec(name="policy", resource=MODEL, shared=True)
    return ResourceEngine([FakeRunner(), FakeRunner(MODEL.runner, shared=True)], [shell, judge])


async def test_worker_has_the_broker_its_token_and_the_servers(world: World) -> None:
    async with engine() as resources, up(resources) as address:
        status = await world.runner(Elsewhere(address, ("http://vllm:8000", "policy"))).run()
        assert (status.phase, status.tasks.scored if status.tasks else 0) == ("Succeeded", 2)
        said = json.loads(world.said.read_text())
        assert said["AGENTFLY_BROKER"] == address
        assert said["AGENTFLY_BROKER_TOKEN_FILE"] == str(world.folder / "token")
        assert said["AGENTFLY_JOB"] == "job"
        first, second = said["AGENTFLY_INFERENCE_URLS"].split(",")
        assert first == "http://vllm:8000"
        assert second.startswith("unix:///policy-")
        assert resources.leases() == [], "what it leased itself it gave back"


async def test_broker_and_pools_that_are_yet_to_come_are_waited_for(world: World) -> None:
    port = free_port()
    running = asyncio.create_task(world.runner(Elsewhere(f"http://127.0.0.1:{port}", ("http://v",))).run())
    await asyncio.sleep(0.3)
    assert not running.done()
    async with ResourceEngine([FakeRunner()]) as resources, up(resources, port):
        await asyncio.sleep(0.3)
        assert not running.done()
        told = [message for message in world.shown if message.startswith("waiting, at most 20 s: ")]
        assert "got no answer" in told[0], "why it waits is shown while it waits"
        assert "spec.pools: shell is no pool of the broker" in told[-1]
        resources.add_pool(PoolSpec(name="shell", resource=ContainerSpec()))
        assert (await running).phase == "Succeeded"


async def test_pool_that_never_comes_is_named_with_those_that_there_are(world: World) -> None:
    box = PoolSpec(name="box", resource=ContainerSpec())
    async with ResourceEngine([FakeRunner()], [box]) as resources, up(resources) as address:
        with pytest.raises(AgentflyError, match=r"spec\.pools: shell is no pool of the broker") as error:
            await world.runner(Elsewhere(address, ("http://v",)), start_timeout=1).run()
        assert "pools that are there: box" in error.value.hints[0]
        assert not world.said.exists()


def written(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def until_written(path: Path) -> str:
    async with asyncio.timeout(20):
        while not written(path):  # noqa: ASYNC110 -- by another process
            await asyncio.sleep(0.05)
    return written(path)


async def test_server_that_is_gone_ends_this_life_of_the_job(world: World) -> None:
    world.worker("import time; time.sleep(60)")
    async with engine() as resources, up(resources) as address:
        running = asyncio.create_task(world.runner(Elsewhere(address, ("policy",))).run())
        await until_written(world.said)
        (lease,) = resources.leases()
        await resources.release(lease.lease_id)
        with pytest.raises(AgentflyError, match=r"policy: its server .* is gone"):
            await running


async def test_stopped_job_leaves_no_worker(world: World) -> None:
    pid = world.folder / "pid"
    world.worker(f"import time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    async with engine() as resources, up(resources) as address:
        runner = world.runner(Elsewhere(address, ("http://v",)))
        running = asyncio.create_task(runner.run())
        process = Path("/proc") / await until_written(pid)
        assert process.exists()
        runner.stop()
        assert (await running).phase == "Pending"
        assert not process.exists()
