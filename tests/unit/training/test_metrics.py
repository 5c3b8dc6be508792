"""From verl's log and the rollouts' records to one line a step."""

import itertools
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.roles.trainer import TrainerConfig
from agentfly.training.metrics import LimitExceeded, MetricsFollower, step_line, write_owed
from agentfly.training.outcomes import LineReader, OutcomeReader, StepOutcomes
from tests.unit.training.conftest import MakeConfig

_NUMBERS = itertools.count()


def entry(step: int, outcome: str = "scored", reward: float | None = 1.0, **changes: Any) -> dict[str, Any]:
    fields = {"step": step, "outcome": outcome, "reason": "", "reward": reward, "stop": "done"}
    fields |= {"turns": 2, "tool_calls": 1}
    return {
        **fields,
        "rollout": f"r{next(_NUMBERS)}",
        "sampled_tokens": 10,
        "tokens": 20,
        "drifted_tokens": 0,
        "forks": 0,
        "seconds": 1.0,
        **changes,
    }


def append(path: Path, *entries: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        handle.writelines(json.dumps(item) + "\n" for item in entries)


def lines(config: TrainerConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in config.metrics_file.read_text().splitlines()]


def summed(*entries: dict[str, Any]) -> StepOutcomes:
    total = StepOutcomes()
    for item in entries:
        total.add(item)
    return total


def test_a_rollout_without_a_reward_is_counted_and_not_in_the_mean() -> None:
    got = summed(
        entry(1, reward=1.0),
        entry(1, reward=0.0),
        entry(1, "failed", None, reason="SandboxLost"),
        entry(1, "masked", None, reason="deadline", drifted_tokens=4, forks=3, stop="context"),
    ).metrics()
    assert got == {
        "tokens": 40,
        "rollouts": {"scored": 2, "masked": 1, "failed": 1},
        "drift_fraction": 4 / 80,
        "forks": 3,
        "turns": 2.0,
        "tool_calls": 1.0,
        "reasons": {"SandboxLost": 1, "deadline": 1},
        "stops": {"done": 3, "context": 1},
        "reward": 0.5,
        "reward_std": 0.5,
    }


def test_a_step_without_a_scored_rollout_has_no_reward_at_all() -> None:
    got = summed(entry(1, "failed", None, reason="StartFailed")).metrics()
    assert "reward" not in got
    assert StepOutcomes().metrics()["rollouts"] == {"scored": 0, "masked": 0, "failed": 0}


def test_a_line_has_verls_values_under_our_names() -> None:
    logged = {
        "timing_s/step": 4.0,
        "timing_s/update_weights": 0.05,
        "training/rollout_probs_diff_max": 1e-6,
        "actor/grad_norm": 2.5,
        "something/else": 1,
    }
    got = step_line(7, 2, 1000.1234, logged, summed(entry(7), entry(7)))
    assert (got["step"], got["attempt"], got["time"]) == (7, 2, 1000.123)
    assert (got["step_seconds"], got["weights_seconds"], got["prob_diff_max"]) == (4.0, 0.05, 1e-6)
    assert got["grad_norm"] == 2.5
    assert got["tokens_per_s"] == 20 / 4.0
    assert "something/else" not in got


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "x"])
def test_a_value_that_is_no_finite_number_is_left_out(value: object) -> None:
    got = step_line(1, 1, 0.0, {"actor/grad_norm": value, "timing_s/step": value}, StepOutcomes())
    assert not {"grad_norm", "step_seconds", "tokens_per_s"} & set(got)


def test_every_step_becomes_one_line_and_earlier_attempts_stay(make_config: MakeConfig) -> None:
    config = make_config(attempt=2)
    append(config.metrics_file, {"step": 1, "attempt": 1})
    follower = MetricsFollower(config)
    assert follower.poll() == 0
    append(config.outcomes_dir / "attempt-1-worker-5.jsonl", entry(2, reward=0.0))
    append(config.outcomes_dir / "attempt-2-worker-5.jsonl", entry(2, reward=0.25), entry(3))
    append(config.outcomes_dir / "attempt-2-worker-6.jsonl", entry(2, reward=0.75))
    append(config.verl_metrics_file, {"step": 2, "data": {"timing_s/step": 2.0}})
    assert follower.poll() == 1
    append(config.verl_metrics_file, {"step": 3, "data": {}})
    assert follower.poll() == 1
    assert follower.poll() == 0
    assert [(line["step"], line["attempt"]) for line in lines(config)] == [(1, 1), (2, 2), (3, 2)]
    assert (lines(config)[1]["reward"], lines(config)[1]["tokens_per_s"]) == (0.5, 10.0)


