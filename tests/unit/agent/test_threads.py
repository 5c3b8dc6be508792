"""Plain functions beside the event loop."""

import asyncio
import contextvars
import threading
import time

import pytest

from agentfly.agent.threads import in_thread

name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


async def test_result_comes_back() -> None:
    assert await in_thread(lambda: 42) == 42


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(3), KeyboardInterrupt()])
async def test_exception_comes_back(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        await in_thread(fail)


async def test_stop_iteration_is_told_as_an_error() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda: next(iter(())))


async def test_context_variables_are_those_of_the_caller() -> None:
    name.set("caller")
    assert await in_thread(name.get) == "caller"


# 1. the loop runs on, however many are stuck


async def test_many_stuck_functions_do_not_stop_another_one() -> None:
    release = threading.Event()
    stuck = [asyncio.create_task(in_thread(release.wait)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(in_thread(lambda: "free"), 5) == "free"
    release.set()
    assert all(await asyncio.gather(*stuck))


# 2. a caller that gives up goes on at once


async def test_late_result_of_an_abandoned_function_is_dropped() -> None:
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_thread(release.wait), 0.02)
    assert time.monotonic() - began < 2
    release.set()
    await asyncio.sleep(0.02)


# 3. the process may exit


def test_loop_ends_while_a_function_is_stuck() -> None:
    release = threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(release.wait), 0.02)

    asyncio.run(give_up())
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "agentfly-call"] == [True]
    release.set()
    for thread in threading.enumerate():
        if thread.name == "agentfly-call":
            thread.join(5)
