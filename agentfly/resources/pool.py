"""The policy of one pool, as a state machine without I/O: events in, one ``decide(now)`` out.

Guarantees:
1. Nothing is started where members in any state together number ``max``. Where there are more, because it
   was lowered or they were adopted, those that nobody holds go.
2. Waiters of a share are served in the order in which they asked, except that one whose image has no member
   is passed by few. One whose member dies before the hand-over, or whose own reset fails, is again where its
   first asking put it. Shares are served by their weights; reserved members are for their share alone.
3. Free means verified: a member becomes free by a start or by a clean reset, in no other way.
4. A withdrawn ticket leaves nothing: no place in the queue, no hold on a member, no start that was begun for
   it and that nobody else needs.
5. A lease ends at its TTL unless it was renewed; its member is reset before anybody else has it.
6. A member is retired after ``max_reuses`` or ``max_lifetime_s``, above ``max_memory_mb``, when it was handed
   back dirty, when it is lost and when a reset does not verify it; never under a holder that still has it.
7. Starts that fail are tried again after a pause that doubles, one at a time while no member of their image
   lives. From ``PERMANENT_FAILURES`` on, each failure with none alive rejects the first waiter for that image
   with the reason. Starts keep to ``max_starting`` and ``starts_per_s``.
8. ``min`` members are kept, and ``buffer`` free ones beside those that are held; others go after ``IDLE_S``
   without a holder.
9. A member of a shared pool has any number of holders, and a new one gets the member with the fewest; another
   is started when all have ``slots``, and stays while the others do. A member is reset when its last holder
   leaves, or, where nobody named the pool, stopped.
10. Above ``max_pending`` waiters, asking fails at once with an estimate of when to ask again, unless a member
    is free or reserved for the asker.
11. News about what is gone or has moved on changes nothing, and says so by returning False.
12. ``decide`` settles: asked again at the same moment, it has nothing to do.
13. A waiter whose image has no member gets one in the place of a free one of the image that was not used
    for longest, those of the announced window last. The window is filled, in its order, with what no waiter
    needs.
14. Up to ``quarantine`` members that a reset did not verify are kept as they are, until a waiter could be
    served in no other way.
15. What a decision costs does not grow with the members and waiters that it is not about.
16. Where the resource has changed, members of the old one are outdated. Starts of them are cut short. Those
    that are held stop when they come back; free ones when nobody needs them any more: what keeps ``min``,
    ``buffer`` and the window goes when its replacement has come, and gives its place to it only where ``max``
    leaves no other, a part of all at a time. Until then they serve whom nothing newer can serve at once.
17. Free members are of at most ``max_resident_images`` images (outdated ones aside): the pool's own where it
    is kept, then the window in its order, then those used last. No waiter waits for it.
18. A member of an earlier process that is adopted counts like any other, also where that makes more than
    ``max``. Its lease goes on for what was left of it; if it is not clean, it is reset before anybody has it.

Not here: the clock, tasks, and who the owner of a ticket is (``engine``).
"""

from collections.abc import Mapping

from agentfly.resources.actions import Action, Phase, Reason, State
from agentfly.resources.errors import ResourceError, Saturated
from agentfly.resources.records import MemberRecord, TicketRecord
from agentfly.resources.rules import PoolRules
from agentfly.resources.spec import ContainerSpec, PoolSpec

RETRY_AFTER_S = (1.0, 60.0)  # bounds of what a refused asker is told to wait
FIXED_FIELDS = ("name", "shared", "per_image")


