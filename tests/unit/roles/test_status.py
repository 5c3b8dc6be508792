from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.api import RolloutJob, TrainingRun
from agentfly.api.reasons import Reason, RolloutJobPhase, TrainingRunPhase
from agentfly.api.rolloutjob import ShardStatus
from agentfly.api.trainingrun import Progress
from agentfly.roles.status import JobSeen, RunSeen, progress, rollout_status, training_status
from agentfly.roles.worker import WorkerReport

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SPEC = {
    "agent": {"entrypoint": "agent.py:agent"},
    "tasks": {"entrypoint": "agent.py:tasks"},
    "model": {"path": "m"},
}
RUN = TrainingRun.model_validate({"metadata": {"name": "r"}, "spec": {**SPEC, "steps": 30}})
JOB = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": SPEC})


def true(status) -> set[str]:
    return {condition.type for condition in status.conditions if condition.status == "True"}


# 2. a generic tool reads every phase rightly

KSTATUS = {
    TrainingRunPhase.Pending: "InProgress",
    TrainingRunPhase.Queued: "Current",
    TrainingRunPhase.Starting: "InProgress",
    TrainingRunPhase.Running: "Current",
    TrainingRunPhase.Suspending: "InProgress",
    TrainingRunPhase.Suspended: "Current",
    TrainingRunPhase.Restarting: "InProgress",
    TrainingRunPhase.Succeeded: "Current",
    TrainingRunPhase.Failed: "Failed",
}


def kstatus(status) -> str:
    """The decision order of kstatus for custom resources."""
    for condition in status.conditions:
        if condition.type == "Reconciling" and condition.status == "True":
            return "InProgress"
        if condition.type == "Stalled" and condition.status == "True":
            return "Failed"
    return "Current"


@pytest.mark.parametrize(("phase", "want"), KSTATUS.items())
def test_kstatus_of_each_phase(phase, want):
    status = training_status(RUN, RunSeen(phase), NOW)
    assert kstatus(status) == want
    assert not {"Reconciling", "Stalled"} <= true(status)


def test_every_phase_of_a_run_is_in_the_table():
    assert set(KSTATUS) == set(TrainingRunPhase)


WAITING = {*TrainingRunPhase} - {TrainingRunPhase.Succeeded, TrainingRunPhase.Failed}


@pytest.mark.parametrize("phase", WAITING)
def test_what_waits_for_a_person_is_stalled(phase):
    status = training_status(RUN, RunSeen(phase, stalled=Reason.MissingObject, message="claim c"), NOW)
    assert kstatus(status) == "Failed"
    stalled = next(each for each in status.conditions if each.type == "Stalled")
    assert (stalled.reason, stalled.message) == ("MissingObject", "claim c")
    assert "Finished" not in true(status)


def test_a_finished_run_waits_for_nobody():
    status = training_status(RUN, RunSeen(TrainingRunPhase.Succeeded, stalled=Reason.MissingObject), NOW)
    assert true(status) == {"Succeeded", "Finished"}


def test_a_phase_may_have_another_reason_than_always():
    status = training_status(RUN, RunSeen(TrainingRunPhase.Starting, reason=Reason.Preparing), NOW)
    assert {each.reason for each in status.conditions if each.status == "True"} == {"Preparing"}


def test_a_job_that_waits_is_stalled_and_a_suspended_one_is_current():
    waiting = rollout_status(JOB, JobSeen(RolloutJobPhase.Pending, stalled=Reason.MissingObject), NOW)
    suspended = rollout_status(JOB, JobSeen(RolloutJobPhase.Suspended), NOW)
    assert true(waiting) == {"Stalled"}
    assert true(suspended) == {"Suspended"}
    assert kstatus(suspended) == "Current"


# 4. finished is finished


def test_success_and_failure_are_both_finished():
    succeeded = training_status(RUN, RunSeen(TrainingRunPhase.Succeeded), NOW)
    failed = training_status(RUN, RunSeen(TrainingRunPhase.Failed, reason=Reason.BackoffLimitExceeded), NOW)
    assert true(succeeded) == {"Succeeded", "Finished"}
    assert true(failed) == {"Failed", "Finished", "Stalled"}
    assert {c.reason for c in failed.conditions if c.status == "True"} == {"BackoffLimitExceeded"}


# 3. the time of a condition changes only with its status


