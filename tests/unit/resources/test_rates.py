"""Section numbers are the guarantees of rates.py."""

import pytest

from agentfly.resources.events import Event, EventKind
from agentfly.resources.rates import KEPT, Rates


def grant(seconds: float, *, warm: bool, pool: str = "swe") -> Event:
    return Event(EventKind.LEASE_GRANTED, pool, seconds=seconds, warm=warm)


def rates(*events: Event) -> Rates:
    made = Rates()
    for event in events:
        made.note(event)
    return made


# 1. The last grants of each pool.


def test_nothing_is_known_before_the_first_grant():
    made = rates(Event(EventKind.LEASE_RELEASED, "swe", seconds=9.0), grant(1, warm=True, pool="other"))
    assert (made.hit_ratio("swe"), made.acquire_p99_s("swe")) == (None, None)


def test_ratio_is_of_those_that_found_a_member_free():
    made = rates(grant(0.1, warm=True), grant(3, warm=False), grant(0.1, warm=True), grant(0.1, warm=True))
    assert made.hit_ratio("swe") == 0.75


@pytest.mark.parametrize(("count", "p99"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_percentile_is_the_nearest_rank(count, p99):
    made = rates(*(grant(seconds, warm=True) for seconds in range(count, 0, -1)))
    assert made.acquire_p99_s("swe") == p99


def test_old_grants_do_not_count():
    made = rates(grant(100, warm=False), *(grant(1, warm=True) for _ in range(KEPT)))
    assert (made.hit_ratio("swe"), made.acquire_p99_s("swe")) == (1, 1)
