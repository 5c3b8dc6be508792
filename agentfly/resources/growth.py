"""When the next start may begin: after the pauses of failing ones, and at the rate that a pool is given.

Guarantees:
1. Starts of an image that fail are tried again after a pause that doubles, up to ``BACKOFF_MAX_S``. Those
   that were begun before a failure was known are not counted again. From ``PERMANENT_FAILURES`` on
   that is a breaker that is open. What is known of a spec ends with it.
2. Starts come at ``starts_per_s``, after at most as many at once as one second gives. The allowance grows
   with time alone: nothing that happens to members sets it back.

Not here: which starts are wanted (``rules``).
"""

from dataclasses import dataclass, field

BACKOFF_S = 1.0  # first pause after a failed start: long enough that a crash loop costs little
BACKOFF_MAX_S = 300.0  # a repaired image or disk is noticed within this time
PERMANENT_FAILURES = 5  # failures in a row, 15 s of pauses: more than a hiccup of a busy machine
FORGET_S = 3600.0  # an image that nobody tried for so long may have been repaired


@dataclass(slots=True)
class Failures:
    """The failures in a row of one image: rounds of starts, when the last of them ended, and why."""

    rounds: int = 0
    at: float = float("-inf")
    reason: str = ""
    hints: tuple[str, ...] = ()


@dataclass(slots=True)
class Growth:
    """What the starts of one pool have come to."""

    failures: dict[str, Failures] = field(default_factory=dict)  # by image; none for one that works
    _full_at: float = float("-inf")  # when the allowance will have grown to its most

    def failed(
        self, image: str, begun: float, now: float, reason: str, hints: tuple[str, ...] = ()
    ) -> int | None:
        """A start begun at ``begun`` failed: how many rounds have by now, None if this is not one more."""
        known = self.failures.get(image, Failures())
        if begun <= known.at:
            return None  # begun before the last failure was known: the same cause, not one more verdict
        self.failures = {name: past for name, past in self.failures.items() if now < past.at + FORGET_S}
        self.failures[image] = Failures(known.rounds + 1, now, reason, hints)
        return known.rounds + 1

    def proved(self, image: str, begun: float) -> None:
        """A member whose start was begun then does its work. Older ones lived while the last start failed."""
        known = self.failures.get(image)
        if known is not None and begun > known.at:
            del self.failures[image]

    def forget(self) -> None:
        """The starts of another spec say nothing about those of this one."""
        self.failures = {}

    def paused_until(self, image: str) -> float:
        """When the next start of this image may begin."""
        known = self.failures.get(image)
        if known is None:
            return float("-inf")
        return known.at + min(BACKOFF_S * 2.0 ** min(known.rounds - 1, 16), BACKOFF_MAX_S)

    def open(self) -> bool:
        """True while an image failed ``PERMANENT_FAILURES`` times in a row, or more."""
        return any(known.rounds >= PERMANENT_FAILURES for known in self.failures.values())

    def retry_at(self, now: float) -> float | None:
        """When, after ``now``, the first start that is put off may be tried; None if none is."""
        pauses = (self.paused_until(image) for image in self.failures)
        return min((until for until in pauses if until > now), default=None)

    def next_at(self, rate: float | None) -> float:
        """When the next start may begin, at this many a second."""
        return float("-inf") if rate is None else self._full_at - (max(1.0, rate) - 1.0) / rate

    def begin(self, now: float, rate: float | None) -> None:
        """A start begins."""
        if rate is not None:
            self._full_at = max(self._full_at, now) + 1.0 / rate

    def wakes(self, rate: float | None) -> list[float]:
        """When something that was not allowed may be."""
        return [self.next_at(rate), *(self.paused_until(image) for image in self.failures)]
