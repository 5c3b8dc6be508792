"""An event loop whose clock moves only while everybody waits: hours of waiting take the time of the work
alone.

Guarantees:
1. Timers fire in the order of their times, and the clock then shows exactly that time: the same program takes
   the same time in every run, on whatever machine.
2. Work takes no time on this clock. What waits for something outside of the process is waited for, and takes
   none either.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Does not wait where nothing but time is waited for, and says how long that would have been."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        events = super().select(0)
        if not events:
            self.skipped += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use with `run`."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds that were waited since the loop was made."""
        return self._skipping.skipped


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, on a loop of this kind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