def test_two_that_poll_at_a_time_write_every_line_once(make_config: MakeConfig) -> None:
    config = make_config()
    append(config.verl_metrics_file, *({"step": n, "data": {}} for n in range(200)))
    config.run_dir.mkdir(exist_ok=True)
    follower = MetricsFollower(config)
    threads = [threading.Thread(target=follower.poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["step"] for line in lines(config)] == list(range(200))


def test_a_line_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LineReader(path)
    assert reader.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert reader.read() == [{"a": 1}]
    with path.open("a") as handle:
        handle.write(": 2}\n")
    assert reader.read() == [{"a": 2}]


def test_a_reader_takes_in_workers_that_start_later(tmp_path: Path) -> None:
    reader = OutcomeReader(tmp_path, 1)
    append(tmp_path / "attempt-1-worker-1.jsonl", entry(1))
    reader.read()
    append(tmp_path / "attempt-1-worker-2.jsonl", entry(1))
    append(tmp_path / "attempt-11-worker-2.jsonl", entry(1))
    reader.read()
    assert reader.of(1).counts == {"scored": 2}


def test_where_rollouts_run_ahead_those_of_earlier_attempts_count_unless_they_were_played_again(
    tmp_path: Path,
) -> None:
    append(tmp_path / "attempt-1-worker-1.jsonl", entry(4, rollout="a", reward=0.0), entry(4, rollout="b"))
    append(tmp_path / "attempt-2-worker-1.jsonl", entry(4, rollout="a", reward=0.5), entry(5, rollout="c"))
    reader, own = OutcomeReader(tmp_path, 2, ahead=True), OutcomeReader(tmp_path, 2)
    for each in (reader, own):
        each.read()
    assert (reader.of(4).rewards, own.of(4).rewards) == ([0.5, 1.0], [0.5])
    reader.forget(4)
    assert reader.steps == [5]


def test_too_much_drift_ends_the_run_with_both_numbers(make_config: MakeConfig) -> None:
    config = make_config(max_drift_fraction=0.1)
    append(config.outcomes_dir / "attempt-1-worker-5.jsonl", entry(1, drifted_tokens=3))
    append(config.verl_metrics_file, {"step": 1, "data": {}})
    with pytest.raises(
        AgentflyError, match=r"maxDriftFraction: 0\.1500 of step 1's tokens drifted, the limit is 0\.1"
    ):
        MetricsFollower(config).poll()
    assert [line["step"] for line in lines(config)] == [1]


def test_drift_at_the_limit_or_without_one_goes_on(make_config: MakeConfig) -> None:
    for limit in (None, 0.15):
        config = make_config(max_drift_fraction=limit, run_dir=make_config().run_dir / str(limit))
        append(config.outcomes_dir / "attempt-1-worker-5.jsonl", entry(1, drifted_tokens=3))
        append(config.verl_metrics_file, {"step": 1, "data": {}})
        assert MetricsFollower(config).poll() == 1


def test_a_failed_attempt_tells_what_its_unfinished_rollouts_came_to(make_config: MakeConfig) -> None:
    config = make_config()
    failures = [entry(4, "failed", None, reason="StartFailed") for _ in range(3)]
    append(config.outcomes_dir / "attempt-1-worker-5.jsonl", entry(4), *failures)
    assert MetricsFollower(config).unfinished() == "step 4: 1 scored, 3 failed (StartFailed x 3)"


def failing(config: TrainerConfig, failed: int, scored: int) -> MetricsFollower:
    failures = [entry(1, "failed", None, reason="StartFailed") for _ in range(failed)]
    append(config.outcomes_dir / "attempt-1-worker-5.jsonl", *failures, *[entry(1) for _ in range(scored)])
    append(config.verl_metrics_file, {"step": 1, "data": {}})
    return MetricsFollower(config)


def test_too_many_failed_rollouts_of_a_step_end_the_run_with_both_numbers(make_config: MakeConfig) -> None:
    config = make_config(failure_budget=0.5)
    with pytest.raises(LimitExceeded) as caught:
        failing(config, failed=3, scored=2).poll()
    assert caught.value.reason == Reason.FailureBudgetExceeded
    assert caught.value.message == (
        "failureBudget: 3 of 5 rollouts of step 1 failed (StartFailed x 3), the limit is 0.5 of them"
    )
    assert [line["step"] for line in lines(config)] == [1]


def test_as_many_failed_rollouts_as_the_budget_allows_go_on(make_config: MakeConfig) -> None:
    assert failing(make_config(failure_budget=0.5), failed=2, scored=2).poll() == 1


def test_a_step_that_was_saved_and_not_written_gets_its_line_by_the_next_attempt(
    make_config: MakeConfig,
) -> None:
    config = make_config(attempt=3)
    first, second = (config.model_copy(update={"attempt": number}) for number in (1, 2))
    append(config.outcomes_dir / "attempt-1-worker-9.jsonl", entry(1), entry(2, reward=0.0), entry(3))
    append(first.verl_metrics_file, {"step": 1, "data": {}})
    append(config.metrics_file, {"step": 1, "attempt": 1, "time": 1.0})
    # The second attempt made step 2 again and then step 3: verl had logged one of them, nobody had read it.
    append(config.outcomes_dir / "attempt-2-worker-9.jsonl", entry(2), entry(2), entry(3, reward=0.5))
    append(second.verl_metrics_file, {"step": 2, "data": {"actor/grad_norm": 2.5}})
    assert write_owed(config, 3) == [2, 3]
    written = lines(config)
    assert [(line["step"], line["attempt"]) for line in written] == [(1, 1), (2, 2), (3, 2)]
    assert (written[1]["grad_norm"], written[1]["rollouts"]["scored"]) == (2.5, 2)
    assert "grad_norm" not in written[2]
    assert written[2]["reward"] == 0.5
    assert write_owed(config, 3) == []


def test_what_is_made_again_and_what_left_nothing_gets_no_line(make_config: MakeConfig) -> None:
    config = make_config(attempt=2)
    append(config.outcomes_dir / "attempt-1-worker-9.jsonl", entry(2), entry(3))
    assert write_owed(config, None) == []
    assert write_owed(config, 2) == [2]
    assert [line["step"] for line in lines(config)] == [2]
