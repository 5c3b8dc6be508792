"""What it takes to get a warm sandbox: from an idle pool, and from the one who had it before.

Two quantities that a wait for a sandbox is made of, apart from the wait for somebody to be done:
a grant while members are free, and the hand-over from a release to the next in the queue, which contains the
verified reset. Both in this process and through the broker, alternating.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import Lease, Resources
from tests.bench.report import Ratio, Section, Table, percentiles
from tests.bench.stats import Series, ratio

POOL = "shell"
WAITERS = (1, 16, 64)
REPEATS = 5
ROUNDS = {1: 32, 16: 4, 64: 4}  # of grants, for each repeat
STARTS = 6  # for each repeat
HANDOVERS = 32  # for each repeat and number of waiters
WAIT_S = 20.0


@dataclass
class Side:
    """One way to the engine, and what it took, by number of waiters."""

    name: str
    resources: Resources
    grants: dict[int, Series] = field(default_factory=lambda: {count: Series() for count in WAITERS})
    handovers: dict[int, Series] = field(default_factory=lambda: {count: Series() for count in WAITERS})


async def measure(
    engine: ResourceEngine, broker: Resources, start: Callable[[], Awaitable[float]]
) -> Section:
    """All of it; ``start`` starts a sandbox without the engine and says what that took, for comparison."""
    cold = Series()
    sides = (Side("in process", engine), Side("through the broker", broker))
    for side in sides:  # warm-up
        await grants(engine, side.resources, 16, rounds=2)
    for _ in range(REPEATS):
        cold.add([await start() for _ in range(STARTS)])
        for side in sides:
            for count in WAITERS:
                side.grants[count].add(await grants(engine, side.resources, count, ROUNDS[count]))
        for side in sides:
            for count in WAITERS:
                side.handovers[count].add(await handovers(engine, side.resources, count))
    return _section(sides, cold)


async def grants(engine: ResourceEngine, resources: Resources, waiters: int, rounds: int) -> list[float]:
    """Latencies of the acquires that found a free member, of ``waiters`` begun at once."""
    samples: list[float] = []
    for _ in range(rounds):
        free = await _all_free(engine)
        tasks = [asyncio.create_task(_acquire(resources, number)) for number in range(waiters)]
        try:
            async with asyncio.timeout(WAIT_S):
                while sum(task.done() for task in tasks) < min(free, waiters):
                    await asyncio.wait(
                        [task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED
                    )
            samples += [task.result()[1] for task in tasks if task.done()]
        finally:
            await _give_back(tasks)
    return samples


async def handovers(engine: ResourceEngine, resources: Resources, queued: int) -> list[float]:
    """Seconds from the call of a release to the next waiter's grant, with ``queued`` waiters in line."""
    free = await _all_free(engine)
    tasks = [asyncio.create_task(_acquire(resources, number)) for number in range(free)]
    samples: list[float] = []
    try:
        async with asyncio.timeout(WAIT_S):
            held = deque(lease for lease, _, _ in await asyncio.gather(*tasks))
            for _ in range(HANDOVERS):
                while sum(not task.done() for task in tasks) < queued:
                    tasks.append(asyncio.create_task(_acquire(resources, len(tasks))))
                waiting = [task for task in tasks if not task.done()]
                await _until(lambda: engine.pool_status()[POOL].queued == queued)
                began = time.perf_counter()
                await held.popleft().release()
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                lease, _, granted = done.pop().result()
                held.append(lease)
                samples.append(granted - began)
    finally:
        await _give_back(tasks)
    return samples


async def _acquire(resources: Resources, number: int) -> tuple[Lease, float, float]:
    """A lease, how long it took, and when it came."""
    began = time.perf_counter()
    lease = await resources.acquire(POOL, f"bench-{number}", deadline=WAIT_S)
    now = time.perf_counter()
    return lease, now - began, now


async def _all_free(engine: ResourceEngine) -> int:
    """Wait until every member is free, and say how many there are."""
    most = engine.pool_status()[POOL].max
    await _until(lambda: engine.pool_status()[POOL].ready == most)
    return most


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 -- between measurements, of an engine that tells nobody
            await asyncio.sleep(0.002)


async def _give_back(tasks: Sequence["asyncio.Task[tuple[Lease, float, float]]"]) -> None:
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=WAIT_S)
    for task in tasks:
        if not task.cancelled() and task.exception() is None and not task.result()[0].lost:
            await task.result()[0].release()


def _section(sides: Sequence[Side], cold: Series) -> Section:
    inside, broker = sides
    ratios = [
        Ratio("start of a sandbox", "warm acquire in process, 1 waiter", ratio(cold, inside.grants[1])),
        Ratio(
            "start of a sandbox", "warm acquire through the broker, 1 waiter", ratio(cold, broker.grants[1])
        ),
        Ratio("hand-over in process, 1 waiter", "start of a sandbox", ratio(inside.handovers[1], cold)),
    ]
    for count in WAITERS:
        what = f"{count} waiter{'s' if count > 1 else ''}"
        ratios += [
            Ratio(
                f"warm acquire through the broker, {what}",
                "the same in process",
                ratio(broker.grants[count], inside.grants[count]),
            ),
            Ratio(
                f"hand-over through the broker, {what}",
                "the same in process",
                ratio(broker.handovers[count], inside.handovers[count]),
            ),
        ]
    ratios.append(
        Ratio(
            "hand-over in process, 64 waiters in line",
            "hand-over in process, 1 waiter in line",
            ratio(inside.handovers[64], inside.handovers[1]),
        )
    )
    return Section("Warm acquire", _TEXT, ratios, [_table("Warm acquire", sides), _handover_table(sides)])


_TEXT = (
    "A real engine with a pool of 16 bubblewrap sandboxes, all warm. *Warm acquire*: from the call to the "
    "lease, for waiters that begin at once and find a member free (of 64 waiters the first 16 do; the others "
    "are not counted here). *Hand-over*: all 16 are held; from the call of one release to the grant of the "
    "next in line, which contains the verified reset of the sandbox between them. *Start*: of one sandbox, "
    "without the engine, until its daemon answers."
)


def _table(title: str, sides: Sequence[Side]) -> Table:
    rows = [[side.name, str(count), *percentiles(side.grants[count])] for count in WAITERS for side in sides]
    return Table(
        title,
        "Milliseconds from the call to the lease, while members are free.",
        ["", "waiters at once", "p50 ms", "p99 ms", "samples"],
        rows,
    )


def _handover_table(sides: Sequence[Side]) -> Table:
    rows = [
        [side.name, str(count), *percentiles(side.handovers[count])] for count in WAITERS for side in sides
    ]
    return Table(
        "Hand-over",
        "Milliseconds from the call of a release to the next waiter's lease, one at a time.",
        ["", "waiters in line", "p50 ms", "p99 ms", "samples"],
        rows,
    )
