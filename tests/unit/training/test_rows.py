"""A trajectory in verl's terms."""

import pytest

from agentfly.api.algorithm import Overlong
from agentfly.rollout.outcomes import Failed, Masked, Outcome, Scored
from agentfly.rollout.trajectory import Drift, Row, RowStep, ToolCallRecord, Trajectory, WeightSpan
from agentfly.training.outcomes import record
from agentfly.training.rows import verl_rows

ROW = Row(
    prompt_ids=[1, 2],
    response_ids=[3, 4, 5],
    response_mask=[1, 0, 1],
    logprobs=[-0.5, 0.0, -1.5],
    steps=[RowStep(turn=1, start=0, end=1, anchor="s", step_reward=0.25), RowStep(turn=2, start=2, end=3)],
)


def trajectory(outcome: Outcome, rows: int = 1) -> Trajectory:
    call = ToolCallRecord(turn=1, name="sh", arguments={}, seconds=0.25, observation_chars=3)
    return Trajectory(
        rollout_id="s1-t0-r0",
        group_id="s1-t0",
        task={"q": 1},
        rows=[ROW] * rows,
        turns=2,
        tool_calls=[call],
        outcome=outcome,
        drift=Drift(tokens=10, drifted=1, forks=2),
        started_at=0.0,
        seconds=2.0,
    )


def test_a_row_is_passed_on_as_it_was_sampled() -> None:
    (row,) = verl_rows(trajectory(Scored(0.75)), weights=6)
    assert row["prompt_ids"] == [1, 2]
    assert row["response_ids"] == [3, 4, 5]
    assert row["response_mask"] == [1, 0, 1]
    assert row["response_logprobs"] == [-0.5, 0.0, -1.5]
    assert row["reward_score"] == 0.75
    assert row["num_turns"] == 4
    assert row["metrics"] == {"generate_sequences": 2.0, "tool_calls": 0.25}
    assert row["extra_fields"]["steps"] == [(0, 1, "s", 0.25), (2, 3, None, 0.0)]
    assert row["extra_fields"]["min_global_steps"] == row["extra_fields"]["max_global_steps"] == 6


def test_a_row_has_the_files_of_its_images_in_order() -> None:
    played = trajectory(Scored(1.0)).model_copy(
        update={
            "rows": [ROW, ROW.model_copy(update={"images": [2, 0]})],
            "images": ["a", "b", "c"],
        }
    )
    assert [row["images"] for row in verl_rows(played, weights=6)] == [[], ["c", "a"]]


def test_a_reward_of_zero_is_a_reward() -> None:
    assert [row["reward_score"] for row in verl_rows(trajectory(Scored(0.0)), 1)] == [0.0]


@pytest.mark.parametrize("outcome", [Failed("StartFailed"), Masked("deadline")])
def test_what_was_not_scored_gives_no_rows(outcome: Outcome) -> None:
    assert verl_rows(trajectory(outcome), 1) == []


def test_all_rows_have_the_same_fields_and_the_last_has_the_reward() -> None:
    rows = verl_rows(trajectory(Scored(1.0), rows=3), 1)
    assert [row["reward_score"] for row in rows] == [None, None, 1.0]
    assert len({tuple(row) for row in rows}) == 1
    assert len({tuple(row["extra_fields"]) for row in rows}) == 1


@pytest.mark.parametrize(
    ("limit", "buffer", "left"),
    [(4, 1, 0.0), (4, 2, 0.0), (6, 4, 0.5), (6, 2, 1.0), (5, 2, 0.5), (3, 1, 0.0), (100, 10, 1.0)],
)
def test_a_long_rollout_loses_reward_and_its_outcome_stays(limit: int, buffer: int, left: float) -> None:
    overlong = Overlong(max_tokens=limit, buffer_tokens=buffer)
    first, last = verl_rows(trajectory(Scored(1.0), rows=2), 1, overlong)  # four sampled tokens
    assert (first["reward_score"], last["reward_score"]) == (None, left)
    assert [row["extra_fields"]["outcome"] for row in (first, last)] == [1.0, 1.0]


def test_a_record_has_what_a_steps_metrics_need() -> None:
    assert record(3, trajectory(Scored(0.5), rows=2)) == {
        "step": 3,
        "rollout": "s1-t0-r0",
        "outcome": "scored",
        "reason": "",
        "reward": 0.5,
        "stop": "",
        "turns": 2,
        "tool_calls": 1,
        "sampled_tokens": 4,
        "tokens": 10,
        "drifted_tokens": 1,
        "forks": 2,
        "seconds": 2.0,
    }
    failed = record(3, trajectory(Failed("SandboxLost", "gone")))
    assert (failed["outcome"], failed["reason"], failed["reward"]) == ("failed", "SandboxLost", None)


def test_a_rollout_is_as_old_as_the_oldest_weights_that_sampled_a_token_of_it() -> None:
    spans = [WeightSpan(version="9", start=0, end=1), WeightSpan(version="10", start=2, end=3)]
    row = ROW.model_copy(update={"weight_versions": spans})
    played = trajectory(Scored(1.0)).model_copy(update={"rows": [ROW, row]})
    for made in verl_rows(played, weights=6):
        extra = made["extra_fields"]
        assert (extra["min_global_steps"], extra["max_global_steps"]) == (9, 10)
