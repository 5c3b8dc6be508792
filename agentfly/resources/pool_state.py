"""What is true of a pool: its members, its tickets, and readings of them.

Guarantees:
1. Nothing here changes anything: every reading is a function of the records, and none of counters.
2. A ticket waits if and only if it is in the queue; a member is held by the tickets in its ``holders``.

Not here: what changes the records, and what follows from the readings (``pool``).
"""

from dataclasses import dataclass, field

from agentfly.resources.actions import Action, Phase, Reason, State
from agentfly.resources.spec import PoolSpec

BACKOFF_S = 1.0  # first pause after a failed start: long enough that a crash loop costs little
BACKOFF_MAX_S = 30.0  # a repaired image or disk is noticed within this time
IDLE_S = 300.0  # a pool that is used in bursts keeps its members between them
PROBE_S = 10.0  # how long a dead free member may be counted as ready


@dataclass(slots=True)
class MemberRecord:
    """One member as its pool knows it. Times are those of the events."""

    id: str
    begun: float
    cause: int | None  # the waiter this start was begun for; None once it is the pool's own
    state: State = State.STARTING
    since: float = 0.0
    born: float = 0.0
    probed: float = 0.0
    leases: int = 0
    holders: set[int] = field(default_factory=set)
    condemned: Reason | None = None


@dataclass(slots=True)
class TicketRecord:
    """One asking, from the queue to the end of its lease."""

    number: int
    phase: Phase = Phase.WAITING
    member: str | None = None
    since: float = 0.0
    expires: float = 0.0


class PoolState:
    """The records of one pool. ``prefix`` starts the ids of its members."""

    def __init__(self, spec: PoolSpec, *, shared: bool = False, prefix: str | None = None) -> None:
        self.spec = spec
        self.shared = shared
        self.max = 1 if shared else spec.max
        self.min = min(spec.min, self.max)
        self.starts = self.resets = self.failures = 0
        self.last_failure = ""
        self.closed = False
        self._prefix = prefix or spec.name
        self._members: dict[str, MemberRecord] = {}
        self._tickets: dict[int, TicketRecord] = {}
        self._queue: dict[int, TicketRecord] = {}  # those that wait, in the order of asking
        self._news: list[Action] = []  # what holders and waiters are to be told
        self._asked = 0
        self._failed_rounds = 0
        self._failed_at = float("-inf")
        self._mean_hold = 0.0

    # What is true now.

    def count(self, *states: State) -> int:
        """How many members are in one of these states."""
        return sum(member.state in states for member in self._members.values())

    @property
    def queued(self) -> int:
        """How many tickets wait."""
        return len(self._queue)

    def quarantined(self) -> dict[str, str]:
        """The members in quarantine, oldest first, and what the check of each found."""
        return {}

    def ahead(self, number: int) -> int:
        """How many tickets wait before this one."""
        return sum(other < number for other in self._queue)

    def reason(self) -> Reason:
        """The one word for how the pool is doing."""
        if self.closed:
            return Reason.CLOSED
        if self.start_failing():
            return Reason.START_FAILING
        if self._queue and len(self._members) >= self.max:
            return Reason.AT_MAX
        alive = self.count(State.FREE, State.LEASED, State.RESETTING)
        return Reason.STARTING if self._queue or alive < self.min else Reason.READY

    def start_failing(self) -> bool:
        """True while the last start failed and no member lives."""
        return self._failed_rounds > 0 and not self._alive()

    def _in(self, member_id: str, *states: State) -> MemberRecord | None:
        member = self._members.get(member_id)
        return member if member is not None and member.state in states else None

    def _grantable(self, member: MemberRecord) -> bool:
        if member.condemned or member.state not in (State.FREE, State.LEASED):
            return False
        return self.shared or (not member.holders and member.state is State.FREE)

    def _servable(self) -> int | float:
        free = sum(self._grantable(member) for member in self._members.values())
        return float("inf") if self.shared and free else free

    def _present(self) -> int:
        return len(self._members) - self.count(State.STOPPING)

    def _alive(self) -> bool:
        living = (State.FREE, State.LEASED, State.RESETTING)
        return any(m.state in living and not m.condemned for m in self._members.values())

    def _lacking(self) -> int:
        """How many starts are missing; below 0, how many there are too many."""
        coming = present = 0
        for member in self._members.values():
            present += member.state is not State.STOPPING
            back = member.state is State.RESETTING and not member.holders
            coming += back or member.state is State.STARTING
        waiting = min(len(self._queue), 1) if self.shared else len(self._queue)
        return max(self.min - present, waiting - coming)

    def _in_use(self, member: MemberRecord) -> bool:
        # A holder that waits for the reset of its member does not use it.
        return any(self._tickets[number].phase is not Phase.CLEANING for number in member.holders)

    def _retirement(self, member: MemberRecord, now: float) -> Reason | None:
        if member.condemned:
            return member.condemned
        if self.spec.max_reuses is not None and member.leases > self.spec.max_reuses:
            return Reason.MAX_REUSES
        if self.spec.max_lifetime_s is not None and now >= member.born + self.spec.max_lifetime_s:
            return Reason.MAX_LIFETIME
        return Reason.IDLE if self.shared and member.state is State.LEASED and self.min == 0 else None

    def _to_probe(self, member: MemberRecord) -> bool:
        # The leases of an exclusive member are renewed at its own daemon: each renewal is a probe.
        return member.state is State.FREE or (self.shared and member.state is State.LEASED)

    def _paused_until(self) -> float:
        if self._failed_rounds == 0:
            return float("-inf")
        return self._failed_at + min(BACKOFF_S * 2.0 ** min(self._failed_rounds - 1, 16), BACKOFF_MAX_S)
