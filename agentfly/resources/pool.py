"""The policy of one pool, as a state machine without I/O: events in, one ``decide(now)`` out.

Guarantees:
1. Members that are starting, free, leased, resetting or stopping together never number more than ``max``.
2. Waiters are served in the order in which they asked. One whose member dies before the hand-over, or whose
   own reset fails, is again where its first asking put it.
3. Free means verified: a member becomes free by a start or by a clean reset, in no other way.
4. A withdrawn ticket leaves nothing: no place in the queue, no hold on a member, no start that was begun for
   it and that nobody else needs.
5. A lease ends at its TTL unless it was renewed; its member is reset before anybody else has it.
6. A member is retired after ``max_reuses`` or ``max_lifetime_s``, when it was handed back dirty, when it is
   lost and when a reset does not verify it; never under a holder that still has it.
7. Starts that fail are tried again after a pause that doubles, one at a time while no member lives. From
   ``PERMANENT_FAILURES`` on, each failure with no member alive rejects the first waiter with the reason.
8. ``min`` members are kept; those above it go after ``IDLE_S`` without a holder.
9. A shared pool has one member with any number of holders. When the last one leaves it is reset, or, if
   ``min`` is 0, stopped.
10. Above ``max_pending`` waiters, asking fails at once with an estimate of when to ask again.
11. News about what is gone or has moved on changes nothing, and says so by returning False.
12. ``decide`` settles: asked again at the same moment, it has nothing to do.

Not here: the clock, tasks, and who the owner of a ticket is (``engine``).
"""

from collections.abc import Iterator, Mapping

from agentfly.resources.actions import (
    Action,
    Grant,
    Lost,
    Phase,
    Probe,
    Reason,
    Reject,
    Reset,
    Start,
    State,
    Stop,
)
from agentfly.resources.errors import Saturated
from agentfly.resources.pool_state import IDLE_S, PROBE_S, MemberRecord, PoolState, TicketRecord
from agentfly.resources.spec import PoolSpec

PERMANENT_FAILURES = 5  # failures in a row, 15 s of pauses: more than a hiccup of a busy machine
HOLD_WEIGHT = 0.2  # of the newest lease in the running mean of how long leases last
RETRY_AFTER_S = (1.0, 60.0)  # bounds of what a refused asker is told to wait


