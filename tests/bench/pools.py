"""How the time of a batch falls with the size of the pool.

A rollout takes turns: it waits for a model (a fixed delay here) and runs a command in its sandbox, which it
holds from its first turn to its last. With one sandbox the batch is played one by one; with N, N at a time,
until the processor cores are busy.
"""

import asyncio
import time

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.bench.report import Ratio, Section, Table
from tests.bench.stats import Series, Spread, ratio

BATCH = 64
SIZES = (1, 2, 4, 8, 16, 32, 64)
TURNS = 3
MODEL_S = 0.1  # of each turn
WAIT_S = 120.0
PAPER = (66.95, 1.86)
"""Minutes of a ScienceWorld step with 1 and 64 containers, in the AgentFly paper."""


async def measure(runner: BubblewrapRunner) -> Section:
    """One batch for each size."""
    found = {size: Series() for size in SIZES}
    for size in SIZES:
        found[size].add([await batch(runner, size)])
    return _section(found)


async def batch(runner: BubblewrapRunner, members: int) -> float:
    """Seconds of a batch on a warm pool."""
    pool = PoolSpec(
        name="batch", resource=ContainerSpec(memory_mb=64), min=members, max=members, lease_ttl_s=120
    )

    async def play(engine: ResourceEngine, number: int) -> None:
        async with await engine.acquire("batch", f"batch-{number}", deadline=WAIT_S) as lease:
            for _ in range(TURNS):
                await asyncio.sleep(MODEL_S)
                await lease.sandbox.exec(["/bin/true"], timeout=60)

    async with ResourceEngine([runner], [pool]) as engine:
        while engine.pool_status()["batch"].ready < members:  # noqa: ASYNC110 -- of an engine that tells nobody
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for number in range(BATCH):
                group.create_task(play(engine, number))
        return time.perf_counter() - began


def _section(found: dict[int, Series]) -> Section:
    faster = {size: ratio(found[1], found[size]) for size in SIZES}
    ratios = [
        Ratio(f"times that {size} members are faster than 1", f"{size}", _scaled(faster[size], 1 / size))
        for size in SIZES[1:]
    ]
    rows = [[str(size), f"{found[size].percentile(50):.2f}", f"{faster[size].middle:.1f}"] for size in SIZES]
    table = Table(
        "Batch time by size of the pool",
        f"{BATCH} rollouts of {TURNS} turns, each {1000 * MODEL_S:g} ms of waiting for a model and one "
        f"command. The AgentFly paper prints {PAPER[0]} and {PAPER[1]} minutes for a ScienceWorld step with "
        f"1 and 64 containers, which is {PAPER[0] / PAPER[1]:.0f} times faster; its rollouts, model and "
        "machine are others.",
        ["members", "seconds", "times faster than 1"],
        rows,
    )
    text = (
        f"A batch of {BATCH} rollouts on pools of 1 to 64 warm sandboxes. A ratio of 1 would be perfect: N "
        "members, an Nth of the time."
    )
    return Section("Size of the pool", text, ratios, [table])


def _scaled(of: Spread, factor: float) -> Spread:
    return Spread(of.middle * factor, of.low * factor, of.high * factor, of.repeats)
