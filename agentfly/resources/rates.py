"""How the last acquires and resets of each pool went: how many found a member free, how long they waited, and
how many members came back clean.

Guarantees:
1. Only the last ``KEPT`` of each kind count in a ratio or a percentile, so that it says how the pool is doing
   now. The totals only grow.

Not here: histograms for a long memory (``agentfly.broker.metrics``).
"""

import math
from collections import deque
from dataclasses import dataclass, field

from agentfly.resources.events import Event, EventKind

KEPT = 512  # enough for a 99th percentile that is more than the largest value


@dataclass(slots=True)
class _Counts:
    """What one pool did: of its last grants how long each waited and whether it was warm, and its resets."""

    grants: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=KEPT))
    resets: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT))
    acquires: int = 0
    warm: int = 0
    clean: int = 0
    dirty: int = 0


_NOTHING = _Counts()


class Rates:
    """An observer of the events of one engine."""

    def __init__(self) -> None:
        self._pools: dict[str, _Counts] = {}

    def note(self, event: Event) -> None:
        """Take notice of an event."""
        if event.kind is EventKind.LEASE_GRANTED and event.seconds is not None:
            pool, warm = self._of(event.pool), bool(event.warm)
            pool.grants.append((event.seconds, warm))
            pool.acquires += 1
            pool.warm += warm
        elif event.kind in (EventKind.MEMBER_RESET, EventKind.RESET_FAILED):
            pool, clean = self._of(event.pool), event.kind is EventKind.MEMBER_RESET
            pool.resets.append(clean)
            pool.clean += clean
            pool.dirty += not clean

    def forget(self, pool: str) -> None:
        """A pool is no more."""
        self._pools.pop(pool, None)

    def hit_ratio(self, pool: str) -> float | None:
        """The fraction of grants for which a member was free when it was asked for; None before the first."""
        grants = self._pools.get(pool, _NOTHING).grants
        return sum(warm for _, warm in grants) / len(grants) if grants else None

    def acquire_p99_s(self, pool: str) -> float | None:
        """The 99th percentile (nearest rank) of the seconds from an acquire to its grant."""
        if not (grants := self._pools.get(pool, _NOTHING).grants):
            return None
        waits = sorted(seconds for seconds, _ in grants)
        return waits[math.ceil(0.99 * len(waits)) - 1]

    def clean_ratio(self, pool: str) -> float | None:
        """The fraction of resets that were verified; None before the first."""
        resets = self._pools.get(pool, _NOTHING).resets
        return sum(resets) / len(resets) if resets else None

    def acquires(self, pool: str) -> tuple[int, int]:
        """How many acquires got a member, and how many of them found one free."""
        counts = self._pools.get(pool, _NOTHING)
        return counts.acquires, counts.warm

    def resets(self, pool: str) -> tuple[int, int]:
        """How many resets were verified, and how many were not."""
        counts = self._pools.get(pool, _NOTHING)
        return counts.clean, counts.dirty

    def _of(self, pool: str) -> _Counts:
        if (counts := self._pools.get(pool)) is None:
            counts = self._pools[pool] = _Counts()
        return counts
