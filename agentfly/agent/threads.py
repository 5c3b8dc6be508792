"""Run a plain function without blocking the event loop.

Guarantees:
1. The loop runs on while the function does, however many functions are stuck.
2. A cancelled or timed-out caller goes on at once; the thread ends by itself and its result is dropped.
3. A stuck function does not keep the process from exiting.

``asyncio.to_thread`` gives neither 1 nor 3: its pool has a few threads, and the loop joins them at exit.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """The function's result or exception, from a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(act: Callable[[], None]) -> None:
        if not future.done():
            act()

    def post(act: Callable[[], None]) -> None:
        # A closed loop means that nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, act)

    def work() -> None:
        try:
            result = context.run(function)
        except StopIteration as stop:
            # A future refuses StopIteration, as a coroutine would.
            refused = RuntimeError(f"the function raised StopIteration({stop.value!r})")
            post(lambda: future.set_exception(refused))
        except BaseException as error:
            raised = error
            post(lambda: future.set_exception(raised))
        else:
            post(lambda: future.set_result(result))

    threading.Thread(target=work, name="agentfly-call", daemon=True).start()
    return await future
