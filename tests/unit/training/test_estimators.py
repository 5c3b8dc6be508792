"""Advantages of whole rollouts and of turns, against numbers worked out by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.api.algorithm import Gigpo, Hgpo
from agentfly.training.estimators import leave_one_out, normalized
from agentfly.training.estimators_steps import Rollout, Step, gigpo, hgpo

# Four groups, mixed: 1 0 0 1; two equal ones; one that is alone; 1 2 6.
KEYS = ["a", "d", "b", "a", "c", "a", "d", "b", "a", "d"]
VALUES = [1.0, 1.0, 2.0, 0.0, 3.0, 0.0, 2.0, 2.0, 1.0, 6.0]


def by_group(values: list[float]) -> dict[str, list[float]]:
    return {key: [v for k, v in zip(KEYS, values, strict=True) if k == key] for key in "abcd"}


def close(values: Any) -> Any:
    return pytest.approx(values, abs=2e-6)


def test_a_reward_less_the_mean_of_its_group() -> None:
    found = by_group(normalized(VALUES, KEYS, scale=False))
    assert found == {"a": [0.5, -0.5, -0.5, 0.5], "b": [0, 0], "c": [0], "d": [-2, -1, 3]}


def test_and_divided_by_its_deviation() -> None:
    found = by_group(normalized(VALUES, KEYS, scale=True))
    # sqrt(4 * 0.25 / 3) = 0.577350, sqrt((4 + 1 + 9) / 2) = 2.645751
    assert found["a"] == close([0.866024, -0.866024, -0.866024, 0.866024])
    assert found["d"] == close([-0.755928, -0.377964, 1.133893])
    assert found["b"] + found["c"] == [0, 0, 0]


def test_and_divided_by_the_deviation_of_a_whole_population() -> None:
    found = normalized([1.0, 0.0, 0.0], ["a"] * 3, scale=True, population=True)
    assert found == close([1.414211, -0.707105, -0.707105])  # sqrt(2 / 9) = 0.471405


def test_a_member_that_counts_three_times() -> None:
    assert normalized([0.0, 1.0], ["a"] * 2, scale=False, counts=[1, 3]) == [-0.75, 0.25]
    # sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
    assert normalized([0.0, 1.0], ["a"] * 2, scale=True, counts=[1, 3]) == close([-1.499997, 0.499999])


def test_a_reward_less_the_mean_of_the_others() -> None:
    found = by_group(leave_one_out(VALUES, KEYS))
    assert found["a"] == close([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert found["d"] == [-3, -1.5, 4.5]
    assert found["b"] + found["c"] == [0, 0, 0]


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_rounding_never_pushes_a_group_of_equals(value: float, size: int) -> None:
    values, keys = [value] * size, ["a"] * size
    assert set(normalized(values, keys, scale=True)) == {0.0}
    assert set(leave_one_out(values, keys)) == {0.0}


numbers = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-10, 10)), max_size=12)


@given(numbers, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_rollouts_changes_nothing(rows: list[Any], random: Any, scale: bool) -> None:
    shuffled = rows[:]
    random.shuffle(shuffled)

    def found(rows: list[Any]) -> list[Any]:
        keys, values = [key for key, _ in rows], [value for _, value in rows]
        one, other = normalized(values, keys, scale=scale), leave_one_out(values, keys)
        return sorted(zip(keys, values, one, other, strict=True))

    assert found(rows) == found(shuffled)


def rollout(
    group: str, reward: float, *anchors: str | None, rewards: dict[int, float] | None = None
) -> Rollout:
    given = rewards or {}
    return Rollout(group, reward, tuple(Step(each, given.get(n, 0.0)) for n, each in enumerate(anchors)))


ROLLOUTS = [
    rollout("g", 1.0, "s0", "s1", "s2"),
    rollout("lonely", 1.0, "s0", "s0"),
    rollout("g", 0.0, "s0", "s1", rewards={1: 0.5}),
    rollout("blind", 2.0, None, None),
    rollout("g", 0.0, "s0", "s2"),
    rollout("blind", 0.0, None),
]


def test_what_a_turn_led_to() -> None:
    assert ROLLOUTS[0].returns(0.5) == [0.25, 0.5, 1.0]
    assert ROLLOUTS[2].returns(0.5) == [0.25, 0.5]
    assert rollout("g", 4.0, "a", "b", "c", rewards={0: 1.0, 2: 2.0}).returns(0.5) == [2.5, 3.0, 6.0]
    assert (ROLLOUTS[0].total, ROLLOUTS[2].total) == (1.0, 0.5)


# Rollouts of g: 1 0.5 0, less 0.5. Turns at s0: 0.25 0.25 0, less 1/6; at s1: equal; at s2: 1 0, less 0.5.
@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, [[0.583333, 0.5, 1.0], [0, 0], [0.083333, 0], [1, 1], [-0.666667, -1.0], [-1]]),
        # Mean over 3 + 2 + 2 turns: 4 / 7; blind: 4 / 3.
        (
            {"mean_over": "Steps"},
            [
                [0.511905, 0.428571, 0.928571],
                [0, 0],
                [0.011905, -0.071429],
                [0.666667, 0.666667],
                [-0.738095, -1.071429],
                [-1.333333],
            ],
        ),
        (
            {"step_weight": 2.0},
            [[0.666667, 0.5, 1.5], [0, 0], [0.166667, 0], [1, 1], [-0.833333, -1.5], [-1]],
        ),
        # Deviations: 0.5 and, of blind, 1.414214; at s0 0.144338, at s2 0.707107.
        (
            {"normalization": "MeanStd"},
            [
                [1.577344, 0.999998, 1.707104],
                [0, 0],
                [0.577346, 0],
                [0.707106, 0.707106],
                [-2.154691, -1.707104],
                [-0.707106],
            ],
        ),
        # Over turns: of g sqrt((3 * 9/49 + 2 * 1/196 + 2 * 16/49) / 6) = 0.449868, of blind 1.154701.
        (
            {"normalization": "MeanStd", "mean_over": "Steps", "step_weight": 0.0},
            [[0.952659] * 3, [0, 0], [-0.158776] * 2, [0.577350] * 2, [-1.270212] * 2, [-1.154700]],
        ),
    ],
)
def test_gigpo(settings: dict[str, Any], want: list[list[float]]) -> None:
    found = gigpo(ROLLOUTS, 0.5, Gigpo(**settings))
    assert found == [close(each) for each in want]


HISTORIES = [
    rollout("g", 1.0, "A", "B", "C"),
    rollout("g", 0.0, "A", "B", "D"),
    rollout("g", 0.0, "E", "B", "C"),
    rollout("lonely", 1.0, "A", "A"),
    rollout("h", 1.0, "A", "B"),
    rollout("h", 1.0, "A", "B"),
]


# One state, weight 2: A 1 0, B 1 0 0, C 1 0. Two, weight 3: AB 1 0, BC 1 0. The rest is alone or equal.
@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"history": 1}, [[0.5, 0.566667, 0.5], [-0.5, -0.433333, 0], [0, -0.333333, -0.5]]),
        ({"history": 0}, [[0.5, 0.666667, 0.5], [-0.5, -0.333333, 0], [0, -0.333333, -0.5]]),
        (
            {"history": 1, "length_exponent": 0.0},
            [[0.5, 0.583333, 0.5], [-0.5, -0.416667, 0], [0, -0.333333, -0.5]],
        ),
        # Three states, weight 4: ABC, ABD and EBC are alone.
        ({"history": 2}, [[0.5, 0.566667, 0.5], [-0.5, -0.433333, 0], [0, -0.333333, -0.5]]),
        # Deviations of populations: 0.5, 0.471405, 0.5.
        (
            {"history": 1, "normalization": "MeanStd"},
            [[0.999998, 1.165683, 0.999998], [-0.999998, -0.882841, 0], [0, -0.707105, -0.999998]],
        ),
    ],
)
def test_hgpo(settings: dict[str, Any], want: list[list[float]]) -> None:
    found = hgpo(HISTORIES, 1.0, Hgpo(**{"normalization": "Mean", **settings}))
    assert found[:3] == [close(each) for each in want]
    assert found[3:] == [[0, 0], [0, 0], [0, 0]]


def test_turns_are_compared_where_their_whole_history_is_the_same() -> None:
    found = hgpo(
        [rollout("g", 1.0, "A", "B"), rollout("g", 0.0, None, "B"), rollout("g", 0.0, "A", "B")],
        1.0,
        Hgpo(history=1, normalization="Mean"),
    )
    # B: 1 0 0. A before B: 1 0; nobody knows what was before the second one's B.
    assert [turns[1] for turns in found] == close([0.566667, -0.333333, -0.433333])


anchors = st.lists(st.sampled_from(["x", "y", None]), min_size=1, max_size=4)
rollouts = st.lists(
    st.builds(
        lambda group, reward, names: rollout(group, reward, *names),
        st.sampled_from("ab"),
        st.sampled_from([0.0, 0.3, 1.0]),
        anchors,
    ),
    max_size=8,
)


@given(rollouts, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_changes_no_turn(given: list[Rollout], random: Any) -> None:
    order = list(range(len(given)))
    random.shuffle(order)
    mixed = [given[number] for number in order]
    for estimate, settings in ((gigpo, Gigpo(normalization="MeanStd")), (hgpo, Hgpo())):
        found, again = estimate(given, 0.9, settings), estimate(mixed, 0.9, settings)
        assert [found[number] for number in order] == again


@given(rollouts)
def test_a_rollout_that_is_alone_teaches_none_of_its_turns(given: list[Rollout]) -> None:
    groups = [each.group for each in given]
    for found in (gigpo(given, 0.9, Gigpo()), hgpo(given, 0.9, Hgpo())):
        for group, turns in zip(groups, found, strict=True):
            assert groups.count(group) > 1 or set(turns) == {0.0}
