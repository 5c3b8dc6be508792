"""User's coroutines beside their caller."""

import asyncio
import contextlib
import contextvars
import sys
import time
from functools import partial
from typing import Any

import pytest

from agentfly.agent import apart as module
from agentfly.agent.apart import apart

name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)


async def give(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def test_result_comes_back() -> None:
    assert await apart(partial(give, 42), "f") == 42


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(3), asyncio.InvalidStateError()])
async def test_exception_comes_back_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        await apart(partial(fail, error), "f")
    assert caught.value is error


async def test_cause_of_an_exception_stays() -> None:
    async def explain() -> None:
        raise ValueError("outer") from KeyError("inner")

    with pytest.raises(ValueError, match="outer") as caught:
        await apart(explain, "f")
    assert isinstance(caught.value.__cause__, KeyError)


async def test_context_variables_are_those_of_the_caller() -> None:
    async def read() -> str:
        return name.get()

    name.set("caller")
    assert await apart(read, "f") == "caller"


async def test_exceptions_of_what_it_awaits_reach_the_coroutine() -> None:
    async def mend() -> str:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            return "mended"
        return "unreachable"

    assert await apart(mend, "f") == "mended"


# 1. the caller goes on


async def test_coroutine_that_swallows_everything_is_never_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    resumed, told = 0, list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    async def cling() -> None:
        nonlocal resumed
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.Event().wait()
            resumed += 1

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await apart(cling, "f")
    assert time.monotonic() - began < 2
    await asyncio.sleep(0.02)
    after = resumed
    await asyncio.sleep(0.05)
    assert resumed == after <= 3
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [str(each.exc_value) for each in told] == ["coroutine ignored GeneratorExit"]


async def test_coroutine_that_swallows_only_cancellation_is_closed_and_cleans_up() -> None:
    closed = False

    async def cling() -> None:
        nonlocal closed
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            closed = True

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(apart(cling, "f"), 0.02)
    await asyncio.sleep(0.02)
    assert closed


async def test_caller_that_is_cancelled_twice_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 60)

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    task = asyncio.create_task(apart(linger, "f"))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task}, timeout=2)
    assert task.cancelled()


# 2. it may clean up


async def test_clean_up_may_await() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(apart(work, "f"), 0.02)
    assert cleaned


async def test_result_that_comes_after_the_cancellation_is_dropped() -> None:
    async def answer() -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 42

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(apart(answer, "f"), 0.02)


# 3. its own cancellation is not the caller's


async def test_waiting_for_a_cancelled_task_is_an_exception() -> None:
    async def wait() -> None:
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        await other

    with pytest.raises(RuntimeError, match="it waited for something that was cancelled") as caught:
        await apart(wait, "f")
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_group_does_not_lose_a_task_that_cancels_itself() -> None:
    async def outcome() -> str:
        try:
            await apart(partial(fail, asyncio.CancelledError()), "f")
        except RuntimeError as error:
            return str(error)
        return "unreachable"

    async with asyncio.TaskGroup() as group:
        good, bad = group.create_task(apart(partial(give, 1), "f")), group.create_task(outcome())
    assert (good.result(), bad.result()) == (1, "it waited for something that was cancelled")
