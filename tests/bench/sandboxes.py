"""One sandbox at a time: start, reset, and what a command costs in it.

A clean reset is that of a lease that wrote to its scratch folders, as nearly all do; a dirty one that of a
lease that wrote to the root file system, which cannot be verified clean and takes a fresh start. Commands in
the sandbox alternate with the same commands forked by this process.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient
from tests.bench.report import Ratio, Section, Table, percentiles
from tests.bench.stats import Series, ratio

TOKEN = "bench-token"
TTL_S = 120.0
REPEATS = 5
STARTS = 6  # for each repeat
EXECS = 40  # of each kind, for each repeat
BARE_S = 10.0
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/bin/true", ("/bin/true",)),
    ("sh -c 'echo hi'", ("sh", "-c", "echo hi")),
)
BARE = """
import json, os, sys, time
quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
seconds = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    os.waitpid(os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ, file_actions=quiet), 0)
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds))
"""
"""Forks and waits, and nothing else: the least that a command costs in a sandbox. Run there."""


@dataclass
class Lives:
    """What starts and resets took."""

    start: Series = field(default_factory=Series)
    clean: Series = field(default_factory=Series)
    dirty: Series = field(default_factory=Series)


async def lives(runner: BubblewrapRunner) -> Lives:
    """Start sandboxes one after another; reset each twice, clean and dirty; stop it."""
    found = Lives()
    await _life(runner)  # warm-up: the first start also copies what all share
    for _ in range(REPEATS):
        samples = [await _life(runner) for _ in range(STARTS)]
        for series, of_one in zip(
            (found.start, found.clean, found.dirty), zip(*samples, strict=True), strict=True
        ):
            series.add(of_one)
    return found


async def start(runner: BubblewrapRunner) -> float:
    """Start a sandbox and stop it; returns the seconds of the start."""
    began = time.perf_counter()
    member = await runner.start(ContainerSpec(), "bench")
    seconds = time.perf_counter() - began
    await runner.stop(member)
    return seconds


async def _life(runner: BubblewrapRunner) -> tuple[float, float, float]:
    began = time.perf_counter()
    member = await runner.start(ContainerSpec(), "bench")
    started = time.perf_counter() - began
    try:
        same, clean = await _reset(runner, member, "echo something > file")
        fresh, dirty = await _reset(runner, same, "echo something > /usr/file")
    finally:
        await runner.stop(member)  # idempotent: after a dirty reset this one has ended already
    await runner.stop(fresh)
    if same.handle is not member.handle or fresh.handle is member.handle:
        raise RuntimeError("reset: took another way than the one that is measured")
    return started, clean, dirty


async def _reset(runner: BubblewrapRunner, member: Member, command: str) -> tuple[Member, float]:
    await runner.lease(member, "bench", 0, TOKEN, TTL_S)
    async with SandboxClient(member.address, TOKEN) as client:
        await client.exec(command)
    began = time.perf_counter()
    after = await runner.reset(member)
    seconds = time.perf_counter() - began
    if after is None:
        raise RuntimeError("reset: the member was condemned")
    return after, seconds


def lives_section(found: Lives) -> Section:
    """Starts and resets as the page shows them."""
    ratios = [
        Ratio("verified reset, clean", "start of a sandbox", ratio(found.clean, found.start)),
        Ratio("reset of a dirty sandbox, by a fresh start", "start", ratio(found.dirty, found.start)),
    ]
    rows = [
        ["start", *percentiles(found.start)],
        ["reset, clean", *percentiles(found.clean)],
        ["reset, dirty", *percentiles(found.dirty)],
    ]
    text = (
        "One bubblewrap sandbox at a time, without the engine. *Start*: until its daemon answers. *Clean "
        "reset*: a lease ran a command and wrote to its scratch folder; its processes and files are removed "
        "and the sandbox is verified pristine. *Dirty reset*: the lease wrote to the root file system; the "
        "sandbox is ended and another started in its place."
    )
    table = Table("Start and reset", "Milliseconds.", ["", "p50 ms", "p99 ms", "samples"], rows)
    return Section("Start and reset of a sandbox", text, ratios, [table])


@dataclass
class Execs:
    """What one command took, in the order in which each round takes it."""

    forked: Series = field(default_factory=Series)
    blocking: Series = field(default_factory=Series)
    boxed: Series = field(default_factory=Series)
    inside: Series = field(default_factory=Series)
    again: Series = field(default_factory=Series)
    bare: Series = field(default_factory=Series)

    def add(self, rounds: Sequence[Sequence[float]]) -> None:
        """Add the rounds of one repeat."""
        kinds = (self.forked, self.blocking, self.boxed, self.inside, self.again)
        for series, samples in zip(kinds, zip(*rounds, strict=True), strict=True):
            series.add(samples)


async def execs(runner: BubblewrapRunner) -> dict[str, Execs]:
    """Run each command in one leased sandbox and bare, alternating command by command."""
    found = {name: Execs() for name, _ in COMMANDS}
    member = await runner.start(ContainerSpec(), "bench")
    try:
        await runner.lease(member, "bench", 0, TOKEN, TTL_S)
        async with SandboxClient(member.address, TOKEN) as client:
            for repeat in range(REPEATS + 1):
                for name, argv in COMMANDS:
                    count = EXECS if repeat else 5
                    samples = [await _round(client, argv) for _ in range(count)]
                    loop = await client.exec(["python3", "-c", BARE, str(count), *argv], timeout=BARE_S)
                    if repeat:  # the first one is the warm-up
                        found[name].add(samples)
                        found[name].bare.add(json.loads(loop.stdout))
    finally:
        await runner.stop(member)
    return found


async def _round(client: SandboxClient, argv: Sequence[str]) -> tuple[float, ...]:
    forked = await _forked(argv)
    blocking = _blocking(argv)
    began = time.perf_counter()
    result = await client.exec(argv)
    boxed = time.perf_counter() - began
    if result.exit_code != 0:
        raise RuntimeError(f"{argv[0]}: exit code {result.exit_code} in the sandbox: {result.text}")
    return forked, blocking, boxed, result.wall_s, await _forked(argv)


def _blocking(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, capture_output=True, timeout=BARE_S, check=True)
    return time.perf_counter() - began


async def _forked(argv: Sequence[str]) -> float:
    began = time.perf_counter()
    async with asyncio.timeout(BARE_S):
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()
    return time.perf_counter() - began


def execs_section(found: dict[str, Execs]) -> Section:
    """Commands as the page shows them."""
    ratios, rows = [], []
    for name, each in found.items():
        what = f"`{name}` through sandboxd"
        ratios += [
            Ratio(what, "bare fork, exec and wait in the sandbox", ratio(each.boxed, each.bare)),
            Ratio("of this, in the daemon", "the same", ratio(each.inside, each.bare)),
            Ratio(what, "`subprocess.run`, no sandbox", ratio(each.boxed, each.blocking)),
            Ratio(what, "`asyncio.create_subprocess_exec`, no sandbox", ratio(each.boxed, each.forked)),
            Ratio(f"noise: asyncio, `{name}`", "itself, a moment later", ratio(each.forked, each.again)),
        ]
        rows += [
            [f"`{name}`", "bare, in the sandbox", *percentiles(each.bare)],
            [f"`{name}`", "subprocess.run, no sandbox", *percentiles(each.blocking)],
            [f"`{name}`", "asyncio, no sandbox", *percentiles(each.forked)],
            [f"`{name}`", "through sandboxd", *percentiles(each.boxed)],
            [f"`{name}`", "of this, in the daemon", *percentiles(each.inside)],
        ]
    text = (
        "`SandboxClient.exec` (a request over a unix socket, the daemon's fork and exec in the sandbox, the "
        "answer) against the same arguments forked by this process with captured output, alternating "
        "command by command: by `subprocess.run`, which blocks the event loop and is the least that Python "
        "needs, and by `asyncio.create_subprocess_exec`, which does not block. *Bare, in the sandbox*: the "
        "same arguments spawned and waited for by a loop in the sandbox, without capturing output, between "
        "the rounds: no daemon can be faster than that."
    )
    table = Table(
        "Commands",
        "Milliseconds from the call to the result; *in the daemon* is the wall time that it reports.",
        ["Command", "", "p50 ms", "p99 ms", "samples"],
        rows,
    )
    return Section("Commands in a sandbox", text, ratios, [table])
