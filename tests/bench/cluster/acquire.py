"""Acquires through the HTTP client at a broker of its own process, over a pool of fake pods.

*Open loop*: arrivals are a Poisson process, whether or not the earlier ones were served; a wait counts from
the moment at which the arrival was due, so that an asker that is late hides nothing.

Guarantees:
1. A wait that ended without a lease is no sample: it is counted as failed, and a rate at which one fails is
   not held.
2. Each step begins with all members free.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.kube import Kube
from agentfly.resources.lease import Request
from tests.bench.cluster import world
from tests.bench.cluster.processes import Broker, broker, daemons
from tests.bench.report import Ratio, Section, Table, milliseconds
from tests.bench.stats import Series, percentile, ratio
from tests.cluster.cluster import Cluster

logger = logging.getLogger("tests.bench")

POOL = "shell"
MEMBERS = 300
SUSTAINED = 45.0  # arrivals per second
SUSTAINED_S = 60.0
HOLD_S = 0.5  # mean of what a holder does, exponential
ONES = 100  # acquires one after another
BURSTS = 3
GROUP = 100
GROUPS = 5
RAMP = (60, 80, 100, 120, 150, 180, 220, 270, 330, 400, 500, 600, 800)  # arrivals per second
RAMP_S = 5.0
RAMP_HOLD_S = 0.2
TOO_LONG_S = 0.5
WAIT_S = 30.0
AGENT = "agentfly-broker/"


@dataclass(frozen=True)
class Step:
    """One open loop: waits in seconds, how many got nothing, and the broker's CPU for all of it."""

    rate: float
    waits: list[float]
    failed: int
    broker_cpu_s: float

    @property
    def holds(self) -> bool:
        """Whether the rate is one that the broker keeps up with."""
        return not self.failed and percentile(self.waits, 99) <= TOO_LONG_S


@dataclass
class Found:
    """What was measured; seconds. ``writes`` are the broker's to the API server, by what was done "
    "meanwhile."""

    sustained: Step
    warm_share: float
    floor: Series = field(default_factory=Series)
    ones: Series = field(default_factory=Series)
    bursts: Series = field(default_factory=Series)
    groups: Series = field(default_factory=Series)
    singles: Series = field(default_factory=Series)
    ramp: list[Step] = field(default_factory=list)
    writes: Counter[str] = field(default_factory=Counter)
    acquires: int = 0


async def measure(cluster: Cluster, folder: Path, kube: Kube) -> Found:
    """All of it, on a pool of its own."""
    space = await world.namespace(cluster, kube, "acquires")
    await world.apply_pool(kube, space, POOL, min=MEMBERS, max=MEMBERS)
    async with daemons(cluster.kubeconfig, space, folder), broker(cluster.kubeconfig, space, folder) as at:
        await at.holds(POOL, MEMBERS)
        async with at.client("bench") as client:
            with cluster.audit() as audit:
                found = await _measure(at, client)
        found.writes = Counter(
            {f"{verb} {what}": count for (verb, what), count in audit.writes(agent=AGENT).items()}
        )
        status = await at.pool(POOL)
        assert status is not None
        found.acquires = status.acquires
    return found


