"""How far re-tokenised text is from the tokens that were sampled.

Guarantees:
1. Equal sequences have no drift; tokens after the end of the first sequence are not counted.
2. A difference is counted where it is, and not in what follows it: one split token is one drift.
3. The cost is linear in the length, times a constant for each difference.
"""

from collections.abc import Sequence

# Two tokenisations of one text meet again within a word or two; WINDOW is generous for that. ANCHOR equal
# tokens in a row make a meeting by chance unlikely.
WINDOW = 32
ANCHOR = 3


def count_drift(sampled: Sequence[int], retokenised: Sequence[int]) -> int:
    """How many tokens of ``sampled`` stand differently in ``retokenised``; at most ``len(sampled)``."""
    drifted = here = there = 0
    while here < len(sampled):
        if there < len(retokenised) and sampled[here] == retokenised[there]:
            here, there = here + 1, there + 1
            continue
        skip = _meeting(sampled, retokenised, here, there)
        if skip is None:
            return min(len(sampled), drifted + len(sampled) - here)
        drifted += max(skip)
        here, there = here + skip[0], there + skip[1]
    return min(len(sampled), drifted)


def _meeting(a: Sequence[int], b: Sequence[int], here: int, there: int) -> tuple[int, int] | None:
    """The smallest steps in ``a`` and ``b`` after which they agree again."""
    for distance in range(1, 2 * WINDOW + 1):
        for step in range(max(0, distance - WINDOW), min(distance, WINDOW) + 1):
            left, right = here + step, there + distance - step
            if left > len(a) or right > len(b):
                continue
            anchor = list(a[left : left + ANCHOR])
            if anchor == list(b[right : right + len(anchor)]):
                return step, distance - step
    return None
