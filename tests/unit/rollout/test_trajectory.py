"""Rows, trajectories and outcomes as data."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfly.rollout import Drift, Failed, Masked, ResourceUse, Row, Scored, ToolCallRecord, Trajectory

ROW = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5],
    "response_mask": [1, 0, 1],
    "logprobs": [-0.5, 0.0, -1.5],
}


def make(**changes: Any) -> Trajectory:
    parts: dict[str, Any] = {
        "rollout_id": "r-0-1",
        "group_id": "r-0",
        "task": {"id": 7},
        "outcome": Scored(0.5),
        "started_at": 1.0,
        "seconds": 2.0,
    }
    return Trajectory(**{**parts, **changes})


# 1. rows


def test_row_is_taken_as_it_is() -> None:
    row = Row.model_validate(ROW)
    assert (row.response_ids, row.response_mask, row.logprobs) == ([3, 4, 5], [1, 0, 1], [-0.5, 0.0, -1.5])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"response_mask": [1, 0]}, "differ in number"),
        ({"response_mask": [1, 1, 0], "logprobs": [-1.0, -1.0, 0.0]}, "does not end on a sampled token"),
        ({"response_ids": [], "response_mask": [], "logprobs": []}, "does not end on a sampled token"),
        ({"logprobs": [-0.5, -0.1, -1.5]}, "logprob -0.1 stands on a token that was not sampled"),
        ({"response_mask": [1, 2, 1]}, "less than or equal to 1"),
        ({"logprobs": [-0.5, 0.0, math.nan]}, "finite"),
    ],
)
def test_row_that_cannot_be_trained_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Row.model_validate({**ROW, **change})


STEPS = [{"turn": 1, "start": 0, "end": 1}, {"turn": 2, "start": 2, "end": 3}]


def test_a_row_knows_which_turn_sampled_which_token() -> None:
    first, second = Row.model_validate({**ROW, "steps": STEPS}).steps
    assert (first.turn, first.start, first.end, second.start) == (1, 0, 1, 2)
    assert (first.anchor, first.step_reward) == (None, 0.0)
    assert Row.model_validate(ROW).steps == []


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([STEPS[1], STEPS[0]], "turn 1 at 0 to 1 is out of order"),
        ([STEPS[0], {**STEPS[1], "turn": 1}], "turn 1 at 2 to 3 is out of order"),
        ([{**STEPS[0], "end": 3}, STEPS[1]], "turn 2 at 2 to 3 is out of order"),
        ([{**STEPS[0], "end": 0}], "turn 1 at 0 to 0 is out of order"),
        ([{**STEPS[0], "end": 4}], "turn 1 at 0 to 4 is out of order"),
        ([STEPS[0]], "steps and sampled tokens differ"),
        ([{"turn": 1, "start": 0, "end": 3}], "steps and sampled tokens differ"),
        ([{**STEPS[0], "step_reward": math.inf}], "finite"),
        ([{**STEPS[0], "turn": 0}], "greater than or equal to 1"),
    ],
)
def test_steps_that_are_not_those_of_the_tokens_are_refused(steps: list[Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Row.model_validate({**ROW, "steps": steps})


def test_sampled_tokens_are_summed_over_rows() -> None:
    assert make(rows=[Row.model_validate(ROW), Row.model_validate(ROW)]).sampled_tokens == 4


# 2. the same fields, whatever the outcome


@pytest.mark.parametrize("outcome", [Scored(1.0), Masked("deadline"), Failed("StartFailed", "no image")])
def test_every_outcome_has_the_same_fields(outcome: Any) -> None:
    dumped = make(outcome=outcome).model_dump(mode="json")
    assert set(dumped) == set(make().model_dump(mode="json"))
    assert dumped["schema"] == "agentfly.trajectory/v1"


def test_only_a_scored_rollout_has_a_reward() -> None:
    assert make(outcome=Scored(0.0)).reward == 0.0
    assert make(outcome=Masked("unscored")).reward is None
    assert make(outcome=Failed("SandboxLost")).model_dump(mode="json")["reward"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_reward_that_is_no_number_cannot_be_scored(value: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        Scored(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metric_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        make(metrics={"loss": value})


# 3. JSON in, JSON out

outcomes = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(Scored),
    st.builds(Masked, st.text(), st.text()),
    st.builds(Failed, st.text(), st.text()),
)


@given(outcomes, st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.booleans())
def test_trajectories_survive_json(outcome: Any, task: dict[str, Any], with_row: bool) -> None:
    trajectory = make(
        outcome=outcome,
        task=task,
        rows=[Row.model_validate(ROW)] if with_row else [],
        messages=[{"role": "user", "content": "é"}],
        tool_calls=[
            ToolCallRecord(turn=1, name="shell", arguments={"a": [1]}, seconds=0.1, observation_chars=3)
        ],
        resources=[ResourceUse(pool="shell", member_id="m", incarnation=2, wait_seconds=0.5)],
        drift=Drift(tokens=5, drifted=1),
        metrics={"tool_calls": 1.0},
    )
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
