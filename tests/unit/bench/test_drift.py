"""What the bench of drift makes of a run's files."""

import pytest

from tests.bench.drift import Step, steps_of, table


def rollout(step: int, logprobs: list[float]) -> dict[str, object]:
    row = {"logprobs": logprobs, "response_mask": [1] * len(logprobs)}
    return {"group_id": f"s{step}-t0", "rows": [row]}


def line(step: int) -> dict[str, float]:
    return {"step": step, "reward": 0.5, "drift_fraction": 0.25, "grad_norm": 2.0}


def trained(*logprobs: float, bits: int = 1) -> dict[str, list[float]]:
    return {"old_log_probs": [*logprobs, -9.0], "response_mask": [bits] * len(logprobs) + [0]}


def test_divergence_is_that_of_whole_answers_for_each_sampled_token() -> None:
    played = [rollout(2, [-1.0, -1.0]), rollout(1, [-0.5, -0.5]), rollout(1, [-1.0])]
    # Two rows of step 1, one that verl fills up with, one of step 2, which has three tokens for two.
    rows = [trained(-0.5, -0.5), trained(-1.0), trained(-7.0, bits=0), trained(-2.0, -2.0, -2.0)]
    first, second = steps_of([line(1), line(2)], played, rows)
    assert (first.divergence, second.divergence) == pytest.approx((0.0, (-2.0 + 6.0) / 2))
    assert (first.reward, first.drift, first.gradient) == (0.5, 0.25, 2.0)


def test_table_has_the_first_and_the_last_steps() -> None:
    steps = [Step(n / 10, 0.0, 0.0, 1.0) for n in range(1, 11)]
    assert table({"as sampled": steps}).splitlines()[-1].startswith("| as sampled | 0.300 | 0.800 | 0.000 |")