@given(st.lists(st.sampled_from(list(TrainingRunPhase)), min_size=2, max_size=8))
def test_a_condition_keeps_its_time_while_its_status_stays(phases):
    run, before = RUN, {}
    for number, phase in enumerate(phases):
        now = NOW + timedelta(seconds=number)
        status = training_status(run, RunSeen(phase), now)
        for condition in status.conditions:
            old = before.get(condition.type)
            kept = old is not None and old.status == condition.status
            assert condition.last_transition_time == (old.last_transition_time if kept else now)
        before = {condition.type: condition for condition in status.conditions}
        run = run.model_copy(update={"status": status})


def test_the_same_is_the_same():
    seen = RunSeen(
        TrainingRunPhase.Running, attempt=2, steps=[{"step": 1, "reward": 0.5, "step_seconds": 2.0}]
    )
    assert training_status(RUN, seen, NOW) == training_status(RUN, seen, NOW)


def test_there_is_no_progress_before_the_first_step():
    assert progress([], 30) is None


def test_progress_estimates_from_the_last_ten_steps():
    steps = [{"step": n, "reward": n / 20, "step_seconds": 100.0 if n <= 5 else 8.0} for n in range(1, 16)]
    seen = progress(steps, 20)
    assert (seen.step, seen.total_steps, seen.eta_seconds) == (15, 20, 40)
    assert seen.metrics == {"reward": "0.75", "step_seconds": "8"}


def test_progress_shows_forks_where_there_are_any():
    steps = [{"step": 1, "step_seconds": 1.0, "forks": forks} for forks in (0, 3)]
    assert progress(steps[:1], 20).metrics == {"step_seconds": "1"}
    assert progress(steps, 20).metrics == {"step_seconds": "1", "forks": "3"}


def test_progress_shows_masked_and_failed_rollouts_of_the_last_step_where_there_are_any():
    steps = [{"step": 1, "rollouts": {"scored": 1, "masked": 2, "failed": 5}}]
    assert progress(steps, 20).metrics == {"masked": "2", "failed": "5"}
    steps.append({"step": 2, "rollouts": {"scored": 7, "masked": 0, "failed": 1}})
    assert progress(steps, 20).metrics == {"failed": "1"}
    steps.append({"step": 3, "rollouts": {"scored": 8, "masked": 0, "failed": 0}})
    assert progress(steps, 20).metrics == {}


def test_a_run_remembers_in_its_status_what_comes_next():
    at = {name: NOW + timedelta(seconds=n) for n, name in enumerate(("attempt", "step", "restart"))}
    seen = RunSeen(
        TrainingRunPhase.Restarting,
        failures=2,
        attempt_time=at["attempt"],
        step_time=at["step"],
        restart_time=at["restart"],
        resumed_step=7,
        active_seconds=40,
        progress=Progress(step=9, total_steps=30),
    )
    status = training_status(RUN, seen, NOW)
    assert (status.failures, status.resumed_step, status.active_seconds) == (2, 7, 40)
    assert (status.attempt_time, status.step_time, status.restart_time) == tuple(at.values())
    assert status.progress.step == 9


def test_a_job_in_a_cluster_shows_its_shards_and_rates():
    shards = ShardStatus(total=4, done=1, counted="0")
    seen = JobSeen(
        RolloutJobPhase.Running,
        shards=shards,
        workers=2,
        selector="a=b",
        trajectories_per_second=0.5,
        tokens_per_second=100.0,
        path="/agentfly-cache/runs/j-1",
    )
    status = rollout_status(JOB, seen, NOW)
    assert (status.shards, status.workers, status.selector) == (shards, 2, "a=b")
    assert (status.trajectories_per_second, status.tokens_per_second) == ("0.5", "100")
    assert status.path == "/agentfly-cache/runs/j-1"


def test_a_job_without_rewards_has_no_summary():
    assert rollout_status(JOB, JobSeen(RolloutJobPhase.Running), NOW).reward is None


def test_a_job_shows_its_workers_report():
    report = WorkerReport(
        total=5,
        scored=3,
        masked=1,
        failed={"StartFailed": 1},
        reward_mean=2 / 3,
        reward_min=0.0,
        reward_max=1.0,
        drift_fraction=0.0,
        forks=4,
    )
    status = rollout_status(JOB, JobSeen(RolloutJobPhase.Succeeded, report), NOW)
    assert status.reward.model_dump() == {"mean": "0.666667", "min": "0", "max": "1"}
    assert status.tasks.model_dump() == {"total": 5, "scored": 3, "masked": 1, "failed": 1}
    assert (status.drift_fraction, status.forks, status.failures) == ("0", 4, {"StartFailed": 1})
    assert true(status) == {"Succeeded", "Finished"}
