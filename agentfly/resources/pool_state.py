"""What is true of a pool: its members, its tickets, its times, and readings of them.

Guarantees:
1. A reading changes nothing, and is a function of the records: the indexes hold nothing else.
2. A ticket waits if and only if it is in the queue; a member is held by the tickets in its ``holders``.

Not here: what changes the records, and what follows from the readings (``rules``, ``pool``).
"""

from collections.abc import Iterator

from agentfly.resources.actions import Action, Phase, Reason, State
from agentfly.resources.alarms import Alarms
from agentfly.resources.growth import Failures, Growth
from agentfly.resources.records import MemberRecord, Roster, TicketRecord
from agentfly.resources.shares import Shares
from agentfly.resources.spec import PoolSpec

IDLE_S = 300.0  # a pool that is used in bursts keeps its members between them
PROBE_S = 10.0  # how long a dead free member may be counted as ready
FIRST_HOLD_S = 1.0  # what a lease is taken to last while none has ended


class PoolState:
    """The records of one pool. ``prefix`` starts the ids of its members.

    ``unnamed`` is a pool that exists only because somebody asked for its spec.
    """

    def __init__(self, spec: PoolSpec, *, prefix: str | None = None, unnamed: bool = False) -> None:
        self.spec = spec
        self.shared = spec.shared
        self.starts = self.resets = self.failures = 0
        self.last_failure = ""
        self.revision = spec.resource.identity()
        self.reset_method = self.reset_reason = ""  # of the member that started last
        self.closed = False
        self._prefix = prefix or spec.name
        self._unnamed = unnamed
        self._roster = Roster(spec.shared)
        self._tickets: dict[int, TicketRecord] = {}
        self._shares = Shares(spec.weights, spec.reserved)
        self._growth = Growth()
        self._wanted: dict[str, int] = {}  # what ``demand`` asked for last
        self._news: list[Action] = []  # what holders and waiters are to be told
        self._touched: dict[str, None] = {}  # members that may have to be reset or retired
        self._released: dict[str, None] = {}  # from quarantine
        self._abandoned: dict[str, None] = {}  # starts whose waiter left
        self._ends: Alarms[int] = Alarms()  # of leases
        self._lives: Alarms[str] = Alarms()
        self._idles: Alarms[str] = Alarms()
        self._probes: Alarms[str] = Alarms()
        self._short_since: float | None = None  # since when fewer are free than ``buffer``
        self._asked = 0
        self._mean_hold = 0.0

    # What is true now.

    @property
    def max(self) -> int:
        """How many members there may be."""
        return self.spec.max

    @property
    def min(self) -> int:
        """How many members are kept without anybody asking."""
        return self.spec.min

    def count(self, *states: State) -> int:
        """How many members are in one of these states."""
        return sum(len(self._roster.state(state)) for state in states)

    @property
    def outdated(self) -> int:
        """How many members are of an older spec."""
        return sum(m.outdated for m in self._roster.members.values() if m.state is not State.STOPPING)

    @property
    def queued(self) -> int:
        """How many tickets wait."""
        return len(self._shares.waiting)

    def waiting(self) -> Iterator[int]:
        """The tickets that wait, in the order of asking."""
        return iter(self._shares.waiting)

    def shares(self) -> dict[str, tuple[int, int]]:
        """Of each share that has any: how many wait, and how many hold a member."""
        return {name: (len(s.waiting), len(s.held)) for name, s in self._shares.shares.items()}

    def images(self) -> dict[str, int]:
        """How many members there are of each image, "" for the pool's own."""
        return self._roster.images()

    def short_s(self, now: float) -> float | None:
        """For how long fewer than ``buffer`` have been free; None while they are not."""
        return None if self._short_since is None else now - self._short_since

    def broken(self) -> tuple[bool, dict[str, str]]:
        """Whether starts are left alone for long, and what the last start of each failing image failed of."""
        failures = self._growth.failures
        return self._growth.open(), {image: known.reason for image, known in failures.items()}

    def retry_in_s(self, now: float) -> float | None:
        """When the first start that is put off may be tried, in seconds; None if none is."""
        when = self._growth.retry_at(now)
        return None if when is None else when - now

    def ahead(self, number: int) -> int:
        """How many tickets wait that asked before this one."""
        return sum(other < number for other in self._shares.waiting)

    def quarantined(self) -> dict[str, str]:
        """The members in quarantine, oldest first, and what the check of each found."""
        return {member.id: member.why for member in self._roster.state(State.QUARANTINED).values()}

    def reason(self) -> Reason:
        """The one word for how the pool is doing."""
        if self.closed:
            return Reason.CLOSED
        if self.start_failing():
            return Reason.START_FAILING
        if self._shares.waiting and len(self._roster) >= self.max:
            return Reason.AT_MAX
        alive = self.count(State.FREE, State.LEASED, State.RESETTING)
        return Reason.STARTING if self._shares.waiting or alive < self.min else Reason.READY

    def start_failing(self) -> bool:
        """True while the last start failed and no member lives."""
        return bool(self._growth.failures) and not self._alive()

    def failing(self, image: str) -> Failures | None:
        """The failures of the starts of an image of which no member lives."""
        return None if self._alive(image) else self._growth.failures.get(image)

    def _alive(self, image: str | None = None) -> bool:
        members = self._roster.members if image is None else self._roster.of_image(image)
        living = (State.FREE, State.LEASED, State.RESETTING)
        return any(m.state in living and not m.condemned for m in members.values())

    def _present(self) -> int:
        return len(self._roster) - self.count(State.STOPPING, State.QUARANTINED)

    def _lasting(self) -> int:
        """How many members there are without the free ones that are outdated."""
        return self._present() - self._roster.outdated()

    def _stopgap(self) -> MemberRecord | None:
        """Of a shared pool without a member of its spec: who serves until there is one.

        None where there is no place for that one: it comes when the holders of the others have left.
        """
        old = None if self._roster.living() else self._roster.least_loaded_old()
        full = len(self._roster) >= self.max and not self._roster.coming()
        return None if old is None or (full and old[0]) else old[1]

    def _lease_s(self) -> float:
        return self._mean_hold or FIRST_HOLD_S

    def _admits(self, share: str, image: str) -> bool:
        """True if one more may ask: there is room in the queue, or it need not wait."""
        waiting = self._shares.waiting
        if len(waiting) < self.spec.max_pending:
            return True
        if self.shared:
            return self._roster.living() > 0 or self._stopgap() is not None
        mine = self._shares.shares.get(share)
        if self._shares.room(self.max).reserved.get(share, 0) > (len(mine.waiting) if mine else 0):
            return True
        wanted: dict[str, int] = {image: 1}
        for ticket in waiting.values():
            wanted[ticket.image] = wanted.get(ticket.image, 0) + 1
        served = sum(min(count, self._roster.grantable(name)) for name, count in wanted.items())
        served = min(served, self._shares.eligible(self.max, more=1))
        return len(waiting) + 1 - served <= self.spec.max_pending

    def _in_use(self, member: MemberRecord) -> bool:
        # A holder that waits for the reset of its member does not use it.
        return any(self._tickets[number].phase is not Phase.CLEANING for number in member.holders)

    def _retirement(self, member: MemberRecord, now: float) -> Reason | None:
        replaced = member.outdated and member.state is not State.FREE and not member.holders
        if member.condemned or replaced:
            return member.condemned or Reason.OUTDATED
        if member.state is State.STARTING:
            return None
        if self.spec.max_reuses is not None and member.leases > self.spec.max_reuses:
            return Reason.MAX_REUSES
        if self.spec.max_lifetime_s is not None and now >= member.born + self.spec.max_lifetime_s:
            return Reason.MAX_LIFETIME
        if self._excess() > 0 and not member.holders and member.state is not State.FREE:
            return Reason.RESIZED
        passing = self._unnamed and self.shared
        return Reason.IDLE if passing and member.state is State.LEASED else None

    def _excess(self) -> int:
        """How many members have to go because ``max`` was lowered."""
        return len(self._roster) - self.count(State.STOPPING) - self.max

    # Records and what is indexed by them.

    def _file(self, member: MemberRecord) -> None:
        """To be called after every change of a member."""
        self._roster.file(member)
        free = member.state is State.FREE
        lifetime = self.spec.max_lifetime_s
        # The leases of an exclusive member are renewed at its own daemon: each renewal is a probe.
        probed = free or (self.shared and member.state is State.LEASED)
        self._idles.set(member.id, member.since + IDLE_S if free else None)
        self._lives.set(member.id, member.born + lifetime if free and lifetime is not None else None)
        self._probes.set(member.id, member.probed + PROBE_S if probed else None)

    def _expires(self, ticket: TicketRecord, when: float) -> None:
        ticket.expires = when
        self._ends.set(ticket.number, when if ticket.phase is Phase.HELD else None)
