"""Who may send to an external API, and when, as a state machine without I/O: events in, ``decide(now)`` out.

Guarantees:
1. Never more than ``concurrency`` tries in flight.
2. Tries are granted in the order in which their requests first asked; one that tries again is where its first
   asking put it. Nobody overtakes a request that waits, so a large one is served too.
3. A try is granted with a key, and only while the breaker, the budget and both rates admit it.
4. A request that cannot be granted before its deadline, or ever, is refused at once, with the reason and,
   where there is one, the time to come back.
5. A try that never reached the API is given back: rates, calls and money.
6. A request that left holds nothing.

Not here: each limit by itself (``limits``, ``keys``), waiting, clocks (``gate``).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentfly.resources.errors import ResourceError
from agentfly.resources.runners.external.keys import Key, Keys
from agentfly.resources.runners.external.limits import Breaker, Bucket, Spending, Tokens
from agentfly.resources.spec import ExternalAPISpec

WAITING_MAX = 4096  # requests that wait, each with its body in memory


class Refused(ResourceError):
    """A request that is not sent, or not again. ``code`` is a constant, see ``external_wire.STATUS``.

    ``retry_after`` is in seconds; None where waiting does not help.
    """

    def __init__(
        self, code: str, message: str, *, retry_after: float | None = None, hints: Sequence[str] = ()
    ) -> None:
        super().__init__(message, hints=hints)
        self.code = code
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Grant:
    """The next try of this request may be sent, with this key."""

    number: int
    key: Key


@dataclass(frozen=True, slots=True)
class Refusal:
    """This request will not be sent."""

    number: int
    error: Refused


@dataclass(frozen=True, slots=True)
class Usage:
    """What an API was used for so far, and how it is now. Counts only grow; none holds a key.

    ``calls`` are tries that reached the API; ``refused`` counts requests by the code of their refusal, before
    they were sent; ``keys`` says of each reference ``ready``, ``limited``, ``refused`` or ``missing``.
    """

    calls: int
    input_tokens: int
    output_tokens: int
    usd: float
    failures: int
    waited_s: float
    refused: dict[str, int]
    in_flight: int
    waiting: int
    breaker: str
    keys: dict[str, str]


@dataclass(slots=True)
class _Request:
    number: int
    estimate: Tokens
    since: float = 0.0  # when it began to wait
    deadline: float = 0.0  # until when it does
    skip: set[str] = field(default_factory=set)  # references that are of no use to it
    trial: bool = False


class Account:
    """The shared state of one API: all its limits, and the requests that wait for them."""

    def __init__(self, spec: ExternalAPISpec) -> None:
        self._spec = spec
        self.keys = Keys(spec.credentials)
        self._breaker = Breaker(spec.circuit_breaker)
        self._spending = Spending(spec.budget)
        self._requests = Bucket(spec.requests_per_second)
        self._tokens = Bucket(spec.tokens_per_second)
        self._asked = 0
        self._known: dict[int, _Request] = {}
        self._queue: dict[int, _Request] = {}
        self._flying: dict[int, _Request] = {}
        self._failures = 0
        self._waited = 0.0
        self._refused: Counter[str] = Counter()

    # Events.

    def ask(self, estimate: Tokens) -> int:
        """A new request; ``wait`` puts it into the queue."""
        self._asked += 1
        self._known[self._asked] = _Request(self._asked, estimate)
        return self._asked

    def wait(self, number: int, deadline: float, now: float) -> None:
        """The request wants to be sent, for the first time or again, before the deadline.

        Raises:
            Refused: too many wait.
        """
        if len(self._queue) >= WAITING_MAX:
            self._refused["busy"] += 1
            raise Refused("busy", f"{WAITING_MAX} requests wait already", retry_after=1.0)
        request = self._known[number]
        request.since, request.deadline = now, deadline
        last = next(reversed(self._queue), 0)
        self._queue[number] = request
        if number < last:
            self._queue = dict(sorted(self._queue.items()))

    def late(self, number: int, now: float) -> Refused:
        """What a request is told that waited until its deadline."""
        request = self._known[number]
        head = next(iter(self._queue.values()), request)
        reason, _ = self._obstacle(head, now) or ("the requests before it", now)
        self._refused["busy"] += 1
        return Refused(
            "busy",
            f"not sent in {request.deadline - request.since:.3g} s: waits for {reason}, "
            f"{sum(n < number for n in self._queue)} requests before it",
            retry_after=1.0,
            hints=("ask for less at a time, or raise this limit or timeoutSeconds of the pool",),
        )

    def settle(self, number: int, now: float, *, used: Tokens | None, ok: bool | None) -> None:
        """The try in flight ended. ``used`` None: it never reached the API; ``ok`` None: it says nothing."""
        request = self._flying.pop(number)
        cost = Tokens() if used is None else used
        self._tokens.take(cost.total - request.estimate.total, now)
        if used is None:
            self._requests.take(-1, now)
        self._spending.settle(request.estimate, used)
        self._breaker.end(ok, now, trial=request.trial)
        self._failures += ok is False

    def skip(self, number: int, key: Key) -> bool:
        """Let the request use other keys from now on. False: there is no other."""
        request = self._known[number]
        if self.keys.ready_at(0.0, {*request.skip, key.reference}) == math.inf:
            return False
        request.skip.add(key.reference)
        return True

    def leave(self, number: int, now: float) -> None:
        """The request is over. A try that was granted and not yet begun never reached the API."""
        if number in self._flying:
            self.settle(number, now, used=None, ok=None)
        if (waiting := self._queue.pop(number, None)) is not None:
            self._waited += now - waiting.since
        self._known.pop(number, None)

    # Decisions.

    def decide(self, now: float) -> list[Grant | Refusal]:
        """What becomes of those who wait, as of ``now``."""
        return list(self._decide(now))

    def wake_at(self, now: float) -> float | None:
        """When, after ``now``, ``decide`` has something to do though nothing happens."""
        head = next(iter(self._queue.values()), None)
        obstacle = None if head is None else self._obstacle(head, now)
        return None if obstacle is None or obstacle[1] == math.inf else obstacle[1]

    def usage(self, now: float) -> Usage:
        """Counts, as of ``now``."""
        spending = self._spending
        return Usage(
            calls=spending.calls,
            input_tokens=spending.tokens.input,
            output_tokens=spending.tokens.output,
            usd=spending.usd,
            failures=self._failures,
            waited_s=self._waited,
            refused=dict(self._refused),
            in_flight=len(self._flying),
            waiting=len(self._queue),
            breaker=self._breaker.state(now),
            keys=self.keys.states(now),
        )

    def _decide(self, now: float) -> Iterator[Grant | Refusal]:
        while self._queue:
            head = next(iter(self._queue.values()))
            error = self._hopeless(head, now)
            if error is None and self._obstacle(head, now) is not None:
                return
            del self._queue[head.number]
            self._waited += now - head.since
            if error is not None:
                self._refused[error.code] += 1
                yield Refusal(head.number, error)
                continue
            key = self.keys.pick(now, head.skip)
            assert key is not None
            self._flying[head.number] = head
            head.trial = self._breaker.begin()
            self._spending.reserve(head.estimate)
            self._requests.take(1, now)
            self._tokens.take(head.estimate.total, now)
            yield Grant(head.number, key)

    def _hopeless(self, request: _Request, now: float) -> Refused | None:
        """Why waiting does not help this request."""
        if (spent := self._spending.spent()) is not None:
            return Refused("budget", f"the budget is used up: {spent}", hints=("raise budget of the pool",))
        if self.keys.ready_at(now, request.skip) == math.inf:
            states = ", ".join(f"{name} is {state}" for name, state in self.keys.states(now).items())
            return Refused(
                "credentials",
                f"the API takes none of the keys: {states}",
                hints=("write a valid key where one of these references points: it is read again",),
            )
        if (until := self._breaker.open_until(now)) is not None:
            text = f"the API failed {self._spec.circuit_breaker.failures} times in a row and is left alone"
            return Refused("breaker", text, retry_after=until - now)
        obstacle = self._obstacle(request, now)
        if obstacle is not None and request.deadline < obstacle[1] < math.inf:
            limited = self.keys.ready_at(now, request.skip) > request.deadline
            return Refused(
                "limited" if limited else "busy",
                f"cannot be sent before its deadline: waits {obstacle[1] - now:.3g} s for {obstacle[0]}",
                retry_after=obstacle[1] - now,
            )
        return None

    def _obstacle(self, request: _Request, now: float) -> tuple[str, float] | None:
        """What the request waits for at the head of the queue, and until when; ``inf``: for others to end."""
        if len(self._flying) >= self._spec.concurrency:
            return f"concurrency ({self._spec.concurrency})", math.inf
        if self._spending.full():
            return "requests in flight that may use up the budget", math.inf
        if self._breaker.trying:
            return "the one request that tries whether the API works again", math.inf
        tokens = self._tokens.ready_at(request.estimate.total, now)
        waits = (
            ("a key that the API does not limit", self.keys.ready_at(now, request.skip)),
            (f"requestsPerSecond ({self._spec.requests_per_second})", self._requests.ready_at(1, now)),
            (f"tokensPerSecond ({self._spec.tokens_per_second})", tokens),
        )
        last = max(waits, key=lambda wait: wait[1])
        return last if last[1] > now else None
