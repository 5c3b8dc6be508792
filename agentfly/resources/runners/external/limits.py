"""The limits of an external API, each by itself: rate, circuit breaker, money, and how long to wait.

Guarantees:
1. A bucket lets through at most ``burst + rate * t`` in any ``t`` seconds. A single request above the burst
   waits for a full bucket and leaves a debt, so that it is served at all.
2. The breaker opens after so many failures in a row within its window, refuses while it is open, and then
   lets one request try; only that one's end closes it or opens it again.
3. What is spent never falls. A request is admitted while what is spent and what is in flight, at its
   estimate, are below the budget: exceeded by at most one estimate, and by what answers cost above theirs.
4. Pauses have full jitter; an API that says when to come back is believed, up to a day.

Not here: who waits (``account``), clocks, sockets.
"""

import math
from collections import deque
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from agentfly.resources.spec import Budget, CircuitBreaker

BURST_S = 1.0  # a second's worth at once: what an API that counts by the second would let through
BACKOFF_S = (0.5, 30.0)  # the first and the longest pause before another try, before jitter
RETRY_AFTER_MAX_S = 86400.0  # a malformed answer must not take a key out for good


class Tokens(NamedTuple):
    """Tokens of one request: of its prompt, and of its answer."""

    input: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.input + self.output


class Bucket:
    """A token bucket that refills at ``rate`` a second; None limits nothing."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self.burst = math.inf if rate is None else max(1.0, rate * BURST_S)
        self._level = self.burst
        self._at = -math.inf

    def ready_at(self, amount: float, now: float) -> float:
        """When this much may be taken: ``now``, or later."""
        lacking = min(amount, self.burst) - self._filled(now)
        return now if self._rate is None or lacking <= 0 else now + lacking / self._rate

    def take(self, amount: float, now: float) -> None:
        """Take this much; a negative amount is given back."""
        if self._rate is not None:
            self._level, self._at = min(self.burst, self._filled(now) - amount), max(now, self._at)

    def _filled(self, now: float) -> float:
        if self._rate is None or now <= self._at:
            return self._level
        return min(self.burst, self._level + (now - self._at) * self._rate)


class Breaker:
    """A circuit breaker: closed, open until a moment, or half-open while one request tries."""

    def __init__(self, spec: CircuitBreaker) -> None:
        self._spec = spec
        self._failed: deque[float] = deque()
        self._opened: float | None = None  # until when it is open; None: closed
        self.trying = False

    def open_until(self, now: float) -> float | None:
        """When the next request may try, if none may now."""
        return None if self._opened is None or self.trying or now >= self._opened else self._opened

    def state(self, now: float) -> str:
        """``closed``, ``open`` or ``half-open``."""
        if self._opened is None:
            return "closed"
        return "half-open" if self.open_until(now) is None else "open"

    def begin(self) -> bool:
        """A request begins; True if it is the one that tries."""
        self.trying = self._opened is not None
        return self.trying

    def end(self, ok: bool | None, now: float, *, trial: bool) -> None:
        """A request ended: the API worked, or failed, or (None) it says nothing about the API."""
        if trial:
            self.trying = False
            if ok:
                self._opened = None
                self._failed.clear()
            elif ok is False:
                self._opened = now + self._spec.open_s
        elif self._opened is None and ok:
            self._failed.clear()
        elif self._opened is None and ok is False:
            self._failed.append(now)
            while self._failed[0] <= now - self._spec.window_s:
                self._failed.popleft()
            if len(self._failed) >= self._spec.failures:
                self._opened = now + self._spec.open_s


class Spending:
    """What was spent of a budget, and what is in flight at its estimate."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.calls = 0
        self.tokens = Tokens()
        self.usd = 0.0
        self._calls_open = 0
        self._usd_open = 0.0

    def spent(self) -> str | None:
        """What is used up, for people; None if there is something left."""
        budget = self._budget
        if budget.calls is not None and self.calls >= budget.calls:
            return f"{self.calls} of {budget.calls} calls"
        if budget.usd is not None and self.usd >= budget.usd:
            return f"{self.usd:.4f} of {budget.usd:g} US dollars"
        return None

    def full(self) -> bool:
        """True if what is in flight may use up the rest."""
        budget = self._budget
        calls = budget.calls is not None and self.calls + self._calls_open >= budget.calls
        return calls or (budget.usd is not None and self.usd + self._usd_open >= budget.usd)

    def price(self, tokens: Tokens) -> float:
        """US dollars for these tokens."""
        budget = self._budget
        return (
            tokens.input * budget.usd_per_million_input + tokens.output * budget.usd_per_million_output
        ) / 1e6

    def reserve(self, estimate: Tokens) -> None:
        """A request begins."""
        self._calls_open += 1
        self._usd_open += self.price(estimate)

    def settle(self, estimate: Tokens, used: Tokens | None) -> None:
        """A request with this estimate ended; ``used`` None says that it never reached the API."""
        self._calls_open -= 1
        # Without the zero, the rounding of many sums would hold a sliver of the budget for ever.
        self._usd_open = self._usd_open - self.price(estimate) if self._calls_open else 0.0
        if used is not None:
            self.calls += 1
            self.tokens = Tokens(self.tokens.input + used.input, self.tokens.output + used.output)
            self.usd += self.price(used)


def backoff(tries: int, chance: float) -> float:
    """Seconds to wait after this many tries (1 or more); ``chance`` is uniform in 0 to 1."""
    first, longest = BACKOFF_S
    return chance * min(longest, first * 2.0 ** min(tries - 1, 30))


def retry_after(value: str | None, date: str | None, wall: float) -> float | None:
    """Seconds that a ``Retry-After`` of seconds or a date asks for; None if there is none that can be read.

    ``date`` is the ``Date`` of the same answer, which beats our clock ``wall`` (seconds since the epoch).
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        then = _http_date(value)
        if then is None:
            return None
        seconds = then - (_http_date(date or "") or wall)
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S) if math.isfinite(seconds) else None


def _http_date(value: str) -> float | None:
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
