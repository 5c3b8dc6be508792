"""How a run lives on one machine: the real runner, data plane, guard and sandboxes around a scripted trainer.

Sections follow the guarantees of `agentfly.local.training`.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agentfly.api import ResourcePool, TrainingRun, TrainingRunStatus
from agentfly.local import environments
from agentfly.local.rundir import RunDir
from agentfly.local.training import TrainingRunner

POOL = {
    "metadata": {"name": "shell"},
    "spec": {"type": "Container", "container": {}, "capacity": {"min": 1, "max": 1}},
}
ROLLOUT = {
    "timeouts": {"callSeconds": 1, "turnSeconds": 1, "rolloutSeconds": 1},  # less than any stall timeout here
    "maxInfraRetries": 0,
}
POLICY = {"startupDeadlineSeconds": 30, "stallTimeoutSeconds": 30, "backoffLimit": 0}


@pytest.fixture
def cache(monkeypatch) -> Iterator[Path]:
    """A cache whose environments are the scripted interpreter."""
    path = Path(tempfile.mkdtemp(prefix="af-"))  # short: it will hold sockets
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    script = (Path(__file__).parent / "interpreter.py").read_text()
    for name, accelerator in (("trainer", "cpu"), ("inference", "cpu"), ("colocated", "cuda")):
        recipe = environments.recipe(name, accelerator)
        python = path / "agentfly" / "env" / f"{name}-{recipe.digest()}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!{sys.executable}\n{script}")
        python.chmod(0o755)
        assert environments.find(name, accelerator=accelerator) == python
    yield path
    shutil.rmtree(path)


class World:
    """A run's folder and its scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunDir(folder / "run")
        self.base = folder
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.shown: list[str] = []

    def runner(
        self, scenario: list[list[str]], more: Mapping[str, object] = {}, **policy: int
    ) -> TrainingRunner:
        (self.base / "scenario.json").write_text(json.dumps(scenario))
        run = TrainingRun.model_validate(
            {
                "metadata": {"name": "run"},
                "spec": {
                    "agent": {"entrypoint": "agent.py:agent"},
                    "tasks": {"path": "tasks.jsonl"},
                    "model": {"path": "model"},
                    "pools": ["shell"],
                    "steps": 3,
                    "rollout": ROLLOUT,
                    "runPolicy": {**POLICY, **policy},
                    **more,
                },
            }
        )
        pools = [ResourcePool.model_validate(POOL)]
        return TrainingRunner(run, pools, self.base, self.folder, lambda run: self.show(run.status))

    def show(self, status: TrainingRunStatus) -> None:
        if not self.shown or self.shown[-1] != status.phase:
            self.shown.append(str(status.phase))


@pytest.fixture
def world(cache, tmp_path) -> Iterator[World]:
    yield World(tmp_path)
    assert list((cache / "agentfly" / "run").glob("*")) == []
    assert [command for command in commands() if str(cache) in command] == []


