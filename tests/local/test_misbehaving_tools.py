"""One rollout's tool misbehaves: its outcome says so, and neither its neighbours nor its successors notice.

Everything is real but the model: the engine, sandboxes of bubblewrap, the daemon in them, a tokenizer.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentfly.agent import Tool, reward, tool
from agentfly.api import ResourcePool
from agentfly.broker.client import BrokerClient
from agentfly.context import Context
from agentfly.local.paths import run_dir as local_run_dir
from agentfly.local.plane import data_plane
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import Resources
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.rollout import Failed, Outcome, Scored
from agentfly.rollout.calls import OBSERVATION_CHARS
from agentfly.sandbox import ExecResult
from tests.local.crowd import (
    DEADLINES,
    GOOD,
    MEMBERS,
    POOL,
    Batch,
    kept,
    looks,
    observations,
    place,
    play,
    whole,
)
from tests.local.machine import footprint
from tests.unit.rollout.toys import call

LIMITED = "memory" not in Cgroups.find().missing
KILLED = r"\[killed: timed out\]"
LATE = f"timed out after {DEADLINES.call:g} s"
FREE = threading.Event()  # lets stuck threads go, at the end of a test


@tool
async def explode() -> str:
    """Raise."""
    raise RuntimeError("the disk is on fire\nand more")


@tool
def leave() -> str:
    """Ask the whole process to exit."""
    sys.exit(3)


@tool
async def cancel_itself() -> str:
    """Wait for a task that somebody has cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task
    return "unreachable"


@tool
async def wait_for_ever() -> str:
    """Wait for what never comes."""
    await asyncio.Event().wait()
    return "unreachable"


@tool
async def cling() -> str:
    """Wait for what never comes, and refuse to be cancelled."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


@tool
def block() -> str:
    """Block a thread."""
    FREE.wait(60)
    return "too late"


@tool
async def babble() -> str:
    """Return far more than any context holds."""
    return "x" * 50_000_000


TOOLS: list[Tool[..., Any]] = [explode, leave, cancel_itself, wait_for_ever, cling, block, babble]


def sh(command: str, seconds: float = 10) -> str:
    return call("shell", command=command, seconds=seconds)


@dataclass(frozen=True)
class Case:
    """What the first rollout calls, and all that must come of it."""

    act: str
    saw: str  # regular expression for the whole observation
    error: str | None = None
    exit_code: int | None = None
    then: str = "still here"
    outcome: Outcome = field(default_factory=lambda: Scored(1.0))


PLANT = """
for d in /tmp /workspace /dev/shm /root /run /etc /usr/bin /usr/lib; do
  mkdir -p $d/.left/deep; echo evil > $d/.left/deep/file; ln -s / $d/link; mkfifo $d/pipe
