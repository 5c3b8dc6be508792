"""What an operator costs that has hundreds of TrainingRuns.

Guarantees:
1. The operator makes everything of the runs; their pods run as far as the API server shows, and every head
   answers.
2. Requests are those of the API server's audit log, and those of the operator alone.
3. A minute is measured when nothing is left to be made, once while no run makes steps and once while all do.

Not here: that no more is asked or written than must be, which the tests of the operator hold.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.kube import TRAINING_RUNS, Kube
from agentfly.roles.launch import STATE_PORT, Report
from tests.bench.cluster import world
from tests.bench.cluster.processes import Usage, daemons, peak_mb, until
from tests.bench.report import Ratio, Section, Table
from tests.bench.stats import Series, ratio
from tests.cluster.audit import WRITES, Audit
from tests.cluster.cluster import Cluster
from tests.integration.operator.run_world import storage, training_run
from tests.integration.operator.world import (
    AGENT,
    FakeBroker,
    OperatorProcess,
    fake_broker,
    install,
    operator,
)

logger = logging.getLogger("tests.bench")

RUNS, NODES = 200, 10
ATTEMPT = 2
STEPS, STEP_S = 1000, 5.0
WINDOW_S = 60.0
MADE_S, SEEN_S, SETTLE_S = 900.0, 120.0, 10.0
AT_ONCE = 16
MEMORY_MB = 300.0
SHORT_S, LONG_S = 10.0, 60.0  # of any so many seconds, the most status writes of one run are told
SHORT, LONG = 11, 3  # one a second, and for progress alone one in 30 s: both ends count
_SAVED = CheckpointStatus.model_validate(
    {"latestStep": 4, "path": "/x/4", "time": "2026-11-30T12:00:00Z", "ranks": NODES}
)

Counts = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Window:
    """A part of the operator's life: CPU, its requests, and when it wrote the status of which run."""

    took_s: float
    cpu_s: float
    counts: Counts
    written: Mapping[str, Sequence[float]]

    def minute(self, *verbs: str) -> float:
        """Requests of these verbs in a minute."""
        found = sum(count for (verb, _), count in self.counts.items() if verb in verbs)
        return found * 60 / self.took_s

    def cpu_minute(self) -> float:
        """Seconds of CPU in a minute."""
        return self.cpu_s * 60 / self.took_s

    def most(self, within_s: float) -> int:
        """Of any so many seconds: the most status writes of one run."""
        return max((_most(times, within_s) for times in self.written.values()), default=0)


@dataclass(frozen=True)
class Found:
    """What an operator used that makes the runs' objects, and what the next one, that finds them."""

    runs: int
    makes: Usage
    starts: Usage
    making: Window
    quiet: Window
    moving: Window


@dataclass
class Heads:
    """What all heads say."""

    step: int = 5
    time: float = field(default_factory=time.time)

    def forward(self) -> None:
        """One more step."""
        self.step, self.time = self.step + 1, time.time()

    async def answer(self, _: web.Request) -> web.Response:
        """Says it."""
        progress = Progress(step=self.step, total_steps=STEPS)
        said = Report(
            attempt=ATTEMPT, phase="Running", progress=progress, step_time=self.time, checkpoint=_SAVED
        )
        return web.Response(text=said.model_dump_json())


