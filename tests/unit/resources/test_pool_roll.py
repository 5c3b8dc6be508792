"""A pool whose resource becomes another: guarantees 16 and 18 of pool.py.

``roll`` is the change, of other fields as well where they are named. ``q-1`` is of an earlier process.
"""

from typing import Any

import pytest

from agentfly.resources.actions import Grant, Probe, Reason, Reset, Start, State, Stop
from agentfly.resources.pool_state import IDLE_S
from agentfly.resources.spec import ContainerSpec
from tests.unit.resources.pool_clock import ASK, FREE, Case, Clock, Step, check, held, spec

NEW = ContainerSpec(pids=9)
OUTDATED = Reason.OUTDATED


def roll(**fields: Any) -> Step:
    return ("change", {"resource": NEW, **fields})


def up(*numbers: int) -> list[Step]:
    return [("started", f"p-{number}") for number in numbers]


CASES: dict[str, Case] = {
    "idle members that nobody needs stop at once": ({}, [*FREE, roll()], [Stop("p-1", OUTDATED)]),
    "those of min are replaced first": (
        {"min": 2, "max": 4},
        [*up(1, 2), roll(min=2, max=4)],
        [Start("p-3"), Start("p-4")],
    ),
    "and stop one by one as their replacements come": (
        {"min": 2, "max": 4},
        [*up(1, 2), roll(min=2, max=4), *up(3)],
        [Stop("p-1", OUTDATED)],
    ),
    "until none is left": (
        {"min": 2, "max": 4},
        [*up(1, 2), roll(min=2, max=4), *up(3, 4)],
        [Stop("p-2", OUTDATED)],
    ),
    "those of the buffer as well": (
        {"buffer": 1, "max": 4},
        [*up(1), roll(buffer=1, max=4)],
        [Start("p-2")],
    ),
    "when it has come the old one goes": (
        {"buffer": 1, "max": 4},
        [*up(1), roll(buffer=1, max=4), *up(2)],
        [Stop("p-1", OUTDATED)],
    ),
    "no more start at a time than may": (
        {"min": 3, "max": 9, "max_starting": 1},
        [*up(1, 2, 3), roll(min=3, max=9, max_starting=1)],
        [Start("p-4")],
    ),
    "at max a quarter makes place at a time": (
        {"min": 8, "max": 8},
        [*up(*range(1, 9)), roll(min=8, max=8)],
        [Stop("p-1", OUTDATED), Stop("p-2", OUTDATED)],
    ),
    "and the next when those have come": (
        {"min": 8, "max": 8},
        [*up(*range(1, 9)), roll(min=8, max=8), ("stopped", "p-1"), ("stopped", "p-2"), *up(9)],
        [Stop("p-3", OUTDATED)],
    ),
    "of few it is one": (
        {"min": 1, "max": 1},
        [*up(1), roll(min=1, max=1)],
        [Stop("p-1", OUTDATED)],
    ),
    "starts of the old spec are cut short, and begun anew for who waits": (
        {"max": 2},
        [ASK, roll(max=2)],
        [Stop("p-1", OUTDATED), Start("p-2")],
    ),
    "one that is held stays": ({}, [*held(), roll()], []),
    "and stops when it comes back": ({}, [*held(), roll(), ("withdraw", 1)], [Stop("p-1", OUTDATED)]),
    "its holder may have it reset": ({}, [*held(), roll(), ("clean", 1)], [Reset("p-1")]),
    "and has it again": (
        {},
        [*held(), roll(), ("clean", 1), ("reset_done", "p-1", True)],
        [Grant(1, "p-1")],
    ),
    "one that is on its way to a holder arrives": ({}, [ASK, *up(1), roll(), ("leased", 1)], []),
    "one that is being reset stops": ({}, [*held(), ("withdraw", 1), roll()], [Stop("p-1", OUTDATED)]),
    "a waiter gets an old one rather than wait": (
        {"min": 1, "max": 2},
        [*up(1), roll(min=1, max=2), ASK],
        [Grant(1, "p-1")],
    ),
    "but a new one if there is one": (
        {"min": 2, "max": 4},
        [*up(1, 2), roll(min=2, max=4), *up(3), ASK],
        [Grant(1, "p-3")],
    ),
    "a waiter is not kept waiting for what is in its way": (
        {"min": 1, "max": 1, "per_image": True},
        [*up(1), roll(min=1, max=1, per_image=True), ("ask", "", "a")],
        [],
    ),
    "what failed was the old spec": (
        {"max": 2},
        [ASK, ("start_failed", "p-1", "no such image"), roll(max=2)],
        [Start("p-2")],
    ),
    "a lower max takes old ones first": (
        {"min": 2, "max": 3},
        [*up(1, 2), roll(min=2, max=3), *up(3), roll(min=1, max=1)],
        [Stop("p-2", Reason.RESIZED)],
    ),
    "while the new ones fail the old ones serve": (
        {"min": 1, "max": 2},
        [*up(1), roll(min=1, max=2), ("start_failed", "p-2", "broken"), IDLE_S],
        [Start("p-3"), Probe("p-1")],
    ),
    "back to what it was: nothing is to be done": (
        {"max": 2},
        [*held(), roll(max=2), ("change", {"max": 2}), ("withdraw", 1)],
        [Reset("p-1")],
    ),
    "other bounds alone replace nothing": ({"max": 2}, [*FREE, ("change", {"max": 3})], []),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_roll(case):
    check(case)


SHARED: dict[str, Case] = {
    "holders stay where they are, and another is started": (
        {"max": 2},
        [*held(), roll(shared=True, max=2)],
        [Start("p-2")],
    ),
    "until it has come, new holders go to the old one": (
        {"max": 2},
        [*held(), roll(shared=True, max=2), ASK],
        [Grant(2, "p-1")],
    ),
    "then to the new one": (
        {"max": 2},
        [*held(), roll(shared=True, max=2), *up(2), ASK],
        [Grant(2, "p-2")],
    ),
    "the old one stops when its last holder leaves": (
        {"max": 2},
        [*held(), roll(shared=True, max=2), *up(2), ("withdraw", 1)],
        [Stop("p-1", OUTDATED)],
    ),
    "where there is no place for two, new holders wait": ({"max": 1}, [*held(), roll(shared=True), ASK], []),
    "until the holders of the old one have left": (
        {"max": 1},
        [*held(), roll(shared=True), ASK, ("withdraw", 1), ("stopped", "p-1")],
        [Start("p-2")],
    ),
    "an idle one makes place": (
        {"max": 1, "min": 1},
        [*up(1), roll(shared=True, min=1)],
        [Stop("p-1", OUTDATED)],
    ),
}


@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED.keys())
def test_shared_pool_rolls(case):
    check(case, shared=True)