done 2>/dev/null
echo 'evil::0:0::/:/bin/sh' >> /etc/passwd; echo 'echo evil' > /usr/bin/id; chmod 700 /tmp
nohup sleep 1000 >/dev/null 2>&1 &
setsid setsid sh -c 'trap "" TERM HUP INT; while :; do sleep 1000; done' >/dev/null 2>&1 &
(setsid sh -c 'setsid sleep 1000 & exit' >/dev/null 2>&1 &)
ipcmk -Q >/dev/null
echo planted
"""
CASES = {
    "raises": Case(
        call("explode"),
        "RuntimeError: the disk is on fire",
        "exception: RuntimeError: the disk is on fire",
    ),
    "exits": Case(call("leave"), "SystemExit: 3", "exception: SystemExit: 3"),
    "cancels itself": Case(
        call("cancel_itself"),
        "RuntimeError: it waited for something that was cancelled",
        "exception: RuntimeError: it waited for something that was cancelled",
    ),
    "waits for ever": Case(call("wait_for_ever"), LATE, "timeout"),
    "refuses to be cancelled": Case(call("cling"), LATE, "timeout"),
    "blocks a thread": Case(call("block"), LATE, "timeout"),
    "sleeps past the call's deadline, ignoring signals": Case(
        sh("trap '' TERM INT HUP QUIT; while :; do sleep 1000; done", seconds=60), LATE, "timeout"
    ),
    "sleeps past its own deadline, ignoring signals": Case(
        sh("trap '' TERM INT HUP QUIT; while :; do sleep 1000; done", seconds=0.5), KILLED, exit_code=137
    ),
    "kills everything that it can": Case(
        sh("sleep 1000 & for s in 9 15 19; do kill -$s 1; done; kill -9 -1; echo alive"),
        "alive",
        exit_code=0,
    ),
    "fills folders in memory": Case(
        sh("for d in /tmp /dev/shm /workspace; do head -c 999999999 /dev/zero > $d/x; done"),
        "\n".join(["head: error writing 'standard output': No space left on device"] * 3),
        exit_code=1,
    ),
    "allocates without end": Case(
        sh("python3 -c 'x = [bytearray(10 << 20) for _ in range(100)]'"),
        r"Killed\n\[killed: out of memory\]" if LIMITED else "(?s)Traceback.*MemoryError",
        exit_code=137 if LIMITED else 1,
    ),
    "forks without end": Case(
        # The loop is the shell's own: a sleep might find no room for its process, and end the line at once.
        sh("f() { f | f & }; f & while :; do :; done", seconds=1),  # its one own fork comes first
        f"(?s).*{KILLED}",
        exit_code=137,
    ),
    "floods its output": Case(
        sh("yes", seconds=0.5), rf"(y\n){{500}}\[stdout: the rest was dropped\]\n{KILLED}", exit_code=137
    ),
    "leaves daemons and files": Case(sh(PLANT), "planted", exit_code=0),
    "removes everything": Case(
        sh("rm -rf /workspace/* /etc/* /usr/bin /* 2>/dev/null", seconds=1),
        KILLED,
        exit_code=137,
        then="sandboxd: /bin/sh: command not found",
        outcome=Scored(0.0),
    ),
}


@pytest.fixture
async def engine(run_dir: Path, sandboxd: Path) -> AsyncIterator[ResourceEngine]:
    """A pool of real sandboxes; afterwards the machine is as it was before."""
    before = footprint(run_dir)
    runner = BubblewrapRunner(run_dir.with_name("m"), sandboxd)
    async with ResourceEngine([runner], [POOL]) as engine:
        await whole(engine)
        yield engine
    await runner.close()
    assert footprint(run_dir) == before


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Nothing of a test runs on into the next one."""
    FREE.clear()
    before = set(threading.enumerate())
    yield
    FREE.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


async def check(resources: Resources, batch: Batch, fresh: list[str]) -> None:
    """The others worked as if alone, and the pool and each of its members are as before."""
    assert len(batch.good) == GOOD
    for trajectory in batch.good:
        name = trajectory.task["name"]
        assert trajectory.outcome == Scored(1.0)
        assert observations(trajectory) == [name, f"{name}\n/tmp:\n\n/workspace:\nname"]
        assert (trajectory.attempt, trajectory.stop_reason) == (0, "done")
        assert [record.error for record in trajectory.tool_calls] == [None, None]
    status = await whole(resources)
    counts = (status.ready, status.leased, status.queued, status.starting, status.resetting, status.stopping)
    assert counts == (MEMBERS, 0, 0, 0, 0, 0)
    assert await looks(resources, "next") == fresh


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CASES)
async def test_one_tool(engine: ResourceEngine, name: str) -> None:
    case = CASES[name]
    fresh = await looks(engine, "first")
    batch = await play(engine, case.act, TOOLS)
    bad = batch.bad
    assert bad.outcome == case.outcome
    saw, then = observations(bad)
    assert re.fullmatch(case.saw, saw), saw
    assert then == case.then
    first, second = bad.tool_calls
    assert (first.error, first.exit_code, second.error) == (case.error, case.exit_code, None)
    assert first.seconds < 4
    assert (bad.attempt, bad.turns, bad.stop_reason) == (0, 3, "done")
    timeouts, errors = int(case.error == "timeout"), int((case.error or "").startswith("exception"))
    assert (bad.metrics["tool_timeouts"], bad.metrics["tool_errors"]) == (timeouts, errors)
    assert (batch.report.scored, batch.report.failures) == (GOOD + 1, 0)
    await check(engine, batch, fresh)


async def test_one_tool_floods_the_context(engine: ResourceEngine) -> None:
    fresh = await looks(engine, "first")
    batch = await play(engine, call("babble"), TOOLS)
    (saw,) = observations(batch.bad)
    dropped = 50_000_000 - OBSERVATION_CHARS
    assert saw == "x" * OBSERVATION_CHARS + f"\n[{dropped} more characters were dropped]"
    assert (batch.bad.outcome, batch.bad.stop_reason, batch.bad.turns) == (Scored(1.0), "context", 1)
    assert batch.bad.rows[0].response_mask[-1] == 1
    await check(engine, batch, fresh)


