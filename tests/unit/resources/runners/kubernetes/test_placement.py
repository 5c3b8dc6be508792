from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.resources.runners.kubernetes.placement import Occupancy, affinity, excluded_nodes

NONE = frozenset()


@pytest.mark.parametrize(
    ("limit", "placed", "waiting", "expected"),
    [
        (1, {}, [], NONE),
        (1, {"a": 1}, [], {"a"}),
        (2, {"a": 1, "b": 2}, [], {"b"}),
        (2, {"a": 1, "b": 2}, [NONE], None),  # who waits may fill a
        (2, {"a": 1, "b": 2}, [frozenset("ab")], {"b"}),  # who waits cannot go to a
        (3, {"a": 1}, [NONE], NONE),
        (3, {"a": 1}, [NONE, NONE], None),
        (1, {}, [NONE], None),
        (1, {"a": 1}, [frozenset("a")], None),  # a node that nobody knows may be where both go
        (3, {}, [NONE] * 3, None),
        (1, {"a": 5}, [], {"a"}),
    ],
)
def test_keeps_away_from_what_is_full(limit, placed, waiting, expected):
    assert excluded_nodes(limit, placed, waiting) == expected


def test_affinity_names_the_nodes_in_order_and_is_nothing_for_none():
    assert affinity([]) == {}
    [term] = affinity({"b", "a"})["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert [each["values"] for each in term["matchFields"]] == [["a"], ["b"]]


STEPS = st.lists(st.tuples(st.sampled_from(["start", "place", "end"]), st.integers(0, 50)), max_size=60)


@given(st.integers(1, 4), STEPS)
def test_no_node_ever_has_more_whatever_the_scheduler_does(limit, steps):
    nodes, placed, waiting = "abcd", [], []
    for step, choice in steps:
        match step:
            case "start":
                excluded = excluded_nodes(limit, Counter(placed), waiting)
                if excluded is not None:
                    assert excluded == {node for node in placed if placed.count(node) >= limit}
                    waiting.append(excluded)
            case "place" if waiting:
                excluded = waiting[choice % len(waiting)]
                open_nodes = [node for node in nodes if node not in excluded]
                if open_nodes:
                    waiting.remove(excluded)
                    placed.append(open_nodes[choice % len(open_nodes)])
            case "end" if placed:
                placed.pop(choice % len(placed))
        assert max(Counter(placed).values(), default=0) <= limit


@given(st.integers(1, 3), st.lists(st.sampled_from("abc"), max_size=6))
def test_a_node_that_may_take_one_more_is_not_excluded(limit, placed):
    counts = Counter(placed)
    assert excluded_nodes(limit, counts, []) == {node for node, count in counts.items() if count >= limit}


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.sampled_from(["p", "q"]), st.sampled_from(["", "a", "b", None])),
        max_size=40,
    )
)
def test_occupancy_is_what_a_plain_count_is(changes):
    occupancy, pods = Occupancy(), {}
    for name, pool, node in changes:
        if node is None:
            occupancy.drop(name)
            pods.pop(name, None)
        else:
            occupancy.put(name, pool, node)
            pods[name] = (pool, node)
    for pool in "pq":
        mine = {name: node for name, (of, node) in pods.items() if of == pool}
        assert occupancy.placed(pool) == Counter(node for node in mine.values() if node)
        assert set(occupancy.waiting(pool)) == {name for name, node in mine.items() if not node}
    for name in "xyz":
        assert occupancy.has_node(name) == bool(pods.get(name, ("", ""))[1])
