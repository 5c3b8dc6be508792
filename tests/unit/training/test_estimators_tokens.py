"""Advantages of tokens: rows of rollouts, masks and critic, by hand and by property."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.api.algorithm import NAMES, WITHOUT_GROUPS, Algorithm
from agentfly.errors import AgentflyError
from agentfly.training.estimators_steps import Step
from agentfly.training.estimators_tokens import Batch, Span, advantages

Row = tuple[str, str, int, list[int], float]


def batch(rows: list[Row], values: Any = None, spans: Any = None, at: int | None = None) -> Batch:
    """Rows as (group, rollout, number, mask, reward), the reward on the last sampled token or at ``at``."""
    width = max(len(mask) for *_, mask, _ in rows)
    padded = np.array([mask + [0] * (width - len(mask)) for *_, mask, _ in rows])
    rewards = np.zeros(padded.shape)
    for number, (*_, mask, reward) in enumerate(rows):
        if any(mask):
            rewards[number, np.flatnonzero(mask)[-1] if at is None else at] = reward
    return Batch(
        rewards=rewards,
        mask=padded,
        groups=[group for group, *_ in rows],
        rollouts=[f"{group}_{rollout}" for group, rollout, *_ in rows],
        numbers=[number for *_, number, _, _ in rows],
        spans=[[] for _ in rows] if spans is None else spans,
        values=values,
    )


PADDING: Row = ("pad", "0", 0, [0], 0.0)


def found(name: str, given: Batch, **more: Any) -> list[list[float]]:
    first, _ = advantages(given, Algorithm.model_validate({"name": name, **more}))
    rounded: list[list[float]] = (np.round(first, 5) + 0.0).tolist()
    return rounded


# Groups a: 1 (three tokens around an observation) and 0 (two rows); b: equal; c: alone.
ROWS: list[Row] = [
    ("a", "0", 0, [1, 0, 1, 1], 1.0),
    ("a", "1", 1, [0, 1], 0.0),
    ("b", "0", 0, [1], 1.0),
    ("a", "1", 0, [1, 1, 1], 0.0),
    ("c", "0", 0, [1, 1], 5.0),
    ("b", "1", 0, [1], 1.0),
    PADDING,
]


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_rollout_counts_once_however_many_rows_it_has(name: str) -> None:
    assert found(name, batch(ROWS)) == [
        [0.70711, 0, 0.70711, 0.70711],
        [0, -0.70711, 0, 0],
        [0, 0, 0, 0],
        [-0.70711, -0.70711, -0.70711, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_rloo_of_two_is_their_difference() -> None:
    rows = found("rloo", batch(ROWS))
    assert rows[0] == [1, 0, 1, 1]
    assert rows[3] == [-1, -1, -1, 0]
    assert rows[4] == [0, 0, 0, 0]


def test_dr_grpo_makes_of_a_mean_over_rows_a_mean_over_rollouts() -> None:
    rows = found("dr_grpo", batch(ROWS))
    assert rows[0] == [0.7, 0, 0.7, 0.7]  # 0.5 * 7 rows / 5 rollouts
    assert rows[1] == [0, -0.7, 0, 0]


def test_gspo_makes_of_a_mean_over_rows_a_mean_over_rollouts() -> None:
    given = batch(ROWS)
    rows = found("gspo", given)
    # 0.707106 * 7 / 5; the second rollout's rows have 1 and 3 of its 4 tokens
    assert rows[0] == [0.98995, 0, 0.98995, 0.98995]
    assert rows[1] == [0, -0.24749, 0, 0]
    assert rows[3] == [-0.74246, -0.74246, -0.74246, 0]
    means = [sum(row) / max(1, sum(mask)) for row, mask in zip(rows, given.mask.tolist(), strict=True)]
    assert sum(means) / len(rows) == pytest.approx(0, abs=1e-5)  # as the mean over rollouts is


def test_reinforce_plus_plus_baseline_whitens_what_was_compared() -> None:
    # 3 times 0.5, 4 times -0.5, 2 times 0: mean -1/18, variance 1.722222 / 8
    rows = found("reinforce_plus_plus_baseline", batch(ROWS))
    assert rows[0] == [1.19737, 0, 1.19737, 1.19737]
    assert rows[3] == [-0.95789, -0.95789, -0.95789, 0]
    assert (rows[2][0], rows[5][0]) == (0.11974, 0.11974)
    assert (rows[4], rows[6]) == ([0, 0, 0, 0], [0, 0, 0, 0])


LINES: list[Row] = [("a", "0", 0, [1, 0, 1, 1], 1.0), ("b", "0", 1, [0, 1], 2.0), ("b", "0", 0, [1, 1], 0.0)]


def test_reinforce_plus_plus_discounts_through_observations_and_rows() -> None:
    given = batch([*LINES, PADDING])
    first, returns = advantages(given, Algorithm(name="reinforce_plus_plus", gamma=0.5))
    assert returns.tolist() == [[0.25, 0, 0.5, 1], [0, 2, 0, 0], [0.5, 1, 0, 0], [0, 0, 0, 0]]
    # Mean 0.875, variance 1.96875 / 5 = 0.39375
    assert first[0].tolist() == pytest.approx([-0.996022, 0, -0.597613, 0.199204], abs=1e-5)
    assert first[1].tolist() == pytest.approx([0, 1.792840, 0, 0], abs=1e-5)


def test_ppo_asks_the_critic_what_comes_next_and_that_may_be_in_the_next_row() -> None:
    values = np.array([[0.5, 9, 0.5, 0.5], [9, 2, 9, 9], [0, 1, 9, 9]])
    rows = [*LINES[:1], ("b", "0", 1, [0, 1], 0.0), LINES[2]]
    algorithm = Algorithm.model_validate({"name": "ppo", "gamma": 0.5, "ppo": {"gaeLambda": 0.5}})
    first, returns = advantages(batch(rows, values), algorithm)
    # a: 0.5; -0.25 + 0.25 * 0.5; -0.25 + 0.25 * -0.125. b: -2; 0 + 0.25 * -2; 0.5 + 0.25 * -0.5
    assert returns.tolist() == [[0.21875, 0, 0.375, 1], [0, 0, 0, 0], [0.375, 0.5, 0, 0]]
    # Mean -2.03125 / 6 = -0.338542, variance (4.735352 - 0.687663) / 5 = 0.809538
    assert first[0].tolist() == pytest.approx([0.063676, 0, 0.237337, 0.931979], abs=2e-6)
    assert first[1].tolist() == pytest.approx([0, -1.846592, 0, 0], abs=2e-6)
    assert first[2].tolist() == pytest.approx([0.793052, -0.179449, 0, 0], abs=2e-6)


def steps(*spans: tuple[int, int, str | None]) -> list[Span]:
    return [Span(start, end, Step(anchor)) for start, end, anchor in spans]


TURNS: list[Row] = [
    ("a", "0", 0, [1, 1, 0, 1], 1.0),
    ("a", "1", 1, [1], 0.0),
    ("a", "1", 0, [1, 1, 1], 0.0),
    ("a", "2", 0, [1, 0, 1], 0.0),
    PADDING,
]
SPANS = [
    steps((0, 2, "s"), (3, 4, "t")),
    steps((0, 1, "t")),
    steps((0, 3, "s")),
    steps((0, 1, "s"), (2, 3, "u")),
    steps((0, 1, "s")),  # of the row that verl copied
]


def test_gigpo_gives_each_token_the_advantage_of_its_turn_in_whichever_row() -> None:
    # Rollouts: 1 0 0. At s: 0.5 0 0. At t: 1 0.
    rows = found("gigpo", batch(TURNS, spans=SPANS), gamma=0.5)
    assert rows[0] == [1.0, 1.0, 0, 1.16667]  # 2/3 + 1/3, 2/3 + 1/2
    assert rows[1] == [-0.83333, 0, 0, 0]
    assert rows[2] == [-0.5, -0.5, -0.5, 0]
    assert rows[3] == [-0.5, 0, -0.33333, 0]
    assert rows[4] == [0, 0, 0, 0]


def test_hgpo_looks_back_over_rows() -> None:
    # st: 1 0, with weight 3 beside 2 for t: 1 0; s: 1 0 0
    rows = found("hgpo", batch(TURNS, spans=SPANS), gamma=1.0, hgpo={"normalization": "Mean", "history": 1})
    assert rows[0] == [0.66667, 0.66667, 0, 0.5]
    assert rows[1] == [-0.5, 0, 0, 0]
    assert rows[3] == [-0.33333, 0, 0, 0]


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_rows_without_turns_are_an_error_that_names_the_rollout(name: str) -> None:
    with pytest.raises(AgentflyError, match="trajectory a_0: does not say which turn"):
        advantages(batch(TURNS), Algorithm.model_validate({"name": name}))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_nothing_is_nothing(name: str) -> None:
    given = batch([PADDING, PADDING], np.zeros((2, 1)))
    assert not advantages(given, Algorithm.model_validate({"name": name}))[0].any()


# Properties


@st.composite
def batches(draw: st.DrawFn, one_row: bool = False) -> Batch:
    """Up to three groups of rollouts of up to three rows, with observations between turns."""
    rows: list[Row] = []
    spans: list[list[Span]] = []
    rewards = st.sampled_from([0.0, 0.1, 0.7, 1.0])
    for group in "abc"[: draw(st.integers(1, 3))]:
        for rollout in range(draw(st.integers(1, 4))):
            count = 1 if one_row else draw(st.integers(1, 3))
            for number in range(count):
                mask: list[int] = []
                turns: list[Span] = []
                for _ in range(draw(st.integers(1, 3))):
                    mask += [0] * draw(st.integers(0, 2))
                    length = draw(st.integers(1, 3))
                    anchor = draw(st.sampled_from(["x", "y", None]))
                    turns.append(Span(len(mask), len(mask) + length, Step(anchor)))
                    mask += [1] * length
                rows.append(
                    (group, str(rollout), number, mask, draw(rewards) if number == count - 1 else 0.0)
                )
                spans.append(turns)
    rows.append(PADDING)
    spans.append(spans[0])
    order = draw(st.permutations(range(len(rows))))
    rows, spans = [rows[place] for place in order], [spans[place] for place in order]
    width = max(len(mask) for *_, mask, _ in rows)
    values = np.linspace(-1, 1, len(rows) * width).reshape(len(rows), width)
    return batch(rows, values, spans)


def changed(given: Batch, **fields: Any) -> Batch:
    names = ("rewards", "mask", "groups", "rollouts", "numbers", "spans", "values")
    return Batch(**{**{name: getattr(given, name) for name in names}, **fields})


algorithms = st.sampled_from(NAMES).map(lambda name: Algorithm.model_validate({"name": name}))


@given(batches(), algorithms)
def test_what_was_not_sampled_gets_nothing(given: Batch, algorithm: Algorithm) -> None:
    for array in advantages(given, algorithm):
        assert np.isfinite(array).all()
        assert not array[given.mask == 0].any()


@given(batches(), algorithms)
def test_a_rollout_alone_in_its_group_teaches_nothing(given: Batch, algorithm: Algorithm) -> None:
    first, _ = advantages(given, algorithm)
    for rows, key in zip(given.episodes, given.keys, strict=True):
        assert given.keys.count(key) > 1 or algorithm.name in WITHOUT_GROUPS or not first[rows].any()


@given(batches(), algorithms, st.data())
def test_the_order_of_rows_changes_nothing(given: Batch, algorithm: Algorithm, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(given.mask))))
    assert given.values is not None
    mixed = Batch(
        given.rewards[order],
        given.mask[order],
        *(
            [each[row] for row in order]
            for each in (given.groups, given.rollouts, given.numbers, given.spans)
        ),
        values=given.values[order],
    )
    for one, other in zip(advantages(given, algorithm), advantages(mixed, algorithm), strict=True):
        assert np.allclose(one[order], other, atol=1e-9)


@given(batches(), algorithms)
def test_a_reward_behind_the_last_sampled_token_is_not_lost(given: Batch, algorithm: Algorithm) -> None:
    longer = np.zeros((len(given.mask), given.mask.shape[1] + 1))
    longer[:, -1] = given.rewards.sum(axis=1)

    def wider(array: Any) -> Any:
        return np.concatenate([array, np.zeros((len(array), 1), array.dtype)], axis=1)

    behind = changed(given, rewards=longer, mask=wider(given.mask), values=wider(given.values))
    for one, other in zip(advantages(given, algorithm), advantages(behind, algorithm), strict=True):
        assert np.allclose(wider(one), other, atol=1e-9)


@given(batches(), st.floats(0.5, 1))
def test_every_token_of_a_rollout_hears_of_its_reward(given: Batch, gamma: float) -> None:
    _, returns = advantages(given, Algorithm(name="reinforce_plus_plus", gamma=gamma))
    for rows, total in zip(given.episodes, given.totals, strict=True):
        count = int(given.mask[rows].sum())
        heard = sorted(returns[rows][given.mask[rows] > 0])
        assert heard == pytest.approx(sorted(total * gamma**later for later in range(count)))


@settings(max_examples=50)
@given(batches(one_row=True), st.sampled_from([n for n in NAMES if n not in ("dr_grpo", "gspo")]))
def test_one_row_or_a_row_for_each_turn_is_the_same(given: Batch, name: str) -> None:
    algorithm = Algorithm.model_validate({"name": name})
    pieces = [
        (row, number, span) for row in range(len(given.mask)) for number, span in enumerate(given.spans[row])
    ]
    mask = np.zeros((len(pieces), given.mask.shape[1]), int)
    for place, (row, _, span) in enumerate(pieces):
        mask[place, span.start : span.end] = given.mask[row, span.start : span.end]
    cut = Batch(
        rewards=np.stack([given.rewards[row] for row, *_ in pieces]) * mask,
        mask=mask,
        groups=[given.groups[row] for row, *_ in pieces],
        rollouts=[given.rollouts[row] for row, *_ in pieces],
        numbers=[number for _, number, _ in pieces],
        spans=[[span] for *_, span in pieces],
        values=np.stack([given.values[row] for row, *_ in pieces]) if given.values is not None else None,
    )
    whole, parts = advantages(given, algorithm)[0], advantages(cut, algorithm)[0]
    put = np.zeros(whole.shape)
    for place, (row, *_) in enumerate(pieces):
        put[row] += parts[place]
    assert np.allclose(whole, put, atol=1e-9)
