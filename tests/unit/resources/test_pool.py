"""The pool as a table: a sentence -> events and, at the end, the wanted actions.

Section numbers are the guarantees of pool.py. Others have files of their own: 7 and 8 test_pool_growth, 9
test_pool_shared, shares of 2 test_pool_shares, 13 test_pool_images, 14 and what is retired or resized
test_pool_upkeep.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from agentfly.resources.actions import Grant, Lost, Probe, Reason, Reset, Start, State, Stop
from agentfly.resources.errors import Saturated
from agentfly.resources.pool_state import PROBE_S
from tests.unit.resources.pool_clock import ASK, FREE, Case, Clock, Step, check, held

CASES: dict[str, Case] = {
    # 1. Never above max, whatever the state of the members.
    "one waiter starts one member": ({}, [ASK], [Start("p-1")]),
    "a second waiter starts a second member while the first is starting": (
        {"max": 2},
        [ASK, ASK],
        [Start("p-2")],
    ),
    "a starting member counts": ({"max": 1}, [ASK, ASK], []),
    "a leased member counts": ({"max": 1}, [*held(), ASK], []),
    "a resetting member counts": ({"max": 1}, [*held(), ("withdraw", 1), ASK], []),
    "a member counts until it has stopped": ({"max": 1}, [*held(), ("dirty", 1), ASK], []),
    "its place is free when it has stopped": (
        {"max": 1},
        [*held(), ("dirty", 1), ASK, ("stopped", "p-1")],
        [Start("p-2")],
    ),
    "a resetting member is expected back, so nothing is started": (
        {"max": 2},
        [*held(), ("withdraw", 1), ASK],
        [],
    ),
    # 2. First come, first served.
    "the first waiter is served first": ({}, [ASK, ASK, ("started", "p-1")], [Grant(1, "p-1")]),
    "the next waiter gets the member that came back": (
        {},
        [*held(), ASK, ASK, ("withdraw", 1), ("reset_done", "p-1", True)],
        [Grant(2, "p-1")],
    ),
    "a waiter whose member died before the hand-over is first again": (
        {"max": 2},
        [ASK, ("started", "p-1"), ASK, ("lost", "p-1", "x"), ("started", "p-2")],
        [Grant(1, "p-2")],
    ),
    "a holder whose reset failed comes before all waiters": (
        {"max": 2},
        [*held(), ASK, ("clean", 1), ("reset_done", "p-1", False), ("started", "p-2")],
        [Grant(1, "p-2")],
    ),
    "the member that came back last goes out first": (
        {"min": 2, "max": 2},
        [("started", "p-2"), 1, ("started", "p-1"), ASK],
        [Grant(1, "p-1")],
    ),
    # 3. Free means verified.
    "a member that comes back is reset, not handed on": ({}, [*held(), ASK, ("withdraw", 1)], [Reset("p-1")]),
    "a member whose reset is not clean is stopped": (
        {},
        [*held(), ASK, ("withdraw", 1), ("reset_done", "p-1", False)],
        [Stop("p-1", Reason.RESET_FAILED)],
    ),
    "a hand-over that was withdrawn is reset all the same": (
        {},
        [ASK, ("started", "p-1"), ("withdraw", 1)],
        [Reset("p-1")],
    ),
    "a holder gets its own member back, pristine": (
        {},
        [*held(), ASK, ("clean", 1), ("reset_done", "p-1", True)],
        [Grant(1, "p-1")],
    ),
    "a holder that asks for a clean member has it reset": ({}, [*held(), ("clean", 1)], [Reset("p-1")]),
    "a holder that leaves during its reset leaves a free member": (
        {},
        [*held(), ("clean", 1), ("withdraw", 1), ASK, ("reset_done", "p-1", True)],
        [Grant(2, "p-1")],
    ),
    # 4. A withdrawn ticket leaves nothing.
    "a member that is reset for its own holder is not what a waiter can count on": (
        {"max": 2},
        [*held(), ("clean", 1), ASK],
        [Start("p-2")],
    ),
    "a start that its waiter left is stopped": (
        {},
        [ASK, ("withdraw", 1)],
        [Stop("p-1", Reason.NOT_NEEDED)],
    ),
    "a start that its waiter left goes on for another who has none": (
        {"max": 1},
        [ASK, ASK, ("withdraw", 1)],
        [],
    ),
    "of two starts the one whose waiter left is stopped": (
        {"max": 2},
        [ASK, ASK, ("withdraw", 1)],
        [Stop("p-1", Reason.NOT_NEEDED)],
    ),
    "a start goes on when its waiter was served by another member": (
        {"max": 2},
        [*held(), ASK, ("withdraw", 1), ("reset_done", "p-1", True)],
        [Grant(2, "p-1")],
    ),
    "and it stays when that waiter leaves": (
        {"max": 2},
        [*held(), ASK, ("withdraw", 1), ("reset_done", "p-1", True), ("withdraw", 2)],
        [Reset("p-1")],
    ),
    "a start for min goes on when a waiter leaves": ({"min": 1}, [ASK, ("withdraw", 1)], []),
    "a waiter that left is not served": (
        {"max": 1},
        [ASK, ASK, ("withdraw", 1), ("started", "p-1")],
        [Grant(2, "p-1")],
    ),
    # 5. Leases end at their TTL.
    "a lease without heartbeat is lost and its member reset": (
        {"lease_ttl_s": 5},
        [*held(), 5],
        [Lost(1, "no heartbeat for 5 s"), Reset("p-1")],
    ),
    "a renewed lease lives on": ({"lease_ttl_s": 5}, [*held(), 4, ("renewed", 1), 4], []),
    "a renewed lease ends a TTL after its renewal": (
        {"lease_ttl_s": 5},
        [*held(), 4, ("renewed", 1), 5],
        [Lost(1, "no heartbeat for 5 s"), Reset("p-1")],
    ),
    "a lease does not end during the reset its holder asked for": (
        {"lease_ttl_s": 5},
        [*held(), ("clean", 1), 50],
        [],
    ),
    # 6. Retirement.
    "a member is retired after its reuses": (
        {"max_reuses": 1},
        [*FREE, ASK, ("leased", 2), ("withdraw", 2)],
        [Stop("p-1", Reason.MAX_REUSES)],
    ),
    "a member that may not be reused is retired after its first lease": (
        {"max_reuses": 0},
        [*held(), ("withdraw", 1)],
        [Stop("p-1", Reason.MAX_REUSES)],
    ),
    "a holder of a member without reuses gets another when it asks for a clean one": (
        {"max_reuses": 0, "max": 2},
        [*held(), ("clean", 1)],
        [Stop("p-1", Reason.MAX_REUSES), Start("p-2")],
    ),
    "a leased member outlives its lifetime": ({"max_lifetime_s": 10}, [*held(), 5, ("renewed", 1), 6], []),
    "a member past its lifetime is retired when it comes back": (
        {"max_lifetime_s": 10},
        [*held(), 11, ("withdraw", 1)],
        [Stop("p-1", Reason.MAX_LIFETIME)],
    ),
    "a free member past its lifetime is retired, not given": (
        {"max_lifetime_s": 10},
        [*FREE, 9.9, ("ask",), ("withdraw", 2), ("reset_done", "p-1", True), 0.1],
        [Stop("p-1", Reason.MAX_LIFETIME)],
    ),
    "a dirty member is stopped, not reset": ({}, [*held(), ("dirty", 1)], [Stop("p-1", Reason.DIRTY)]),
    "a lost member is stopped and its holder told": (
        {},
        [*held(), ("lost", "p-1", "it is gone")],
        [Lost(1, "it is gone"), Stop("p-1", Reason.LOST)],
    ),
    "a member lost during its reset is stopped": (
        {},
        [*held(), ("withdraw", 1), ("lost", "p-1", "x")],
        [Stop("p-1", Reason.LOST)],
    ),
    "a warm member that the probe finds gone is replaced": (
        {"min": 1, "max": 2},
        [("started", "p-1"), PROBE_S, ("probed", "p-1", False)],
        [Stop("p-1", Reason.LOST)],
    ),
    "a free member is probed from time to time": ({}, [*FREE, PROBE_S], [Probe("p-1")]),
    "a leased exclusive member is not probed: its renewals are probes": (
        {"lease_ttl_s": 60},
        [*held(), PROBE_S],
        [],
    ),
    # 11. Old news.
    "a start that ends after its stop changes nothing": (
        {},
        [ASK, ("withdraw", 1), ("started", "p-1"), ASK],
        [],
    ),
    "a late hand-over of a withdrawn ticket changes nothing": (
        {},
        [ASK, ("started", "p-1"), ("withdraw", 1), ("leased", 1)],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pool(case):
    check(case)


# 10. Saturation.


def test_asking_above_max_pending_fails_at_once_with_an_estimate():
    clock = Clock(max=1, max_pending=2)
    clock.play([*held(), 8, ("renewed", 1), ASK, ASK])
    with pytest.raises(Saturated) as full:
        clock.pool.ask()
    assert full.value.message == "pool p: 2 waiters, which is all that max_pending (2) admits"
    assert full.value.retry_after == 1.0
    clock.play([("withdraw", 1)])
    with pytest.raises(Saturated) as full:
        clock.pool.ask()
    assert full.value.retry_after == pytest.approx(0.2 * 8 * 3), "the mean lease times those ahead"
    clock.play([("withdraw", 2)])
    assert clock.pool.ask() == 4
    with pytest.raises(Saturated) as full:
        clock.pool.ask()
    assert full.value.retry_after == pytest.approx(0.2 * 8 * 3), "a waiter that left held nothing"


def test_pool_without_a_queue_serves_what_is_free():
    clock = Clock(min=1, max=1, max_pending=0)
    with pytest.raises(Saturated):
        clock.pool.ask()
    clock.play([("started", "p-1")])
    assert clock.play([ASK]) == [Grant(1, "p-1")]


# 11. Old news, event by event: False, and the pool is what it was.

NEWS: list[tuple[Any, ...]] = [
    ("withdraw", 9),
    ("dirty", 9),
    ("started", "p-9"),
    ("start_failed", "p-9", "x"),
    ("leased", 9),
    ("renewed", 9),
    ("clean", 9),
    ("reset_done", "p-9", True),
    ("lost", "p-9", "x"),
    ("probed", "p-9", False),
    ("stopped", "p-9"),
    ("started", "p-1"),
    ("start_failed", "p-1", "x"),
    ("leased", 1),
    ("reset_done", "p-1", True),
    ("stopped", "p-1"),
]


@pytest.mark.parametrize("news", NEWS, ids=lambda news: " ".join(map(str, news)))
def test_old_news_changes_nothing(news):
    clock, other = Clock(), Clock()
    clock.play(held())
    other.play(held())
    assert clock.event(*news) is False
    assert clock.pool.decide(clock.now) == []
    assert vars(clock.pool) == vars(other.pool)


# Waking, closing, words.


def test_pool_wakes_for_what_comes_with_time_alone():
    clock = Clock(lease_ttl_s=5)
    assert clock.pool.wake_at(clock.now) is None
    clock.play(held())
    assert clock.pool.wake_at(clock.now) == clock.now + 5
    clock.play([("withdraw", 1), ("reset_done", "p-1", True)])
    assert clock.pool.wake_at(clock.now) == clock.now + PROBE_S
    clock.play([PROBE_S])
    assert clock.pool.wake_at(clock.now) == clock.now + PROBE_S


def test_closed_pool_stops_every_member_once():
    clock = Clock(min=1, max=3)
    clock.play([("started", "p-1"), ASK, ("leased", 1), ASK])
    clock.pool.close()
    assert clock.play([1.0]) == [Stop("p-1", Reason.CLOSED), Stop("p-2", Reason.CLOSED)]
    assert (clock.pool.reason(), clock.pool.wake_at(clock.now)) == (Reason.CLOSED, None)
    assert clock.pool.withdraw(1, clock.now)
    clock.play([("stopped", "p-1"), ("stopped", "p-2"), 1000])
    assert clock.pool.count(*State) == 0


REASONS: dict[Reason, tuple[dict[str, Any], Sequence[Step]]] = {
    Reason.READY: ({"min": 1}, [("started", "p-1")]),
    Reason.STARTING: ({"min": 1}, []),
    Reason.AT_MAX: ({"max": 1}, [*held(), ASK]),
    Reason.START_FAILING: ({"min": 1}, [("start_failed", "p-1", "x")]),
}


@pytest.mark.parametrize(("reason", "case"), REASONS.items())
def test_one_word_says_how_the_pool_is(reason, case):
    fields, steps = case
    clock = Clock(**fields)
    clock.play(steps)
    assert clock.pool.reason() is reason


def test_waiters_ahead_are_counted():
    clock = Clock(max=1)
    clock.play([*held(), ASK, ASK, ASK])
    assert [clock.pool.ahead(number) for number in (2, 3, 4)] == [0, 1, 2]
