"""What follows for a rollout job; the numbers are the module's guarantees."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from agentfly.api import RolloutJob
from agentfly.api.reasons import EventReason, Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.roles.launch import Report
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.roles.worker import EXIT_BUDGET
from agentfly_operator.plan.job import UNREAD, JobObserved, JobPlan, plan_job, unread
from agentfly_operator.plan.job_seen import MakeWorkers, SetWorkers
from agentfly_operator.plan.queue_seen import QueueSeen
from agentfly_operator.plan.run_seen import Child, PolicyOf, PrepareOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from tests.unit.operator.make import NOW
from tests.unit.operator.make_job import (
    ENV,
    PREPARED,
    READY,
    asked,
    broken,
    finished,
    live,
    make,
    message,
    running,
    seen,
    true,
    turned,
)

# From the first look to workers: a sentence -> job, what is seen, phase, steps

CASES: dict[str, tuple[RolloutJob, JobObserved, Phase, tuple[Any, ...]]] = {
    "a new job is prepared": (make(), JobObserved(), Phase.Starting, (MakePrepare(),)),
    "a preparation is waited for": (make(), JobObserved(PrepareOf(exists=True)), Phase.Starting, ()),
    "a preparation that nobody read is done again": (
        make(),
        JobObserved(replace(PREPARED, report=None)),
        Phase.Starting,
        (Remove("Job", "job-prepare", "prepare-1"),),
    ),
    "what was prepared is stored before more is made": (make(), JobObserved(PREPARED), Phase.Starting, ()),
    "a prepared job gets its policy": (
        turned(make(), JobObserved(PREPARED)),
        JobObserved(PREPARED),
        Phase.Starting,
        (MakePolicy(),),
    ),
    "servers that start are waited for": (
        turned(make(), JobObserved(PREPARED)),
        JobObserved(PREPARED, replace(READY, ready=False)),
        Phase.Starting,
        (),
    ),
    "a pool of the spec that is not ready is waited for": (
        turned(make(pools=["env"]), JobObserved(PREPARED, pools={"env": ENV})),
        JobObserved(PREPARED, READY, pools={"env": replace(ENV, ready=False)}),
        Phase.Starting,
        (),
    ),
    "workers start when all is ready": (
        turned(make(pools=["env"]), JobObserved(PREPARED, pools={"env": ENV})),
        JobObserved(PREPARED, READY, pools={"env": ENV}),
        Phase.Starting,
        (MakeWorkers(3),),
    ),
    "a job whose workers run is running": (running(), seen(live(0)), Phase.Running, ()),
    "another number of workers is set": (
        running(workers={"count": 7, "tasksPerShard": 2}),
        seen(live(0)),
        Phase.Running,
        (SetWorkers("job-workers", "workers-1", 7, suspend=False),),
    ),
    "a policy that somebody deleted is made again": (
        running(),
        seen(live(0), policy=PolicyOf()),
        Phase.Running,
        (MakePolicy(),),
    ),
    "workers that somebody deleted are made again": (
        running(),
        JobObserved(PREPARED, READY),
        Phase.Starting,
        (MakeWorkers(3),),
    ),
    "a missing pool does not disturb workers": (
        running(),
        seen(live(0), missing=("ResourcePool env",)),
        Phase.Running,
        (),
    ),
    "suspension begins with the workers": (
        asked(running(), suspend=True),
        seen(live(0)),
        Phase.Running,
        (SetWorkers("job-workers", "workers-1", 2, suspend=True),),
    ),
    "servers go when workers are gone": (
        asked(running(), suspend=True),
        seen(workers={"suspended": True}),
        Phase.Suspended,
        (Remove("ResourcePool", "job-policy", "policy-1"),),
    ),
    "servers stay while a worker ends": (
        asked(running(), suspend=True),
        seen(live(0), workers={"suspended": True}),
        Phase.Running,
        (),
    ),
    "a job that is suspended from the start gets nothing": (
        make(suspend=True),
        JobObserved(),
        Phase.Suspended,
        (),
    ),
    "resuming begins with the servers": (
        running(),
        seen(workers={"suspended": True}, policy=PolicyOf()),
        Phase.Starting,
        (MakePolicy(),),
    ),
    "workers resume when servers serve": (
        running(),
        seen(workers={"suspended": True}),
        Phase.Starting,
        (SetWorkers("job-workers", "workers-1", 2, suspend=False),),
    ),
}


@pytest.mark.parametrize(("job", "observed", "phase", "wanted"), CASES.values(), ids=CASES.keys())
def test_steps(job: RolloutJob, observed: JobObserved, phase: Phase, wanted: tuple[Any, ...]) -> None:
    plan = plan_job(job, observed, NOW + timedelta(seconds=5))
    assert plan.status is not None
    assert (plan.status.phase, plan.steps) == (phase, wanted)
    assert plan == plan_job(job, observed, NOW + timedelta(seconds=5))


# 2. the end


@pytest.mark.parametrize(
    "observed",
    [JobObserved(), seen(live(0), finished(1), missing=("x",)), JobObserved(PREPARED, READY)],
    ids=["nothing", "much", "some"],
)
def test_finished_job_stays_finished_and_loses_everything(observed: JobObserved) -> None:
    over = turned(
        running(), seen(*[finished(index) for index in range(3)], workers={"completed_indexes": "0-2"})
    )
    assert over.status.phase is Phase.Succeeded
    for spec in ({}, {"suspend": True}):
        job = over.model_copy(update={"spec": make(**spec).spec})
        plan = plan_job(job, observed, NOW + timedelta(hours=1))
        assert plan.status == over.status.model_copy(update={"workers": len(observed.pods) and 1})
        assert not any(not isinstance(step, Remove) for step in plan.steps)
    names = {
        (step.kind, step.name)
        for step in plan_job(over, seen(live(0)), NOW).steps
        if isinstance(step, Remove)
    }
    assert names == {("Job", "job-workers"), ("ResourcePool", "job-policy"), ("Job", "job-prepare")}


def test_everything_goes_only_after_the_end_is_stored() -> None:
    everything = seen(
        *[finished(index) for index in range(3)],
        workers={"completed_indexes": "0-2", "complete": True},
        others=(Child("ConfigMap", "job-launch", "launch-1"),),
    )
    plan = plan_job(running(), everything, NOW)
    assert plan.status is not None
    assert (plan.status.phase, plan.steps) == (Phase.Succeeded, ())
    after = plan_job(turned(running(), everything), everything, NOW)
    assert Remove("ConfigMap", "job-launch", "launch-1") in after.steps
    assert after.steps[0] == Remove("Job", "job-workers", "workers-1")


def test_job_that_is_being_deleted_gets_nothing() -> None:
    job = make()
    meta = job.metadata.model_copy(update={"deletion_timestamp": NOW})
    assert plan_job(job.model_copy(update={"metadata": meta}), JobObserved(), NOW) == JobPlan(None)


# 3. counting


def test_counts_of_finished_shards_stand_in_the_status() -> None:
    job = turned(running(), seen(finished(0), live(1), workers={"completed_indexes": "0"}))
    status = job.status
    assert status.tasks is not None
    assert (status.tasks.total, status.tasks.scored) == (10, 4)
    assert status.reward is not None
    assert status.reward.mean == "0.5"
    assert status.shards is not None
    assert (status.shards.total, status.shards.done, status.shards.counted) == (3, 1, "0")
    assert (status.workers, status.path) == (1, "runs/job-01234567/results")
    assert status.selector is not None
    assert "agentfly.dev/role=worker" in status.selector


def test_two_pods_of_one_shard_are_counted_once() -> None:
    both = (finished(0), replace(finished(0), name="other", uid="other"))
    job = turned(running(), seen(*both), seen(*both))
    assert job.status.tasks is not None
    assert job.status.tasks.scored == 4


def test_shard_that_nobody_can_read_is_waited_for_and_then_told() -> None:
    gone = seen(finished(0), finished(2), workers={"completed_indexes": "0-2", "complete": True})
    job = turned(running(), gone)
    assert unread(job, gone) == {1}
    early = plan_job(job, replace(gone, unread_since=NOW), NOW + UNREAD - timedelta(seconds=1))
    assert early.status is not None
    assert early.status.phase is Phase.Running
    some = seen(finished(0), live(2), workers={"completed_indexes": "0,1"}, unread_since=NOW)
    assert message(plan_job(turned(running(), some), some, NOW + UNREAD)) == (
        "shards 1: their results are on the claim, and not counted here"
    )
    late = plan_job(job, replace(gone, unread_since=NOW), NOW + UNREAD)
    assert true(late)["Succeeded"] == "Completed"
    assert message(late) == (
        "every rollout has an outcome; shards 1: their results are on the claim, and not counted here"
    )
    assert late.status is not None
    assert late.status.shards is not None
    assert (late.status.shards.done, late.status.shards.counted) == (3, "0,2")


def test_rates_are_since_the_start_and_stay_without_news() -> None:
    job = running()
    job = job.model_copy(
        update={
            "status": plan_job(job, seen(finished(0, sampled_tokens=60)), NOW + timedelta(seconds=11)).status
        }
    )
    assert (job.status.trajectories_per_second, job.status.tokens_per_second) == ("0.4", "6")
    later = plan_job(job, seen(finished(0, sampled_tokens=60)), NOW + timedelta(minutes=11))
    assert later.status == job.status


# 5. suspension


def test_suspended_job_says_so_and_keeps_its_counts() -> None:
    job = running()
    job = turned(job, seen(finished(0)))
    asked = make(suspend=True).spec
    job = job.model_copy(update={"spec": asked})
    plan = plan_job(job, seen(finished(0), workers={"suspended": True}), NOW)
    assert true(plan) == {"Suspended": "SuspendedByUser"}
    assert message(plan) == "on request, 1 of 3 shards are done"
    assert [event.reason for event in plan.events] == [EventReason.Suspended]
    resumed = turned(job, seen(finished(0), workers={"suspended": True})).model_copy(
        update={"spec": make().spec}
    )
    assert [event.reason for event in plan_job(resumed, seen(workers={"suspended": True}), NOW).events] == [
        EventReason.Resumed
    ]


def test_shard_that_finishes_while_the_workers_end_is_counted() -> None:
    job = turned(asked(running(), suspend=True), seen(finished(0), workers={"suspended": True}))
    assert job.status.shards is not None
    assert job.status.shards.counted == "0"


# 6. failing


@pytest.mark.parametrize(
    ("pods", "budget", "reason"),
    [
        ((finished(0, scored=3, failed={"Infra": 1}),), 0.1, None),
        ((finished(0, scored=2, failed={"Infra": 2}),), 0.1, Reason.FailureBudgetExceeded),
        ((broken(1, EXIT_BUDGET, "FailureBudgetExceeded"),), 1.0, Reason.FailureBudgetExceeded),
    ],
)
def test_failure_budget_is_of_all_rollouts(pods: Any, budget: float, reason: Reason | None) -> None:
    job = running(runPolicy={"failureBudget": budget})
    plan = plan_job(job, seen(*pods, live(2)), NOW)
    assert true(plan).get("Failed") == reason
    assert plan.status is not None
    assert plan.status.completion_time == (NOW if reason else None)


@pytest.mark.parametrize(
    ("tokens", "done", "failed"), [(100, False, False), (100, True, True), (10_000, False, True)]
)
def test_drift_is_judged_when_it_says_something(tokens: int, done: bool, failed: bool) -> None:
    job = running(rollout={"groupSize": 2, "maxDriftFraction": 0.1})
    pods = [finished(0, drift_fraction=0.5, drift_tokens=tokens)]
    pods += [finished(1), finished(2)] if done else []
    plan = plan_job(job, seen(*pods), NOW)
    assert (true(plan).get("Failed") == Reason.DriftExceeded) is failed


def test_failed_shard_fails_the_job_when_the_others_have_ended() -> None:
    job = running()
    on = seen(broken(0), live(1), workers={"failed_indexes": "0"})
    assert true(plan_job(job, on, NOW))["Running"]
    assert "shards 0 failed, the others go on" in message(plan_job(job, on, NOW))
    ended = seen(
        broken(0), finished(1), finished(2),
        workers={"failed_indexes": "0", "completed_indexes": "1,2", "failed": True},
    )  # fmt: skip
    plan = plan_job(job, ended, NOW)
    assert true(plan)["Failed"] == Reason.AttemptFailed
    assert message(plan) == "shard 0: no agent"
    assert plan.status is not None
    assert plan.status.tasks is not None
    assert plan.status.tasks.scored == 8
    assert [event.reason for event in plan.events] == [EventReason.Failed]


def test_failed_preparation_fails_the_job_with_its_words() -> None:
    report = Report(
        phase="Ended", exit_code=EXIT_INVALID, reason="InvalidSpec", message="tasks: there is none"
    )
    plan = plan_job(make(), JobObserved(PrepareOf(exists=True, failed=True, report=report)), NOW)
    assert true(plan)["Failed"] == Reason.InvalidSpec
    assert message(plan) == "the preparation failed: tasks: there is none"


def test_time_of_a_job_is_over_and_begins_anew_after_a_suspension() -> None:
    policy = {"runPolicy": {"activeDeadlineSeconds": 60}}
    job, began = running(**policy), NOW + timedelta(seconds=1)
    plan = plan_job(job, seen(live(0)), began + timedelta(seconds=59))
    assert true(plan)["Running"]
    assert plan.wake_at == began + timedelta(seconds=60)
    assert true(plan_job(job, seen(live(0)), began + timedelta(seconds=60)))["Failed"] == "DeadlineExceeded"
    suspended = job.model_copy(update={"spec": make(suspend=True, **policy).spec})
    suspended = turned(suspended, seen(workers={"suspended": True}))
    resumed = suspended.model_copy(update={"spec": make(**policy).spec})
    later = NOW + timedelta(hours=1)
    again = resumed.model_copy(update={"status": plan_job(resumed, seen(live(0)), later).status})
    assert true(plan_job(again, seen(live(0)), later + timedelta(seconds=59)))["Running"]


# 7. stalls


@pytest.mark.parametrize(
    ("job", "observed", "reason", "told"),
    [
        (make(storage=None), JobObserved(), Reason.MissingObject, "spec.storage is absent"),
        (
            make(),
            JobObserved(missing=("PersistentVolumeClaim runs",)),
            Reason.MissingObject,
            "not there: PersistentVolumeClaim runs",
        ),
        (make(), JobObserved(conflicts=("Job job-prepare exists",)), Reason.NameTaken, "job-prepare"),
        (make(), JobObserved(refused="exceeded quota"), Reason.StartFailed, "exceeded quota"),
        (
            make(labels={"kueue.x-k8s.io/queue-name": "q"}),
            JobObserved(queue=QueueSeen(absent="it is not installed")),
            Reason.KueueMissing,
            "Kueue is not there: it is not installed",
        ),
        (
            make(labels={"kueue.x-k8s.io/queue-name": "q"}),
            JobObserved(queue=QueueSeen(served=True, missing=("LocalQueue q",))),
            Reason.MissingObject,
            "not there: LocalQueue q",
        ),
    ],
)
def test_what_a_person_must_mend_stalls_the_job(
    job: RolloutJob, observed: JobObserved, reason: Reason, told: str
) -> None:
    plan = plan_job(job, observed, NOW)
    assert true(plan) == {"Stalled": reason}
    assert told in message(plan)
    assert plan.steps == ()
    told_of = reason.value in EventReason.__members__
    assert [event.reason.value for event in plan.events] == [reason.value] * told_of
    again = plan_job(turned(job, observed), observed, NOW + timedelta(seconds=3))
    assert again.events == ()
    assert again.wake_at is not None
