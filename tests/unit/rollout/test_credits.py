"""State and reward of each turn."""

from typing import Any

import pytest

from agentfly.rollout.credits import credits_of
from agentfly.rollout.trajectory import ToolCallRecord


def record(turn: int, **said: Any) -> ToolCallRecord:
    return ToolCallRecord(turn=turn, name="go", arguments={}, seconds=0.0, observation_chars=0, **said)


@pytest.mark.parametrize(
    ("calls", "anchors"),
    [
        ([], ["", "", ""]),  # 1. where all begin, and 2. no tool ran
        ([record(1, anchor="a"), record(2, anchor="b")], ["", "a", "b"]),
        ([record(1, anchor="a"), record(1, anchor="b")], ["", "b", "b"]),  # said last
        ([record(1, anchor="a"), record(1)], ["", "a", "a"]),  # the other tool said none
        ([record(1, anchor="a"), record(2)], ["", "a", None]),
        ([record(1, anchor="a"), record(2, error="unknown_tool")], ["", "a", "a"]),
        ([record(1, anchor="a"), record(2, error="invalid_arguments")], ["", "a", "a"]),
        ([record(1, anchor="a"), record(2, error="timeout")], ["", "a", None]),
        ([record(1), record(2, anchor="b")], ["", None, "b"]),
    ],
)
def test_state_of_each_turn(calls: list[ToolCallRecord], anchors: list[str | None]) -> None:
    assert [anchor for anchor, _ in credits_of(3, calls).values()] == anchors


def test_reward_of_a_turn_is_the_sum_of_its_calls() -> None:
    calls = [record(1, step_reward=0.5), record(1, step_reward=-2.0), record(1), record(3, step_reward=1.0)]
    assert [reward for _, reward in credits_of(3, calls).values()] == [-1.5, 0.0, 1.0]