class Pool(PoolRules):
    """One pool: events and decisions."""

    # Events.

    def ask(self, share: str = "", image: str = "") -> int:
        """A ticket for one member of this image ("" or the pool's own name of it: the pool's own).

        Raises:
            Saturated: there are ``max_pending`` waiters already.
            ResourceError: the pool has members of its own image only.
        """
        image = self._image(image)
        if not self._admits(share, image):
            waiting, (low, high) = self.queued, RETRY_AFTER_S
            raise Saturated(
                f"pool {self.spec.name}: {waiting} waiters, which is all that max_pending "
                f"({self.spec.max_pending}) admits",
                retry_after=min(max(self._mean_hold * (waiting + 1) / self.max, low), high),
                hints=(f"raise max ({self.max}) or max_pending of the pool, or lower the concurrency",),
            )
        self._asked += 1
        ticket = self._tickets[self._asked] = TicketRecord(self._asked, share, image)
        self._shares.enter(ticket)
        return self._asked

    def withdraw(self, number: int, now: float, *, dirty: bool = False) -> bool:
        """The ticket's holder or waiter is through with it; a dirty member is not to be used again."""
        return self._end(number, now, dirty=dirty)

    def started(self, member_id: str, now: float) -> bool:
        """The start ended well."""
        member = self._roster.get(member_id, State.STARTING)
        if member is None:
            return False
        self._start_over(member)
        member.state = State.FREE
        member.since = member.born = member.probed = now
        self._file(member)
        return True

    def start_failed(self, member_id: str, reason: str, now: float, hints: tuple[str, ...] = ()) -> bool:
        """The start ended badly and left nothing behind; ``hints`` are remedies."""
        member = self._roster.get(member_id, State.STARTING)
        if member is None:
            return False
        self._start_over(member)
        self._roster.remove(member)
        self._failed(member, reason, now, hints)
        return True

    def leased(self, number: int, began: float) -> bool:
        """The member's daemon knows the lease, asked for at ``began``: the ticket's holder has it."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.phase is not Phase.GRANTED or ticket.member is None:
            return False
        ticket.phase, ticket.since = Phase.HELD, began
        self._expires(ticket, began + self.spec.lease_ttl_s)
        member = self._roster.members[ticket.member]
        member.leases += 1
        self._growth.proved(member.image, member.begun)
        return True

    def renewed(self, number: int, began: float) -> bool:
        """The daemon answered a heartbeat that was sent at ``began``. False: there is no such lease."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return False
        self._expires(ticket, max(ticket.expires, began + self.spec.lease_ttl_s))
        return True

    def clean(self, number: int) -> bool:
        """The holder wants its member, or another, pristine. False: it holds none, or it is shared."""
        ticket = self._tickets.get(number)
        if ticket is None or ticket.phase is not Phase.HELD or ticket.member is None or self.shared:
            return False
        ticket.phase = Phase.CLEANING
        self._expires(ticket, ticket.expires)
        self._changed(self._roster.members[ticket.member])
        return True

    def reset_done(
        self, member_id: str, clean: bool, now: float, *, why: str = "", memory_mb: float | None = None
    ) -> bool:
        """A reset ended; ``clean`` is the answer of the verification, ``why`` what it found.

        ``memory_mb`` is what the member holds now, where the pool has a ``max_memory_mb``.
        """
        member = self._roster.get(member_id, State.RESETTING)
        if member is None:
            return False
        if clean:
            member.state, member.since, member.probed = State.FREE, now, now
            self._weigh(member, memory_mb)
        else:
            member.condemned, member.why = Reason.RESET_FAILED, why
            self._scatter(member, str(Reason.RESET_FAILED), now)
            self._changed(member)
        return True

    def lost(self, member_id: str, reason: str, now: float) -> bool:
        """The member is gone, or is not what it should be."""
        member = self._roster.get(member_id, State.FREE, State.LEASED, State.RESETTING)
        if member is None:
            return False
        member.condemned = Reason.LOST
        self._scatter(member, reason, now)  # before the verdict: who was to get it may be the first waiter
        self._changed(member)
        if member.leases == 0:  # it never worked: as good as a start that failed, and paused like one
            self._failed(member, reason, now)
        return True

    def probed(self, member_id: str, alive: bool, now: float, *, memory_mb: float | None = None) -> bool:
        """A probe was answered; ``memory_mb`` is what the member holds now, if the runner knows."""
        member = self._roster.get(member_id, State.FREE, State.LEASED)
        if member is None:
            return False
        if not alive:
            return self.lost(member_id, "the probe found it gone", now)
        member.probed = now
        self._growth.proved(member.image, member.begun)
        self._weigh(member, memory_mb)
        return True

    def stopped(self, member_id: str) -> bool:
        """Nothing of the member is left."""
        member = self._roster.get(member_id, State.STOPPING)
        if member is None:
            return False
        self._roster.remove(member)
        return True

    def unquarantine(self, member_id: str) -> bool:
        """Nobody needs to look at the member any more: it is stopped. False: it is not in quarantine."""
        if self._roster.get(member_id, State.QUARANTINED) is None:
            return False
        self._released[member_id] = None
        return True

    def demand(self, wanted: Mapping[str, int]) -> None:
        """How many members of each image should be free or coming, soonest need first, until the next call.

        Each one that is granted fulfils one of them.

        Raises:
            ResourceError: the pool has members of its own image only.
        """
        counts: dict[str, int] = {}
        for name, count in wanted.items():
            image = self._image(name)
            counts[image] = counts.get(image, 0) + count
        self._wanted = counts

    def change(self, spec: PoolSpec) -> None:
        """Go on under another specification. If its resource is another, all members there are are outdated.

        Raises:
            ValueError: name, kind, shared or per_image differ; the message names the field.
        """
        for name in FIXED_FIELDS:
            if getattr(spec, name) != getattr(self.spec, name):
                raise ValueError(f"{name}: of pool {self.spec.name} cannot change while it runs")
        if spec.resource.kind != self.spec.resource.kind:
            raise ValueError(f"kind: of pool {self.spec.name} cannot change while it runs")
        self.spec, before = spec, self.revision
        self.revision = spec.resource.identity()
        if self.revision != before:
            self._growth.forget()  # what failed was another spec
        self._shares.weights, self._shares.reserved = spec.weights, spec.reserved
        for member in self._roster.members.values():
            member.outdated = member.revision != self.revision
            self._changed(member)

    def adopt(
        self, member_id: str, image: str, now: float, *, clean: bool, leases: int, revision: str
    ) -> bool:
        """A member of an earlier process lives on here: free if ``clean``, else to be reset or ``resumed``.

        ``leases`` is how many it had, ``revision`` the identity of its spec with the pool's own image.
        False: there is a member of this name.
        """
        if member_id in self._roster.members:
            return False
        state = State.FREE if clean else State.LEASED
        member = MemberRecord(member_id, image, begun=now, cause=None, state=state, revision=revision)
        member.outdated = revision != self.revision
        member.since = member.born = member.probed = now
        member.leases = leases
        self._changed(member)
        return True

    def expect(self, member_id: str, image: str, now: float, *, revision: str) -> bool:
        """A member of an earlier process starts, or is silent: it counts as starting until it is ``known``.

        False: there is a member of this name.
        """
        if member_id in self._roster.members:
            return False
        # It is nobody's to cut short, whatever its spec: somebody may hold it.
        self._file(MemberRecord(member_id, image, begun=now, cause=None, since=now, revision=revision))
        return True

    def known(self, member_id: str) -> bool:
        """A member that was expected says how it is: it is to be adopted as that."""
        member = self._roster.get(member_id, State.STARTING)
        if member is None:
            return False
        self._start_over(member)
        self._roster.remove(member)
        return True

    def takes_back(self, member_id: str) -> bool:
        """Whether a holder from before may have this member on: it lives, and nobody else has it alone."""
        member = self._roster.get(member_id, State.FREE, State.LEASED)
        return member is not None and member.condemned is None and (self.shared or not member.holders)

    def resumed(self, member_id: str, share: str, now: float, ttl_left_s: float) -> int:
        """An adopted member has a holder since before, whose lease ends in ``ttl_left_s``: its ticket."""
        member = self._roster.members[member_id]
        member.state = State.LEASED
        self._asked += 1
        ticket = self._tickets[self._asked] = TicketRecord(self._asked, share, member.image)
        self._shares.enter(ticket)
        self._shares.hold(ticket, now)
        ticket.phase, ticket.member, ticket.since = Phase.HELD, member_id, now
        member.holders.add(ticket.number)
        self._expires(ticket, now + ttl_left_s)
        self._file(member)
        return ticket.number

    def close(self) -> None:
        """From now on everything is stopped and nobody is served."""
        self.closed = True

    # Decisions.

    def decide(self, now: float) -> list[Action]:
        """What is to be done, as of ``now``. The pool takes it as begun."""
        actions = list(self._stop_all(now) if self.closed else self._act(now))
        if self.count(State.FREE) >= self.spec.buffer:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        return actions

    def wake_at(self, now: float) -> float | None:
        """When, after ``now``, ``decide`` may have something to do though nothing happened."""
        if self.closed:
            return None
        times = self._growth.wakes(self.spec.starts_per_s)
        for alarms in (self._ends, self._lives, self._idles, self._probes):
            if (time := alarms.next()) is not None:
                times.append(time)
        return min((time for time in times if time > now), default=None)

    def _weigh(self, member: MemberRecord, memory_mb: float | None) -> None:
        most = self.spec.max_memory_mb
        if memory_mb is not None and most is not None and memory_mb > most and not self._in_use(member):
            member.condemned = Reason.MAX_MEMORY
            self._changed(member)
        else:
            self._file(member)

    def _image(self, image: str) -> str:
        own = self.spec.resource.image if isinstance(self.spec.resource, ContainerSpec) else ""
        if image in ("", own):
            return ""
        if not self.spec.per_image:
            raise ResourceError(
                f"pool {self.spec.name}: has no members of image {image}",
                hints=("leave the image out", "or set images: {policy: PerAcquire}, if it has containers"),
            )
        return image
