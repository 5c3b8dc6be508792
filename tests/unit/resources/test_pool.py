"""The pool as a table: a sentence -> events and, at the end, the wanted actions.

A script is a list of steps. A step is ``(event, arguments...)`` or a number: that many seconds pass. After
every step the pool decides, as its engine makes it do; the wanted actions are those of the last step. Members
are ``p-1``, ``p-2``; tickets are 1, 2. Section numbers are the guarantees of pool.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from agentfly.resources.actions import Action, Grant, Lost, Probe, Reason, Reject, Reset, Start, State, Stop
from agentfly.resources.errors import Saturated
from agentfly.resources.growth import BACKOFF_MAX_S
from agentfly.resources.pool import Pool
from agentfly.resources.pool_state import IDLE_S, PROBE_S
from agentfly.resources.spec import ContainerSpec, PoolSpec

Step = float | tuple[Any, ...]

TIMED = {
    "withdraw",
    "dirty",
    "started",
    "start_failed",
    "leased",
    "renewed",
    "reset_done",
    "lost",
    "probed",
}


class Clock:
    """A pool, its time, and the actions of the last step."""

    def __init__(self, **fields: Any) -> None:
        spec = PoolSpec.model_validate({"name": "p", "resource": ContainerSpec(), **fields})
        self.pool = Pool(spec)
        self.now = 100.0
        self.actions: list[Action] = self.pool.decide(self.now)

    def play(self, steps: Sequence[Step]) -> list[Action]:
        for step in steps:
            if isinstance(step, tuple):
                self.event(*step)
            else:
                self.now += step
            self.actions = self.pool.decide(self.now)
            assert self.pool.decide(self.now) == [], "12: decide settles"
        return self.actions

    def event(self, name: str, *args: Any) -> Any:
        if name == "dirty":
            return self.pool.withdraw(*args, self.now, dirty=True)
        if name in TIMED:
            args = (*args, self.now)
        return getattr(self.pool, name)(*args)


def held(ticket: int = 1, member: str = "p-1") -> list[Step]:
    """The first waiter holds the first member."""
    return [("ask",), ("started", member), ("leased", ticket)]


FREE: list[Step] = [*held(), ("withdraw", 1), ("reset_done", "p-1", True)]
ASK: Step = ("ask",)

CASES: dict[str, tuple[dict[str, Any], Sequence[Step], list[Action]]] = {
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
    # 7. Failing starts.
    "a failed start is not repeated at once": ({}, [ASK, ("start_failed", "p-1", "x")], []),
    "a failed start is repeated after its pause": (
        {},
        [ASK, ("start_failed", "p-1", "x"), 1.0],
        [Start("p-2")],
    ),
    "the second pause is twice the first": (
        {},
        [ASK, ("start_failed", "p-1", "x"), 1.0, ("start_failed", "p-2", "x"), 1.9],
        [],
    ),
    "and not longer": (
        {},
        [ASK, ("start_failed", "p-1", "x"), 1.0, ("start_failed", "p-2", "x"), 2.0],
        [Start("p-3")],
    ),
    "starts that fail together are one failure": (
        {"max": 3},
        [ASK, ASK, ("start_failed", "p-1", "x"), ("start_failed", "p-2", "x"), 1.0],
        [Start("p-3")],
    ),
    "while no member lives one start at a time is tried": (
        {"max": 3},
        [ASK, ASK, ASK, *[("start_failed", f"p-{i}", "x") for i in (1, 2, 3)], 1.0],
        [Start("p-4")],
    ),
    "after a start that ended well the others follow": (
        {"max": 3},
        [ASK, ASK, ASK, *[("start_failed", f"p-{i}", "x") for i in (1, 2, 3)], 1.0, ("started", "p-4")],
        [Grant(1, "p-4"), Start("p-5"), Start("p-6")],
    ),
    "leases of older members do not end the pause of failing starts": (
        {"max": 2},
        [
            *held(),
            ASK,
            ("start_failed", "p-2", "x"),
            ("withdraw", 1),
            ("reset_done", "p-1", True),
            ("leased", 2),
            ASK,
        ],
        [],
    ),
    "a member lost before its first lease is as good as a failed start": (
        {"max": 2},
        [ASK, ("started", "p-1"), ("lost", "p-1", "x")],
        [Stop("p-1", Reason.LOST)],
    ),
    # 8. Warm members.
    "min members are started without anybody asking": (
        {"min": 2, "max": 3},
        [],
        [Start("p-1"), Start("p-2")],
    ),
    "leased members count towards min": ({"min": 1, "max": 2}, held(), []),
    "a stopped member is replaced up to min": (
        {"min": 1, "max": 2},
        [*held(), ("dirty", 1)],
        [Stop("p-1", Reason.DIRTY), Start("p-2")],
    ),
    "a member above min goes after a time without holder": ({}, [*FREE, IDLE_S], [Stop("p-1", Reason.IDLE)]),
    "min members stay": ({"min": 1}, [("started", "p-1"), IDLE_S * 9], [Probe("p-1")]),
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


@pytest.mark.parametrize(("fields", "steps", "want"), CASES.values(), ids=CASES.keys())
def test_pool(fields, steps, want):
    clock = Clock(**fields)
    clock.play(steps)
    assert clock.actions == want


SHARED: dict[str, tuple[dict[str, Any], Sequence[Step], list[Action]]] = {
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
    "the last one leaves and it is stopped": (
        {},
        [*held(), ASK, ("leased", 2), ("withdraw", 1), ("withdraw", 2)],
        [Stop("p-1", Reason.IDLE)],
    ),
    "the last one leaves and, kept warm, it is reset": (
        {"min": 1},
        [("started", "p-1"), ASK, ("leased", 1), ("withdraw", 1)],
        [Reset("p-1")],
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


@pytest.mark.parametrize(("fields", "steps", "want"), SHARED.values(), ids=SHARED.keys())
def test_shared_pool(fields, steps, want):
    clock = Clock(shared=True, **fields)
    clock.play(steps)
    assert clock.actions == want


# 7. Permanent failure.


def fail_rounds(clock: Clock, rounds: int) -> list[Action]:
    actions: list[Action] = []
    for _ in range(rounds):
        (start,) = (action for action in clock.actions if isinstance(action, Start))
        actions += clock.play([("start_failed", start.member, "no such image")])
        wake = clock.pool.wake_at(clock.now)
        assert wake is not None
        clock.play([wake - clock.now])
    return actions


def test_fifth_failure_rejects_the_first_waiter_and_each_later_one_the_next():
    clock = Clock()
    clock.play([ASK])
    clock.pool.ask()
    assert fail_rounds(clock, 4) == []
    assert fail_rounds(clock, 1) == [Reject(1, "no such image")]
    assert fail_rounds(clock, 1) == [Reject(2, "no such image")]
    assert clock.pool.queued == 0


def test_waiter_of_the_member_that_never_worked_is_the_one_rejected():
    clock = Clock(max=1)
    clock.play([ASK])
    clock.pool.ask()
    fail_rounds(clock, 4)
    assert clock.play([("started", "p-5")]) == [Grant(1, "p-5")]
    actions = clock.play([("lost", "p-5", "it took no lease")])
    assert actions == [Reject(1, "it took no lease"), Stop("p-5", Reason.LOST)]


def test_failures_reject_nobody_while_a_member_lives():
    clock = Clock(max=2, lease_ttl_s=1e6)
    clock.play([*held(), ASK])
    assert fail_rounds(clock, 8) == []
    assert clock.pool.queued == 1


def test_pause_between_failing_starts_is_bounded():
    clock = Clock(min=1)
    fail_rounds(clock, 40)
    began = clock.now
    fail_rounds(clock, 1)
    assert clock.now - began == BACKOFF_MAX_S


def test_a_member_that_served_ends_the_count_of_failures():
    clock = Clock()
    clock.play([ASK])
    fail_rounds(clock, 3)
    clock.play([("started", "p-4"), ("leased", 1), ("dirty", 1), ("stopped", "p-4"), ASK])
    began = clock.now
    fail_rounds(clock, 1)
    assert clock.now - began == 1.0


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


def test_living_shared_member_is_never_saturated():
    clock = Clock(shared=True, max_pending=1)
    clock.play(held())
    for number in range(2, 5):
        assert clock.pool.ask() == number
    assert len(clock.pool.decide(clock.now)) == 3


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