# Members of an earlier process.


def adopt(**fields: Any) -> Step:
    named = {"clean": True, "leases": 0, "revision": spec().resource.identity(), **fields}
    return ("adopt", "q-1", "", named)


ADOPTED: dict[str, Case] = {
    "a clean one is free": ({}, [adopt(), ASK], [Grant(1, "q-1")]),
    "one that is not is reset": ({}, [adopt(clean=False)], [Reset("q-1")]),
    "one of another spec that nobody needs stops": ({}, [adopt(revision="x")], [Stop("q-1", OUTDATED)]),
    "not clean, not of this spec: it is not worth a reset": (
        {"min": 1, "max": 2},
        [adopt(revision="x", clean=False)],
        [Stop("q-1", OUTDATED)],
    ),
    "one above max stops": (
        {"min": 1},
        [*up(1), adopt()],
        [Stop("p-1", Reason.RESIZED)],
    ),
    "it is probed like any other": ({"min": 1}, [*up(1), ("dirty", 1), 1], []),
}


@pytest.mark.parametrize("case", ADOPTED.values(), ids=ADOPTED.keys())
def test_adopted(case):
    check(case)


def test_adopted_lease_counts_for_its_share_and_ends_in_time():
    clock = Clock(max=2, reserved={"verify": 1}, lease_ttl_s=30)
    clock.pool.adopt("q-1", "", clock.now, clean=False, leases=1, revision=clock.pool.revision)
    ticket = clock.pool.resumed("q-1", "verify", clock.now, 7.0)
    assert clock.play([0]) == []
    assert clock.pool.shares() == {"verify": (0, 1)}
    assert not clock.pool.adopt("q-1", "", clock.now, clean=True, leases=0, revision="")
    clock.play([6.9])
    assert clock.pool.count(State.LEASED) == 1
    assert Reset("q-1") in clock.play([0.1])
    assert clock.pool.withdraw(ticket, clock.now) is False


@pytest.mark.parametrize("most", [1, 2, 4, 8, 16])
def test_roll_ends_with_as_many_as_before_and_never_has_fewer_than_it_may(most):
    for least in range(1, most + 1):
        clock = Clock(min=least, max=most)
        clock.play(up(*range(1, least + 1)))
        clock.play([roll(min=least, max=most)])
        fewest = least
        for _ in range(100):
            actions, clock.actions = clock.actions, []
            fewest = min(fewest, clock.pool.count(State.FREE))
            follow: list[Step] = []
            for action in actions:
                match action:
                    case Start(member):
                        follow.append(("started", member))
                    case Stop(member):
                        follow.append(("stopped", member))
            if not follow:
                break
            for step in follow:
                clock.event(*step)
            clock.play([0])
        assert (clock.pool.outdated, clock.pool.count(State.FREE)) == (0, least)
        assert fewest >= (least if most > least else least - max(1, most // 4))