def commands() -> list[str]:
    """The command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes().decode(errors="replace"))
    return found


async def test_a_run_succeeds_and_shows_each_phase_once(world):
    status = await world.runner([["step", "step", "save", "step", "save"]]).run()
    assert world.shown == ["Starting", "Running", "Succeeded"]
    assert (status.phase, status.attempt, status.restarts) == ("Succeeded", 1, 0)
    assert (status.progress.step, status.progress.total_steps) == (3, 3)
    assert status.checkpoint.latest_step == 3
    assert (status.roles, status.pools) == ({}, {})
    assert json.loads(world.folder.status.read_text())["phase"] == "Succeeded"
    assert world.folder.picture.read_bytes().startswith(b"\x89PNG")


async def test_a_trainer_that_serves_the_policy_has_vllm_beside_it_and_no_server_is_started(world):
    colocated = {"trainer": {"gpusPerNode": 2}, "inference": {"mode": "Colocated", "gpus": 1}}
    roles = set()
    runner = world.runner([["step", "save", "step", "step", "save"]], colocated)
    runner._show = lambda run: (world.show(run.status), roles.update(run.status.roles))
    status = await runner.run()
    assert (status.phase, roles) == ("Succeeded", {"trainer"})
    config = json.loads((world.folder.root / "control" / "trainer-1.json").read_text())
    assert config["servers"]["gpus"] == 1


# 2. asked to stop


async def test_a_stop_waits_for_the_checkpoint_and_the_next_life_continues(world):
    runner = world.runner([["step", "suspend"], ["step", "step", "save"]])
    life = asyncio.create_task(runner.run())
    await until(lambda: "Running" in world.shown)
    runner.suspend()
    status = await life
    assert (status.phase, status.checkpoint.latest_step) == ("Suspended", 1)
    assert [c.status for c in status.conditions if c.type == "Suspended"] == ["True"]

    status = await world.runner([["step", "suspend"], ["step", "step", "save"]]).run()
    assert world.shown == [
        *("Starting", "Running", "Suspending", "Suspended"),
        *("Starting", "Running", "Succeeded"),
    ]
    assert (status.attempt, status.restarts, status.progress.step) == (2, 0, 3)


async def test_a_stop_before_the_trainer_is_up_suspends_at_once(world):
    runner = world.runner([["hang"]])
    runner.suspend()
    began = time.monotonic()
    assert (await runner.run()).phase == "Suspended"
    assert time.monotonic() - began < 10


async def test_asked_again_it_stops_at_once(world):
    life = asyncio.create_task(world.runner([["step", "hang"]]).run())
    await until(lambda: "Running" in world.shown)
    life.cancel()
    status = await asyncio.wait_for(life, 10)
    assert (status.phase, world.shown[-1]) == ("Suspended", "Suspended")


# 3. failed attempts


async def test_a_failed_attempt_is_tried_again_from_its_checkpoint(world):
    status = await world.runner([["step", "save", "9"], ["step", "step", "save"]]).run()
    assert world.shown == ["Starting", "Running", "Restarting", "Starting", "Running", "Succeeded"]
    assert (status.attempt, status.restarts, status.progress.step) == (2, 1, 3)
    failure = status.last_failure
    assert (failure.attempt, failure.exit_code, failure.reason) == (1, 9, "AttemptFailed")
    log = world.folder.logs / "trainer-1.log"
    assert failure.message == f"trainer: exit code 9: ValueError: as the scenario says; read {log}"
    assert (status.failures, status.resumed_step, status.restart_time) == (0, 1, None)
    assert status.attempt_time > failure.time


async def test_failures_without_progress_end_the_run_with_the_cause(world):
    status = await world.runner([["5"]]).run()
    assert world.shown == ["Starting", "Failed"]
    stalled = next(c for c in status.conditions if c.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "BackoffLimitExceeded")
    log = world.folder.logs / "trainer-1.log"
    assert stalled.message == f"trainer: exit code 5: ValueError: as the scenario says; read {log}"
    assert (status.failures, status.resumed_step) == (1, 0)


async def test_a_trainer_that_hangs_is_ended_by_its_lack_of_progress(world):
    status = await world.runner([["step", "hang"]], stallTimeoutSeconds=2).run()
    assert status.phase == "Failed"
    assert (status.last_failure.reason, status.last_failure.message) == (
        "NoProgress",
        "no step within spec.runPolicy.stallTimeoutSeconds (2)",
    )


async def test_a_trainer_that_never_starts_is_ended_by_the_startup_deadline(world):
    status = await world.runner([["hang"]], startupDeadlineSeconds=2).run()
    assert status.last_failure.reason == "StartupDeadlineExceeded"


async def test_the_active_deadline_fails_the_run_whatever_the_backoff_limit(world):
    runner = world.runner([["step", "save", "hang"]], activeDeadlineSeconds=2, backoffLimit=9)
    status = await runner.run()
    assert status.phase == "Failed"
    assert {c.reason for c in status.conditions if c.type == "Failed"} == {"DeadlineExceeded"}


# 4. finished is finished


async def test_a_finished_run_starts_nothing_when_it_is_run_again(world):
    first = await world.runner([["7"]]).run()
    again = await world.runner([["step", "step", "step"]]).run()
    assert again == first
    assert not world.folder.metrics.exists()


async def until(true) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 what is waited for is a file or a callback of another task
            await asyncio.sleep(0.05)


async def test_what_would_fail_again_fails_the_run_at_once_with_its_own_reason(world):
    status = await world.runner([["step", "save", "drift"]], backoffLimit=9).run()
    assert (status.phase, status.attempt, status.last_failure.exit_code) == ("Failed", 1, 87)
    failed = next(c for c in status.conditions if c.type == "Failed")
    assert (failed.reason, failed.message) == ("DriftExceeded", "maxDriftFraction: as the scenario says")


async def test_the_active_deadline_counts_what_earlier_lives_ran(world):
    scenario = [["step", "suspend"], ["step", "hang"]]
    runner = world.runner(scenario)
    life = asyncio.create_task(runner.run())
    await until(lambda: "Running" in world.shown)
    runner.suspend()
    assert (await life).phase == "Suspended"
    world.folder.metrics.write_text(json.dumps({"step": 1, "reward": 0.1, "step_seconds": 500}) + "\n")

    status = await world.runner(scenario, activeDeadlineSeconds=500).run()
    assert {c.reason for c in status.conditions if c.type == "Failed"} == {"DeadlineExceeded"}


async def test_only_a_run_that_was_finished_says_so(world):
    first, again = world.runner([["7"]]), world.runner([["7"]])
    await first.run()
    await again.run()
    assert (first.finished_before, again.finished_before) == (False, True)
