"""Pools whose members differ by image: guarantees 13 and 17 of pool.py, and 5 of shares.py.

The second argument of ``ask`` is the image; the pool's own is "", and "host" by its name.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.resources.actions import Grant, Probe, Reason, Reset, Start, State, Stop
from agentfly.resources.errors import ResourceError
from agentfly.resources.pool import Pool
from agentfly.resources.pool_state import IDLE_S
from agentfly.resources.shares import LEAD
from tests.unit.resources.pool_clock import ASK, Case, Clock, Step, check, spec


def ask(image: str, share: str = "") -> Step:
    return ("ask", share, image)


def free(member: str, ticket: int) -> list[Step]:
    """The member was started, held and came back, clean."""
    return [("started", member), ("leased", ticket), ("withdraw", ticket), ("reset_done", member, True)]


A_AND_B: list[Step] = [ask("a"), *free("p-1", 1), 1.0, ask("b"), *free("p-2", 2), 1.0]

CASES: dict[str, Case] = {
    "a member of the image is started": ({}, [ask("a")], [Start("p-1", "a")]),
    "the pool's own image has two names": ({}, [ask("host")], [Start("p-1", "")]),
    "a waiter gets no member of another image": (
        {"max": 2},
        [ask("a"), *free("p-1", 1), ask("b")],
        [Start("p-2", "b")],
    ),
    "but one of its own at once": ({"max": 2}, [*A_AND_B, ask("a")], [Grant(3, "p-1")]),
    "one that is coming is waited for": (
        {"max": 2},
        [ask("a"), ("started", "p-1"), ("leased", 1), ("withdraw", 1), ask("a")],
        [],
    ),
    "one that is coming is of no use for another image": (
        {"max": 2},
        [ask("a"), ("started", "p-1"), ("leased", 1), ("withdraw", 1), ask("b")],
        [Start("p-2", "b")],
    ),
    "at max, the image that was not used for longest makes room": (
        {"max": 2},
        [*A_AND_B, ask("c")],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "used, not started: of two the other one": (
        {"max": 2},
        [*A_AND_B, ask("a"), ("leased", 3), ("withdraw", 3), ("reset_done", "p-1", True), ask("c")],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "then the member that is needed starts": (
        {"max": 2},
        [*A_AND_B, ask("c"), ("stopped", "p-1")],
        [Start("p-3", "c")],
    ),
    "one for each that waits, and no more": (
        {"max": 2},
        [*A_AND_B, ask("c"), ask("c")],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "what is held makes no room": (
        {"max": 1, "lease_ttl_s": 99},
        [ask("a"), ("started", "p-1"), ("leased", 1), ask("b")],
        [],
    ),
    "what comes back without anybody waiting for it does": (
        {"max": 1},
        [ask("a"), ("started", "p-1"), ("leased", 1), ask("b"), ("withdraw", 1), ("reset_done", "p-1", True)],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "what is announced goes last": (
        {"max": 2},
        [*A_AND_B, ("demand", {"a": 1}), ask("c")],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "and of what is announced the last": (
        {"max": 2},
        [*A_AND_B, ("demand", {"b": 1, "a": 1}), ask("c")],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "before it goes who is in quarantine": (
        {"max": 2, "quarantine": 1},
        [
            *[ask("a"), *free("p-1", 1), ask("b"), *free("p-2", 2)[:-1], ("reset_done", "p-2", False)],
            *[("demand", {"a": 1}), ask("c")],
        ],
        [Stop("p-2", Reason.RESET_FAILED)],
    ),
    "a holder of the image that waits is not counted on": (
        {"max": 2},
        [ask("a"), ("started", "p-1"), ("leased", 1), ask("a")],
        [Start("p-2", "a")],
    ),
    # The window.
    "what is announced is started": (
        {"max": 3},
        [("demand", {"a": 2, "b": 1})],
        [Start("p-1", "a"), Start("p-2", "a"), Start("p-3", "b")],
    ),
    "in its order, as far as there is room": (
        {"max": 1},
        [("demand", {"a": 1, "b": 1})],
        [Start("p-1", "a")],
    ),
    "what is free or coming counts": ({"max": 3}, [ask("a"), *free("p-1", 1), ("demand", {"a": 1})], []),
    "a grant takes one off": (
        {"max": 3},
        [("demand", {"a": 1}), ("started", "p-1"), ask("a")],
        [Grant(1, "p-1")],
    ),
    "a waiter for the image takes what was announced before more is started": (
        {"max": 3},
        [("demand", {"a": 1}), ask("a")],
        [Start("p-2", "a")],
    ),
    "waiters come first": (
        {"max": 1, "lease_ttl_s": 99},
        [ask("a"), ("demand", {"b": 1}), ("started", "p-1")],
        [Grant(1, "p-1")],
    ),
    "at max, idle images outside the window make room": (
        {"max": 2},
        [*A_AND_B, ("demand", {"b": 1, "c": 1})],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "those inside do not": ({"max": 2}, [*A_AND_B, ("demand", {"b": 1, "a": 1, "c": 1})], []),
    "unless they are wanted later than max has room for": (
        {"max": 2},
        [*A_AND_B, ("demand", {"c": 1, "a": 1, "b": 1})],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "what is announced does not end for idleness": (
        {"max": 2},
        [ask("a"), *free("p-1", 1), ("demand", {"a": 1}), IDLE_S],
        [Probe("p-1")],
    ),
    "when nothing is announced any more it does": (
        {"max": 2},
        [ask("a"), *free("p-1", 1), ("demand", {"a": 1}), IDLE_S, ("demand", {})],
        [Stop("p-1", Reason.IDLE)],
    ),
    "min counts members of any image": (
        {"min": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), ("demand", {"a": 2})],
        [Stop("p-1", Reason.EVICTED), Stop("p-2", Reason.EVICTED)],
    ),
    "and what is announced fills it": (
        {"min": 1, "max": 2},
        [("started", "p-1"), ("demand", {"a": 1}), ("started", "p-2"), ("lost", "p-1", "x")],
        [Stop("p-1", Reason.LOST)],
    ),
    "the pool's own image is one under both names": (
        {"max": 3},
        [("demand", {"": 1, "host": 1})],
        [Start("p-1"), Start("p-2")],
    ),
    # Images that may stay.
    "above as many images as may stay, the one not used for longest goes": (
        {"max": 4, "max_resident_images": 2},
        [*A_AND_B, ask("c"), *free("p-3", 3)],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "with all its members": (
        {"max": 4, "max_resident_images": 1},
        [
            *[ask("a"), ask("a"), ("started", "p-1"), ("started", "p-2"), ("leased", 1), ("leased", 2)],
            *[("withdraw", 1), ("withdraw", 2), ("reset_done", "p-1", True), ("reset_done", "p-2", True)],
            *[1.0, ask("b"), *free("p-3", 3)],
        ],
        [Stop("p-1", Reason.EVICTED), Stop("p-2", Reason.EVICTED)],
    ),
    "what is held is no matter": (
        {"max": 4, "max_resident_images": 1, "lease_ttl_s": 99},
        [ask("a"), ("started", "p-1"), ("leased", 1), ask("b"), *free("p-2", 2)],
        [],
    ),
    "what is announced stays": (
        {"max": 4, "max_resident_images": 2},
        [*A_AND_B, ("demand", {"a": 1}), ask("c"), *free("p-3", 3)],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "no more is announced than may stay": (
        {"max": 4, "max_resident_images": 2},
        [("demand", {"a": 1, "b": 1, "c": 1})],
        [Start("p-1", "a"), Start("p-2", "b")],
    ),
    "the pool's own is one of them where it is kept": (
        {"max": 4, "max_resident_images": 2, "min": 1},
        [("started", "p-1"), ("demand", {"a": 1, "b": 1, "c": 1})],
        [Start("p-2", "a")],
    ),
    "and stays": (
        {"max": 4, "max_resident_images": 1, "min": 1},
        [("started", "p-1"), ask("a"), *free("p-2", 1)],
        [Stop("p-2", Reason.EVICTED)],
    ),
    "a waiter gets its image whatever stays": (
        {"max": 4, "max_resident_images": 1},
        [*A_AND_B, ask("c"), ("started", "p-3")],
        [Grant(3, "p-3")],
    ),
    # Shares and reservations.
    "a verifier gets its image in the place of an idle one": (
        {"max": 2, "reserved": {"verify": 1}, "lease_ttl_s": 99},
        [ask("a"), *free("p-1", 1), ask("b"), ("started", "p-2"), ("leased", 2), ask("c", "verify")],
        [Stop("p-1", Reason.EVICTED)],
    ),
    "no other waiter does": (
        {"max": 2, "reserved": {"verify": 1}, "lease_ttl_s": 99},
        [ask("a"), *free("p-1", 1), ask("b"), ("started", "p-2"), ("leased", 2), ask("c")],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_images(case):
    check(case, per_image=True)


def test_number_warms_a_pool_of_one_image():
    clock = Clock(max=4)
    assert clock.play([("demand", {"": 2})]) == [Start("p-1"), Start("p-2")]
    assert clock.play([("started", "p-1"), ASK]) == [Grant(1, "p-1")]
    assert clock.play([("demand", {"": 2})]) == [Start("p-3")]


@pytest.mark.parametrize("event", ["ask", "demand"])
def test_image_of_a_pool_that_has_one_is_refused(event):
    pool = Pool(spec())
    with pytest.raises(ResourceError, match=r"^pool p: has no members of image a$"):
        pool.ask("", "a") if event == "ask" else pool.demand({"a": 1})
    assert pool.ask("", "host") == 1


# 5 of shares.py: who is passed over, and how often.


def test_waiter_of_another_image_is_passed_by_few():
    clock = Clock(max=1, per_image=True, lease_ttl_s=1e9)
    clock.play([ask("a"), ("started", "p-1"), ("leased", 1), ask("b"), *[ask("a")] * 9])
    ticket, passed = 1, 0
    while (actions := clock.play([("withdraw", ticket), ("reset_done", "p-1", True)])) != [
        Stop("p-1", Reason.EVICTED)
    ]:
        (grant,) = actions
        assert isinstance(grant, Grant)
        ticket, passed = grant.ticket, passed + 1
        clock.play([("leased", ticket)])
    assert passed == LEAD
    assert clock.play([("stopped", "p-1")]) == [Start("p-2", "b")]


def test_nobody_is_held_up_for_what_may_not_start_yet():
    clock = Clock(max=1, per_image=True, lease_ttl_s=1e9, starts_per_s=0.001)
    clock.play([ask("a"), ("started", "p-1"), ("leased", 1), ask("b"), *[ask("a")] * 9])
    for ticket in (1, *range(3, 11)):
        grants = clock.play([("withdraw", ticket), ("reset_done", "p-1", True)])
        assert grants == [Grant(max(3, ticket + 1), "p-1")]
        clock.play([("leased", grants[0].ticket)])
    clock.play([1000, ("withdraw", 11)])
    assert clock.play([("reset_done", "p-1", True)]) == [Stop("p-1", Reason.EVICTED)]


def test_nobody_is_held_up_for_an_image_that_is_broken():
    clock = Clock(max=1, per_image=True, lease_ttl_s=1e9)
    clock.play([ask("b"), ("start_failed", "p-1", "no such image"), *[ask("a")] * 9])
    clock.play([("started", "p-2"), ("leased", 2)])
    for ticket in range(2, 10):
        grants = clock.play([("withdraw", ticket), ("reset_done", "p-2", True), ("leased", ticket + 1)])
        assert clock.pool.queued == 10 - ticket, grants


def test_one_decision_serves_all_that_it_makes_room_for():
    clock = Clock(max=3, per_image=True, reserved={"verify": 1}, starts_per_s=0.01)
    clock.play([ask(""), *free("p-1", 1), 100, ask("b"), *free("p-2", 2)])
    for share, image in (("", "a"), ("", "a"), ("verify", "a"), ("", ""), ("", "b")):
        clock.pool.ask(share, image)
    assert clock.play([0]) == [Grant(6, "p-1"), Grant(7, "p-2")], "the reservation has its place all the same"


def test_share_of_another_image_is_passed_for_few_leases():
    clock = Clock(max=1, per_image=True, lease_ttl_s=1e9)
    clock.play([ask("a", "one"), ("started", "p-1"), ("leased", 1), ask("b", "two"), *[ask("a", "one")] * 99])
    ticket, passed = 1, 0
    while clock.pool.count(State.STOPPING) == 0:
        passed += 1
        clock.play([10, ("withdraw", ticket), ("reset_done", "p-1", True), *[("leased", ticket + 1)]])
        ticket = ticket + 1 if ticket > 1 else 3
        clock.play([("leased", ticket)])
    assert passed <= LEAD + 2


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_nobody_without_a_member_on_its_way_is_passed_by_more_than_a_few(seed):
    luck = Random(seed)
    clock = Clock(max=luck.randint(1, 3), per_image=True, lease_ttl_s=1e9)
    wanted: list[str] = [""]  # by ticket
    passed: dict[int, int] = {}  # by ticket that waits
    held: list[int] = []
    image: dict[str, str] = {}
    jobs: dict[str, Step] = {}  # what is being done to a member, and how it ends
    for _ in range(80):
        if luck.random() < 0.5:
            wanted.append(luck.choice("aaab" if luck.random() < 0.9 else "cde"))
            passed[clock.pool.ask("", wanted[-1])] = 0
            clock.play([0])
        elif jobs and luck.random() < 0.6:
            clock.play([jobs.pop(luck.choice(list(jobs)))])
        elif held:
            clock.play([0.1, ("withdraw", held.pop(luck.randrange(len(held))))])
        for action in clock.actions:
            match action:
                case Start(member, of):
                    image[member], jobs[member] = of, ("started", member)
                case Reset(member):
                    jobs[member] = ("reset_done", member, True)
                case Stop(member):
                    jobs[member] = ("stopped", member)
                case Grant(ticket, _):
                    clock.pool.leased(ticket, clock.now)
                    held.append(ticket)
                    del passed[ticket]
                    coming = {image[member] for member in jobs}
                    none_coming = [t for t in passed if t < ticket and wanted[t] not in coming]
                    for other in none_coming if clock.pool.count(State.STOPPING) == 0 else ():
                        passed[other] += 1
                        assert passed[other] <= LEAD
