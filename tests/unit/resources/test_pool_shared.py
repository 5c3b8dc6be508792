"""Shared pools: guarantee 9 of pool.py, and what of the others is different with many holders."""

import pytest

from agentfly.resources.actions import Grant, Lost, Probe, Reason, Reset, Start, State, Stop
from agentfly.resources.pool_state import IDLE_S, PROBE_S
from tests.unit.resources.pool_clock import ASK, Case, Clock, Step, check, held

SHARED: dict[str, Case] = {
    "many waiters start one member": ({"max": 4}, [ASK, ASK, ASK], []),
    "all waiters get the one member": (
        {},
        [ASK, ASK, ("started", "p-1")],
        [Grant(1, "p-1"), Grant(2, "p-1")],
    ),
    "one more asks and has it at once": ({}, [*held(), ASK], [Grant(2, "p-1")]),
    "one of two leaves and nothing happens": (
        {},
        [*held(), ASK, ("leased", 2), ("withdraw", 1)],
        [],
    ),
    "the last one leaves and it is reset, since a start may take minutes": (
        {},
        [*held(), ASK, ("leased", 2), ("withdraw", 1), ("withdraw", 2)],
        [Reset("p-1")],
    ),
    "it ends when nobody came for a while": (
        {},
        [*held(), ("withdraw", 1), ("reset_done", "p-1", True), IDLE_S],
        [Stop("p-1", Reason.IDLE)],
    ),
    "where nobody named the pool, it is stopped at once": (
        {"unnamed": True},
        [*held(), ASK, ("leased", 2), ("withdraw", 1), ("withdraw", 2)],
        [Stop("p-1", Reason.IDLE)],
    ),
    "one who hands it back dirty does not end it for the others": (
        {},
        [*held(), ASK, ("leased", 2), ("dirty", 1)],
        [],
    ),
    "but nobody new gets it": ({}, [*held(), ASK, ("leased", 2), ("dirty", 1), ASK], []),
    "and it goes with the last of them": (
        {},
        [*held(), ASK, ("leased", 2), ("dirty", 1), ("withdraw", 2)],
        [Stop("p-1", Reason.DIRTY)],
    ),
    "when it dies all holders are told": (
        {},
        [*held(), ASK, ("leased", 2), ("probed", "p-1", False)],
        [Lost(1, "the probe found it gone"), Lost(2, "the probe found it gone"), Stop("p-1", Reason.LOST)],
    ),
    "it is probed while it is leased": ({"lease_ttl_s": 60}, [*held(), PROBE_S], [Probe("p-1")]),
    "it is not reset for one of its holders": ({}, [*held(), ("clean", 1)], []),
}


@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED.keys())
def test_shared_pool(case):
    check(case, shared=True)


def test_shares_that_left_are_not_kept():
    clock = Clock(shared=True, min=1, max=1)
    clock.play([("started", "p-1")])
    for number in range(1, 100):
        clock.play([("ask", f"job-{number}"), ("leased", number), ("withdraw", number)])
        clock.play([("reset_done", "p-1", True)])
    assert not clock.pool._shares.shares


def load(count: int, first: int = 1) -> list[Step]:
    """So many holders more."""
    return [step for number in range(first, first + count) for step in (ASK, ("leased", number))]


SEVERAL: dict[str, Case] = {
    "another member is started when all have their slots": (
        {"max": 2, "slots": 2},
        [ASK, ("started", "p-1"), ("leased", 1), ASK],
        [Grant(2, "p-1"), Start("p-2")],
    ),
    "not before": ({"max": 2, "slots": 2}, [ASK, ("started", "p-1"), ("leased", 1)], []),
    "one that comes meanwhile is served at once by what there is": (
        {"max": 2, "slots": 1},
        [ASK, ("started", "p-1"), ASK],
        [Grant(2, "p-1")],
    ),
    "without slots one member has all holders": ({"max": 4}, [*held(), *load(9, 2), ASK], [Grant(11, "p-1")]),
    "max bounds them": ({"max": 1, "slots": 1}, [*held(), ASK], [Grant(2, "p-1")]),
    "as many are started at once as all waiters need": (
        {"max": 9, "slots": 2},
        [ASK, ASK, ASK, ("started", "p-1")],
        [Grant(1, "p-1"), Grant(2, "p-1"), Grant(3, "p-1")],
    ),
    "a holder gets the member with the fewest": (
        {"min": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), ASK, ("leased", 1), ASK],
        [Grant(2, "p-1")],
    ),
    "also after others left": (
        {"min": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), *load(4), ("withdraw", 1), ASK],
        [Grant(5, "p-2")],
    ),
    "a dirty member counts for nobody who is new": (
        {"min": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), *load(3), ("dirty", 1), ASK],
        [Grant(4, "p-1")],
    ),
    "of several, one that nobody holds any more is reset": (
        {"max": 2, "slots": 1},
        [*held(), ("withdraw", 1)],
        [Reset("p-1")],
    ),
    "one that was started since all have their slots stays while they do": (
        {"max": 2, "slots": 1, "lease_ttl_s": 2 * IDLE_S},
        [*held(), ("started", "p-2"), IDLE_S],
        [Probe("p-1"), Probe("p-2")],
    ),
    "and ends after a time": (
        {"max": 2},
        [*held(), ("withdraw", 1), ("reset_done", "p-1", True), IDLE_S],
        [Stop("p-1", Reason.IDLE)],
    ),
    "above min only": (
        {"min": 1, "max": 2},
        [("started", "p-1"), ASK, ("leased", 1), ("withdraw", 1), ("reset_done", "p-1", True), IDLE_S],
        [Probe("p-1")],
    ),
    "where another took over, the dirty one goes with its last holder": (
        {"max": 2, "slots": 1},
        [*held(), ("started", "p-2"), ASK, ("leased", 2), ("dirty", 1)],
        [Stop("p-1", Reason.DIRTY)],
    ),
    "a waiter beside a dying member has another started": (
        {"max": 2},
        [*held(), ASK, ("leased", 2), ("dirty", 1), ASK],
        [Start("p-2")],
    ),
}


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL.keys())
def test_several_shared_members(case):
    check(case, shared=True)


def test_cold_shared_pool_starts_what_its_waiters_fill():
    clock = Clock(shared=True, max=9, slots=2)
    for _ in range(5):
        clock.pool.ask()
    assert clock.play([0]) == [Start("p-1"), Start("p-2"), Start("p-3")]
    clock.play([("started", "p-1"), ("started", "p-2"), ("started", "p-3")])
    assert clock.pool.count(State.LEASED) == 1, "those who waited went to the first; the next will not"
    assert clock.play([ASK]) == [Grant(6, "p-3")]


def test_living_shared_member_is_never_saturated():
    clock = Clock(shared=True, max_pending=1)
    clock.play(held())
    for number in range(2, 5):
        assert clock.pool.ask() == number
    assert len(clock.pool.decide(clock.now)) == 3
