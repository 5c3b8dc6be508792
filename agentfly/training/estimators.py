"""Advantages of whole rollouts, from their rewards: pure, on plain numbers.

Guarantees:
1. A group is what has the same key; each member counts once, however many training rows it has.
2. A member that is alone in its group gets 0: there is nothing to compare it with.
3. Members of a group whose values are all equal get exactly 0: rounding of their mean must not push them all
   the same way, which a division by a deviation of nearly 0 would make a real push.
4. The order of members changes nothing, to the last bit.

Sources: GRPO arXiv 2402.03300, Dr.GRPO 2503.20783, RLOO 2402.14740.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

EPSILON = 1e-6
"""Added to a deviation before it divides, as verl does."""


def members(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Places of the members of each group."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return dict(found)


def normalized(
    values: Sequence[float],
    keys: Sequence[Hashable],
    *,
    scale: bool,
    counts: Sequence[int] | None = None,
    population: bool = False,
) -> list[float]:
    """``x - mean``, or ``(x - mean) / (deviation + 1e-6)`` with ``scale``, within each group.

    Args:
        values: one for each member.
        keys: which group each member belongs to.
        scale: whether to divide by the standard deviation.
        counts: how often each member enters mean and deviation. None: once.
        population: divide squares by n, not by n - 1.
    """
    result = [0.0] * len(values)
    for places in members(keys).values():
        inside = [values[place] for place in places]
        if min(inside) == max(inside):
            continue
        weights = [1 if counts is None else counts[place] for place in places]
        total = sum(weights)
        mean = math.fsum(value * weight for value, weight in zip(inside, weights, strict=True)) / total
        deviation = 1.0
        if scale:
            squares = math.fsum(
                weight * (value - mean) ** 2 for value, weight in zip(inside, weights, strict=True)
            )
            deviation = math.sqrt(squares / (total if population else total - 1)) + EPSILON
        for place, value in zip(places, inside, strict=True):
            result[place] = (value - mean) / deviation
    return result


def leave_one_out(values: Sequence[float], keys: Sequence[Hashable]) -> list[float]:
    """Each value less the mean of the others in its group."""
    result = [0.0] * len(values)
    for places in members(keys).values():
        inside = [values[place] for place in places]
        if min(inside) == max(inside):
            continue
        total = math.fsum(inside)
        for place, value in zip(places, inside, strict=True):
            result[place] = (len(inside) * value - total) / (len(inside) - 1)
    return result
