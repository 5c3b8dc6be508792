"""Many rollouts that do nothing: on members that are reset, and on members that are started and deleted.

Both sides are the same pool behind the same engine and differ in one field: ``max_reuses=0`` retires every
member after its first lease.
"""

import asyncio
import time
from dataclasses import dataclass, field

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.runners.base import Runner
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.bench.report import Ratio, Section, Table
from tests.bench.stats import Series, ratio

WIDTH = 16  # members, and rollouts at a time
WAIT_S = 300.0


@dataclass(frozen=True)
class Kind:
    """One kind of sandbox, and how many rollouts each side plays in each repeat, ``width`` at a time."""

    name: str
    runner: Runner
    spec: ContainerSpec
    reset: int
    fresh: int
    repeats: int
    width: int = WIDTH


@dataclass
class Found:
    """Rollouts per second of both sides."""

    reset: Series = field(default_factory=Series)
    fresh: Series = field(default_factory=Series)


async def measure(kinds: list[Kind]) -> Section:
    """All kinds, both sides in turn."""
    found = {kind.name: Found() for kind in kinds}
    for kind in kinds:
        for _ in range(kind.repeats):
            found[kind.name].reset.add([await rate(kind, kind.reset, None)])
            found[kind.name].fresh.add([await rate(kind, kind.fresh, 0)])
    return _section(kinds, found)


async def rate(kind: Kind, rollouts: int, max_reuses: int | None) -> float:
    """Rollouts per second, each of which runs one command that does nothing."""
    width = kind.width
    pool = PoolSpec(
        name="noop", resource=kind.spec, min=width, max=width, max_reuses=max_reuses, lease_ttl_s=120
    )
    left = iter(range(rollouts))

    async def work(engine: ResourceEngine) -> None:
        for number in left:
            async with await engine.acquire("noop", f"noop-{number}", deadline=WAIT_S) as lease:
                await lease.sandbox.exec(["/bin/true"], timeout=60)

    async with ResourceEngine([kind.runner], [pool]) as engine:
        while engine.pool_status()["noop"].ready < width:  # noqa: ASYNC110 -- of an engine that tells nobody
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(work(engine))
        return rollouts / (time.perf_counter() - began)


def _section(kinds: list[Kind], found: dict[str, Found]) -> Section:
    ratios = [
        Ratio(
            f"no-op rollouts per second, {kind.name}, reset",
            "the same, started and deleted",
            ratio(found[kind.name].reset, found[kind.name].fresh),
        )
        for kind in kinds
    ]
    rows = [
        [
            kind.name,
            f"{found[kind.name].reset.percentile(50):.1f} ({kind.reset})",
            f"{found[kind.name].fresh.percentile(50):.1f} ({kind.fresh})",
            str(kind.repeats),
        ]
        for kind in kinds
    ]
    text = (
        f"Rollouts that run one command that does nothing, {WIDTH} at a time on {WIDTH} sandboxes: once each "
        "sandbox is reset and verified between two rollouts, once it is deleted and another one started. "
        "2,000 rollouts are 50 tasks of 40. Where a side is too slow for as many, it plays fewer, and rates "
        "are compared."
    )
    table = Table(
        "Reset against start and delete",
        "Rollouts per second, and how many were played in each repeat.",
        ["", "reset /s", "start and delete /s", "repeats"],
        rows,
    )
    return Section("Reset against start and delete", text, ratios, [table])
