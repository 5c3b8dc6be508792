"""The pool under any order of events: hypothesis plays an engine, and a shadow says what must hold.

The shadow knows only what was told and what was decided: which members exist, which of them are verified, who
holds what, who waits. It never looks into the pool.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentfly.resources.actions import Action, Grant, Lost, Probe, Reject, Reset, Start, State, Stop
from agentfly.resources.errors import Saturated
from agentfly.resources.growth import BACKOFF_MAX_S
from agentfly.resources.pool import Pool
from agentfly.resources.spec import ContainerSpec, PoolSpec


class PoolMachine(RuleBasedStateMachine):
    shared = False

    @initialize(
        maximum=st.integers(1, 4),
        minimum=st.integers(0, 2),
        ttl=st.sampled_from([5.0, 1000.0]),
        reuses=st.sampled_from([None, 0, 2]),
        lifetime=st.sampled_from([None, 50.0]),
        pending=st.sampled_from([2, 1024]),
    )
    def begin(self, maximum, minimum, ttl, reuses, lifetime, pending):
        spec = PoolSpec(
            name="p",
            resource=ContainerSpec(),
            max=maximum,
            min=min(minimum, maximum),
            lease_ttl_s=ttl,
            max_reuses=reuses,
            max_lifetime_s=lifetime,
            max_pending=pending,
            shared=self.shared,
        )
        self.pool = Pool(spec)
        self.max = maximum
        self.pending = pending
        self.now = 0.0
        self.starting: set[str] = set()
        self.resetting: set[str] = set()
        self.stopping: set[str] = set()
        self.alive: set[str] = set()
        self.verified: set[str] = set()
        self.waiting: list[int] = []
        self.granted: dict[int, str] = {}
        self.held: dict[int, str] = {}
        self.cleaning: dict[int, str] = {}
        self.settle()

    # What the engine would do.

    def settle(self) -> None:
        for action in self.pool.decide(self.now):
            self.see(action)
        assert self.pool.decide(self.now) == [], "12: decide settles"
        wake = self.pool.wake_at(self.now)
        assert wake is None or wake > self.now

    def see(self, action: Action) -> None:
        match action:
            case Start(member):
                assert member not in self.starting | self.alive | self.stopping
                self.starting.add(member)
            case Grant(ticket, member):
                self.see_grant(ticket, member)
            case Reset(member):
                assert member in self.alive, "only what lives is reset"
                assert not self.holders(member) - set(self.cleaning), "6: never under a holder"
                self.resetting.add(member)
                self.verified.discard(member)
            case Stop(member, _):
                assert not self.holders(member), "6: never under a holder"
                for where in (self.starting, self.alive, self.resetting, self.verified):
                    where.discard(member)
                self.stopping.add(member)
                self.requeue({t for t, m in self.cleaning.items() if m == member})
            case Probe(member):
                assert member in self.alive
            case Reject(ticket, _):
                assert ticket == min(self.waiting), "7: the first waiter is rejected"
                self.waiting.remove(ticket)
            case Lost(ticket, _):
                self.held.pop(ticket)

    def see_grant(self, ticket: int, member: str) -> None:
        assert member in self.verified, "3: free means verified"
        assert member in self.alive
        if self.cleaning.get(ticket) == member:
            del self.cleaning[ticket]
        else:
            assert ticket == min(self.waiting), "2: first come, first served"
            self.waiting.remove(ticket)
        if not self.shared:
            assert not self.holders(member), "one holder at a time"
            self.verified.discard(member)
        self.granted[ticket] = member

    def holders(self, member: str) -> set[int]:
        return {t for where in (self.granted, self.held) for t, m in where.items() if m == member}

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

    @rule()
    def ask(self):
        try:
            ticket = self.pool.ask()
        except Saturated:
            assert len(self.waiting) >= self.pending, "10: only above max_pending"
        else:
            self.waiting.append(ticket)
        self.settle()

    @precondition(lambda self: self.tickets())
    @rule(data=st.data(), dirty=st.booleans())
    def withdraw(self, data, dirty):
        ticket = data.draw(st.sampled_from(self.tickets()))
        assert self.pool.withdraw(ticket, self.now, dirty=dirty)
        assert not self.pool.withdraw(ticket, self.now)
        for where in (self.granted, self.held, self.cleaning):
            where.pop(ticket, None)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        self.settle()

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def start_ends(self, data, well):
        member = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.discard(member)
        if well:
            assert self.pool.started(member, self.now)
            self.alive.add(member)
            self.verified.add(member)
        else:
            assert self.pool.start_failed(member, "broken", self.now)
        self.settle()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def hand_over_ends(self, data, well):
        ticket = data.draw(st.sampled_from(sorted(self.granted)))
        member = self.granted[ticket]
        if well:
            assert self.pool.leased(ticket, self.now)
            self.held[ticket] = self.granted.pop(ticket)
        else:
            assert self.pool.lost(member, "took no lease", self.now)
            self.lose(member)
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def heartbeat(self, data):
        assert self.pool.renewed(data.draw(st.sampled_from(sorted(self.held))), self.now)
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def clean(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        assert self.pool.clean(ticket) is not self.shared
        if not self.shared:
            self.cleaning[ticket] = self.held.pop(ticket)
        self.settle()

    @precondition(lambda self: self.resetting)
    @rule(data=st.data(), well=st.sampled_from([True, True, False]))
    def reset_ends(self, data, well):
        member = data.draw(st.sampled_from(sorted(self.resetting)))
        self.resetting.discard(member)
        assert self.pool.reset_done(member, well, self.now)
        if well:
            self.verified.add(member)
        else:
            self.lose(member)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def member_dies(self, data):
        member = data.draw(st.sampled_from(sorted(self.alive)))
        assert self.pool.lost(member, "gone", self.now)
        self.lose(member)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), alive=st.booleans())
    def probe_ends(self, data, alive):
        member = data.draw(st.sampled_from(sorted(self.alive)))
        counts = self.pool.probed(member, alive, self.now)
        assert counts is (member not in self.resetting), "a probe of what is being reset is old news"
        if counts and not alive:
            self.lose(member)
        self.settle()

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def stop_ends(self, data):
        member = data.draw(st.sampled_from(sorted(self.stopping)))
        assert not self.pool.started(member, self.now), "11: a start that lost against its stop"
        assert self.pool.stopped(member)
        self.stopping.discard(member)
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 12.0, 60.0, 400.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.settle()

    # What always holds.

    @invariant()
    def never_above_max(self):
        assert len(self.starting | self.alive | self.stopping) <= self.max

    @invariant()
    def nobody_waits_beside_what_is_free(self):
        free = {m for m in self.verified & self.alive if not self.holders(m) or self.shared}
        if self.waiting and not self.shared:
            assert not free - set(self.cleaning.values())

    @invariant()
    def counts_are_those_of_the_shadow(self):
        assert self.pool.queued == len(self.waiting)
        members = self.starting | self.alive | self.stopping
        assert self.pool.count(*State) == len(members)

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
        assert not self.starting | self.alive | self.stopping

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


class SharedPoolMachine(PoolMachine):
    shared = True


@pytest.mark.parametrize("machine", [PoolMachine, SharedPoolMachine])
def test_pool_holds_under_any_order_of_events(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
