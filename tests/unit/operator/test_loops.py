"""Loops: woken, coalesced, tried again, ended. What must happen is waited for; what must not has a time."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agentfly_operator.cluster import loops as module
from agentfly_operator.cluster.loops import Loops
from agentfly_operator.cluster.metrics import Metrics

Pass = Callable[[str], Awaitable[float | None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COALESCE_S", 0.01)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.02)


class World:
    """Counts passes and does in each what it is told to.

    Attributes:
        gate: what a pass waits for.
    """

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()
        self.times: list[float] = []
        self.running = 0
        self.most = 0
        self.after: float | None = 60.0
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self, key: str) -> float | None:
        self.passes[key] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            if self.error is not None and key == "bad":
                self.times.append(asyncio.get_running_loop().time())
                raise self.error
            return self.after
        finally:
            self.running -= 1


@pytest.fixture
async def made() -> AsyncIterator[tuple[World, Loops[str], Metrics]]:
    world, metrics = World(), Metrics()
    loops = Loops("Thing", world.run, metrics)
    yield world, loops, metrics
    await loops.close()
    assert world.running == 0


async def until(holds: Callable[[], bool]) -> None:
    end = asyncio.get_running_loop().time() + 20
    while not holds():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.002)


async def settle() -> None:
    """What should not happen has the time to."""
    await asyncio.sleep(0.05)


# 1, 2. wakes


async def test_wakes_that_come_together_lead_to_one_pass(made: tuple[World, Loops[str], Metrics]) -> None:
    world, loops, _ = made
    for _ in range(50):
        loops.wake("a")
    await until(lambda: world.passes["a"] == 1)
    await settle()
    assert world.passes["a"] == 1
    for _ in range(50):
        loops.wake("a")
    await until(lambda: world.passes["a"] == 2)
    await settle()
    assert world.passes["a"] == 2


async def test_a_wake_during_a_pass_leads_to_another(made: tuple[World, Loops[str], Metrics]) -> None:
    world, loops, _ = made
    world.gate.clear()
    loops.wake("a")
    await until(lambda: world.running == 1)
    loops.wake("a")
    await settle()
    assert world.passes["a"] == 1
    world.gate.set()
    await until(lambda: world.passes["a"] == 2)
    await settle()
    assert (world.passes["a"], world.most) == (2, 1)


async def test_time_leads_to_a_pass_too(made: tuple[World, Loops[str], Metrics]) -> None:
    world, loops, _ = made
    world.after = 0.01
    loops.wake("a")
    await until(lambda: world.passes["a"] >= 3)


# 3. errors


async def test_a_pass_that_fails_is_tried_again_ever_more_slowly_and_costs_no_other(
    made: tuple[World, Loops[str], Metrics],
) -> None:
    world, loops, metrics = made
    world.error = ValueError("planted")
    loops.wake("good")

    def failed() -> float | None:
        named = {"kind": "Thing", "result": "error"}
        return metrics.registry.get_sample_value("agentfly_operator_reconcile_total", named)

    def five() -> bool:
        loops.wake("bad")  # again and again: that does not shorten a pause
        return len(world.times) >= 5

    await until(five)
    pauses = [after - before for before, after in itertools.pairwise(world.times)]
    assert all(pause >= 0.8 * 0.02 * 2**number for number, pause in enumerate(pauses))
    assert world.passes["good"] == 1
    await until(lambda: failed() == len(world.times))
    world.error = None
    before = world.passes["bad"]
    await until(lambda: world.passes["bad"] > before)
    assert "bad" in loops


# 4. deadline


async def test_a_pass_that_hangs_is_ended(
    made: tuple[World, Loops[str], Metrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PASS_S", 0.02)
    world, loops, _ = made
    world.gate.clear()
    loops.wake("a")
    await until(lambda: world.passes["a"] >= 2)
    assert world.most == 1


# 5. the end of an object


async def test_a_loop_ends_with_its_object_and_begins_again(made: tuple[World, Loops[str], Metrics]) -> None:
    world, loops, metrics = made
    world.after = None
    loops.wake("a")
    await until(lambda: loops.keys == [])
    assert metrics.registry.get_sample_value("agentfly_operator_objects", {"kind": "Thing"}) == 0
    world.after = 60.0
    loops.wake("a")
    await until(lambda: world.passes["a"] == 2)
    assert loops.keys == ["a"]


async def test_an_object_that_comes_back_during_its_last_pass_is_seen(
    made: tuple[World, Loops[str], Metrics],
) -> None:
    world, loops, _ = made
    world.after = None
    world.gate.clear()
    loops.wake("a")
    await until(lambda: world.running == 1)
    loops.wake("a")
    world.gate.set()
    await until(lambda: world.passes["a"] == 2)
    await until(lambda: loops.keys == [])
    assert world.passes["a"] == 2


async def test_there_is_a_bound_on_passes_at_once(made: tuple[World, Loops[str], Metrics]) -> None:
    world, loops, _ = made
    world.gate.clear()
    for number in range(100):
        loops.wake(str(number))
    await until(lambda: world.running == module.AT_ONCE)
    await settle()
    world.gate.set()
    await until(lambda: len(world.passes) == 100)
    assert world.most == module.AT_ONCE


async def test_after_its_close_nothing_is_woken() -> None:
    world = World()
    loops = Loops("Thing", world.run, Metrics())
    loops.wake("a")
    await loops.close()
    loops.wake("b")
    await settle()
    assert world.passes["b"] == 0
