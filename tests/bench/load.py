"""The engine under load: acquires that arrive whether or not the earlier ones were served, and its own cost.

*Open loop*: arrivals are a Poisson process at a fixed rate, so a slow answer does not slow the askers down,
and waits are counted in full. *Cycles*: acquire and release as fast as workers can, on members that cost
nothing, so that what remains is the engine.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import Resources
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.spec import ContainerSpec, PoolSpec, ResourceSpec
from tests.bench.report import Ratio, Section, Table, percentiles
from tests.bench.stats import Series, ratio

POOL = "shell"
RATE = 45.0  # arrivals per second
OPEN_S = 6.0  # for each repeat and side
HOLD_S = 0.05  # mean of what a holder does, exponential
REPEATS = 3
CYCLES_S = 1.5  # for each repeat and size
SIZES = ((16, 1), (16, 64), (1000, 64))  # members, workers
WAIT_S = 20.0


class Nothing:
    """A runner of members that cost nothing."""

    name = "bubblewrap"

    def check(self) -> str | None:
        """It works everywhere."""
        return None

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """A member that is only a name."""
        return Member(member_id, spec, 1, f"unix:///{member_id}")

    async def probe(self, member: Member) -> Vitals:
        """Always well."""
        return Vitals(alive=True)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """Nothing to do."""

    async def reset(self, member: Member) -> Member | None:
        """The same, one incarnation on."""
        return Member(member.id, member.spec, member.incarnation + 1, member.address)

    async def stop(self, member: Member) -> None:
        """Nothing to do."""


@dataclass
class Side:
    """One way to the engine, and the waits of its open loop."""

    name: str
    resources: Resources
    waits: Series = field(default_factory=Series)


async def measure(engine: ResourceEngine, broker: Resources) -> Section:
    """Open loops on both sides in turn, and cycles on engines of their own."""
    sides = (Side("in process", engine), Side("through the broker", broker))
    rates = {size: Series() for size in SIZES}
    for repeat in range(REPEATS):
        for side in sides:
            side.waits.add(await open_loop(side.resources, random.Random(repeat)))
        for members, workers in SIZES:
            rates[members, workers].add([await cycles(members, workers)])
    return _section(sides, rates)


async def open_loop(resources: Resources, rng: random.Random) -> list[float]:
    """Seconds from the call to the lease of every arrival."""
    waits: list[float] = []

    async def arrive(number: int) -> None:
        began = time.perf_counter()
        lease = await resources.acquire(POOL, f"open-{number}", deadline=WAIT_S)
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(rng.expovariate(1 / HOLD_S))
        await lease.release()

    end = time.perf_counter() + OPEN_S
    due = time.perf_counter()
    async with asyncio.timeout(OPEN_S + 2 * WAIT_S), asyncio.TaskGroup() as group:
        number = 0
        while due < end:
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(arrive(number))
            number += 1
            due += rng.expovariate(RATE)
    return waits


async def cycles(members: int, workers: int) -> float:
    """Acquires and releases per second of an engine whose members cost nothing."""
    pool = PoolSpec(name=POOL, resource=ContainerSpec(), min=members, max=members, lease_ttl_s=60)
    done = 0

    async def work(engine: ResourceEngine, number: int, end: float) -> None:
        nonlocal done
        while time.perf_counter() < end:
            lease = await engine.acquire(POOL, f"cycle-{number}", deadline=WAIT_S)
            await lease.release()
            done += 1

    async with ResourceEngine([Nothing()], [pool]) as engine:
        while engine.pool_status()[POOL].ready < members:  # noqa: ASYNC110 -- of an engine that tells nobody
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(work(engine, number, began + CYCLES_S))
        return done / (time.perf_counter() - began)


def _section(sides: tuple[Side, Side], rates: dict[tuple[int, int], Series]) -> Section:
    inside, broker = sides
    small, large = rates[16, 64], rates[1000, 64]
    ratios = [
        Ratio(
            "median wait of an open loop through the broker",
            "the same in process",
            ratio(broker.waits, inside.waits),
        ),
        Ratio("cycles per second, 1000 members", "the same with 16 members", ratio(large, small)),
    ]
    waits = Table(
        "Open loop",
        f"Milliseconds from the call to the lease; {RATE:g} acquires a second arrive at random, each holds "
        f"its sandbox for {1000 * HOLD_S:g} ms on average.",
        ["", "p50 ms", "p99 ms", "samples"],
        [[side.name, *percentiles(side.waits)] for side in sides],
    )
    rows = [
        [str(members), str(workers), f"{series.percentile(50):.0f}", str(len(series))]
        for (members, workers), series in rates.items()
    ]
    cost = Table(
        "Cycles of the engine",
        "Acquire and release per second, in process, with members that cost nothing; median of the repeats.",
        ["members", "workers", "cycles /s", "repeats"],
        rows,
    )
    text = (
        "*Open loop*: acquires arrive at random, at a fixed rate, whether or not the earlier ones were "
        "served, on the pool of 16 sandboxes. *Cycles*: workers that acquire and release without a pause, on "
        "members that cost nothing: what remains is the engine."
    )
    return Section("Under load", text, ratios, [waits, cost])
