"""Section numbers are the guarantees of turns.py. A pool that counts its decisions; time is virtual."""

import asyncio

from agentfly.resources.actions import Action, Probe
from agentfly.resources.pool import Pool
from agentfly.resources.spec import ContainerSpec, PoolSpec
from agentfly.resources.turns import Turns
from tests.unit.resources.harness import VirtualLoop, run, virtual


class Counted(Pool):
    """``wake`` is when it wants to be asked again."""

    def __init__(self, name: str = "p") -> None:
        super().__init__(PoolSpec(name=name, resource=ContainerSpec()))
        self.decided: list[float] = []
        self.wake: float | None = None
        self.faults = 0

    def decide(self, now: float) -> list[Action]:
        self.decided.append(now)
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a defect")
        return [Probe(f"{self.spec.name}-{len(self.decided)}")]

    def wake_at(self, now: float) -> float | None:
        return self.wake if self.wake is not None and self.wake > now else None


def rig() -> tuple[Turns, list[str]]:
    done: list[str] = []

    def failed(pool: Pool, error: Exception) -> None:
        done.append(f"{pool.spec.name} failed: {error}")

    return Turns(lambda pool, action: done.append(f"{pool.spec.name}: {action}"), failed), done


# 1. Once in each turn of the loop.


@virtual
async def test_much_news_is_one_decision_of_the_pools_that_it_is_of():
    turns, done = rig()
    one, two, third = Counted("one"), Counted("two"), Counted("third")
    for _ in range(100):
        turns.due(one)
        turns.due(two)
    assert (one.decided, done) == ([], []), "nothing is decided before the caller lets go"
    await asyncio.sleep(0)
    assert [len(pool.decided) for pool in (one, two, third)] == [1, 1, 0]
    assert done == ["one: Probe(member='one-1')", "two: Probe(member='two-1')"]
    turns.due(one)
    await asyncio.sleep(0)
    assert (len(one.decided), turns.number) == (2, 2)


@virtual
async def test_decision_at_once_is_not_made_again():
    turns, _ = rig()
    pool = Counted()
    turns.due(pool)
    turns.now(pool)
    assert len(pool.decided) == 1
    await asyncio.sleep(1)
    assert len(pool.decided) == 1


# 2. Wake-ups.


@virtual
async def test_pool_decides_at_the_time_that_it_named():
    turns, _ = rig()
    pool = Counted()
    pool.wake = 5.0
    turns.due(pool)
    await asyncio.sleep(10)
    assert pool.decided == [0.0, 5.0]


@virtual
async def test_earlier_wish_counts_and_a_later_one_is_found_out_on_the_way():
    turns, _ = rig()
    pool = Counted()
    for wake in (5.0, 3.0, 8.0):
        pool.wake = wake
        turns.now(pool)
    await asyncio.sleep(20)
    assert pool.decided == [0.0, 0.0, 0.0, 3.0, 8.0]


@virtual
async def test_cancelled_turns_wake_nobody():
    turns, _ = rig()
    pool = Counted()
    pool.wake = 5.0
    turns.now(pool)
    turns.cancel()
    await asyncio.sleep(10)
    assert pool.decided == [0.0]


# 3. Another loop.


def test_what_one_loop_left_is_decided_in_the_next():
    turns, _ = rig()
    left, other = Counted("left"), Counted("other")

    def news_at_the_very_end() -> None:
        turns.due(left)
        first.stop()

    async def second() -> None:
        turns.due(other)
        await asyncio.sleep(0)

    first = VirtualLoop()
    first.call_soon(news_at_the_very_end)
    first.run_forever()
    first.close()
    assert left.decided == []
    run(second())
    assert (len(left.decided), len(other.decided)) == (1, 1)


def test_wish_of_an_earlier_loop_does_not_hide_one_of_this():
    turns, _ = rig()
    pool = Counted()
    pool.wake = 5.0

    async def once() -> None:
        turns.now(pool)

    async def again() -> None:
        turns.now(pool)
        await asyncio.sleep(10)

    run(once())
    run(again())
    assert pool.decided[-1] == 5.0


# 4. A decision that raises.


@virtual
async def test_decision_that_raises_is_told_and_keeps_no_other_pool_from_its_own():
    turns, done = rig()
    broken, well = Counted("broken"), Counted("well")
    broken.faults = 1
    turns.due(broken)
    turns.due(well)
    await asyncio.sleep(0)
    assert done == ["broken failed: a defect", "well: Probe(member='well-1')"]
    turns.due(broken)
    await asyncio.sleep(0)
    assert done[2:] == ["broken: Probe(member='broken-2')"], "it is asked again at the next news"
