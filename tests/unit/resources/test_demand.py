"""Section numbers are the guarantees of demand.py. That the engine passes them on: test_engine_asking."""

import pytest

from agentfly.resources.demand import DEMAND_S, Demands, counted
from agentfly.resources.errors import ResourceError

# 1. How long a want stands.


def test_newer_want_of_an_owner_replaces_the_older():
    demands = Demands()
    demands.say("swe", "a", {"x": 2, "y": 1}, 0)
    demands.say("swe", "a", {"y": 3}, 1)
    assert demands.total("swe") == {"y": 3}
    demands.say("swe", "a", {}, 2)
    assert (demands.total("swe"), demands.next_end()) == ({}, None)


def test_released_owner_wants_nothing_any_more():
    demands = Demands()
    demands.say("swe", "a", {"x": 1}, 0)
    demands.say("web", "a", {"x": 1}, 0)
    demands.say("swe", "b", {"z": 1}, 0)
    assert demands.forget("a") == ["swe", "web"]
    assert demands.forget("a") == []
    assert (demands.total("swe"), demands.total("web")) == ({"z": 1}, {})


def test_want_ends_unless_it_is_said_again():
    demands = Demands()
    demands.say("swe", "a", {"x": 1}, 0)
    demands.say("swe", "b", {"y": 1}, 10)
    assert demands.next_end() == DEMAND_S
    assert demands.expire(DEMAND_S - 1) == []
    demands.say("swe", "a", {"x": 1}, 20)
    assert demands.expire(DEMAND_S + 10) == ["swe"]
    assert demands.total("swe") == {"x": 1}
    assert demands.next_end() == DEMAND_S + 20


def test_granted_member_is_wanted_no_more_by_whoever_wanted_it_first():
    demands = Demands()
    demands.say("swe", "a", {"x": 1}, 0)
    demands.say("swe", "b", {"x": 2}, 0)
    for left in ({"x": 2}, {"x": 1}, {}, {}):
        demands.granted("swe", "x")
        assert demands.total("swe") == left
    demands.granted("web", "x")


# 2. Several owners.


def test_wants_add_up_and_the_soonest_comes_first():
    demands = Demands()
    demands.say("swe", "a", {"x": 1, "y": 1, "late": 1}, 0)
    demands.say("swe", "b", {"z": 2, "y": 4}, 0)
    total = demands.total("swe")
    assert list(total.items()) == [("x", 1), ("z", 2), ("y", 5), ("late", 1)]
    assert demands.total("web") == {}


# What is wanted, as it is said.


def test_sequence_counts_each_time_that_an_image_comes():
    assert list(counted("swe", ["b", "a", "b"]).items()) == [("b", 2), ("a", 1)]
    assert counted("swe", {"a": 3}) == {"a": 3}


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_count_that_is_none_is_refused(count):
    with pytest.raises(ResourceError, match=r"pool swe: demand of image x: .* is not a number of members"):
        counted("swe", {"x": count})
