"""Counts and statistics over many rollouts."""

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.rollout import Drift, Failed, Masked, RolloutReport, Row, Scored
from tests.unit.rollout.test_trajectory import ROW, make

# 1. every rollout is counted once


def test_outcomes_are_counted_by_reason() -> None:
    report = RolloutReport(total=6)
    for outcome in (Scored(1.0), Masked("deadline"), Masked("deadline"), Masked("unscored"), Failed("Infra")):
        report.add(make(outcome=outcome))
    assert (report.scored, report.masked, report.failed) == (1, {"deadline": 2, "unscored": 1}, {"Infra": 1})
    assert (report.finished, report.failures) == (5, 1)


def test_first_message_of_each_reason_and_errors_of_tools_are_told() -> None:
    report, log = RolloutReport(total=5), Path("logs/agentfly.log")
    assert report.told(log) == []
    outcomes = (Failed("Infra", "a"), Failed("Infra", "b"), Failed("E", "x" * 5000))
    for outcome in (*outcomes, Masked("unscored", "reward judge returned None"), Masked("deadline")):
        report.add(make(outcome=outcome, metrics={"tool_errors": 2}))
    assert report.told(log) == [
        "masked 1 (deadline)",
        "masked 1 (unscored): reward judge returned None",
        f"failed 1 (E): {'x' * 1000}",
        "failed 2 (Infra): a",
        "tool_errors 10: tracebacks are in logs/agentfly.log",
    ]


def test_tokens_and_drift_are_summed() -> None:
    report = RolloutReport(total=2)
    report.add(make(rows=[Row.model_validate(ROW)], drift=Drift(tokens=30, drifted=3, forks=2)))
    report.add(make(rows=[Row.model_validate(ROW)], drift=Drift(tokens=70, drifted=0)))
    assert (report.sampled_tokens, report.tokens, report.drifted_tokens) == (4, 100, 3)
    assert (report.drift_fraction, report.drifted_rollouts, report.forks) == (0.03, 1, 2)


# 2. reward statistics


def test_no_scored_rollout_has_no_statistics() -> None:
    report = RolloutReport(total=1)
    report.add(make(outcome=Masked("unscored")))
    assert report.reward is None
    assert report.drift_fraction == 0.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_reward_statistics_are_those_of_the_rewards(rewards: list[float]) -> None:
    report = RolloutReport(total=len(rewards))
    for value in rewards:
        report.add(make(outcome=Scored(value)))
    stats = report.reward
    assert stats is not None
    assert stats.mean == pytest.approx(statistics.fmean(rewards), abs=1e-6)
    assert stats.std == pytest.approx(statistics.pstdev(rewards), abs=1e-6)
    assert (stats.min, stats.max) == (min(rewards), max(rewards))
