"""How differences between two tokenisations are counted."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.rollout.drift import count_drift

tokens = st.lists(st.integers(0, 5), max_size=40)


# 1. equal sequences have none


@given(tokens, tokens)
def test_equal_sequences_have_no_drift(sampled: list[int], after: list[int]) -> None:
    assert count_drift(sampled, sampled + after) == 0


@given(tokens, tokens)
def test_drift_is_zero_only_for_a_prefix(sampled: list[int], other: list[int]) -> None:
    drift = count_drift(sampled, other)
    assert 0 <= drift <= len(sampled)
    assert (drift == 0) == (other[: len(sampled)] == sampled)


# 2. a difference is counted where it is


@pytest.mark.parametrize(
    ("sampled", "other", "drift"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], 1),
        ([1, 2, 3, 4, 5, 6], [1, 9, 4, 5, 6], 2),
        ([1, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 0, 3, 4, 5, 0, 7, 8], 2),
        ([1, 2, 3], [1, 2], 1),
        ([1, 2, 3], [], 3),
        ([], [1], 0),
        ([1, 2], [1, 0, 2], 1),
        # The 9 that both have is a chance meeting: what follows it differs.
        ([1, 9, 2, 3, 4], [1, 5, 6, 9, 7, 2, 3, 4], 4),
    ],
)
def test_drift_is_counted_in_place(sampled: list[int], other: list[int], drift: int) -> None:
    assert count_drift(sampled, other) == drift


def test_sequences_that_never_meet_drift_to_the_end() -> None:
    assert count_drift([1, *range(100, 200)], [1, *range(300, 400)]) == 100


# 3. the cost is linear


def test_long_sequences_full_of_differences_are_quick() -> None:
    sampled = [7 if at % 10 == 0 else at for at in range(20_000)]
    began = time.monotonic()
    assert count_drift(sampled, list(range(20_000))) == pytest.approx(2_000, abs=1)
    assert time.monotonic() - began < 2
