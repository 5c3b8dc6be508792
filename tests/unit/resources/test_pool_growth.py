"""When a pool starts members: guarantees 7 and 8 of pool.py."""

import pytest

from agentfly.resources.actions import Action, Grant, Probe, Reason, Reject, Start, Stop
from agentfly.resources.growth import BACKOFF_MAX_S
from agentfly.resources.pool_state import IDLE_S
from tests.unit.resources.pool_clock import ASK, FREE, Case, Clock, check, held

CASES: dict[str, Case] = {
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
    "free members are kept beside those that are held": (
        {"buffer": 2, "max": 4},
        [("started", "p-1"), ("started", "p-2"), ASK],
        [Grant(1, "p-2"), Start("p-3")],
    ),
    "as far as max permits": (
        {"buffer": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), ASK],
        [Grant(1, "p-2")],
    ),
    "waiters come before the buffer": (
        {"buffer": 1, "max": 2},
        [("started", "p-1"), ASK, ("started", "p-2"), ASK, ASK],
        [],
    ),
    "one that comes back is one of the buffer": (
        {"buffer": 1, "max": 3},
        [("started", "p-1"), ASK, ("leased", 1), ("withdraw", 1), ("start_failed", "p-2", "x"), 60],
        [],
    ),
    "the buffer does not go for idleness": (
        {"buffer": 1, "max": 3},
        [("started", "p-1"), IDLE_S],
        [Probe("p-1")],
    ),
    "what is above it does": (
        {"buffer": 1, "max": 3},
        [("started", "p-1"), ASK, ("started", "p-2"), ("withdraw", 1), ("reset_done", "p-1", True), IDLE_S],
        [Stop("p-2", Reason.IDLE), Probe("p-1")],
    ),
    # 7. Pacing.
    "no more start at one time than may": ({"max": 4, "max_starting": 2}, [ASK, ASK, ASK], []),
    "the next starts when one has": (
        {"max": 4, "max_starting": 2},
        [ASK, ASK, ASK, ("started", "p-1")],
        [Grant(1, "p-1"), Start("p-3")],
    ),
    "or when one has failed, for min as well": (
        {"max": 4, "min": 3, "max_starting": 1},
        [("started", "p-1"), ("start_failed", "p-2", "x"), 1.0],
        [Start("p-3")],
    ),
    "at once as many start as in one second": (
        {"max": 9, "min": 5, "starts_per_s": 2},
        [0.5],
        [Start("p-3")],
    ),
    "less than one a second is one at a time": ({"max": 9, "min": 5, "starts_per_s": 0.1}, [9.9], []),
    "and then the next": ({"max": 9, "min": 5, "starts_per_s": 0.1}, [10], [Start("p-2")]),
    "what was not used in a pause is not saved up": (
        {"max": 9, "starts_per_s": 1},
        [1000, ASK, ASK, ASK],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_growth(case):
    check(case)


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


def test_sustained_arrivals_do_not_set_the_allowance_back():
    clock = Clock(max=99, starts_per_s=1, lease_ttl_s=1e6)
    started = []
    for _ in range(100):  # ten a second, for ten seconds: each drop of a free member is one more event
        clock.pool.ask()
        started += [action for action in clock.play([0.1]) if isinstance(action, Start)]
    assert len(started) == pytest.approx(10, abs=1)


def test_pool_wakes_when_the_next_start_may_begin():
    clock = Clock(max=9, min=2, starts_per_s=0.25)
    assert clock.actions == [Start("p-1")]
    assert clock.pool.wake_at(clock.now) == clock.now + 4


def test_images_fail_apart():
    clock = Clock(max=4, per_image=True)
    clock.play([("ask", "", "broken"), ("start_failed", "p-1", "no such image")])
    assert clock.play([("ask", "", "good")]) == [Start("p-2", "good")]
    clock.play([("started", "p-2"), ("leased", 2)])
    assert clock.play([1.0]) == [Start("p-3", "broken")]
    fails = [("start_failed", f"p-{number}", "no such image") for number in (3, 4, 5, 6)]
    rejected = []
    for fail, pause in zip(fails, (2.0, 4.0, 8.0, 16.0), strict=True):
        rejected += [a for a in clock.play([fail]) if isinstance(a, Reject)]
        clock.play([("renewed", 2), pause])
    assert rejected == [Reject(1, "no such image")], "though members of another image live"


def test_broken_image_holds_up_nobody_else():
    clock = Clock(max=1, per_image=True)
    clock.play([("ask", "", "broken"), ("ask", "", "good")])
    assert clock.play([("start_failed", "p-1", "no such image")]) == [Start("p-2", "good")]


def test_each_broken_image_has_its_own_pause():
    clock = Clock(max=4, per_image=True)
    clock.play([("ask", "", "one"), ("start_failed", "p-1", "x"), 1.0, ("start_failed", "p-2", "x")])
    clock.play([("ask", "", "two"), ("start_failed", "p-3", "x")])
    assert clock.play([1.0]) == [Start("p-4", "two")]
    assert clock.play([1.0]) == [Start("p-5", "one")]