# The sandbox itself ends. Nothing inside can bring that about, so the test does.


def first_process(marker: str) -> int:
    """The pid here of the first process of the sandbox in which a command has this text, or 0."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (entry / "cmdline").read_text():
                pid = int(entry.name)
                while not (status := _status(pid))["NSpid"].endswith("\t1"):
                    pid = int(status["PPid"])
                return pid
    return 0


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def die(ctx: Context) -> ExecResult:
    """Kill the sandbox while a command runs in it; returns as the command does."""
    box, marker = await ctx.acquire("shell"), f"1000.{ctx.owner.encode().hex()}"
    running = asyncio.create_task(box.sandbox.exec(["python3", "-c", "import time; time.sleep(60)", marker]))
    async with asyncio.timeout(10):
        while not (pid := first_process(marker)):  # noqa: ASYNC110 -- nobody tells when a process is there
            await asyncio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return await running


@tool
async def lose_sandbox(ctx: Context) -> ExecResult:
    """Run a command in a sandbox that dies."""
    return await die(ctx)


async def lose_first_sandbox(ctx: Context, name: str) -> None:
    if name == "bad" and ctx.attempt == 0:
        await die(ctx)
    await place(ctx, name)


@reward
async def lose_judged_sandbox(ctx: Context, name: str) -> float:
    if name == "bad":
        await die(ctx)
    return await kept(ctx, name)


async def test_sandbox_dies_under_a_tool(engine: ResourceEngine) -> None:
    fresh = await looks(engine, "first")
    batch = await play(engine, call("lose_sandbox"), [lose_sandbox])
    outcome = batch.bad.outcome
    assert isinstance(outcome, Failed)
    assert outcome.reason == "SandboxLost"
    assert re.fullmatch(
        r"tool: SandboxUnreachable: sandbox unix://\S+: POST /exec failed: .+", outcome.message
    )
    assert (batch.bad.attempt, batch.bad.reward, observations(batch.bad)) == (0, None, [])
    assert (batch.report.scored, batch.report.failed) == (GOOD, {"SandboxLost": 1})
    await check(engine, batch, fresh)


async def test_sandbox_dies_under_the_reward(engine: ResourceEngine) -> None:
    fresh = await looks(engine, "first")
    batch = await play(engine, sh("echo fine"), reward=lose_judged_sandbox)
    outcome = batch.bad.outcome
    assert isinstance(outcome, Failed)
    assert outcome.reason == "SandboxLost"
    assert outcome.message.startswith("reward: SandboxUnreachable: ")
    assert (batch.bad.attempt, observations(batch.bad)) == (0, ["fine", "still here"])
    await check(engine, batch, fresh)


async def test_sandbox_dies_before_the_first_call_and_the_rollout_is_played_again(
    engine: ResourceEngine,
) -> None:
    fresh = await looks(engine, "first")
    batch = await play(engine, sh("echo fine"), setup=lose_first_sandbox)
    assert (batch.bad.outcome, batch.bad.attempt) == (Scored(1.0), 1)
    assert observations(batch.bad) == ["fine", "still here"]
    assert (batch.report.scored, batch.report.failures) == (GOOD + 1, 0)
    await check(engine, batch, fresh)


# The same through the broker, as a trainer's workers have it.


SHELL = ResourcePool.model_validate(
    {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": POOL.name},
        "spec": {
            "type": "Container",
            "container": {"memory": "96Mi", "pids": 32},
            "capacity": {"min": MEMBERS, "max": MEMBERS},
        },
    },
    by_alias=True,
)


@pytest.mark.parametrize("name", ["leaves daemons and files", "removes everything", "forks without end"])
async def test_data_plane_outlives_one_tool_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_dir.parent / "c"))
    kept_here = local_run_dir()
    before = footprint(run_dir)
    case = CASES[name]
    async with (
        data_plane(
            [SHELL], logs_in=tmp_path, inference_python=Path(sys.executable), start_timeout_s=10
        ) as plane,
        BrokerClient(plane.broker) as client,
    ):
        await whole(client)
        fresh = await looks(client, "first")
        batch = await play(client, case.act, TOOLS)
        assert batch.bad.outcome == case.outcome
        saw, then = observations(batch.bad)
        assert re.fullmatch(case.saw, saw), saw
        assert then == case.then
        await check(client, batch, fresh)
    assert footprint(run_dir) == before
    assert list(kept_here.iterdir()) == []
