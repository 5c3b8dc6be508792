"""Who waits, on whose account, and whose turn it is.

Guarantees:
1. Within a share, first come, first served. A ticket that waits again stands where its first asking put it.
2. Among shares, the turn is that of the share with the lowest virtual time: the member-seconds that it has
   used, and one mean lease for each member that it holds, over its weight. While all of them wait, the
   members held by each converge to its weight, and so do the leases granted if leases are equally long.
3. What a share did not use while it did not wait is not saved up, and it falls at most ``LAG`` leases behind.
4. A share with reserved members that it does not hold is served even if that leaves none for others, and they
   never take so many that it could not be.
5. Who is passed over because its image has no member is passed by at most ``LEAD`` later waiters of its
   share, and by other shares for at most as many of its leases.

Not here: which members there are (``records``) and what becomes of a turn (``rules``).
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentfly.resources.records import TicketRecord

LAG = 8  # leases: evens out what whole members cannot, and is soon over where it was not the share's doing
LEAD = 4  # a member is started in the time of a few leases; further passing would not save starts


@dataclass(slots=True)
class Share:
    """One account. ``clock`` is its virtual time as of ``at``."""

    asked: int = 0
    waiting: dict[int, TicketRecord] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    clock: float = 0.0
    at: float = 0.0
    fresh: bool = True  # it waits since the last decision


@dataclass(slots=True)
class Shares:
    """The shares of one pool: all tickets that wait, in the order of asking, and those that hold a member."""

    weights: Mapping[str, float]
    reserved: Mapping[str, int]
    waiting: dict[int, TicketRecord] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    held: int = 0

    def weight(self, name: str) -> float:
        """The weight of a share, named or not."""
        return self.weights.get(name, 1.0)

    def enter(self, ticket: TicketRecord) -> None:
        """A new ticket waits."""
        share = self.shares.setdefault(ticket.share, Share())
        ticket.place = share.asked
        share.asked += 1
        share.waiting[ticket.number] = self.waiting[ticket.number] = ticket

    def hold(self, ticket: TicketRecord, now: float) -> None:
        """A ticket that waited has a member."""
        share = self._advanced(ticket.share, now)
        del share.waiting[ticket.number], self.waiting[ticket.number]
        share.held.add(ticket.number)
        self.held += 1

    def wait_again(self, ticket: TicketRecord, now: float) -> None:
        """A ticket has its member no longer, and stands where it stood."""
        share = self._let_go(ticket, now)
        share.waiting = dict(sorted([*share.waiting.items(), (ticket.number, ticket)]))
        self.waiting = dict(sorted([*self.waiting.items(), (ticket.number, ticket)]))

    def leave(self, ticket: TicketRecord, now: float) -> None:
        """A ticket is over."""
        share = self._let_go(ticket, now)
        share.waiting.pop(ticket.number, None)
        self.waiting.pop(ticket.number, None)
        share.fresh = share.fresh or not (share.waiting or share.held)

    def forget(self, name: str) -> None:
        """Where nobody takes turns, a share of which nothing is left need not be known."""
        share = self.shares[name]
        if not (share.waiting or share.held):
            del self.shares[name]

    def refresh(self, now: float, lease_s: float) -> None:
        """Bring all virtual times up to now, and those that are behind up to where they may be."""
        waiting = [(name, share) for name, share in self.shares.items() if share.waiting]
        for name in self.shares:
            self._advanced(name, now)
        clocks = [share.clock for _, share in waiting]
        seasoned = [share.clock for _, share in waiting if not share.fresh]
        slack = LAG * lease_s / min(self.weight(name) for name, _ in waiting)
        floor = max(
            min(seasoned) if seasoned else max(share.clock for share in self.shares.values()),
            max(clocks) - slack,
        )
        for name, share in list(self.shares.items()):
            if share.waiting or share.held:
                share.clock, share.fresh = max(share.clock, floor), False
            elif share.clock <= floor:
                del self.shares[name]  # it would begin there anyway

    def room(self, most: int) -> "Room":
        """What each share may be given, of ``most`` members that can be held in all."""
        reserved = {}
        for name, count in self.reserved.items():
            share = self.shares.get(name)
            reserved[name] = max(0, count - len(share.held) if share else count)
        left = max(0, most - self.held)
        return Room(left, max(0, left - sum(reserved.values())), reserved)

    def eligible(self, most: int, *, more: int = 0) -> int:
        """How many of those that wait could be given a member, of ``most`` that can be held in all.

        ``more`` are taken to wait too, with nothing reserved for them.
        """
        room = self.room(most)
        within = sum(
            min(count, len(self.shares[name].waiting))
            for name, count in room.reserved.items()
            if name in self.shares
        )
        return min(room.left, within + min(room.common, len(self.waiting) - within + more))

    def _advanced(self, name: str, now: float) -> Share:
        share = self.shares[name]
        share.clock += len(share.held) * (now - share.at) / self.weight(name)
        share.at = now
        return share

    def _let_go(self, ticket: TicketRecord, now: float) -> Share:
        share = self._advanced(ticket.share, now)
        if ticket.number in share.held:
            share.held.discard(ticket.number)
            self.held -= 1
        return share


@dataclass(slots=True)
class Room:
    """How many members can still be given: ``left`` in all, ``common`` of them to anybody."""

    left: int
    common: int
    reserved: dict[str, int]

    def admits(self, share: str) -> bool:
        """True if the share may be given one more."""
        return self.left > 0 and (self.common > 0 or self.reserved.get(share, 0) > 0)

    def give(self, share: str) -> None:
        """Give the share one."""
        self.left -= 1
        if self.reserved.get(share, 0) > 0:
            self.reserved[share] -= 1
        else:
            self.common -= 1


class Order:
    """The waiters in the order of their turns. Each must be taken or passed before the next is asked for.

    One that is taken counts from then on as holding a member. ``shares`` is not touched, and must not be by
    others before the last turn was asked for.
    """

    def __init__(self, shares: Shares, most: int, lease_s: float) -> None:
        self._shares = shares
        self._room = shares.room(most)
        self._lease_s = lease_s
        self._lines: dict[str, Iterator[TicketRecord]] = {}
        self._passed: dict[str, tuple[float, int]] = {}  # of the first of a share: its key, its place in it
        self._taken: dict[str, int] = {}
        self._heap: list[tuple[float, int, TicketRecord]] = []
        for name, share in shares.shares.items():
            if share.waiting:
                self._lines[name] = iter(share.waiting.values())
                self._push(name)

    def __iter__(self) -> Iterator[TicketRecord]:
        while self._heap:
            key, _, ticket = self._heap[0]
            if self._room.admits(ticket.share) and not self._too_far(key, ticket):
                yield ticket
            else:
                heapq.heappop(self._heap)

    def take(self, ticket: TicketRecord) -> None:
        """The ticket has a member, or one is on its way."""
        heapq.heappop(self._heap)
        self._room.give(ticket.share)
        self._taken[ticket.share] = self._taken.get(ticket.share, 0) + 1
        self._push(ticket.share)

    def pass_over(self, ticket: TicketRecord, *, waits: bool) -> None:
        """The ticket is not served now; ``waits`` says that others may not pass it for ever."""
        key, _, _ = heapq.heappop(self._heap)
        if waits:
            self._passed.setdefault(ticket.share, (key, ticket.place))
        self._push(ticket.share)

    def _push(self, name: str) -> None:
        ticket = next(self._lines[name], None)
        if ticket is not None:
            share, weight = self._shares.shares[name], self._shares.weight(name)
            holds = len(share.held) + self._taken.get(name, 0) + 1
            heapq.heappush(self._heap, (share.clock + self._lease_s * holds / weight, ticket.number, ticket))

    def _too_far(self, key: float, ticket: TicketRecord) -> bool:
        # Of two shares, as many leases of the one passed over as LEAD; within a share, as many waiters.
        for name, (first, place) in self._passed.items():
            if name == ticket.share:
                if ticket.place - place > LEAD:
                    return True
            elif key - first > LEAD * self._lease_s / self._shares.weight(name):
                return True
        return False
