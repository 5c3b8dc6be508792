"""Many sandboxes alive at the same time, and what one of them holds while it does nothing."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient
from tests.bench.report import Ratio, Section, Table
from tests.bench.stats import spread

COUNT = 500
AT_ONCE = 16
SAMPLED = 20  # in which a command is run while all live
TOKEN = "bench-token"


async def measure(runner: BubblewrapRunner) -> Section:
    """Start them all, look, stop them all."""
    members: list[Member] = []
    try:
        before = set(_below(Path("/proc/self")))
        began = time.perf_counter()
        gate = asyncio.Semaphore(AT_ONCE)

        async def start(number: int) -> None:
            async with gate:
                members.append(await runner.start(ContainerSpec(memory_mb=64), f"crowd-{number}"))

        async with asyncio.TaskGroup() as group:
            for number in range(COUNT):
                group.create_task(start(number))
        started = time.perf_counter() - began
        held = sum(_pss(pid) for pid in set(_below(Path("/proc/self"))) - before) / COUNT
        await asyncio.gather(*(_answers(runner, member) for member in members[:: COUNT // SAMPLED]))
    finally:
        began = time.perf_counter()
        await asyncio.gather(*(runner.stop(member) for member in members))
    stopped = time.perf_counter() - began
    return _section(started, stopped, held, _pss_of_python())


async def _answers(runner: BubblewrapRunner, member: Member) -> None:
    await runner.lease(member, "bench", 0, TOKEN, 120)
    async with SandboxClient(member.address, TOKEN) as client:
        result = await client.exec("echo here", timeout=60)
    if result.stdout != "here\n":
        raise RuntimeError(f"{member.id}: did not answer: {result}")


def _below(process: Path) -> list[int]:
    found = []
    for task in (process / "task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_below(Path("/proc") / child)]
    return found


def _pss(pid: int) -> int:
    """Bytes of a process, shared pages divided among those that share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _pss_of_python() -> int:
    idle = [sys.executable, "-c", "print(flush=True); import sys; sys.stdin.read()"]
    with subprocess.Popen(idle, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as python:
        assert python.stdout is not None
        python.stdout.readline()
        return _pss(python.pid)


def _section(started: float, stopped: float, held: float, python: float) -> Section:
    ratios = [Ratio("memory of an idle sandbox", "memory of an idle Python", spread([held / python]))]
    rows = [[str(COUNT), f"{COUNT / started:.0f}", f"{COUNT / stopped:.0f}", f"{held / 2**20:.2f}"]]
    table = Table(
        "Many at once",
        f"Sandboxes alive at the same time; started {AT_ONCE} at a time, stopped all together; {SAMPLED} of "
        "them ran a command while all lived. Memory is the proportional set size of all processes of one.",
        ["alive", "starts /s", "stops /s", "MiB each"],
        rows,
    )
    return Section("Many at once", f"{COUNT} bubblewrap sandboxes at the same time.", ratios, [table])
