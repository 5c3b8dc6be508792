"""A rollout job whose workers are in a queue of Kueue; the numbers are the guarantees of `plan.job_queue`."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from agentfly.api import RolloutJob
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly_operator.plan.job import JobObserved, JobPlan, plan_job
from agentfly_operator.plan.job_seen import MakeWorkers, SetWorkers
from agentfly_operator.plan.queue_seen import QueueSeen, WorkloadOf
from agentfly_operator.plan.queue_steps import SwitchWorkload
from agentfly_operator.plan.run_seen import PolicyOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from agentfly_operator.render.job import workers_job
from tests.unit.operator.make import CONFIG, NOW
from tests.unit.operator.make_job import ENV, PREPARED, READY, WORKERS, asked, live, make, turned
from tests.unit.operator.make_work import job as a_job

LABELS = {"kueue.x-k8s.io/queue-name": "team-a"}
KUEUE = QueueSeen(served=True)
WAITS = WorkloadOf("job-job-workers", "w-1", pending="8 more needed")
RUNS = replace(WAITS, reserved=True, admitted=True, pending="")
HELD = replace(WORKERS, suspended=True)
EVICTED = replace(RUNS, evicted="Preempted", why="for a better one")


def seen(**changes: Any) -> JobObserved:
    workload = changes.pop("workload", None)
    whole = {"prepare": PREPARED, "pools": {"env": ENV}, "queue": replace(KUEUE, workload=workload)}
    return JobObserved(**{**whole, **changes})


def queued(**spec: Any) -> RolloutJob:
    """A job of three shards whose Job waits in the queue."""
    return turned(make(labels=LABELS, **spec), seen(), seen(workers=HELD, workload=WAITS))


def plan(job: RolloutJob, observed: JobObserved) -> JobPlan:
    return plan_job(job, observed, NOW + timedelta(seconds=9))


def admitted(found: JobPlan) -> tuple[str, str, str]:
    assert found.status is not None
    each = next(each for each in found.status.conditions if each.type == Type.Admitted)
    return each.status, each.reason, each.message


# 1. who is in a queue


def test_the_job_of_its_workers_is_in_the_queue_and_does_not_begin_by_itself() -> None:
    job = a_job()
    assert "suspend" not in workers_job(job, 4, CONFIG)["spec"]
    labels = {**LABELS, "kueue.x-k8s.io/priority-class": "high"}
    job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"labels": labels})})
    made = workers_job(job, 4, CONFIG)
    assert made["spec"]["suspend"] is True
    assert labels.items() <= made["metadata"]["labels"].items()
    assert not labels.keys() & made["spec"]["template"]["metadata"]["labels"].keys()


def test_a_job_that_came_into_a_queue_by_itself_is_left_to_it() -> None:
    found = plan(turned(make(), seen()), seen(policy=READY, workers=replace(HELD, queue="default")))
    assert found.status is not None
    assert found.status.phase is Phase.Queued
    assert not [step for step in found.steps if isinstance(step, SetWorkers)]


# 2. from the queue to servers

CASES: dict[str, tuple[RolloutJob, JobObserved, Phase, tuple[Any, ...]]] = {
    "it is prepared first": (make(labels=LABELS), JobObserved(queue=KUEUE), Phase.Starting, (MakePrepare(),)),
    "its Job is made before there are servers": (
        turned(make(labels=LABELS), seen()), seen(), Phase.Starting, (MakeWorkers(3),),
    ),
    "and not before its pools are ready": (
        turned(make(labels=LABELS, pools=["env"]), seen()),
        seen(pools={"env": replace(ENV, ready=False)}),
        Phase.Starting,
        (),
    ),
    "it waits for quota, and has no servers": (
        queued(), seen(workers=HELD, workload=WAITS), Phase.Queued, (),
    ),
    "it has servers when its workers may run": (
        queued(), seen(workers=WORKERS, workload=RUNS), Phase.Running, (MakePolicy(),),
    ),
    "it is evicted, and workers that end still have servers": (
        queued(), JobObserved(PREPARED, READY, HELD, (live(0),), queue=replace(KUEUE, workload=EVICTED)),
        Phase.Queued, (),
    ),
    "it is evicted, and has no worker": (
        queued(), seen(policy=READY, workers=HELD, workload=EVICTED), Phase.Queued,
        (Remove("ResourcePool", "job-policy", "policy-1"),),
    ),
    "another number of workers is Kueue's to decide on": (
        asked(queued(), workers={"count": 7, "tasksPerShard": 2}),
        seen(policy=READY, workers=WORKERS, workload=RUNS),
        Phase.Running,
        (SetWorkers("job-workers", "workers-1", 7, suspend=None),),
    ),
    "what Kueue suspends it does not let go on": (
        queued(), seen(policy=PolicyOf(), workers=HELD, workload=None), Phase.Queued, (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_from_the_queue_to_workers(case: str) -> None:
    job, observed, phase, steps = CASES[case]
    found = plan(job, observed)
    assert found.status is not None
    assert (found.status.phase, found.steps) == (phase, steps)


def test_the_condition_says_what_kueue_says() -> None:
    waits = seen(workers=HELD, workload=WAITS)
    assert admitted(plan(queued(), waits)) == ("False", "Queued", "8 more needed")
    assert "is its namespace one that Kueue manages" in admitted(plan(queued(), seen(workers=HELD)))[2]
    evicted = seen(workers=HELD, workload=EVICTED)
    assert admitted(plan(queued(), evicted))[:2] == ("False", "Evicted")
    runs = plan(queued(), seen(workers=WORKERS, workload=RUNS))
    assert admitted(runs)[:2] == ("True", "Admitted")
    assert [event.reason for event in runs.events] == [EventReason.Admitted]
    first = plan(turned(make(labels=LABELS), seen()), waits)
    assert EventReason.Queued in [event.reason for event in first.events]


# 3. suspension


def test_a_suspended_job_is_switched_off_and_one_that_goes_on_is_switched_on() -> None:
    job = asked(turned(queued(), seen(workers=WORKERS, workload=RUNS)), suspend=True)
    off = SwitchWorkload("job-job-workers", "w-1", active=False)
    assert plan(job, seen(workers=WORKERS, policy=READY, workload=RUNS)).steps == (
        off,
        Remove("ResourcePool", "job-policy", "policy-1"),
    )
    busy = JobObserved(PREPARED, READY, WORKERS, (live(0),), queue=replace(KUEUE, workload=RUNS))
    assert plan(job, busy).steps == (off,)
    paused = replace(EVICTED, evicted="Deactivated", active=False, paused=True)
    stopped = plan(job, seen(workers=HELD, policy=READY, workload=paused))
    assert stopped.status is not None
    assert stopped.status.phase is Phase.Suspended
    assert stopped.steps == (Remove("ResourcePool", "job-policy", "policy-1"),)
    resumed = asked(turned(job, seen(workers=HELD, workload=paused)))
    assert plan(resumed, seen(workers=HELD, workload=paused)).steps == ()  # its quota is not returned yet
    paused = replace(paused, reserved=False, admitted=False)
    on = SwitchWorkload("job-job-workers", "w-1", active=True)
    assert plan(resumed, seen(workers=HELD, workload=paused)).steps == (on,)


def test_a_job_of_which_kueue_knows_nothing_yet_is_suspended_as_any() -> None:
    job = asked(queued(), suspend=True)
    (step,) = plan(job, seen(workers=WORKERS)).steps
    assert step == SetWorkers("job-workers", "workers-1", 2, suspend=True)


def test_what_somebody_else_switched_off_waits_for_a_person() -> None:
    off = replace(WAITS, active=False, evicted="Deactivated", why="too many tries")
    found = plan(queued(), seen(workers=HELD, policy=READY, workload=off))
    assert found.status is not None
    stalled = next(each for each in found.status.conditions if each.type == Type.Stalled)
    assert (stalled.status, stalled.reason) == ("True", "Deactivated")
    assert "too many tries" in stalled.message
    assert found.steps == (Remove("ResourcePool", "job-policy", "policy-1"),)


def test_a_queued_job_waits_for_kueue_when_it_goes() -> None:
    gone = QueueSeen(served=False, absent="it is not installed")
    found = plan(queued(), JobObserved(PREPARED, READY, HELD, queue=gone))
    assert admitted(found)[:2] == ("False", "KueueMissing")
    assert found.steps == (Remove("ResourcePool", "job-policy", "policy-1"),)
    runs = plan(queued(), JobObserved(PREPARED, READY, WORKERS, queue=gone))
    assert runs.status is not None
    assert runs.status.phase is Phase.Running
