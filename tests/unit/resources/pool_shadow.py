"""A shadow of a pool: it plays the engine, and knows only what was told and what was decided.

Which members exist, which of them are verified, who holds what, who waits: from these it says what must hold.
It never asks the pool. ``test_pool_machine`` lets hypothesis choose the events; all else about one follows
from a number, since many choices a step would leave time for few runs.
"""

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentfly.resources.actions import (
    Action,
    Grant,
    Lost,
    Probe,
    Quarantine,
    Reject,
    Reset,
    Start,
    State,
    Stop,
)
from agentfly.resources.errors import Saturated
from agentfly.resources.growth import BACKOFF_MAX_S
from agentfly.resources.pool import Pool
from agentfly.resources.records import Roster
from agentfly.resources.spec import ContainerSpec, PoolSpec

SHARES = ("", "train", "verify")
HEAVY, LIGHT = 1000.0, 10.0  # MiB, above and below the bound that some pools have
MOSTLY = (True, True, True, False)
NUMBERS = st.integers(0, 2**16)


class PoolShadow(RuleBasedStateMachine):
    """Events of an exclusive pool of one image; subclasses say what differs."""

    shared = False
    images: tuple[str, ...] = ("",)

    @initialize(number=NUMBERS)
    def begin(self, number):
        self.spec = self.spec_of(Random(number))
        self.pool = Pool(self.spec, unnamed=number % 3 == 1)
        self.now = 0.0
        self.ceiling = self.spec.max
        self.failed_at = float("-inf")
        self.wanted, self.processes = False, 0
        self.starting: set[str] = set()
        self.resetting: set[str] = set()
        self.stopping: set[str] = set()
        self.quarantined: set[str] = set()
        self.alive: set[str] = set()
        self.verified: set[str] = set()
        self.dirty: set[str] = set()
        self.image: dict[str, str] = {}
        self.revision: dict[str, str] = {}
        self.leases: dict[str, int] = {}
        self.asked: dict[int, tuple[str, str]] = {}
        self.waiting: list[int] = []
        self.granted: dict[int, str] = {}
        self.held: dict[int, str] = {}
        self.cleaning: dict[int, str] = {}
        self.settle()

    def spec_of(self, luck: Random) -> PoolSpec:
        most = luck.randint(1, 4)
        some = most > 1 and not self.shared
        return PoolSpec(
            name="p",
            resource=ContainerSpec(pids=luck.choice((8, 8, 9))),
            shared=self.shared,
            per_image=self.images != ("",),
            max_resident_images=luck.choice((None, 1, 2)) if self.images != ("",) else None,
            max=most,
            min=luck.randint(0, min(2, most)),
            buffer=luck.choice((0, 0, 1, 2)),
            max_starting=luck.choice((None, None, 1)),
            starts_per_s=luck.choice((None, None, 0.5)),
            slots=luck.choice((None, 1, 2)) if self.shared else None,
            lease_ttl_s=luck.choice((5.0, 1000.0)),
            max_pending=luck.choice((2, 1024)),
            weights=luck.choice(({}, {"train": 3.0})),
            reserved=luck.choice(({}, {"verify": 1})) if some else {},
            max_reuses=luck.choice((None, 0, 2)),
            max_lifetime_s=luck.choice((None, 50.0)),
            max_memory_mb=luck.choice((None, 100)),
            quarantine=luck.randint(0, min(2, most - 1)),
        )

    # What the engine would do.

    def settle(self) -> None:
        for action in self.pool.decide(self.now):
            self.see(action)
        again = self.pool.decide(self.now)
        assert again == [], f"12: decide settles, but it went on to {again}"
        wake = self.pool.wake_at(self.now)
        assert wake is None or wake > self.now
        self.ceiling = max(self.spec.max, min(self.ceiling, len(self.members())))

    def see(self, action: Action) -> None:
        match action:
            case Start(member, image):
                assert member not in self.members()
                assert len(self.members()) < self.spec.max, "1: nothing is started above max"
                self.starting.add(member)
                self.image[member] = image
                self.revision[member] = self.spec.resource.identity()
                self.leases[member] = 0
            case Grant(ticket, member):
                self.see_grant(ticket, member)
            case Reset(member):
                assert member in self.alive, "only what lives is reset"
                own = member in self.cleaning.values()
                assert own or not self.outdated(member), "16: what is outdated is reset for its holder only"
                assert not self.holders(member), "6: never under a holder"
                self.resetting.add(member)
                self.verified.discard(member)
            case Stop(member, _):
                self.see_gone(member)
                self.stopping.add(member)
            case Quarantine(member, _):
                self.see_gone(member)
                self.quarantined.add(member)
            case Probe(member):
                assert member in self.alive
            case Reject(ticket, _):
                image = self.asked[ticket][1]
                assert ticket == min(t for t in self.waiting if self.asked[t][1] == image), "7: the first"
                self.waiting.remove(ticket)
            case Lost(ticket, _):
                self.held.pop(ticket)

    def see_gone(self, member: str) -> None:
        assert not self.holders(member), "6: never under a holder"
        for where in (self.starting, self.alive, self.resetting, self.verified, self.dirty, self.quarantined):
            where.discard(member)
        self.requeue({t for t, m in self.cleaning.items() if m == member})

    def see_grant(self, ticket: int, member: str) -> None:
        assert member in self.verified, "3: free means verified"
        assert member in self.alive
        assert member not in self.dirty, "6: what was handed back dirty is not used again"
        image_of_waiter = None
        if self.cleaning.get(ticket) == member:
            del self.cleaning[ticket]
        else:
            share, image = self.asked[ticket]
            image_of_waiter = image
            alike = [t for t in self.waiting if self.shared or self.asked[t] == (share, image)]
            assert ticket == min(alike), "2: first come, first served"
            assert self.image[member] == image
            assert self.may_have_one(share), "2: what is reserved is not taken"
            self.waiting.remove(ticket)
        if self.outdated(member) and ticket not in self.granted and image_of_waiter is not None:
            better = [m for m in self.verified - self.dirty if not self.outdated(m)]
            better = better if self.shared else [m for m in better if m in self.free()]
            assert not [m for m in better if self.image[m] == image_of_waiter], "16: the new before the old"
        if self.shared:
            like = [m for m in self.verified - self.dirty if self.outdated(m) == self.outdated(member)]
            fewest = min(len(self.holders(other)) for other in like)
            assert len(self.holders(member)) == fewest, "9: the member with the fewest"
        else:
            assert not self.holders(member), "one holder at a time"
            self.verified.discard(member)
        self.granted[ticket] = member

    # What follows.

    def outdated(self, member: str) -> bool:
        return self.revision[member] != self.spec.resource.identity()

    def members(self) -> set[str]:
        return self.starting | self.alive | self.stopping | self.quarantined

    def holders(self, member: str) -> set[int]:
        return {t for where in (self.granted, self.held) for t, m in where.items() if m == member}

    def holding(self, share: str) -> int:
        return sum(self.asked[t][0] == share for t in [*self.granted, *self.held, *self.cleaning])

    def may_have_one(self, share: str) -> bool:
        """True if the share may be given one more member, were it free."""
        if self.shared:
            return True
        left = self.spec.max - len(self.granted) - len(self.held) - len(self.cleaning)
        owed = {name: max(0, n - self.holding(name)) for name, n in self.spec.reserved.items()}
        return left > 0 and (owed.get(share, 0) > 0 or left > sum(owed.values()))

    def free(self) -> set[str]:
        return {m for m in self.verified if not self.holders(m) and m not in self.cleaning.values()}

    def requeue(self, tickets: set[int]) -> None:
        for ticket in tickets:
            self.granted.pop(ticket, None)
            self.cleaning.pop(ticket, None)
            self.waiting.append(ticket)

    def lose(self, member: str) -> None:
        self.requeue({t for t, m in {**self.granted, **self.cleaning}.items() if m == member})

    def tickets(self) -> list[int]:
        return sorted([*self.waiting, *self.granted, *self.held, *self.cleaning])

    # Events.

    @rule(number=NUMBERS)
    def ask(self, number):
        share, image = Random(number).choice(SHARES), Random(number + 1).choice(self.images)
        try:
            ticket = self.pool.ask(share, image)
        except Saturated:
            assert len(self.waiting) >= self.spec.max_pending, "10: only above max_pending"
            mine = sum(self.asked[t][0] == share for t in self.waiting)
            owed = self.spec.reserved.get(share, 0) - self.holding(share)
            assert owed <= mine, "10: never one for whom a member is reserved"
        else:
            self.waiting.append(ticket)
            self.asked[ticket] = (share, image)
        self.settle()

    @precondition(lambda self: self.tickets())
    @rule(number=NUMBERS)
    def holder_acts(self, number):
        luck = Random(number)
        acts = [self.withdraw, self.withdraw, self.heartbeat, self.clean] if self.held else [self.withdraw]
        luck.choice(acts)(luck)

    @precondition(lambda self: self.starting or self.granted or self.resetting or self.stopping)
    @rule(number=NUMBERS)
    def work_ends(self, number):
        luck = Random(number)
        works = {
            self.start_ends: self.starting,
            self.hand_over_ends: self.granted,
            self.reset_ends: self.resetting,
            self.stop_ends: self.stopping,
        }
        luck.choice([end for end, members in works.items() for _ in members])(luck)

    @precondition(lambda self: self.starting or self.granted or self.resetting or self.stopping)
    @rule(number=NUMBERS)
    def more_work_ends(self, number):
        self.work_ends(number)

    @precondition(lambda self: self.alive or self.quarantined)
    @rule(number=NUMBERS)
    def member_is_seen(self, number):
        luck = Random(number)
        sights = [self.probe_ends, self.probe_ends, self.member_dies] if self.alive else []
        luck.choice([*sights, *[self.look_is_over for _ in self.quarantined]])(luck)

    def withdraw(self, luck: Random) -> None:
        ticket, dirty = luck.choice(self.tickets()), luck.random() < 0.5
        assert self.pool.withdraw(ticket, self.now, dirty=dirty)
        assert not self.pool.withdraw(ticket, self.now)
        for where in (self.granted, self.held, self.cleaning):
            member = where.pop(ticket, None)
            if dirty and member is not None:
                self.dirty.add(member)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        self.settle()

    def start_ends(self, luck: Random) -> None:
        member, well = luck.choice(sorted(self.starting)), luck.choice(MOSTLY)
        self.starting.discard(member)
        if well:
            assert self.pool.started(member, self.now)
            self.alive.add(member)
            self.verified.add(member)
        else:
            self.failed_at = self.now
            assert self.pool.start_failed(member, "broken", self.now)
        self.settle()

    def hand_over_ends(self, luck: Random) -> None:
        ticket, well = luck.choice(sorted(self.granted)), luck.choice(MOSTLY)
        member = self.granted[ticket]
        if well:
            assert self.pool.leased(ticket, self.now)
            self.held[ticket] = self.granted.pop(ticket)
            self.leases[member] += 1
        else:
            self.dies(member)
        self.settle()

    def heartbeat(self, luck: Random) -> None:
        assert self.pool.renewed(luck.choice(sorted(self.held)), self.now)
        self.settle()

    def clean(self, luck: Random) -> None:
        ticket = luck.choice(sorted(self.held))
        assert self.pool.clean(ticket) is not self.shared
        if not self.shared:
            self.cleaning[ticket] = self.held.pop(ticket)
        self.settle()

    def reset_ends(self, luck: Random) -> None:
        member, well = luck.choice(sorted(self.resetting)), luck.random() < 0.5
        memory = luck.choice((None, LIGHT, HEAVY))
        self.resetting.discard(member)
        assert self.pool.reset_done(member, well, self.now, why="a file", memory_mb=memory)
        if not well:
            self.lose(member)
        elif self.spec.max_memory_mb is None or memory is not HEAVY:
            self.verified.add(member)
        self.settle()

    def member_dies(self, luck: Random) -> None:
        self.dies(luck.choice(sorted(self.alive)))
        self.settle()

    def dies(self, member: str) -> None:
        self.failed_at = self.now  # if it never worked, it is as good as a start that failed
        self.verified.discard(member)
        assert self.pool.lost(member, "gone", self.now)
        self.lose(member)

    def probe_ends(self, luck: Random) -> None:
        member, alive = luck.choice(sorted(self.alive)), luck.choice(MOSTLY)
        memory = luck.choice((None, LIGHT, HEAVY))
        counts = self.pool.probed(member, alive, self.now, memory_mb=memory)
        assert counts is (member not in self.resetting), "a probe of what is being reset is old news"
        if counts and not alive:
            self.failed_at = self.now
            self.verified.discard(member)
            self.lose(member)
        self.settle()

    def stop_ends(self, luck: Random) -> None:
        member = luck.choice(sorted(self.stopping))
        assert not self.pool.started(member, self.now), "11: a start that lost against its stop"
        assert self.pool.stopped(member)
        self.stopping.discard(member)
        self.settle()

    def look_is_over(self, luck: Random) -> None:
        member = luck.choice(sorted(self.quarantined))
        assert self.pool.unquarantine(member)
        self.settle()
        assert member in self.stopping

    @rule(number=NUMBERS)
    def another_wish(self, number):
        luck = Random(number)
        if luck.random() < 0.5:
            self.resize(luck)
        else:
            self.demand(luck)
        self.settle()

    def demand(self, luck: Random) -> None:
        self.wanted = True
        self.pool.demand({image: luck.randint(0, 3) for image in luck.sample(self.images, len(self.images))})

    def resize(self, luck: Random) -> None:
        self.spec = self.spec_of(luck)
        self.ceiling = max(self.ceiling, len(self.members()))
        self.pool.change(self.spec)

    @precondition(lambda self: self.members())
    @rule(number=NUMBERS)
    def another_process_comes(self, number):
        """All that the pool knew is gone; the next one is told what lives."""
        luck = Random(number)
        lost = {m for m in self.alive if luck.random() < 0.1}
        living = sorted((self.alive | self.stopping | self.quarantined) - lost)
        free, held = self.free() - self.dirty, dict(self.held)
        if luck.random() < 0.5:
            self.spec = self.spec_of(luck)  # meanwhile somebody wrote another
        self.processes += 1
        self.pool = Pool(self.spec, prefix=f"p{self.processes}", unnamed=number % 3 == 1)
        self.failed_at = self.now
        for kind in (
            self.starting,
            self.resetting,
            self.stopping,
            self.quarantined,
            self.alive,
            self.verified,
        ):
            kind.clear()
        for where in (self.granted, self.held, self.cleaning):
            where.clear()
        self.waiting.clear()
        self.dirty.clear()
        asked, self.asked = self.asked, {}
        owners = {member: ticket for ticket, member in held.items()}
        luck.shuffle(living)
        for member in living:
            self.alive.add(member)
            clean = member in free or (self.shared and member in owners)
            image, revision = self.image[member], self.revision[member]
            told = {"clean": member in free, "leases": self.leases[member], "revision": revision}
            assert self.pool.adopt(member, image, self.now, **told)
            assert not self.pool.adopt(member, image, self.now, **told)
            if clean:
                self.verified.add(member)
            if member in owners:
                share = asked[owners[member]][0]
                ticket = self.pool.resumed(member, share, self.now, 4.0)
                self.held[ticket] = member
                self.asked[ticket] = (share, image)
        self.ceiling = max(self.spec.max, len(self.members()))
        kept = dict(self.held)
        self.settle()
        assert self.held == kept, "no lease that lives is lost"

    @rule()
    def pool_is_removed(self):
        """Everything stops, and the next one begins with nothing."""
        for ticket in self.tickets():
            assert self.pool.withdraw(ticket, self.now)
        for where in (self.granted, self.held, self.cleaning):
            where.clear()
        self.waiting.clear()
        self.pool.close()
        stopped = self.stopping | {a.member for a in self.pool.decide(self.now) if isinstance(a, Stop)}
        assert stopped == self.members(), "no member is left behind"
        assert self.pool.decide(self.now) == []
        assert all(self.pool.stopped(member) for member in stopped)
        assert self.pool.count(*State) == 0
        self.begin(len(self.image))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 12.0, 60.0, 400.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.settle()

    # What always holds.

    @invariant()
    def never_above_max(self):
        assert len(self.members()) <= self.ceiling
        assert len(self.quarantined) <= self.spec.quarantine

    @invariant()
    def nobody_waits_beside_what_is_free(self):
        for share, image in {self.asked[t] for t in self.waiting}:
            if self.may_have_one(share) and self.images == ("",):
                assert not [m for m in self.free() if self.image[m] == image], "2: served at once"

    @invariant()
    def nobody_waits_for_what_could_be_started(self):
        paced = self.spec.max_starting or self.spec.starts_per_s
        if paced or self.now < self.failed_at + BACKOFF_MAX_S or not self.waiting:
            return
        if any(self.may_have_one(self.asked[t][0]) for t in self.waiting):
            back = self.resetting - set(self.cleaning.values())
            coming = self.starting | self.stopping | back
            assert coming or self.free() or len(self.members()) >= self.spec.max, "4: nobody is forgotten"
            assert coming or self.free() or not self.quarantined, "14: no museum holds work up"

    @invariant()
    def images_are_as_many_as_may_stay(self):
        most = self.spec.max_resident_images
        resident = {self.image[m] for m in self.free() if not self.outdated(m)}
        assert most is None or len(resident) <= most, "17: no more images than may stay"

    @invariant()
    def outdated_are_needed_or_held(self):
        assert self.pool.outdated == sum(self.outdated(m) for m in self.members() - self.stopping)
        if not self.spec.min and not self.spec.buffer and self.images == ("",):
            assert self.wanted or not [m for m in self.free() if self.outdated(m)], "16: nobody needs them"

    @invariant()
    def counts_are_those_of_the_shadow(self):
        assert self.pool.queued == len(self.waiting)
        assert self.pool.count(*State) == len(self.members())
        assert set(self.pool.quarantined()) == self.quarantined
        assert self.pool.count(State.STARTING) == len(self.starting)
        assert self.pool.count(State.FREE) == len(self.free()), "3: free means verified"

    @invariant()
    def index_is_what_the_records_say(self):
        roster = self.pool._roster
        again = Roster(self.shared, used=roster.used)
        for member in roster.members.values():
            places, member.places = member.places, ()
            again.file(member)
            assert member.places == places
        assert again == roster
        shares = self.pool._shares
        assert shares.held == sum(len(share.held) for share in shares.shares.values())
        assert list(shares.waiting) == sorted(self.waiting)

    def teardown(self):
        """From here on everything works: everybody is served or told, and closing leaves nothing."""
        if not hasattr(self, "pool"):
            return
        for _ in range(1000):
            if not self.tickets():
                break
            self.go_well()
        assert self.tickets() == [], "a waiter was forgotten"
        self.pool.close()
        self.settle()
        for member in list(self.stopping):
            assert self.pool.stopped(member)
            self.stopping.discard(member)
        assert not self.members()

    def go_well(self) -> None:
        for member in list(self.starting):
            self.starting.discard(member)
            self.pool.started(member, self.now)
            self.alive.add(member)
            self.verified.add(member)
        for member in list(self.resetting):
            self.resetting.discard(member)
            self.pool.reset_done(member, True, self.now)
            self.verified.add(member)
        for member in list(self.stopping):
            self.stopping.discard(member)
            self.pool.stopped(member)
        for ticket in list(self.granted):
            self.pool.leased(ticket, self.now)
            self.held[ticket] = self.granted.pop(ticket)
        for ticket in list(self.held):
            self.pool.withdraw(ticket, self.now)
            del self.held[ticket]
        self.settle()
        if not (self.starting or self.resetting or self.stopping or self.granted):
            self.now += BACKOFF_MAX_S
            self.settle()
