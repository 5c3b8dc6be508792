"""Times at which something has to be looked at, one for each key.

Guarantees:
1. ``due`` gives each key whose time has come, once; ``next`` the earliest time that is set.
2. Setting a time costs the logarithm of how many are set at most; putting one off, as heartbeats do with the
   end of a lease, costs next to nothing.

Not here: what the times mean (``pool_state``).
"""

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", int, str)

SPARE = 64  # entries of the heap that stand for nothing any more and are still cheaper kept than cleared


@dataclass(slots=True)
class Alarms(Generic[K]):
    """The times of any number of keys, in seconds."""

    _times: dict[K, float] = field(default_factory=dict)
    _heap: list[tuple[float, K]] = field(default_factory=list)
    _first: dict[K, float] = field(default_factory=dict)  # the earliest entry of each key in the heap

    def set(self, key: K, when: float | None) -> None:
        """The one time of this key; None for none."""
        if when is None:
            self._times.pop(key, None)
        else:
            self._times[key] = when
            if when < self._first.get(key, float("inf")):
                self._push(when, key)
        if len(self._heap) > 2 * len(self._times) + SPARE:
            self._heap = [(time, other) for other, time in self._times.items()]
            heapq.heapify(self._heap)
            self._first = dict(self._times)

    def due(self, now: float) -> list[K]:
        """The keys whose time has come; they have none from now on."""
        due: list[K] = []
        while (first := self.next()) is not None and first <= now:
            _, key = heapq.heappop(self._heap)
            del self._times[key], self._first[key]
            due.append(key)
        return due

    def next(self) -> float | None:
        """The earliest time."""
        while self._heap:
            when, key = self._heap[0]
            wanted = self._times.get(key)
            if wanted == when:
                return when
            heapq.heappop(self._heap)  # put off, put forward or cleared since it was set
            if self._first.get(key) == when:
                del self._first[key]
                if wanted is not None:
                    self._push(wanted, key)
        return None

    def _push(self, when: float, key: K) -> None:
        self._first[key] = when
        heapq.heappush(self._heap, (when, key))
