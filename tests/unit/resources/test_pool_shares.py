"""Whose turn it is: shares, weights and reservations, of guarantees 2 and 10 of pool.py, and shares.py.

The share of a ticket is the first argument of ``ask``. ``simulate`` is an engine whose workers ask again as
soon as they have released, so that every share waits all the time.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from agentfly.resources.actions import Grant, Reset, Start
from agentfly.resources.errors import Saturated
from agentfly.resources.pool import Pool
from tests.unit.resources.pool_clock import Case, Clock, Step, check, spec

Hold = Callable[[str, Random], float]


def ask(share: str) -> Step:
    return ("ask", share)


def back(ticket: int, member: str) -> list[Step]:
    """The member comes back, clean."""
    return [("withdraw", ticket), ("reset_done", member, True)]


TRAIN_HAS_ONE: list[Step] = [ask("train"), ("started", "p-1"), ("leased", 1)]

CASES: dict[str, Case] = {
    "the share that holds less is first, though it asked later": (
        {"max": 2},
        [*TRAIN_HAS_ONE, ask("train"), ask("eval"), ("started", "p-2")],
        [Grant(3, "p-2")],
    ),
    "a share of more weight may hold more": (
        {"max": 3, "weights": {"train": 3}},
        [*TRAIN_HAS_ONE, ask("train"), ask("eval"), ("started", "p-2")],
        [Grant(2, "p-2")],
    ),
    "an idle share's part is the others'": (
        {"max": 2, "weights": {"eval": 9}},
        [*TRAIN_HAS_ONE, ask("train"), ("started", "p-2")],
        [Grant(2, "p-2")],
    ),
    "within a share the first is first": (
        {"max": 1},
        [*TRAIN_HAS_ONE, ask("train"), ask("train"), *back(1, "p-1")],
        [Grant(2, "p-1")],
    ),
    "equal shares take turns": (
        {"max": 1, "lease_ttl_s": 99},
        [*TRAIN_HAS_ONE, ask("train"), ask("eval"), 5, *back(1, "p-1")],
        [Grant(3, "p-1")],
    ),
    "what is reserved is not started for others": (
        {"max": 2, "reserved": {"verify": 1}},
        [*TRAIN_HAS_ONE, ask("train")],
        [],
    ),
    "nor given to them": (
        {"min": 2, "max": 2, "reserved": {"verify": 1}},
        [("started", "p-1"), ("started", "p-2"), ask("train"), ask("train")],
        [],
    ),
    "rollouts hold all they may, and a verifier still gets one": (
        {"min": 2, "max": 2, "reserved": {"verify": 1}},
        [("started", "p-1"), ("started", "p-2"), ask("train"), ask("train"), ask("verify")],
        [Grant(3, "p-1")],
    ),
    "it need not be warm": (
        {"max": 2, "reserved": {"verify": 1}},
        [*TRAIN_HAS_ONE, ask("train"), ask("verify")],
        [Start("p-2")],
    ),
    "what the share holds already counts": (
        {"max": 3, "reserved": {"verify": 1}},
        [ask("verify"), ("started", "p-1"), ask("train"), ask("train")],
        [Start("p-3")],
    ),
    "it may hold more than what is reserved": (
        {"max": 2, "reserved": {"verify": 1}},
        [ask("verify"), ask("verify")],
        [Start("p-2")],
    ),
    "two reservations do not block each other": (
        {"max": 3, "reserved": {"a": 1, "b": 1}},
        [ask(""), ask(""), ask("a"), ask("b")],
        [Start("p-3")],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_shares(case):
    check(case)


def test_part_of_an_idle_share_is_not_saved_up():
    clock = Clock(max=2, lease_ttl_s=1e6)
    clock.play([ask("train"), ask("train"), ("started", "p-1"), ("started", "p-2")])
    clock.play([("leased", 1), ("leased", 2), 1000, ask("train"), ask("train"), ask("eval"), ask("eval")])
    assert clock.play(back(1, "p-1")) == [Grant(5, "p-1")]
    assert clock.play([("leased", 5), *back(2, "p-2")]) == [Grant(3, "p-2")], "half and half at once"
    assert clock.play([("leased", 3), 10, *back(3, "p-2")]) == [Grant(4, "p-2")]


def test_share_that_waited_long_does_not_take_everything_for_as_long():
    many = 32
    clock = Clock(min=many, max=many, lease_ttl_s=1e6)
    clock.play([("started", f"p-{number + 1}") for number in range(many)])
    clock.play([ask("train")] * many)
    clock.play([("leased", number + 1) for number in range(many)])
    clock.play([*[ask("eval")] * many, *[ask("train")] * many, 3600])
    eval_holds = 0
    for ticket in range(1, many + 1):
        member = clock.pool._tickets[ticket].member
        (grant,) = clock.play([("withdraw", ticket), ("reset_done", member, True)])
        eval_holds += many < grant.ticket <= 2 * many
    assert 16 <= eval_holds <= 24


def test_full_queue_of_others_does_not_refuse_one_with_a_reservation():
    clock = Clock(max=2, max_pending=2, reserved={"verify": 1})
    clock.play([*TRAIN_HAS_ONE, ask("train"), ask("train")])
    with pytest.raises(Saturated):
        clock.pool.ask("train")
    assert clock.play([ask("verify")]) == [Start("p-2")]
    with pytest.raises(Saturated):
        clock.pool.ask("verify")


def test_free_member_that_is_reserved_is_no_reason_to_admit_others():
    clock = Clock(min=2, max=2, max_pending=1, reserved={"verify": 1})
    clock.play([("started", "p-1"), ("started", "p-2"), ask("train"), ask("train")])
    with pytest.raises(Saturated):
        clock.pool.ask("train")


# Long runs.


def simulate(members: int, weights: dict[str, float], hold: Hold, leases: int, **fields: Any) -> Any:
    """Grants and member-seconds by share, of so many leases, each share with more workers than members."""
    pool = Pool(spec(max=members, weights=weights, lease_ttl_s=1e9, max_pending=10**6, **fields))
    luck, now, events, order = Random(7), 0.0, [], 0
    shares: dict[int, str] = {}
    grants: Counter[str] = Counter()
    seconds: Counter[str] = Counter()

    def later(pause: float, what: str, who: Any) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (now + pause, order, what, who))

    def turn() -> None:
        for action in pool.decide(now):
            match action:
                case Start(member):
                    later(0.1, "started", member)
                case Reset(member):
                    later(0.001, "reset", member)
                case Grant(ticket, _):
                    pool.leased(ticket, now)
                    share = shares[ticket]
                    length = hold(share, luck)
                    grants[share] += 1
                    seconds[share] += length
                    later(length, "ends", ticket)

    for _ in range(members + 2):
        for share in weights:
            shares[pool.ask(share)] = share
    turn()
    while grants.total() < leases:
        now, _, what, who = heapq.heappop(events)
        if what == "started":
            pool.started(who, now)
        elif what == "reset":
            pool.reset_done(who, True, now)
        else:
            pool.withdraw(who, now)
            share = shares.pop(who)
            shares[pool.ask(share)] = share
        turn()
    return grants, seconds


WEIGHTS = [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 5.0}]


@pytest.mark.parametrize("members", [1, 3, 16])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_equal_leases_are_granted_by_weight(members, weights):
    grants, _ = simulate(members, weights, lambda share, luck: luck.uniform(9, 11), 1500)
    for share, weight in weights.items():
        part = weight / sum(weights.values())
        assert grants[share] / grants.total() == pytest.approx(part, rel=0.05)


@pytest.mark.parametrize("members", [1, 3, 16])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_members_are_held_by_weight_however_long_each_lease_is(members, weights):
    _, seconds = simulate(members, weights, lambda share, luck: luck.expovariate(0.1), 1500)
    for share, weight in weights.items():
        part = weight / sum(weights.values())
        assert seconds[share] / seconds.total() == pytest.approx(part, rel=0.05)


def test_share_of_long_leases_gets_no_more_members_than_that_of_short_ones():
    def hold(share: str, luck: Random) -> float:
        return luck.uniform(90, 110) if share == "a" else luck.uniform(4, 6)

    _, seconds = simulate(8, {"a": 1.0, "b": 1.0}, hold, 1000)
    assert seconds["a"] / seconds.total() == pytest.approx(0.5, rel=0.05)


def test_nobody_starves_beside_a_share_of_great_weight():
    grants, _ = simulate(1, {"a": 100.0, "b": 1.0}, lambda share, luck: 10.0, 1010)
    assert grants["b"] == pytest.approx(10, abs=1)
