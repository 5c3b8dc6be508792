"""How a job lives on one machine: the real runner, data plane, guard and servers around a scripted worker.

Sections follow the guarantees of `agentfly.local.rollouts`.
"""

import asyncio
import fcntl
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.errors import AgentflyError
from agentfly.local import environments
from agentfly.local.rollouts import RolloutRunner
from agentfly.local.rundir import RunDir


@pytest.fixture
def cache(monkeypatch) -> Iterator[Path]:
    """A cache whose two environments are the scripted interpreter."""
    path = Path(tempfile.mkdtemp(prefix="af-"))  # short: it will hold sockets
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    script = (Path(__file__).parent / "interpreter.py").read_text()
    for name in ("trainer", "inference"):
        python = home(path, name) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!{sys.executable}\n{script}")
        python.chmod(0o755)
    yield path
    shutil.rmtree(path)


def home(cache: Path, name: environments.Name) -> Path:
    return cache / "agentfly" / "env" / f"{name}-{environments.recipe(name).digest()}"


class World:
    """A job's folder and its scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunDir(folder / "job")
        self.base = folder
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")

    def runner(self, scenario: list[list[str]], **policy: float) -> RolloutRunner:
        (self.base / "scenario.json").write_text(json.dumps(scenario))
        job = RolloutJob.model_validate(
            {
                "metadata": {"name": "job"},
                "spec": {
                    "agent": {"entrypoint": "agent.py:agent"},
                    "tasks": {"path": "tasks.jsonl"},
                    "model": {"path": "model"},
                    "runPolicy": policy,
                },
            }
        )
        return RolloutRunner(job, [], self.base, self.folder, lambda job: None)

    @property
    def lives(self) -> int:
        """How many workers were started."""
        file = self.base / "lives"
        return int(file.read_text()) if file.exists() else 0


@pytest.fixture
def world(cache, tmp_path) -> Iterator[World]:
    yield World(tmp_path)
    assert list((cache / "agentfly" / "run").glob("*")) == []


def why(status: RolloutJobStatus) -> tuple[str, str]:
    """Reason and message of the failure."""
    return next((c.reason, c.message) for c in status.conditions if c.type == "Failed")


async def test_a_job_succeeds_with_the_counts_of_its_worker(world):
    status = await world.runner([["report 3 1 4", "0"]], failureBudget=0.5).run()
    assert (status.phase, status.tasks.scored, status.tasks.failed) == ("Succeeded", 3, 1)


# 1. however it ends


async def test_a_stop_while_another_process_builds_the_environment_ends_at_once(world, cache):
    shutil.rmtree(home(cache, "inference"))
    with home(cache, "inference").with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runner = world.runner([])
        life = asyncio.create_task(runner.run())
        log = world.folder.logs / "environments.log"
        await until(log.exists)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        runner.stop()
        status = await asyncio.wait_for(life, 10)
        assert time.monotonic() - began < 2
        assert status.phase == "Pending"
    (cache / "agentfly" / "run").mkdir(exist_ok=True)


async def test_an_environment_that_cannot_be_built_is_told_with_its_log(world, cache, monkeypatch):
    shutil.rmtree(home(cache, "inference"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AgentflyError) as caught:
        await world.runner([]).run()
    assert caught.value.message.startswith("role environment inference: exit code 1: environment: ")
    assert caught.value.hints == (f"read {world.folder.logs / 'environments.log'}",)


# 2. what goes on and what stays finished


async def test_a_failed_job_names_its_log_and_stays_failed(world):
    first = await world.runner([["report 1 2 4", "1"], ["0"]]).run()
    log = world.folder.logs / "rollout.log"
    assert why(first) == (
        "AttemptFailed",
        f"worker: exit code 1: rollouts: as the scenario says; read {log}",
    )
    again = world.runner([["report 1 2 4", "1"], ["0"]], failureBudget=1.0)
    assert (await again.run(), again.finished_before, world.lives) == (first, True, 1)


async def test_a_job_over_its_failure_budget_goes_on_when_the_budget_was_raised_far_enough(world):
    scenario = [["report 1 2 4", "3"], ["report 4 0 4", "0"]]
    first = await world.runner(scenario, failureBudget=0.1).run()
    assert (first.phase, why(first)[0]) == ("Failed", "FailureBudgetExceeded")
    for budget in (0.1, 0.4):
        again = world.runner(scenario, failureBudget=budget)
        assert (await again.run(), again.finished_before, world.lives) == (first, True, 1)
    reopened = world.runner(scenario, failureBudget=0.5)
    status = await reopened.run()
    assert (status.phase, reopened.finished_before, world.lives) == ("Succeeded", False, 2)
    assert (status.tasks.scored, status.tasks.failed) == (4, 0)
    assert status.completion_time > first.completion_time


# 3. a server that dies


@pytest.mark.parametrize("then", ["hang", "3"], ids=["while it works", "as the worker gives up"])
async def test_a_server_that_dies_ends_the_life_and_the_same_command_goes_on(then, world):
    scenario = [["report 1 1 4", "die", then], ["report 4 0 4", "0"]]
    began = time.monotonic()
    with pytest.raises(AgentflyError, match=r"^policy: its server http://127.0.0.1:\d+ is gone$"):
        await world.runner(scenario, failureBudget=0.1).run()
    assert time.monotonic() - began < 30
    stored = RolloutJobStatus.model_validate(world.folder.read_status())
    assert stored.phase == "Pending"
    assert any("is gone" in c.message for c in stored.conditions if c.type == "Reconciling")
    assert (await world.runner(scenario, failureBudget=0.1).run()).phase == "Succeeded"


async def until(true) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 what is waited for is a file
            await asyncio.sleep(0.05)