async def _measure(at: Broker, client: BrokerClient) -> Found:
    await one_by_one(client, 20)  # warm-up
    ones, floor = Series(), Series()
    for _ in range(5):
        floor.add(await round_trips(at, ONES // 5))
        ones.add(await one_by_one(client, ONES // 5))
    before = await at.pool(POOL)
    logger.info("%s/s for %.0f s", f"{SUSTAINED:g}", SUSTAINED_S)
    sustained = await open_loop(at, client, SUSTAINED, SUSTAINED_S, HOLD_S)
    logger.info("p50 %s ms, p99 %s ms", *(milliseconds(percentile(sustained.waits, p)) for p in (50, 99)))
    after = await at.pool(POOL)
    assert before is not None
    assert after is not None
    warm = (after.acquires_warm - before.acquires_warm) / (after.acquires - before.acquires)
    found = Found(sustained, warm, floor, ones)
    logger.info("bursts and groups")
    for _ in range(BURSTS):
        await at.holds(POOL, MEMBERS)
        found.bursts.add(await at_once(client, MEMBERS))
    for _ in range(GROUPS):
        await at.holds(POOL, MEMBERS)
        found.groups.add([await group(client, GROUP)])
        await at.holds(POOL, MEMBERS)
        found.singles.add([max(await at_once(client, GROUP))])
    for rate in RAMP:
        await at.holds(POOL, MEMBERS)
        found.ramp.append(await open_loop(at, client, rate, RAMP_S, RAMP_HOLD_S))
        logger.info("%d/s: p99 %s ms", rate, milliseconds(percentile(found.ramp[-1].waits, 99)))
        if not found.ramp[-1].holds:
            break
    await at.holds(POOL, MEMBERS)
    return found


async def round_trips(at: Broker, count: int) -> list[float]:
    """Seconds of a request that does nothing, on a kept connection."""
    samples = []
    async with aiohttp.ClientSession() as session:
        for _ in range(count + 1):
            began = time.perf_counter()
            async with session.get(at.address + wire.HEALTH) as answer:
                await answer.read()
            samples.append(time.perf_counter() - began)
    return samples[1:]


async def one_by_one(client: BrokerClient, count: int) -> list[float]:
    """Seconds of acquires of which each begins when the last is released."""
    samples = []
    for number in range(count):
        began = time.perf_counter()
        lease = await client.acquire(POOL, f"one-{number}", deadline=WAIT_S)
        samples.append(time.perf_counter() - began)
        await lease.release()
    return samples


async def at_once(client: BrokerClient, count: int) -> list[float]:
    """Seconds from now to the lease of each of so many acquires."""
    began = time.perf_counter()

    async def one(number: int) -> float:
        lease = await client.acquire(POOL, f"burst-{number}", deadline=WAIT_S)
        took = time.perf_counter() - began
        await everybody.wait()  # a member that came back early would be warm for another
        await lease.release()
        return took

    everybody = asyncio.Barrier(count)
    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def group(client: BrokerClient, count: int) -> float:
    """Seconds of one acquire of so many members."""
    requests = [Request(POOL, key=f"seat-{number}") for number in range(count)]
    began = time.perf_counter()
    leases = await client.acquire_many(requests, "group", deadline=WAIT_S)
    took = time.perf_counter() - began
    await asyncio.gather(*(lease.release() for lease in leases))
    return took


async def open_loop(at: Broker, client: BrokerClient, rate: float, seconds: float, hold_s: float) -> Step:
    """Acquires at a rate."""
    rng = random.Random(f"{rate} {seconds}")
    waits: list[float] = []
    failed = 0

    async def arrive(number: int, due: float) -> None:
        nonlocal failed
        try:
            lease = await client.acquire(POOL, f"open-{rate}-{number}", deadline=WAIT_S)
        except AgentflyError:
            failed += 1
            return
        waits.append(time.perf_counter() - due)
        await asyncio.sleep(rng.expovariate(1 / hold_s))
        await lease.release()

    cpu = at.cpu_s()
    await arrivals(arrive, rate, seconds, rng)
    return Step(rate, waits, failed, at.cpu_s() - cpu)


async def arrivals(
    arrive: Callable[[int, float], Coroutine[None, None, None]],
    rate: float,
    seconds: float,
    rng: random.Random,
) -> None:
    """Calls ``arrive`` with a number and the moment it was due; returns when all calls have."""
    due = time.perf_counter()
    end, number = due + seconds, 0
    async with asyncio.timeout(seconds + 4 * WAIT_S), asyncio.TaskGroup() as tasks:
        while due < end:
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(arrive(number, due))
            number += 1
            due += rng.expovariate(rate)


def ceiling(ramp: Sequence[Step]) -> Step | None:
    """The highest rate that is held, of those before the first that is not."""
    held = None
    for step in ramp:
        if not step.holds:
            break
        held = step
    return held


PUBLISHED = (
    "Published bars: of agent-sandbox (sustained 45/s: #1251; burst: #1240; ceiling: #1275) and of "
    "OpenSandbox (batch: its README), which were measured on other and larger hardware, on real pods, and "
    "with an acquire that ends at a bound pod. They say what users of those see, not how the systems "
    "compare on one machine."
)


def section(found: Found) -> Section:
    """The page's part."""
    return Section("Acquires at a broker", _TEXT, _ratios(found), [_waits(found), _ramp(found)])


def _ratios(found: Found) -> list[Ratio]:
    return [
        Ratio(
            "acquire, one by one", "a request to the broker that does nothing", ratio(found.ones, found.floor)
        ),
        Ratio(
            f"{GROUP} single acquires at once, the last",
            f"one acquire of {GROUP}",
            ratio(found.singles, found.groups),
        ),
    ]


def _waits(found: Found) -> Table:
    sustained = found.sustained.waits
    bursts = [sample for repeat in found.bursts.repeats for sample in repeat]
    rows = [
        _row("one by one", [s for repeat in found.ones.repeats for s in repeat], ""),
        _row(f"{SUSTAINED:g}/s for {SUSTAINED_S:.0f} s", sustained, "p50 92, p99 376"),
        _row(f"{MEMBERS} at once", bursts, "p90 1740"),
        _row(f"one acquire of {GROUP}", [s for repeat in found.groups.repeats for s in repeat], "920"),
    ]
    text = (
        f"Milliseconds to the lease. Of the acquires at {SUSTAINED:g}/s {found.sustained.failed} failed and "
        f"{100 * found.warm_share:.1f} % found a member free at once. During all of this and the ramp below, "
        f"{found.acquires} acquires, releases and resets, the broker wrote to the API server "
        f"{found.writes.total()} times, counted by its audit log. {PUBLISHED}"
    )
    columns = ["", "p50 ms", "p90 ms", "p99 ms", "max ms", "samples", "published ms"]
    return Table("Waits for a warm member", text, columns, rows)


def _row(name: str, samples: Sequence[float], published: str) -> list[str]:
    cells = [milliseconds(percentile(samples, percent)) for percent in (50, 90, 99, 100)]
    return [name, *cells, str(len(samples)), published]


def _ramp(found: Found) -> Table:
    held = ceiling(found.ramp)
    said = "none of these rates is held" if held is None else f"{held.rate:g} a second"
    text = (
        f"Open loops of {RAMP_S:.0f} s at a growing rate, until the 99th percentile exceeds "
        f"{1000 * TOO_LONG_S:.0f} ms. The ceiling: {said}; published: 145 to 151. Client, daemons and API "
        "server share the cores with the broker, which is one process and can use one. *CPU each*: of the "
        "broker, for an acquire, its release and the reset."
    )
    rows = [
        [
            f"{step.rate:g}",
            *(milliseconds(percentile(step.waits, percent)) for percent in (50, 99)),
            str(step.failed),
            milliseconds(step.broker_cpu_s / len(step.waits)),
            "yes" if step.holds else "no",
        ]
        for step in found.ramp
    ]
    columns = ["acquires /s", "p50 ms", "p99 ms", "failed", "broker's CPU ms each", "held"]
    return Table("The ceiling", text, columns, rows)


_TEXT = (
    f"A real API server, a pool of {MEMBERS} pods that only run as far as it shows, and the broker that is "
    "shipped, as a process of its own, asked over HTTP by one client. Daemons of the pods answer at once. "
    "An acquire contains a lease at the member's daemon; each release is followed by a reset."
)
