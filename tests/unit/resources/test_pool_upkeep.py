"""What becomes of members: memory, quarantine and another spec; guarantees 1, 6 and 14 of pool.py."""

from typing import Any

import pytest

from agentfly.resources.actions import Grant, Probe, Quarantine, Reason, Reset, Start, State, Stop
from agentfly.resources.pool_state import PROBE_S
from agentfly.resources.spec import InProcessSpec
from tests.unit.resources.pool_clock import ASK, FREE, Case, Clock, Step, check, held, spec

HEAVY: dict[str, Any] = {"memory_mb": 101.0}
FAILED: Step = ("reset_done", "p-1", False, {"why": "a file is left"})
MUSEUM: list[Step] = [*held(), ("withdraw", 1), FAILED]

CASES: dict[str, Case] = {
    # 6. Memory.
    "a free member that holds too much is retired": (
        {"max_memory_mb": 100},
        [*FREE, ("probed", "p-1", True, HEAVY)],
        [Stop("p-1", Reason.MAX_MEMORY)],
    ),
    "one that holds as much as it may is not": (
        {"max_memory_mb": 100},
        [*FREE, ("probed", "p-1", True, {"memory_mb": 100.0})],
        [],
    ),
    "what nobody counted is nothing": ({"max_memory_mb": 100}, [*FREE, ("probed", "p-1", True)], []),
    "never under its holder": ({"max_memory_mb": 100}, [*held(), ("probed", "p-1", True, HEAVY)], []),
    "what a reset left behind is seen before the next holder has it": (
        {"max_memory_mb": 100},
        [*held(), ASK, ("withdraw", 1), ("reset_done", "p-1", True, HEAVY)],
        [Stop("p-1", Reason.MAX_MEMORY)],
    ),
    "a holder that wanted a clean member gets another": (
        {"max_memory_mb": 100, "max": 2},
        [*held(), ("clean", 1), ("reset_done", "p-1", True, HEAVY)],
        [Stop("p-1", Reason.MAX_MEMORY), Start("p-2")],
    ),
    # 14. Quarantine.
    "a member whose reset was not verified is kept for a look": (
        {"max": 2, "quarantine": 1},
        MUSEUM,
        [Quarantine("p-1", "a file is left")],
    ),
    "one that was handed back dirty is not: nobody doubts the reset": (
        {"max": 2, "quarantine": 1},
        [*held(), ("dirty", 1)],
        [Stop("p-1", Reason.DIRTY)],
    ),
    "one that died in its reset is not": (
        {"max": 2, "quarantine": 1},
        [*held(), ("withdraw", 1), ("lost", "p-1", "x")],
        [Stop("p-1", Reason.LOST)],
    ),
    "nobody gets it": ({"max": 2, "quarantine": 1}, [*MUSEUM, ASK], [Start("p-2")]),
    "the oldest makes place for the next": (
        {"max": 3, "quarantine": 1},
        [*MUSEUM, ASK, ("started", "p-2"), ("leased", 2), ("withdraw", 2), ("reset_done", "p-2", False)],
        [Quarantine("p-2", ""), Stop("p-1", Reason.RESET_FAILED)],
    ),
    "it does not count as one of min": (
        {"min": 1, "max": 2, "quarantine": 1},
        [("started", "p-1"), ASK, ("leased", 1), ("withdraw", 1), FAILED],
        [Quarantine("p-1", "a file is left"), Start("p-2")],
    ),
    "it counts towards max": (
        {"min": 2, "max": 3, "quarantine": 1},
        [
            ("started", "p-1"),
            ("started", "p-2"),
            *[ASK, ("leased", 1), ("withdraw", 1), ("reset_done", "p-2", False)],
            *[ASK, ASK],
        ],
        [],
    ),
    "work is not held up for it": (
        {"max": 2, "quarantine": 1},
        [*MUSEUM, ASK, ("started", "p-2"), ("leased", 2), ASK],
        [Stop("p-1", Reason.RESET_FAILED)],
    ),
    "while another is coming it stays": (
        {"max": 2, "quarantine": 1},
        [*MUSEUM, ASK, ("started", "p-2"), ("leased", 2), ("withdraw", 2), ASK],
        [],
    ),
    "it is stopped when the look is over": (
        {"max": 2, "quarantine": 1},
        [*MUSEUM, ("unquarantine", "p-1")],
        [Stop("p-1", Reason.RESET_FAILED)],
    ),
    "it is not probed": ({"max": 2, "quarantine": 1}, [*MUSEUM, PROBE_S], []),
    # 1. Another spec.
    "a lower max stops free members": (
        {"min": 2, "max": 2},
        [("started", "p-1"), ("started", "p-2"), ("change", {"max": 1})],
        [Stop("p-1", Reason.RESIZED)],
    ),
    "before those that start, the last begun first": (
        {"min": 3, "max": 3},
        [("started", "p-1"), ("change", {"max": 1})],
        [Stop("p-1", Reason.RESIZED), Stop("p-3", Reason.RESIZED)],
    ),
    "never one that is held": ({"max": 2}, [*held(), ASK, ("started", "p-2"), ("change", {"max": 1})], []),
    "that one goes when it comes back": (
        {"max": 2},
        [*held(), ASK, ("started", "p-2"), ("leased", 2), ("change", {"max": 1}), ("withdraw", 1)],
        [Stop("p-1", Reason.RESIZED)],
    ),
    "nothing starts before they are fewer": (
        {"max": 2},
        [*held(), ASK, ("started", "p-2"), ("leased", 2), ("change", {"max": 1}), ASK, ("dirty", 1)],
        [Stop("p-1", Reason.DIRTY)],
    ),
    "a higher max serves who waits": ({"max": 1}, [*held(), ASK, ("change", {"max": 2})], [Start("p-2")]),
    "a higher min starts": ({"max": 2}, [("change", {"max": 2, "min": 1})], [Start("p-1")]),
    "a lower bound of reuses retires who is above it": (
        {"max": 2},
        [
            *FREE,
            ASK,
            ("leased", 2),
            ("withdraw", 2),
            ("reset_done", "p-1", True),
            ("change", {"max_reuses": 0}),
        ],
        [Stop("p-1", Reason.MAX_REUSES)],
    ),
    "a lower bound of age": (
        {},
        [*FREE, 9, ("change", {"max_lifetime_s": 5})],
        [Stop("p-1", Reason.MAX_LIFETIME)],
    ),
    "a smaller quarantine lets the oldest go": (
        {"max": 2, "quarantine": 1},
        [*MUSEUM, ("change", {"max": 2})],
        [Stop("p-1", Reason.RESET_FAILED)],
    ),
    "a reservation keeps who comes later out": (
        {"max": 2},
        [*held(), ("change", {"max": 2, "reserved": {"verify": 1}}), ASK],
        [],
    ),
    "a lease keeps its time until it is renewed": (
        {"lease_ttl_s": 50},
        [*held(), ("change", {"lease_ttl_s": 5}), 6],
        [],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_upkeep(case):
    check(case)


def test_quarantine_is_listed_with_what_was_found():
    clock = Clock(max=2, quarantine=1)
    clock.play(MUSEUM)
    assert clock.pool.quarantined() == {"p-1": "a file is left"}
    assert clock.pool.count(State.QUARANTINED) == 1
    assert clock.pool.unquarantine("p-2") is False


def test_shared_member_is_weighed_when_nobody_holds_it():
    clock = Clock(shared=True, min=1, max_memory_mb=100)
    clock.play([("started", "p-1"), ASK, ("leased", 1)])
    assert clock.play([("probed", "p-1", True, HEAVY)]) == []
    assert clock.play([("withdraw", 1)]) == [Reset("p-1")]
    assert clock.play([("reset_done", "p-1", True, HEAVY)])[0] == Stop("p-1", Reason.MAX_MEMORY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "q"),
        ("kind", InProcessSpec(entrypoint="a:b")),
        ("shared", True),
        ("per_image", True),
    ],
)
def test_what_a_pool_is_cannot_change(field, value):
    clock = Clock(max=2)
    clock.play(held())
    before = clock.pool.spec
    with pytest.raises(ValueError, match=f"^{field}: of pool p cannot change"):
        clock.pool.change(spec(**{"max": 3, "resource" if field == "kind" else field: value}))
    assert clock.pool.spec is before
    assert clock.play([("withdraw", 1)]) == [Reset("p-1")]


def test_waiters_of_a_pool_that_shrank_are_served_in_the_end():
    clock = Clock(max=3)
    clock.play([*held(), ASK, ("started", "p-2"), ("leased", 2), ASK, ASK])
    clock.play([("change", {"max": 1})])
    clock.play([("withdraw", 1), ("stopped", "p-1"), ("stopped", "p-3")])
    assert clock.play([("withdraw", 2)]) == [Reset("p-2")]
    assert clock.play([("reset_done", "p-2", True)]) == [Grant(3, "p-2")]
    assert (clock.pool.max, clock.pool.count(*State)) == (1, 1)
    assert Probe("p-2") not in clock.actions