async def measure(
    cluster: Cluster, folder: Path, kube: Kube, runs: int = RUNS, window_s: float = WINDOW_S
) -> Found:
    """All of it, in a cluster that has nothing else."""
    rights = await asyncio.to_thread(install, cluster)
    space = await world.namespace(cluster, kube, "runs")
    async with (
        fake_broker() as broker,
        answering() as heads,
        daemons(cluster.kubeconfig, space, folder),
        storage(kube, space),
    ):
        await suspended(kube, space, broker, runs)
        with operator(rights, folder, broker.url, namespaces=(space,)) as process:
            making, ready_s = await make(cluster, kube, process, space, runs)
            makes = Usage(making.cpu_s, peak_mb(process.process.pid), ready_s)
            logger.info("%d runs, made: %s", runs, makes)
            await asyncio.to_thread(process.stop)
        began = time.monotonic()
        with operator(rights, folder, broker.url, namespaces=(space,)) as process:
            await until("the operator has seen all runs", lambda: _sees(process, runs), SEEN_S, every_s=0.1)
            ready_s, cpu_s = time.monotonic() - began, process.cpu_s()
            await asyncio.sleep(SETTLE_S)
            quiet = await window(cluster, process, window_s)
            logger.info("quiet: %.1f CPU s", quiet.cpu_s)
            async with steps(heads):
                moving = await window(cluster, process, window_s)
            logger.info("moving: %.1f CPU s", moving.cpu_s)
            starts = Usage(cpu_s, peak_mb(process.process.pid), ready_s)
    return Found(runs, makes, starts, making, quiet, moving)


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[Heads]:
    """Every address of this machine is that of a head."""
    heads, app = Heads(), web.Application()
    app.router.add_get("/state", heads.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", STATE_PORT).start()
        yield heads
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def steps(heads: Heads) -> AsyncIterator[None]:
    """All runs make a step at a time, as long as the block lasts."""

    async def go_on() -> None:
        while True:
            heads.forward()
            await asyncio.sleep(STEP_S)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def suspended(kube: Kube, space: str, broker: FakeBroker, runs: int) -> None:
    """Runs that go on from a checkpoint once an operator looks at them: nothing has to be prepared."""
    left = iter(range(runs))
    before = {"phase": "Suspended", "attempt": ATTEMPT - 1, "checkpoint": _SAVED.to_json()}

    async def make() -> None:
        for number in left:
            obj = training_run(
                space, trainer={"nodes": NODES}, rollout={"groupSize": NODES}, tasksPerStep=1, steps=STEPS
            )
            obj["metadata"]["name"] = name = f"run-{number}"
            await kube.create(TRAINING_RUNS, obj)
            await kube.patch_status(TRAINING_RUNS, name, before, space)
            broker.serves(f"{name}-policy", ready=1, min=1, max=1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(make())


async def make(
    cluster: Cluster, kube: Kube, process: OperatorProcess, space: str, runs: int
) -> tuple[Window, float]:
    """What the operator used until every run makes steps, and how long that took."""
    began, audit = time.monotonic(), cluster.audit()

    async def all_run() -> bool:
        found = await kube.list(TRAINING_RUNS, space)
        return sum(each.get("status", {}).get("phase") == "Running" for each in found) == runs

    with audit:
        await until("all runs make steps", all_run, MADE_S, process.log.read_text, every_s=1.0)
        took = time.monotonic() - began
    return _window(audit, took, process.cpu_s()), took


async def window(cluster: Cluster, process: OperatorProcess, for_s: float) -> Window:
    """What it uses in some time."""
    audit = cluster.audit()
    with audit:
        began, used = time.monotonic(), process.cpu_s()
        await asyncio.sleep(for_s)
        took, used = time.monotonic() - began, process.cpu_s() - used
    return _window(audit, took, used)


def _window(audit: Audit, took_s: float, cpu_s: float) -> Window:
    written: dict[str, list[float]] = {}
    for event in audit.events:
        if _is_status(event):
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            written.setdefault(event["objectRef"]["name"], []).append(at)
    return Window(took_s, cpu_s, audit.counts(agent=AGENT), written)


def _is_status(event: Mapping[str, Any]) -> bool:
    ref = event.get("objectRef") or {}
    ours = event.get("userAgent", "").startswith(AGENT) and event["verb"] in WRITES
    status = (ref.get("resource"), ref.get("subresource")) == ("trainingruns", "status")
    return ours and status and event["stage"] == "ResponseComplete"


def _most(times: Sequence[float], within_s: float) -> int:
    return max(sum(first <= each <= first + within_s for each in times) for first in times)


async def _sees(process: OperatorProcess, runs: int) -> bool:
    _, text = await process.page("/metrics")
    return sum(line.startswith("agentfly_trainingrun_step{") for line in text.splitlines()) == runs


def section(found: Found) -> Section:
    """The page's part."""
    ratios = []
    for what, above, below in (
        ("CPU seconds", found.moving.cpu_minute(), found.quiet.cpu_minute()),
        ("writes", found.moving.minute(*WRITES), found.quiet.minute(*WRITES)),
    ):
        if below > 0:
            pair = Series([[above]]), Series([[below]])
            ratios.append(Ratio(f"{what} of a minute in which every run makes steps", _QUIET, ratio(*pair)))
    pods = f"{found.runs * NODES:,} trainer pods"
    lives = [_life("makes all of it", found.makes), _life("starts where all is there", found.starts)]
    minutes = [_minute("no run makes steps", found.quiet), _minute("all make steps", found.moving)]
    writes = [
        _writes("all of it is made", found.making, SHORT_S, SHORT),
        _writes("all make steps", found.moving, SHORT_S, SHORT),
        _writes("all make steps, which is progress alone", found.moving, LONG_S, LONG),
    ]
    tables = [
        Table("Runs", _LIVES, ["the operator", "CPU s", "peak MB", "s until ready", "bound"], lives),
        Table("A minute with runs", _MINUTES, _PER_MINUTE, minutes),
        Table("Status writes", _WRITES, ["while", "of any", "most of one run", "bound"], writes),
    ]
    return Section(f"An operator with {found.runs} TrainingRuns", f"{pods}: {_TEXT}", ratios, tables)


def _life(what: str, used: Usage) -> list[str]:
    bound = "held" if used.peak_mb < MEMORY_MB else "missed"
    return [what, f"{used.cpu_s:.1f}", f"{used.peak_mb:.0f}", f"{used.ready_s:.0f}", bound]


def _minute(what: str, of: Window) -> list[str]:
    asked = (of.minute("get"), of.minute("list", "watch"), of.minute(*WRITES))
    return [what, f"{of.cpu_minute():.1f}", *(f"{each:.0f}" for each in asked)]


def _writes(what: str, of: Window, within_s: float, bound: int) -> list[str]:
    most = of.most(within_s)
    return [what, f"{within_s:.0f} s", f"{most}", f"{bound}, {'held' if most <= bound else 'missed'}"]


_QUIET = "the same, while none does"
_PER_MINUTE = ["while", "CPU s", "gets", "lists and watches", "writes"]
_TEXT = (
    f"runs of {NODES} pods each that go on from a checkpoint, so that nothing has to be prepared. Their pods "
    "only run as far as the API server shows; heads answer, and are asked every 5 s. Two operators, "
    "one after the other: the first makes everything, the second finds it."
)
_LIVES = (
    "From the start of the process: until every run makes steps, and until the operator has looked at every "
    "run. The second one's memory is that of the minutes below, too. "
    f"Bound: less than {MEMORY_MB:.0f} MB."
)
_MINUTES = (
    "Of the operator's process, and of its requests in the API server's audit log, its own pools' included. "
    f"Where they make steps, all of them make one every {STEP_S:g} s."
)
_WRITES = (
    "When the API server received them. Bounds: one a second, and one in 30 s where nothing but progress "
    "changes; a span of time has one more than that, because both of its ends count."
)
