"""What owners say that they will need: images of a pool, and how many members of each.

Guarantees:
1. What an owner wants of a pool stands until it says something else, is released, or for ``DEMAND_S``; each
   member of it that is granted to anybody is one less.
2. The wants of several owners add up; what anybody needs soonest comes first.

Not here: what a pool makes of it (``pool``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from agentfly.resources.errors import ResourceError

DEMAND_S = 300.0  # a job looks ahead again long before; one that died keeps nothing warm for longer


class Demands:
    """The wants of all owners, by pool."""

    def __init__(self) -> None:
        self._wants: dict[str, dict[str, tuple[dict[str, int], float]]] = {}

    def say(self, pool: str, owner: str, wanted: Mapping[str, int], now: float) -> None:
        """This is what the owner wants of the pool now, soonest need first; nothing, if it is empty."""
        owners = self._wants.setdefault(pool, {})
        owners.pop(owner, None)
        if wanted:
            owners[owner] = (dict(wanted), now + DEMAND_S)

    def granted(self, pool: str, image: str) -> None:
        """A member was granted: whoever wants it for the longest wants one less."""
        for wanted, _ in self._wants.get(pool, {}).values():
            if image in wanted:
                wanted[image] -= 1
                if not wanted[image]:
                    del wanted[image]
                return

    def forget(self, owner: str) -> list[str]:
        """Forget what the owner wanted; the pools that it concerns."""
        return [pool for pool, owners in self._wants.items() if owners.pop(owner, None) is not None]

    def drop(self, pool: str) -> None:
        """Forget what anybody wanted of a pool that is no more."""
        self._wants.pop(pool, None)

    def expire(self, now: float) -> list[str]:
        """Forget what was not said again in time; the pools that it concerns."""
        concerned = []
        for pool, owners in self._wants.items():
            over = [owner for owner, (_, until) in owners.items() if until <= now]
            for owner in over:
                del owners[owner]
            if over:
                concerned.append(pool)
        return concerned

    def total(self, pool: str) -> dict[str, int]:
        """What all owners want of the pool, soonest need first."""
        counts: Counter[str] = Counter()
        ranks: dict[str, int] = {}
        for wanted, _ in self._wants.get(pool, {}).values():
            for rank, (image, count) in enumerate(wanted.items()):
                counts[image] += count
                ranks[image] = min(rank, ranks.get(image, rank))
        return {image: counts[image] for image in sorted(ranks, key=ranks.__getitem__)}

    def next_end(self) -> float | None:
        """When the next want ends."""
        return min((until for owners in self._wants.values() for _, until in owners.values()), default=None)


def counted(pool: str, wanted: Mapping[str, int] | Sequence[str]) -> dict[str, int]:
    """How many of each image, in the order of need; a sequence counts each time that an image is in it.

    Raises:
        ResourceError: a count is not a whole number above 0.
    """
    counts = dict(wanted) if isinstance(wanted, Mapping) else dict(Counter(wanted))
    for image, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ResourceError(
                f"pool {pool}: demand of image {image or 'of its own'}: {count!r} is not a number of members",
                hints=("name what is needed with a number of 1 or more, and leave out what is not",),
            )
    return counts
