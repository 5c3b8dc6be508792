"""How the last acquires of each pool went: how many found a member free, and how long they waited.

Guarantees:
1. Only the last ``KEPT`` grants of a pool count, so that the figures say how it is doing now.

Not here: histograms for a long memory (``agentfly.broker.metrics``).
"""

import math
from collections import deque

from agentfly.resources.events import Event, EventKind

KEPT = 512  # enough for a 99th percentile that is more than the largest value


class Rates:
    """An observer of the events of one engine."""

    def __init__(self) -> None:
        self._grants: dict[str, deque[tuple[float, bool]]] = {}

    def note(self, event: Event) -> None:
        """Take notice of an event."""
        if event.kind is EventKind.LEASE_GRANTED and event.seconds is not None:
            grants = self._grants.setdefault(event.pool, deque(maxlen=KEPT))
            grants.append((event.seconds, bool(event.warm)))

    def hit_ratio(self, pool: str) -> float | None:
        """The fraction of grants for which a member was free when it was asked for; None before the first."""
        grants = self._grants.get(pool)
        return sum(warm for _, warm in grants) / len(grants) if grants else None

    def acquire_p99_s(self, pool: str) -> float | None:
        """The 99th percentile (nearest rank) of the seconds from an acquire to its grant."""
        if not (grants := self._grants.get(pool)):
            return None
        waits = sorted(seconds for seconds, _ in grants)
        return waits[math.ceil(0.99 * len(waits)) - 1]
