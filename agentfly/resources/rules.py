"""What a pool does, rule by rule: from the records of a moment to actions, which it takes as begun.

Guarantees: those of ``pool``, whose numbers the comments give.

Not here: the events that change the records (``pool``), and the order of turns (``shares``).
"""

from collections.abc import Generator, Iterator

from agentfly.resources.actions import (
    Action,
    Grant,
    Lost,
    Phase,
    Probe,
    Quarantine,
    Reason,
    Reject,
    Reset,
    Start,
    State,
    Stop,
)
from agentfly.resources.growth import PERMANENT_FAILURES
from agentfly.resources.outlook import Outlook
from agentfly.resources.pool_state import IDLE_S, PoolState
from agentfly.resources.records import MemberRecord, TicketRecord
from agentfly.resources.shares import Order

ROLL_FRACTION = 0.25  # of max: a quarter of a full pool is away at a time while it changes its spec
HOLD_WEIGHT = 0.2  # of the newest lease in the running mean of how long leases last


class PoolRules(PoolState):
    """The decisions of a pool."""

    def _act(self, now: float) -> Iterator[Action]:
        yield from self._expire(now)
        yield from self._retire(now)
        yield from self._shrink(now)
        if self.spec.per_image:
            # What is stopped or granted for one image changes whose turn it is for another.
            while actions := list(self._balance(now)):
                yield from actions
        else:
            yield from self._balance(now)
        yield from self._probe(now)

    def _balance(self, now: float) -> Iterator[Action]:
        serve = self._serve_shared if self.shared else self._serve
        outlook = yield from serve(now)
        outlook.ahead = self._ahead(outlook)
        yield from self._give_up(outlook)
        yield from self._roll(outlook)
        yield from self._make_room(outlook, now)
        yield from self._start(outlook, now)
        yield from self._trim(outlook, now)
        yield from self._clear_images(outlook)

    def _expire(self, now: float) -> Iterator[Action]:
        for number in self._ends.due(now):
            self._end(number, now)
            self._news.append(Lost(number, f"no heartbeat for {self.spec.lease_ttl_s:g} s"))
        news, self._news = self._news, []
        yield from news

    def _retire(self, now: float) -> Iterator[Action]:
        self._touched.update(dict.fromkeys(self._lives.due(now)))
        touched, self._touched = self._touched, {}
        for member_id in touched:
            living = (State.STARTING, State.FREE, State.LEASED, State.RESETTING)
            member = self._roster.get(member_id, *living)
            if member is None or self._in_use(member):
                continue
            if reason := self._retirement(member, now):
                for number in list(member.holders):
                    self._requeue(self._tickets[number], now)
                if reason is Reason.RESET_FAILED and self.spec.quarantine:
                    yield self._quarantine(member, now)
                else:
                    yield self._stop(member, reason)
            elif member.state is State.LEASED:
                member.state, member.since = State.RESETTING, now
                self._file(member)
                self.resets += 1
                yield Reset(member.id)

    def _quarantine(self, member: MemberRecord, now: float) -> Quarantine:
        member.state, member.since = State.QUARANTINED, now
        self._file(member)
        return Quarantine(member.id, member.why)

    def _shrink(self, now: float) -> Iterator[Action]:
        """What is above the bounds of a spec that has changed, or of the quarantine."""
        released, self._released = self._released, {}
        kept = [m for m in self._roster.state(State.QUARANTINED).values() if m.id not in released]
        kept = kept[max(0, len(kept) - self.spec.quarantine) :]
        for member in list(self._roster.state(State.QUARANTINED).values()):
            if member not in kept:
                yield self._stop(member, Reason.RESET_FAILED)
        if self._excess() <= 0:
            return
        free = [m for m in self._roster.state(State.FREE).values() if not m.holders]
        free.sort(key=lambda member: not member.outdated)
        starting = list(self._roster.state(State.STARTING).values())
        for member in [*free, *reversed(starting), *kept][: self._excess()]:
            yield self._stop(member, Reason.RESIZED)

    # Waiters.

    def _serve(self, now: float) -> Generator[Action, None, Outlook]:
        for member in self._roster.own():
            for number in list(member.holders):  # reset for its own holder, who is not in the queue
                yield self._hand_over(self._tickets[number], member, now)
        outlook = self._outlook()
        if self._shares.waiting:
            self._shares.refresh(now, self._lease_s())
            served = self._serve_images(outlook, now) if self.spec.per_image else self._serve_all(outlook)
            for ticket in served:
                # The one that came back last goes out first, so that those above the need stay idle and end.
                member = self._roster.best_free(ticket.image)
                yield self._hand_over(ticket, member, now)
        return outlook

    def _outlook(self) -> Outlook:
        stopping = self.count(State.STOPPING)
        return Outlook(self._roster.coming(), max(0, self.max - len(self._roster) + stopping))

    def _order(self) -> Order:
        return Order(self._shares, self.max, self._lease_s())

    def _serve_all(self, outlook: Outlook) -> list[TicketRecord]:
        """Those whose turn it is and who are served now, where all members are of one image."""
        free, served = self._roster.grantable(""), []
        if free:
            order = self._order()
            for ticket in order:
                order.take(ticket)
                served.append(ticket)
                if len(served) == free:
                    break
        missing = outlook.provide("", self._shares.eligible(self.max) - len(served))
        outlook.unmet += [""] * missing
        return served

    def _serve_images(self, outlook: Outlook, now: float) -> list[TicketRecord]:
        """As ``_serve_all``, where each waiter needs a member of its image."""
        images = {*self._roster.free_images(), *self._roster.old_images()}
        free = {image: self._roster.grantable(image) for image in images}
        hopes = sum(free.values()) + sum(outlook.coming.values()) + outlook.places
        museum = self.count(State.QUARANTINED)
        may_start = self._permits(now) > 0
        served: list[TicketRecord] = []
        order = self._order()
        for ticket in order:
            image = ticket.image
            if free.get(image, 0) > 0:
                free[image] -= 1
                served.append(ticket)
            elif not outlook.coming.get(image) and self._startable(image, now, outlook) <= 0:
                order.pass_over(ticket, waits=False)  # whose image is broken holds nobody up
                continue
            elif outlook.provide(image):
                outlook.unmet.append(image)
                order.pass_over(ticket, waits=may_start)  # else there is nothing that others could wait for
                if not hopes and len(outlook.unmet) >= museum:
                    break
                continue
            order.take(ticket)
            hopes -= 1
        return served

    def _serve_shared(self, now: float) -> Generator[Action, None, Outlook]:
        for ticket in list(self._shares.waiting.values()):
            best = self._roster.least_loaded()
            member = best[1] if best is not None else self._stopgap()
            if member is None:
                break
            yield self._hand_over(ticket, member, now)
        outlook = self._outlook()
        waiting, living, slots = len(self._shares.waiting), self._roster.living(), self.spec.slots
        best = self._roster.least_loaded()
        if slots is not None and (waiting or (best is not None and best[0] >= slots)):
            holders = waiting + self._shares.held
            missing = outlook.provide("", max(0, holders // slots + 1 - living))
        elif waiting or (self._shares.held and not living and self._roster.least_loaded_old()):
            missing = outlook.provide("", 1)
        else:
            missing = 0
        outlook.unmet += [""] * min(missing, waiting)
        return outlook

    # Members.

    def _give_up(self, outlook: Outlook) -> Iterator[Action]:
        """Stop the starts that were begun for waiters who left, as far as nobody else needs them."""
        for member_id in list(reversed(self._abandoned)):
            member = self._roster.members[member_id]
            if self._spare(member.image, outlook) <= 0:
                continue
            if self._lasting() <= self.min:
                self._start_over(member)  # it is one of those that are kept without anybody asking
                continue
            outlook.coming[member.image] -= 1
            outlook.places += 1
            yield self._stop(member, Reason.NOT_NEEDED)

    def _roll(self, outlook: Outlook) -> Iterator[Action]:
        """Stop free members of an older spec, as far as what is wanted has come without them."""
        if not (left := self._roster.outdated()):
            return
        left -= max(0, self.min - self._lasting() + self.count(State.STARTING))
        for image in self._roster.old_images():
            old = list(self._roster.old(image).values())
            wanted = max(0, outlook.ahead.get(image, 0) - len(self._roster.free(image)))
            for member in old[: max(0, min(len(old) - wanted, left))]:
                left -= 1
                outlook.places += 1
                yield self._stop(member, Reason.OUTDATED)

    def _in_the_way(self, outlook: Outlook) -> MemberRecord | None:
        """A free member of an older spec whose place one of the new may have.

        Where max leaves room beside what is wanted, the new ones come first, and one is away only if nothing
        else moves. Else it is a part of all at a time.
        """
        held = self.count(State.LEASED, State.RESETTING)
        full = max(self.min, held + sum(outlook.ahead.values())) >= self.max
        most = max(1, int(self.max * ROLL_FRACTION)) if full else 1
        moving = self.count(State.STOPPING, State.STARTING) + len(outlook.starts)
        return self._outdated() if moving < most else None

    def _outdated(self) -> MemberRecord | None:
        for image in self._roster.old_images():
            return next(iter(self._roster.old(image).values()))
        return None

    def _make_room(self, outlook: Outlook, now: float) -> Iterator[Action]:
        """Stop what stands in the way of waiters, and see to what comes after them."""
        permits = self._permits(now) - len(outlook.starts)
        for image in outlook.unmet:
            if permits > 0 and self._startable(image, now) > 0:
                victim = self._outdated() or self._surplus(outlook) or self._inmate() or self._least_needed()
                if victim is None:
                    break
                permits -= 1
                yield self._stop(victim, victim.condemned or Reason.EVICTED)
        for image, target in outlook.ahead.items():
            lacking = target - len(self._roster.free(image)) - outlook.coming.get(image, 0)
            lacking = min(lacking, self._startable(image, now, outlook))
            begun = outlook.begin(image, lacking)
            permits -= begun
            for _ in range(lacking - begun):
                victim = (self._in_the_way(outlook) or self._surplus(outlook)) if permits > 0 else None
                if victim is None:
                    break
                permits -= 1
                yield self._stop(victim, Reason.OUTDATED if victim.outdated else Reason.EVICTED)
        # Last, since what is started for others counts too.
        lacking = self.min - self._lasting() - len(outlook.starts)
        lacking = min(lacking, self._startable("", now, outlook))
        begun = outlook.begin("", lacking)
        permits -= begun
        while begun < lacking and permits > 0 and (victim := self._in_the_way(outlook)) is not None:
            begun, permits = begun + 1, permits - 1
            yield self._stop(victim, Reason.OUTDATED)

    def _ahead(self, outlook: Outlook) -> dict[str, int]:
        """The buffer and the announced window, in its order, as far as there is room."""
        if not self._wanted and not self.spec.buffer:
            return {}
        room = outlook.places + self.count(State.FREE) + sum(outlook.coming.values())
        wanted = {"": self.spec.buffer} | self._wanted
        wanted[""] = max(self.spec.buffer, wanted[""])
        images = self.spec.max_resident_images or len(wanted)
        ahead: dict[str, int] = {}
        for image, count in wanted.items():
            images -= bool(count) if image else self._keeps_own()
            if room <= 0 or images < 0:
                break
            ahead[image] = min(count, room)
            room -= ahead[image]
        return ahead

    def _keeps_own(self) -> bool:
        """True if members of the pool's own image are wanted without anybody asking."""
        return self.min > 0 or self.spec.buffer > 0 or self._wanted.get("", 0) > 0

    def _spare(self, image: str, outlook: Outlook) -> int:
        """How many of an image are free or coming and wanted by nobody."""
        return len(self._roster.free(image)) + outlook.coming.get(image, 0) - outlook.ahead.get(image, 0)

    def _surplus(self, outlook: Outlook) -> MemberRecord | None:
        """A free member that nobody wants, of the image that was not used for longest."""
        images = [image for image in self._roster.free_images() if self._spare(image, outlook) > 0]
        if not images:
            return None
        oldest = min(images, key=lambda image: (self._roster.used.get(image, 0.0), image))
        return next(iter(self._roster.free(oldest).values()))

    def _inmate(self) -> MemberRecord | None:
        """The member that is longest in quarantine."""
        return next(iter(self._roster.state(State.QUARANTINED).values()), None)

    def _least_needed(self) -> MemberRecord | None:
        """A free member that is wanted, but later than any other."""
        for image in reversed(["", *self._wanted]):
            if free := self._roster.free(image):
                return next(iter(free.values()))
        return None

    def _permits(self, now: float) -> int:
        """How many starts may begin now."""
        if now < self._growth.next_at(self.spec.starts_per_s):
            return 0
        most = self.max if self.spec.max_starting is None else self.spec.max_starting
        return most - self.count(State.STARTING)

    def _startable(self, image: str, now: float, outlook: Outlook | None = None) -> int:
        """How many starts of this image may begin beside those planned: any number unless they fail.

        Then it is one at a time, after a pause, while no member of the image lives.
        """
        if image not in self._growth.failures:
            return self.max
        if now < self._growth.paused_until(image):
            return 0
        if self._alive(image):
            return self.max
        planned = [*outlook.starts, *outlook.unmet].count(image) if outlook else 0
        return 1 - planned - sum(m.state is State.STARTING for m in self._roster.of_image(image).values())

    def _start(self, outlook: Outlook, now: float) -> Iterator[Action]:
        causes: dict[str, list[int]] = {}
        if outlook.starts and len(self._roster) < self.max and self._permits(now) > 0:
            for ticket in reversed(self._shares.waiting.values()):
                if ticket.start is None:
                    causes.setdefault(ticket.image, []).append(ticket.number)
        for image in outlook.starts:
            if len(self._roster) >= self.max or self._permits(now) <= 0:
                return
            if self._startable(image, now) > 0:
                waiters = causes.get(image)
                yield self._begin(image, waiters.pop() if waiters else None, now)

    def _trim(self, outlook: Outlook, now: float) -> Iterator[Action]:
        self._idles.due(now)
        for member in list(self._roster.state(State.FREE).values()):
            if now < member.since + IDLE_S or self._lasting() <= self.min:
                break
            if not member.outdated and self._spare(member.image, outlook) > 0 and not self._is_last_room():
                yield self._stop(member, Reason.IDLE)

    def _clear_images(self, outlook: Outlook) -> Iterator[Action]:
        """Stop the free members of images above ``max_resident_images``: announced ones last, then by use."""
        most = self.spec.max_resident_images
        resident = [] if most is None else self._roster.free_images()
        if most is None or len(resident) <= most:
            return
        own = [""] if self._keeps_own() else []
        announced = dict.fromkeys([*own, *(image for image, count in outlook.ahead.items() if count)])
        by_use = sorted(resident, key=lambda image: (-self._roster.used.get(image, 0.0), image))
        kept = [image for image in dict.fromkeys([*announced, *by_use]) if image in resident][:most]
        for image in resident:
            for member in list(self._roster.free(image).values()) if image not in kept else ():
                yield self._stop(member, Reason.EVICTED)

    def _is_last_room(self) -> bool:
        """True where another member would be started at once for a free one of a shared pool that went."""
        slots = self.spec.slots
        if not self.shared or slots is None or not self._shares.held:
            return False
        return self._roster.with_room(slots) <= 1

    def _probe(self, now: float) -> Iterator[Action]:
        for member_id in self._probes.due(now):
            member = self._roster.members[member_id]
            member.probed = now
            self._file(member)
            yield Probe(member_id)

    def _stop_all(self, now: float) -> Iterator[Action]:
        for member in list(self._roster.members.values()):
            if member.state is not State.STOPPING:
                for number in list(member.holders):
                    self._requeue(self._tickets[number], now)
                yield self._stop(member, Reason.CLOSED)

    # Changes that several rules and events have in common.

    def _begin(self, image: str, cause: int | None, now: float) -> Start:
        self.starts += 1
        name = f"{self._prefix}-{self.starts}"
        member = MemberRecord(name, image, begun=now, cause=cause, since=now, revision=self.revision)
        if cause is not None:
            self._tickets[cause].start = member.id
        self._growth.begin(now, self.spec.starts_per_s)
        self._file(member)
        return Start(member.id, image)

    def _stop(self, member: MemberRecord, reason: Reason) -> Stop:
        self._start_over(member)
        member.state, member.condemned = State.STOPPING, reason
        self._file(member)
        return Stop(member.id, reason)

    def _start_over(self, member: MemberRecord) -> None:
        """The start is nobody's any more: it has ended, however it did, or goes on for the pool itself."""
        self._abandoned.pop(member.id, None)
        ticket = None if member.cause is None else self._tickets.get(member.cause)
        if ticket is not None and ticket.start == member.id:
            ticket.start = None
        member.cause = None

    def _hand_over(self, ticket: TicketRecord, member: MemberRecord, now: float) -> Grant:
        if ticket.phase is Phase.WAITING:
            self._shares.hold(ticket, now)
            if self._wanted.get(ticket.image):
                self._wanted[ticket.image] -= 1  # what was announced has come
        if ticket.start is not None:  # another member came first; the start is now the pool's own growth
            self._roster.members[ticket.start].cause = None
            ticket.start = None
        ticket.phase, ticket.member = Phase.GRANTED, member.id
        member.holders.add(ticket.number)
        member.state, member.since = State.LEASED, now
        self._roster.used[member.image] = now
        self._file(member)
        return Grant(ticket.number, member.id)

    def _end(self, number: int, now: float, *, dirty: bool = False) -> bool:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            return False
        self._shares.leave(ticket, now)
        if self.shared:
            self._shares.forget(ticket.share)
        if ticket.phase is Phase.HELD:
            self._mean_hold += HOLD_WEIGHT * (now - ticket.since - self._mean_hold)
        if ticket.start is not None:
            self._abandoned[ticket.start] = None
        self._let_go(ticket, now, dirty=dirty)
        return True

    def _requeue(self, ticket: TicketRecord, now: float) -> None:
        self._let_go(ticket, now)
        ticket.phase, ticket.member = Phase.WAITING, None
        self._shares.wait_again(ticket, now)  # where it was

    def _let_go(self, ticket: TicketRecord, now: float, *, dirty: bool = False) -> None:
        self._ends.set(ticket.number, None)
        if ticket.member is not None:
            member = self._roster.members[ticket.member]
            member.holders.discard(ticket.number)
            if dirty and member.condemned is None:
                member.condemned = Reason.DIRTY
            self._roster.used[member.image] = now
            self._changed(member)

    def _scatter(self, member: MemberRecord, reason: str, now: float) -> None:
        for number in list(member.holders):
            ticket = self._tickets[number]
            if ticket.phase is Phase.HELD:
                self._end(number, now)
                self._news.append(Lost(number, reason))
            else:
                self._requeue(ticket, now)

    def _changed(self, member: MemberRecord) -> None:
        """The member may have to be reset or retired."""
        self._touched[member.id] = None
        self._file(member)

    def _failed(self, member: MemberRecord, reason: str, now: float, hints: tuple[str, ...] = ()) -> None:
        self.failures += 1
        self.last_failure = reason
        rounds = self._growth.failed(member.image, member.begun, now, reason, hints)
        if rounds is None or rounds < PERMANENT_FAILURES or self._alive(member.image):
            return
        waiting = (t.number for t in self._shares.waiting.values() if t.image == member.image)
        if (first := next(waiting, None)) is not None:
            self._end(first, now)
            self._news.append(Reject(first, reason, hints))