class Pool(PoolState):
    """One pool: events and decisions."""

    # Events.

    def ask(self, share: str = "", image: str = "") -> int:
        """A ticket for one member of this image ("" or the pool's own name of it: the pool's own).

        Raises:
            Saturated: there are ``max_pending`` waiters already.
            ResourceError: the pool has members of its own image only.
        """
        waiting = len(self._queue)
        if waiting >= self.spec.max_pending and waiting - self._servable() >= self.spec.max_pending:
            low, high = RETRY_AFTER_S
            raise Saturated(
                f"pool {self.spec.name}: {waiting} waiters, which is all that max_pending "
                f"({self.spec.max_pending}) admits",
                retry_after=min(max(self._mean_hold * (waiting + 1) / self.max, low), high),
                hints=(f"raise max ({self.max}) or max_pending of the pool, or lower the concurrency",),
            )
        self._asked += 1
        self._tickets[self._asked] = self._queue[self._asked] = TicketRecord(self._asked)
        return self._asked

    def withdraw(self, number: int, now: float, *, dirty: bool = False) -> bool:
        """The ticket's holder or waiter is through with it; a dirty member is not to be used again."""
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return False
        self._queue.pop(number, None)
        if ticket.phase is Phase.HELD:
            self._mean_hold += HOLD_WEIGHT * (now - ticket.since - self._mean_hold)
        if ticket.member is not None:
            member = self._members[ticket.member]
            member.holders.discard(number)
            if dirty and member.condemned is None:
                member.condemned = Reason.DIRTY
        return True

    def started(self, member_id: str, now: float) -> bool:
        """The start ended well."""
        member = self._in(member_id, State.STARTING)
        if member is None:
            return False
        member.state = State.FREE
        member.since = member.born = member.probed = now
        return True

    def start_failed(self, member_id: str, reason: str, now: float) -> bool:
        """The start ended badly and left nothing behind."""
        member = self._in(member_id, State.STARTING)
        if member is None:
            return False
        del self._members[member_id]
        self._failed(member, reason, now)
        return True

    def leased(self, number: int, began: float) -> bool:
        """The member's daemon knows the lease, asked for at ``began``: the ticket's holder has it."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.phase is not Phase.GRANTED or ticket.member is None:
            return False
        ticket.phase, ticket.since, ticket.expires = Phase.HELD, began, began + self.spec.lease_ttl_s
        member = self._members[ticket.member]
        member.leases += 1
        self._proved(member)
        return True

    def renewed(self, number: int, began: float) -> bool:
        """The daemon answered a heartbeat that was sent at ``began``. False: there is no such lease."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return False
        ticket.expires = max(ticket.expires, began + self.spec.lease_ttl_s)
        return True

    def clean(self, number: int) -> bool:
        """The holder wants its member, or another, pristine. False: it holds none, or it is shared."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.phase is not Phase.HELD or self.shared:
            return False
        ticket.phase = Phase.CLEANING
        return True

    def reset_done(
        self, member_id: str, clean: bool, now: float, *, why: str = "", memory_mb: float | None = None
    ) -> bool:
        """A reset ended; ``clean`` is the answer of the verification, ``why`` what it found.

        ``memory_mb`` is what the member holds now, where the pool has a ``max_memory_mb``.
        """
        member = self._in(member_id, State.RESETTING)
        if member is None:
            return False
        if clean:
            member.state, member.since, member.probed = State.FREE, now, now
        else:
            member.condemned = Reason.RESET_FAILED
            self._scatter(member, str(Reason.RESET_FAILED), now)
        return True

    def lost(self, member_id: str, reason: str, now: float) -> bool:
        """The member is gone, or is not what it should be."""
        member = self._in(member_id, State.FREE, State.LEASED, State.RESETTING)
        if member is None:
            return False
        member.condemned = Reason.LOST
        self._scatter(member, reason, now)  # before the verdict: who was to get it may be the first waiter
        if member.leases == 0:  # it never worked: as good as a start that failed, and paused like one
            self._failed(member, reason, now)
        return True

    def probed(self, member_id: str, alive: bool, now: float, *, memory_mb: float | None = None) -> bool:
        """A probe was answered; ``memory_mb`` is what the member holds now, if the runner knows."""
        member = self._in(member_id, State.FREE, State.LEASED)
        if member is None:
            return False
        if not alive:
            return self.lost(member_id, "the probe found it gone", now)
        member.probed = now
        self._proved(member)
        return True

    def stopped(self, member_id: str) -> bool:
        """Nothing of the member is left."""
        if self._in(member_id, State.STOPPING) is None:
            return False
        del self._members[member_id]
        return True

    def unquarantine(self, member_id: str) -> bool:
        """Nobody needs to look at the member any more: it is stopped."""
        return self._in(member_id, State.QUARANTINED) is not None

    def demand(self, wanted: Mapping[str, int]) -> None:
        """How many members of each image should be free or coming, soonest need first, until the next call.

        Raises:
            ResourceError: the pool has members of its own image only.
        """

    def resize(self, spec: PoolSpec) -> None:
        """Go on under another specification of the same members.

        Raises:
            ValueError: name, resource, shared or per_image differ; the message names the field.
        """
        self.spec = spec

    def close(self) -> None:
        """From now on everything is stopped and nobody is served."""
        self.closed = True

    # Decisions.

    def decide(self, now: float) -> list[Action]:
        """What is to be done, as of ``now``. The pool takes it as begun."""
        if self.closed:
            return list(self._stop_all())
        rules = (self._expire, self._retire, self._grant, self._start, self._trim, self._probe)
        return [action for rule in rules for action in rule(now)]

    def wake_at(self, now: float) -> float | None:
        """When, after ``now``, ``decide`` may have something to do though nothing happened."""
        if self.closed:
            return None
        times = [self._paused_until()]
        lifetime = self.spec.max_lifetime_s
        for member in self._members.values():
            held = [self._tickets[number] for number in member.holders]
            times += [ticket.expires for ticket in held if ticket.phase is Phase.HELD]
            if member.state is State.FREE:
                times.append(member.since + IDLE_S)
                if lifetime is not None:
                    times.append(member.born + lifetime)
            if self._to_probe(member):
                times.append(member.probed + PROBE_S)
        return min((time for time in times if time > now), default=None)

    # The rules, in the order in which they are applied.

    def _expire(self, now: float) -> Iterator[Action]:
        for member in self._members.values():
            for ticket in [self._tickets[number] for number in member.holders]:
                if ticket.phase is Phase.HELD and ticket.expires <= now:
                    self.withdraw(ticket.number, now)
                    self._news.append(Lost(ticket.number, f"no heartbeat for {self.spec.lease_ttl_s:g} s"))
        news, self._news = self._news, []
        yield from news

    def _retire(self, now: float) -> Iterator[Action]:
        for member in self._members.values():
            if member.state in (State.STARTING, State.STOPPING) or self._in_use(member):
                continue
            if reason := self._retirement(member, now):
                for number in list(member.holders):
                    self._requeue(self._tickets[number])
                yield self._stop(member, reason)
            elif member.state is State.LEASED:
                member.state, member.since = State.RESETTING, now
                self.resets += 1
                yield Reset(member.id)

    def _grant(self, now: float) -> Iterator[Action]:
        own = [m for m in self._members.values() if m.state is State.FREE and m.holders]
        for member in own:
            for number in member.holders:  # reset for its own holder, who is not in the queue
                yield self._hand_over(self._tickets[number], member, now)
        if not self._queue:
            return
        free = [m for m in self._members.values() if self._grantable(m)]
        free.sort(key=lambda m: (m.since, m.id))
        while self._queue and free:
            # The one that came back last goes out first, so that those above the need stay idle and end.
            member = free[-1] if self.shared else free.pop()
            yield self._hand_over(next(iter(self._queue.values())), member, now)

    def _start(self, now: float) -> Iterator[Action]:
        lacking = self._lacking()
        if lacking <= 0 or now < self._paused_until():
            return
        room = self.max - len(self._members)
        if self.start_failing():
            room = min(room, 1 - self.count(State.STARTING))
        caused = {member.cause for member in self._members.values()}
        causes = (number for number in self._queue if number not in caused)
        for _ in range(min(room, lacking)):
            self.starts += 1
            member = MemberRecord(
                f"{self._prefix}-{self.starts}", begun=now, cause=next(causes, None), since=now
            )
            self._members[member.id] = member
            yield Start(member.id)

    def _trim(self, now: float) -> Iterator[Action]:
        starting = [m for m in self._members.values() if m.state is State.STARTING]
        for member in reversed(starting):
            abandoned = member.cause is not None and member.cause not in self._tickets
            if abandoned and self._lacking() < 0:
                yield self._stop(member, Reason.NOT_NEEDED)
        idle = [m for m in self._members.values() if m.state is State.FREE and now >= m.since + IDLE_S]
        for member in sorted(idle, key=lambda m: (m.since, m.id)):
            if self._present() > self.min:
                yield self._stop(member, Reason.IDLE)

    def _probe(self, now: float) -> Iterator[Action]:
        for member in self._members.values():
            if self._to_probe(member) and now >= member.probed + PROBE_S:
                member.probed = now
                yield Probe(member.id)

    def _stop_all(self) -> Iterator[Action]:
        for member in self._members.values():
            if member.state is not State.STOPPING:
                for number in list(member.holders):
                    self._requeue(self._tickets[number])
                yield self._stop(member, Reason.CLOSED)

    def _failed(self, member: MemberRecord, reason: str, now: float) -> None:
        self.failures += 1
        self.last_failure = reason
        if member.begun <= self._failed_at:
            return  # begun before the last failure was known: the same cause, not one more verdict
        self._failed_rounds += 1
        self._failed_at = now
        if self._queue and self._failed_rounds >= PERMANENT_FAILURES and not self._alive():
            first = next(iter(self._queue))
            self.withdraw(first, now)
            self._news.append(Reject(first, reason))

    def _proved(self, member: MemberRecord) -> None:
        # Older members prove nothing: they lived while the last start failed.
        if member.begun > self._failed_at:
            self._failed_rounds = 0

    def _scatter(self, member: MemberRecord, reason: str, now: float) -> None:
        for number in list(member.holders):
            ticket = self._tickets[number]
            if ticket.phase is Phase.HELD:
                self.withdraw(number, now)
                self._news.append(Lost(number, reason))
            else:
                self._requeue(ticket)

    def _requeue(self, ticket: TicketRecord) -> None:
        if ticket.member is not None:
            self._members[ticket.member].holders.discard(ticket.number)
        ticket.phase, ticket.member = Phase.WAITING, None
        self._queue = dict(sorted([*self._queue.items(), (ticket.number, ticket)]))  # where it was

    def _hand_over(self, ticket: TicketRecord, member: MemberRecord, now: float) -> Grant:
        self._queue.pop(ticket.number, None)
        ticket.phase, ticket.member = Phase.GRANTED, member.id
        member.holders.add(ticket.number)
        member.state, member.since = State.LEASED, now
        for start in self._members.values():
            if start.cause == ticket.number:
                start.cause = None  # another member came first; the start is now the pool's own growth
        return Grant(ticket.number, member.id)

    def _stop(self, member: MemberRecord, reason: Reason) -> Stop:
        member.state, member.condemned = State.STOPPING, reason
        return Stop(member.id, reason)
