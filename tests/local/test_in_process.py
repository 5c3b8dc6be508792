"""Isolated instances: the contract of every runner, and what a process of its own is for."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.instance import InstanceClient
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.spec import InProcessSpec
from tests.local.machine import descendants
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners import games


def heavy(**fields: Any) -> InProcessSpec:
    return InProcessSpec(entrypoint=f"{Path(games.__file__)}:Heavy", isolated=True, **fields)


@pytest.fixture
def runner(tmp_path):
    return InProcessRunner(tmp_path / "r")


class TestIsolated(RunnerContract):
    exclusive = False  # the engine decides whether an instance is shared

    @pytest.fixture
    def spec(self):
        return heavy()

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "r"

    def left(self, runner):
        return {path.name for path in self.folder.iterdir()} | set(descendants())


async def test_its_memory_is_counted_and_nothing_of_it_outlives_a_stop(runner):
    member = await runner.start(heavy(), "game-1")
    try:
        await runner.lease(member, "owner", 0, "token", 30)
        game = InstanceClient(member.address, "token")
        before = (await runner.probe(member)).memory_mb
        await game.call("hold", 64)
        after = (await runner.probe(member)).memory_mb
        assert 60 < after - before < 80
        await game.call("spawn")
        assert descendants()["sleep"] == 1
        await game.close()
    finally:
        await runner.stop(member)
    assert not descendants()


async def test_it_inherits_everything_but_the_keys_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("GAME_LEVEL", "3")
    runner = InProcessRunner(tmp_path / "r", hidden={"JUDGE_KEY"})
    member = await runner.start(heavy(), "game-1")
    try:
        await runner.lease(member, "owner", 0, "token", 30)
        game = InstanceClient(member.address, "token")
        seen = await game.call("variables", "JUDGE_KEY", "GAME_LEVEL")
        assert seen == {"JUDGE_KEY": None, "GAME_LEVEL": "3"}
        await game.close()
    finally:
        await runner.stop(member)


async def test_an_instance_that_dies_is_lost_and_said_so(runner):
    member = await runner.start(heavy(), "game-1")
    try:
        await runner.lease(member, "owner", 0, "token", 30)
        game = InstanceClient(member.address, "token")
        with pytest.raises(Infra, match="/call") as caught:
            await game.call("die")
        assert caught.value.hints == ("its process may have died; release it and acquire again",)
        await game.close()
        assert not (await runner.probe(member)).alive
        assert await runner.reset(member) is None
        with pytest.raises((Infra, LeaseLost), match="member game-1"):
            await runner.lease(member, "owner", 0, "token", 30)
    finally:
        await runner.stop(member)


async def test_a_call_that_hangs_in_its_process_does_not_hold_up_the_stop(runner):
    member = await runner.start(heavy(call_timeout_s=0.1), "game-1")
    await runner.lease(member, "owner", 0, "token", 30)
    game = InstanceClient(member.address, "token")
    with pytest.raises(Infra, match="hang did not return"):
        await game.call("hang")
    await game.close()
    async with asyncio.timeout(5):
        await runner.stop(member)
    assert not descendants()


async def test_a_process_that_dies_at_its_start_says_its_last_words(runner, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import os, sys\nprint('no board here', file=sys.stderr, flush=True)\nos._exit(3)\n")
    spec = InProcessSpec(entrypoint=f"{broken}:make", isolated=True)
    with pytest.raises(StartFailed, match="ended before it was ready: no board here"):
        await runner.start(spec, "game-1")
    assert list((tmp_path / "r").iterdir()) == []
    assert not descendants()


OWNER = """
import asyncio, sys
from pathlib import Path
from agentfly.resources.instance import InstanceClient
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.spec import InProcessSpec

async def main():
    runner = InProcessRunner(Path(sys.argv[1]))
    member = await runner.start(InProcessSpec(entrypoint=sys.argv[2], isolated=True), "game-1")
    await runner.lease(member, "owner", 0, "token", 30)
    game = InstanceClient(member.address, "token")
    await game.call("spawn")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_dies_with_its_owner_and_takes_its_processes_along(tmp_path):
    argv = [sys.executable, "-c", OWNER, str(tmp_path / "r"), heavy().entrypoint]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        below = _below(owner.pid)
        assert len(below) >= 3, "guard, instance and what it started"
        owner.kill()
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _below(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(far for child in children for far in _below(child))]


def _alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        return True
    return False
