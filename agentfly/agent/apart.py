"""Run a user's coroutine so that it can neither hold up its caller nor end it.

Guarantees:
1. A caller that is cancelled or timed out goes on within ``GRACE_S``, also when the coroutine swallows its
   cancellation; a coroutine that does is closed and never resumed again. (Of one that refuses even that,
   Python tells on standard error.)
2. Until then it may clean up: its ``finally`` blocks run, and may await.
3. A cancellation of the coroutine's own (it awaited what somebody else had cancelled) is an ordinary
   exception, not the caller's cancellation. ``SystemExit`` reaches the caller, and not the event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""Closing a connection takes milliseconds; what takes longer than this refuses to end."""


async def apart(function: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
    """The coroutine's result or exception, from a task of its own. ``name`` is for the log."""
    driven = _Driven(function)
    task = asyncio.create_task(driven.run(), name=f"agentfly-call {name}")
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
        raise
    finally:
        if not task.done():
            logger.warning("%s: swallows its cancellation and is closed", name)
            driven.closing = True
            task.cancel()
    return task.result()()


class _Driven(Generic[T]):
    """Stands between a task and a coroutine, so that the task can end without it."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        self.closing = False

    async def run(self) -> Callable[[], T]:
        """What returns the coroutine's result or raises its exception, out of the loop's sight."""
        try:
            result = await self
        except asyncio.CancelledError as cause:
            return _raising(RuntimeError("it waited for something that was cancelled"), cause)
        except (Exception, SystemExit) as error:
            return _raising(error, error.__cause__)
        return lambda: result

    def __await__(self) -> Generator[Any, Any, T]:
        # What `yield from` does, with a way out that the coroutine cannot refuse.
        coroutine = self._function()
        resume: Callable[[Any], Any] = coroutine.send
        given: Any = None
        while True:
            try:
                waits_for = resume(given)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                given = yield waits_for
                resume = coroutine.send
            except BaseException as error:
                if self.closing:
                    break
                given, resume = error, coroutine.throw
        with contextlib.suppress(RuntimeError):  # it refuses even that
            coroutine.close()
        # The last references: Python finalises the coroutine here, where there is a loop. Elsewhere each of
        # its awaits would fail at once, and one that swallows every exception would go round for ever.
        del resume, coroutine
        raise asyncio.CancelledError


def _raising(error: BaseException, cause: BaseException | None) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error from cause

    return fail
