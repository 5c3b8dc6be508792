"""The barrier of the lockstep loop; no test waits for time."""

import asyncio

from tests.bench.barrier import TurnBarrier


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_passes_before_all_have_arrived() -> None:
    barrier = TurnBarrier(2)
    first = asyncio.create_task(barrier.arrive())
    await settle()
    assert not first.done()
    await barrier.arrive()
    await settle()
    assert first.done()


async def test_it_closes_again_behind_those_who_passed() -> None:
    barrier = TurnBarrier(2)
    await asyncio.gather(barrier.arrive(), barrier.arrive())
    again = asyncio.create_task(barrier.arrive())
    await settle()
    assert not again.done()
    await barrier.arrive()
    await again


async def test_who_left_is_not_waited_for() -> None:
    barrier = TurnBarrier(3)
    waiting = [asyncio.create_task(barrier.arrive()) for _ in range(2)]
    await settle()
    assert not any(task.done() for task in waiting)
    barrier.leave()
    await asyncio.gather(*waiting)


async def test_who_is_cancelled_while_waiting_does_not_count_as_arrived() -> None:
    barrier = TurnBarrier(3)
    cancelled = asyncio.create_task(barrier.arrive())
    await settle()
    cancelled.cancel()
    await settle()
    barrier.leave()  # two are left, and neither has arrived
    one = asyncio.create_task(barrier.arrive())
    await settle()
    assert not one.done()
    await barrier.arrive()
    await one


async def test_the_last_one_to_leave_disturbs_nobody() -> None:
    barrier = TurnBarrier(1)
    await barrier.arrive()
    barrier.leave()
