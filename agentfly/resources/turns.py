"""When the pools of an engine decide: after news of them, and when they asked to be woken.

Guarantees:
1. A pool decides once in each turn of the event loop in which there was news of it, however much there was;
   a pool of which there was none is not asked.
2. It decides again at the time that it named, unless it did before.
3. News that one event loop left undecided is decided in the next loop that is used.
4. A decision that raises is told to ``failed``. Other pools decide all the same, this one at its next news.

Not here: what is decided (``pool``), and what is done about it (``engine``).
"""

import asyncio
from collections.abc import Callable

from agentfly.resources.actions import Action
from agentfly.resources.pool import Pool


class Turns:
    """The turns of one engine's pools. ``carry_out`` is given each action, in order."""

    def __init__(
        self, carry_out: Callable[[Pool, Action], None], failed: Callable[[Pool, Exception], None]
    ) -> None:
        self.number = 0  # of the turns that there were
        self._carry_out, self._failed = carry_out, failed
        self._stopped = False
        self._due: dict[Pool, None] = {}
        self._scheduled: asyncio.AbstractEventLoop | None = None
        self._timers: dict[Pool, tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle]] = {}

    def due(self, pool: Pool) -> None:
        """There is news of the pool: it decides before this turn of the loop is over."""
        loop = asyncio.get_running_loop()
        self._due[pool] = None
        if self._scheduled is not loop:
            self._scheduled = loop
            loop.call_soon(self._run)

    def now(self, pool: Pool) -> None:
        """Let the pool decide at once, for a caller who needs to know what follows."""
        self._due.pop(pool, None)
        self._decide(pool)

    def forget(self, pool: Pool) -> None:
        """A pool that was closed need not be woken."""
        self._due.pop(pool, None)
        if (timer := self._timers.pop(pool, None)) is not None:
            timer[1].cancel()

    def cancel(self) -> None:
        """Wake nobody any more."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def stop(self) -> None:
        """Decide nothing any more."""
        self._stopped = True
        self.cancel()

    def _run(self) -> None:
        self._scheduled = None
        self.number += 1
        due, self._due = self._due, {}
        for pool in due:
            self._decide(pool)

    def _decide(self, pool: Pool) -> None:
        if self._stopped:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            for action in pool.decide(now):
                self._carry_out(pool, action)
            wake = pool.wake_at(now)
        except Exception as error:
            self._failed(pool, error)
        else:
            if wake is not None:
                self._wake(pool, wake, loop)

    def _wake(self, pool: Pool, when: float, loop: asyncio.AbstractEventLoop) -> None:
        if (known := self._timers.get(pool)) is not None:
            if known[0] is loop and known[1].when() <= when:
                return  # woken too early it decides nothing, which costs less than a new timer at every turn
            known[1].cancel()
        self._timers[pool] = (loop, loop.call_at(when, self._woken, pool))

    def _woken(self, pool: Pool) -> None:
        self._timers.pop(pool, None)
        self.now(pool)
