"""From samples to what is reported: percentiles, and ratios of repeats that were taken side by side.

Guarantees:
1. A percentile is interpolated between the two nearest samples; the 0th and 100th are the extremes.
2. A ratio is formed within each repeat, where both sides had the same noise; reported is the median over the
   repeats, with the lowest and the highest.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spread:
    """The median of some repeats, and how far they lie apart."""

    middle: float
    low: float
    high: float
    repeats: int


@dataclass
class Series:
    """Samples of one quantity, kept apart by repeat."""

    repeats: list[list[float]] = field(default_factory=list)

    def add(self, samples: Sequence[float]) -> None:
        """Add the samples of one more repeat."""
        if not samples:
            raise ValueError("repeat: has no samples")
        self.repeats.append(list(samples))

    def percentile(self, percent: float) -> float:
        """Of all samples together."""
        return percentile([sample for repeat in self.repeats for sample in repeat], percent)

    def medians(self) -> list[float]:
        """The median of each repeat."""
        return [statistics.median(repeat) for repeat in self.repeats]

    def __len__(self) -> int:
        return sum(len(repeat) for repeat in self.repeats)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the samples lie (0 to 100), interpolated linearly."""
    if not samples or not 0 <= percent <= 100:
        raise ValueError(f"percentile: {percent} of {len(samples)} samples is not defined")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of one value for each repeat."""
    if not values:
        raise ValueError("spread: there are no repeats")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(measured: Series, against: Series) -> Spread:
    """Median of ``measured`` over median of ``against``, repeat by repeat."""
    pairs = zip(measured.medians(), against.medians(), strict=True)
    return spread([above / below for above, below in pairs])


def exactly(value: float) -> Spread:
    """Of what is the same in every repeat, and is measured once."""
    return Spread(value, value, value, 1)
