"""An owner that is killed leaves no sandbox, and what it leaves on disk is swept."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners.bubblewrap.process import spawn
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner, sweep
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.resources.runners.sandboxd.owner_dir import LOCK, OwnerDir
from agentfly.resources.spec import ContainerSpec
from tests.local.machine import footprint, groups

OWNER = """
import asyncio, sys
from pathlib import Path
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient

async def main():
    runner = BubblewrapRunner(Path(sys.argv[1]), Path(sys.argv[2]))
    for number in range(3):
        member = await runner.start(ContainerSpec(), f"m-{number}")
        await runner.lease(member, "owner", 0, "token", 600)
        async with SandboxClient(member.address, "token") as client:
            await client.exec("setsid sleep 900 >/dev/null 2>&1 & mkdir -p /etc/x && chmod 0 /etc/x")
        print(await member.handle.process.daemon_pid(), flush=True)
    {last}

asyncio.run(main())
"""
LIMITED = bool(Cgroups.find().bases)
WAIT = "await asyncio.sleep(600)"
START_FOR_EVER = "while True: await runner.start(ContainerSpec(), 'more')"


@contextmanager
def owner(
    run_dir: Path, sandboxd: Path, last: str = WAIT
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with three sandboxes, and their daemons' pids."""
    command = [sys.executable, "-c", OWNER.replace("{last}", last), str(run_dir), str(sandboxd)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, [int(process.stdout.readline()) for _ in range(3)]
        finally:
            process.kill()


def gone(pids: list[int], within: float) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("last", [WAIT, START_FOR_EVER])
def test_killed_owner_leaves_nothing_after_a_sweep(run_dir: Path, sandboxd: Path, last: str) -> None:
    home = run_dir.with_name("killed")
    before = footprint(run_dir)
    with owner(home, sandboxd, last) as (process, pids):
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert gone(pids, within=20)
        assert bool(groups(process.pid)) == LIMITED
    if last == START_FOR_EVER:
        time.sleep(0.5)  # one that was just being started ends when it sees its owner gone
    swept, end = sweep(run_dir.parent), time.monotonic() + 20
    while footprint(run_dir) != before and time.monotonic() < end:
        time.sleep(0.1)
        swept += sweep(run_dir.parent)
    assert swept[:1] == ["killed"]
    assert footprint(run_dir) == before
    assert groups(process.pid) == set()


def test_sweep_kills_what_waits_for_a_bubblewrap_that_died_too_early(run_dir: Path) -> None:
    dead, alive = run_dir.parent / "dead", OwnerDir(run_dir.parent / "alive").path
    dead.mkdir()
    (dead / LOCK).touch()
    # As bubblewrap's child before it was told who it is: it names the folder, and knows no parent.
    waiting = [
        subprocess.Popen(
            ["bwrap", "-c", f"read line; : {folder}/1/upper"], executable="/bin/sh", stdin=subprocess.PIPE
        )
        for folder in (dead, alive)
    ]
    try:
        for process in waiting:  # the kernel shows its arguments a moment after it runs
            while b"upper" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                time.sleep(0.01)
        assert sweep(run_dir.parent) == ["dead"]
        assert waiting[0].wait(5) == -signal.SIGKILL
        assert waiting[1].poll() is None
    finally:
        for process in waiting:
            process.kill()
            process.communicate()


# Starts a child in its own group, as bubblewrap does, and is killed before it could tell of it.
KILLED_EARLY = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(child.pid))
os.kill(os.getpid(), 9)
"""


async def test_child_of_a_bubblewrap_that_somebody_killed_does_not_stay(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    process = spawn(lambda *_: [sys.executable, "-c", KILLED_EARLY, str(said)], [], tmp_path / "log")
    async with asyncio.timeout(10):
        while not said.exists() or not said.read_text():  # noqa: ASYNC110 -- of another process
            await asyncio.sleep(0.01)
        await process.end()
    assert gone([int(said.read_text())], within=1)


def test_sweep_leaves_a_living_owner_alone(run_dir: Path, sandboxd: Path) -> None:
    home = run_dir.with_name("living")
    with owner(home, sandboxd) as (_, pids):
        assert sweep(run_dir.parent) == []
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert (home / "1" / "s").is_socket()
    sweep(run_dir.parent)


def test_interrupt_of_the_terminal_is_the_owners_to_handle(run_dir: Path, sandboxd: Path) -> None:
    with owner(run_dir.with_name("terminal"), sandboxd) as (process, pids):
        assert all(os.getpgid(pid) != os.getpgid(process.pid) for pid in pids)
    assert gone(pids, within=2)
    sweep(run_dir.parent)


async def test_folder_of_a_living_owner_is_refused(run_dir: Path, sandboxd: Path) -> None:
    first = BubblewrapRunner(run_dir.with_name("shared"), sandboxd)
    second = BubblewrapRunner(run_dir.with_name("shared"), sandboxd)
    member = await first.start(ContainerSpec(), "m-0")
    with pytest.raises(StartFailed, match="in use by another process"):
        await second.start(ContainerSpec(), "m-0")
    await asyncio.gather(first.stop(member))
    await first.close()
    await second.stop(await second.start(ContainerSpec(), "m-0"))
    await second.close()


async def test_long_run_dir_is_refused_with_a_remedy(run_dir: Path, sandboxd: Path) -> None:
    runner = BubblewrapRunner(run_dir.with_name("x" * 100), sandboxd)
    with pytest.raises(StartFailed, match="too long to hold unix sockets") as caught:
        await runner.start(ContainerSpec(), "m-0")
    assert caught.value.hints
