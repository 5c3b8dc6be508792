"""The clock that moves only while everybody waits, and the three loops on it."""

import asyncio
import time

import pytest

from tests.bench import loops, virtual
from tests.bench.ahead import train
from tests.bench.loops import OURS, SLOW_S, Players, make_trace, play
from tests.bench.scripted import load

# The clock: 1. timers in order, at their times; 2. work takes none


def test_timers_fire_in_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        clock, seen = asyncio.get_running_loop().time, list[tuple[str, float]]()

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, clock()))

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("day", 86400.0), ("hour", 3600.0), ("second", 1.0)):
                group.create_task(wait(name, seconds))
        return seen

    assert virtual.run(main()) == [("second", 1.0), ("hour", 3600.0), ("day", 86400.0)]


def test_work_takes_no_time() -> None:
    async def main() -> float:
        time.sleep(0.01)  # noqa: ASYNC251 -- this is the work
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == 0.0


# The loops


def test_loop_takes_the_same_time_in_every_run() -> None:
    trace = make_trace(load(), "long", 24)
    assert play(trace, 8, Players.ours).ends == play(trace, 8, Players.ours).ends


def test_ours_is_at_least_twice_as_fast_as_lockstep_on_a_long_tail() -> None:
    trace = make_trace(load(), "long", 64)
    assert play(trace, 16, Players.ours).rate >= 2 * play(trace, 16, Players.lockstep).rate


def test_slow_call_delays_nobody_else() -> None:
    plain, slow = (make_trace(load(), "long", 32, slow=slow) for slow in (False, True))
    longest = max(play(plain, 8, Players.ours).ends.values())
    ours = play(slow, 8, Players.ours)
    assert ours.ends["0"] > SLOW_S
    # One sandbox of eight is with the slow one.
    assert ours.others < 8 / 7 * longest + 1
    assert play(slow, 8, Players.lockstep).others > SLOW_S


@pytest.mark.parametrize("loop", [Players.ours, Players.lockstep, Players.by_engine])
def test_every_loop_plays_the_same_turns(loop: object) -> None:
    trace = make_trace(load(), "recorded", 16)
    assert play(trace, 8, loop).turns == sum(len(load().turns[key]) for key in trace.order)


def test_section_compares_ours_with_both_and_each_with_itself() -> None:
    section = loops.measure(16, 8)
    assert [(ratio.measured.partition(",")[0], ratio.against) for ratio in section.ratios] == [
        ("throughput of our loop", "lockstep"),
        ("throughput of our loop", "a queue for each engine"),
        ("throughput of our loop", "lockstep"),
        ("throughput of our loop", "a queue for each engine"),
        *[("seconds until all other rollouts ended", "the same without that call")] * 3,
    ]
    assert [row[0].partition(",")[0] for row in section.tables[0].rows][:2] == [OURS, "lockstep"]


# Rollouts ahead of the updates


def test_rollouts_ahead_hide_the_updates_and_no_rollout_is_played_twice() -> None:
    trace = make_trace(load(), "long", 64)
    waiting, one, two = (train(trace, 4, ahead, 20.0, width=16) for ahead in (0, 1, 2))
    assert waiting.tokens == one.tokens == two.tokens > 0
    alone = train(trace, 4, 0, 0.0, width=16).played.seconds
    assert waiting.played.seconds == pytest.approx(alone + 4 * 20.0)
    # Of four steps' rollouts, which take less than the updates, nobody waits for any but the first's.
    assert two.played.seconds <= one.played.seconds < 4 * 20.0 + 0.4 * alone


def test_without_updates_rollouts_ahead_fill_the_ends_of_steps() -> None:
    trace = make_trace(load(), "long", 64)
    waiting, ahead = (train(trace, 4, steps, 0.0, width=16) for steps in (0, 1))
    assert ahead.played.seconds < waiting.played.seconds
