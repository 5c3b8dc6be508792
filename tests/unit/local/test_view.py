"""Sections follow the guarantees of `agentfly.local.view`."""

import io
import re
from datetime import UTC, datetime

from rich.console import Console

from agentfly.api import PoolUse, RolloutJob, TrainingRun
from agentfly.api.reasons import RolloutJobPhase, TrainingRunPhase
from agentfly.local.view import block, line, rollout_summary, training_summary, view
from agentfly.roles.status import JobSeen, RunSeen, rollout_status, training_status
from agentfly.roles.worker import WorkerReport

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SPEC = {"agent": {"entrypoint": "a.py:a"}, "tasks": {"path": "t"}, "model": {"path": "m"}}
RUN = TrainingRun.model_validate({"metadata": {"name": "r"}, "spec": {**SPEC, "steps": 30}})
JOB = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": SPEC})
STEP = {"step": 3, "reward": 0.25, "step_seconds": 10.0, "tokens_per_s": 431.2}
POOLS = {"shell": PoolUse(ready=6, leased=4, queued=2, max=16)}


def running(**seen) -> TrainingRun:
    status = training_status(RUN, RunSeen(**{"phase": TrainingRunPhase.Running, **seen}), NOW)
    return RUN.model_copy(update={"status": status})


def rolling(report: WorkerReport | None, phase=RolloutJobPhase.Running) -> RolloutJob:
    return JOB.model_copy(update={"status": rollout_status(JOB, JobSeen(phase, report), NOW)})


def shown(*works) -> list[str]:
    text = io.StringIO()
    with view(Console(file=text, width=200)) as show:
        for work in works:
            show(work)
    return [re.sub(r"^\d\d:\d\d:\d\d  ", "", row) for row in text.getvalue().splitlines()]


# 1. without a terminal a line for each change that matters


def test_a_line_is_printed_for_each_phase_message_and_step():
    starting = {"phase": TrainingRunPhase.Starting}
    assert shown(
        running(**starting, message="making the model"),
        running(**starting, message="making the model", pools=POOLS),
        running(**starting, message="starting the trainer"),
        running(steps=[STEP]),
        running(steps=[STEP], pools=POOLS),
    ) == [
        "Starting    making the model",
        "Starting    starting the trainer",
        "Running     step 3/30  reward 0.250  tokens/s 431  eta 4m30s",
    ]


# 2. phase, progress, reward, speed, pools


def test_a_step_with_masked_and_failed_rollouts_says_so():
    step = {**STEP, "rollouts": {"scored": 4, "masked": 1, "failed": 3}}
    assert line(running(steps=[step])) == (
        "Running     step 3/30  reward 0.250  tokens/s 431  masked 1  failed 3  eta 4m30s"
    )


def test_a_line_has_all_of_a_run():
    assert line(running(steps=[STEP], pools=POOLS)) == (
        "Running     step 3/30  reward 0.250  tokens/s 431  eta 4m30s  shell 4/6 leased, 2 queued"
    )


def test_a_line_has_all_of_a_job():
    report = WorkerReport(
        total=9, scored=4, masked=1, failed={"A": 2}, reward_mean=0.5, reward_min=0.0, reward_max=1.0
    )
    assert line(rolling(report)) == "Running     rollouts 7/9  masked 1  failed 2  reward 0.500"


def test_a_block_shows_the_same_and_the_attempt():
    text = io.StringIO()
    Console(file=text, width=120).print(block(running(attempt=2, steps=[STEP], pools=POOLS)))
    words = text.getvalue().split()
    assert words[:4] == ["r", "Running", "attempt", "2"]
    for word in ("3/30", "0.250", "431", "4m30s", "shell"):
        assert word in words


# 3. the last line


def test_the_last_line_of_a_run_has_its_first_and_last_rewards():
    steps = [{"step": n, "reward": 0.0 if n <= 5 else 1.0} for n in range(1, 11)]
    status = running(phase=TrainingRunPhase.Succeeded, steps=steps).status
    assert training_summary("demo", status, steps) == (
        "demo: Succeeded steps=10 reward_first5=0.000 reward_last5=1.000"
    )


def test_the_last_line_of_a_run_without_a_step_has_no_reward():
    assert training_summary("demo", running(phase=TrainingRunPhase.Suspended).status, []) == (
        "demo: Suspended steps=0"
    )


def test_the_last_line_of_a_job_counts_outcomes():
    report = WorkerReport(total=3, scored=2, masked=1, reward_mean=0.5, reward_min=0.0, reward_max=1.0)
    assert rollout_summary("j", rolling(report, RolloutJobPhase.Succeeded).status) == (
        "j: Succeeded rollouts=3 scored=2 masked=1 failed=0 reward=0.500"
    )
