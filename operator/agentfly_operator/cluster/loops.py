"""One loop for each object: it waits to be woken, looks, acts, and waits again.

Guarantees:
1. A wake is never lost: one that comes during a pass leads to another pass.
2. Wakes that come close together lead to one pass; of one object there is one pass at a time.
3. A pass that fails is tried again after a pause that doubles up to a minute, and costs no other object
   anything. A wake does not shorten that pause: what fails because of load must not add to it.
4. A pass has a deadline.
5. A loop ends when its pass says that the object is gone, and begins again with the next wake.

Not here: what a pass does.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from agentfly.errors import AgentflyError
from agentfly_operator.cluster.metrics import Metrics

logger = logging.getLogger(__name__)

COALESCE_S = 0.15
PASS_S = 60.0
AT_ONCE = 16  # passes of all objects together: a start with thousands must not flood the API server
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0

K = TypeVar("K")


class Loops(Generic[K]):
    """The loops of one kind.

    Args:
        run: one pass over the object of this key; seconds until the next one at the latest, or None if the
            object is gone.
    """

    def __init__(self, kind: str, run: Callable[[K], Awaitable[float | None]], metrics: Metrics) -> None:
        self._kind = kind
        self._run = run
        self._metrics = metrics
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._bells: dict[K, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def wake(self, key: K) -> None:
        """Look at this object soon."""
        if self._closed:
            return
        bell = self._bells.get(key)
        if bell is None:
            bell = self._bells[key] = asyncio.Event()
            task = asyncio.create_task(self._loop(key, bell), name=f"{self._kind} {key}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._count()
        bell.set()

    @property
    def keys(self) -> list[K]:
        """The objects that have a loop."""
        return list(self._bells)

    def __contains__(self, key: object) -> bool:
        return key in self._bells

    async def close(self) -> None:
        """End all loops, also in the middle of a pass: the next operator looks anew."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=PASS_S)

    async def _loop(self, key: K, bell: asyncio.Event) -> None:
        failures = 0
        try:
            while True:
                bell.clear()
                passed = await self._pass(key, failures)
                if passed is None:
                    if not bell.is_set():
                        return
                    continue
                failed, pause = passed
                failures = failures + 1 if failed else 0
                if failed:
                    await asyncio.sleep(pause)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await bell.wait()
                    await asyncio.sleep(COALESCE_S)
        finally:
            del self._bells[key]
            self._count()

    async def _pass(self, key: K, failures: int) -> tuple[bool, float] | None:
        """Whether it failed, and how long to wait; None if the object is gone."""
        result = "ok"
        async with self._slots:
            try:
                with self._metrics.reconcile_seconds.labels(self._kind).time():
                    async with asyncio.timeout(PASS_S):
                        after = await self._run(key)
                return None if after is None else (False, after)
            except AgentflyError as error:
                result = "error"
                logger.warning("%s %s: %s", self._kind, key, error.render())
            except Exception:
                result = "error"
                logger.exception("%s %s: a pass failed", self._kind, key)
            finally:
                self._metrics.reconciles.labels(self._kind, result).inc()
        pause: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures)
        return True, pause * random.uniform(0.8, 1.2)

    def _count(self) -> None:
        self._metrics.objects.labels(self._kind).set(len(self._bells))
