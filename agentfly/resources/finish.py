"""Clean-up that a cancellation of the caller does not cut short.

Guarantees:
1. The work goes on to its end however often the caller is cancelled; then the cancellation is passed on.
2. An error of work whose caller was cancelled is logged: the caller sees the cancellation.

Not here: deadlines. The work bounds itself.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None or task.cancelled():
        return task.result()
    if (failure := task.exception()) is not None:
        logger.error("clean-up of a cancelled caller failed: %s", str(failure) or type(failure).__name__)
    raise cancelled
