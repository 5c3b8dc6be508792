"""What follows for a rollout job; the numbers are the module's guarantees."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfly.api import RolloutJob
from agentfly.api.reasons import EventReason, Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.roles.launch import Report
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.roles.worker import EXIT_BUDGET, WorkerReport
from agentfly_operator.plan.children import JobOf, PoolOf
from agentfly_operator.plan.job import UNREAD, JobObserved, JobPlan, plan_job, unread
from agentfly_operator.plan.job_counts import indexes, ranges
from agentfly_operator.plan.job_seen import MakeWorkers, SetWorkers
from agentfly_operator.plan.queue_seen import QueueSeen
from agentfly_operator.plan.run_seen import Child, PodOf, PolicyOf, PrepareOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from tests.unit.operator.make import NOW

READY = PolicyOf(exists=True, name="job-policy", uid="policy-1", ready=True)
WORKERS = JobOf("job-workers", "workers-1", parallelism=2)
PREPARED = PrepareOf(
    exists=True, complete=True, name="job-prepare", uid="prepare-1",
    report=Report(phase="Ended", exit_code=0, tasks=5),
)  # fmt: skip
ENV = PoolOf("env", "env-1", ready=True)


def make(status: Mapping[str, Any] | None = None, labels: Any = None, **spec: Any) -> RolloutJob:
    whole = {
        "agent": {"entrypoint": "agent.py:agent"},
        "tasks": {"path": "tasks.jsonl"},
        "model": {"path": "/agentfly-cache/model"},
        "storage": {"claim": "runs"},
        "workers": {"count": 2, "tasksPerShard": 2},
        "rollout": {"groupSize": 2},
        **spec,
    }
    meta = {"name": "job", "namespace": "team", "uid": "0123456789", "generation": 1, "labels": labels or {}}
    return RolloutJob.model_validate({"metadata": meta, "spec": whole, "status": status or {}})


def turned(job: RolloutJob, seen: JobObserved, *more: JobObserved) -> RolloutJob:
    """The job with the status that follows from what is seen, each thing a second after the last."""
    for number, each in enumerate((seen, *more)):
        status = plan_job(job, each, NOW + timedelta(seconds=number)).status
        assert status is not None
        job = job.model_copy(update={"status": status})
    return job


def running(**spec: Any) -> RolloutJob:
    """A job of 5 tasks in 3 shards whose workers run."""
    started = JobObserved(PREPARED, READY, pools={"env": ENV})
    return turned(make(**spec), started, replace(started, workers=WORKERS))


def asked(job: RolloutJob, **spec: Any) -> RolloutJob:
    """The job with another spec than before."""
    return job.model_copy(update={"spec": make(**spec).spec})


def seen(*pods: PodOf, **changes: Any) -> JobObserved:
    workers = changes.pop("workers", {})
    whole = {"prepare": PREPARED, "policy": READY, "pools": {"env": ENV}, **changes}
    return JobObserved(workers=replace(WORKERS, **workers), pods=pods, **whole)


def finished(index: int, **counts: Any) -> PodOf:
    shard = WorkerReport(
        **{"total": 4, "scored": 4, "reward_mean": 0.5, "reward_min": 0.0, "reward_max": 1.0, **counts}
    )
    report = Report(phase="Ended", exit_code=0, shard=shard)
    return PodOf(f"pod-{index}", f"uid-{index}", index=index, phase="Succeeded", exit_code=0, report=report)


def broken(index: int, code: int = 1, reason: str = "AttemptFailed", message: str = "no agent") -> PodOf:
    report = Report(phase="Ended", exit_code=code, reason=reason, message=message)
    return PodOf(f"bad-{index}", f"bad-{index}", index=index, phase="Failed", exit_code=code, report=report)


def live(index: int) -> PodOf:
    return PodOf(f"live-{index}", f"live-{index}", index=index, phase="Running")


def true(plan: JobPlan) -> dict[str, str]:
    """The conditions that are true, with their reasons."""
    assert plan.status is not None
    return {each.type: each.reason for each in plan.status.conditions if each.status == "True"}


def message(plan: JobPlan) -> str:
    assert plan.status is not None
    return next(each.message for each in plan.status.conditions if each.status == "True" and each.message)


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


# 3, 4, 5, 8. whatever happens in whatever order


class Cluster(RuleBasedStateMachine):
    """A job whose pods finish, fail and vanish, with an operator that starts anew at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.job = make()
        self.now = NOW
        self.prepare = PrepareOf()
        self.policy = PolicyOf()
        self.workers: JobOf | None = None
        self.pods: dict[str, PodOf] = {}
        self.published: set[int] = set()
        self.readable: set[int] = set()  # seen finished by an operator whose write went through
        self.unread_since: Any = None
        self.shown: frozenset[int] = frozenset()  # completed indexes as the watch of Jobs has them
        self.made = 0

    def look(self) -> JobObserved:
        workers = None
        if self.workers is not None:
            every = len(self.published) == 3
            workers = replace(
                self.workers, completed_indexes=ranges(self.shown), complete=every and len(self.shown) == 3
            )
        return JobObserved(
            self.prepare, self.policy, workers, tuple(self.pods.values()) if workers else (),
            unread_since=self.unread_since,
        )  # fmt: skip

    @rule(stored=st.booleans(), seconds=st.integers(1, 30))
    def look_and_act(self, stored: bool, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        observed = self.look()
        if not unread(self.job, observed):
            self.unread_since = None
        elif self.unread_since is None:
            self.unread_since = self.now
        observed = replace(observed, unread_since=self.unread_since)
        plan = plan_job(self.job, observed, self.now)
        assert plan.status is not None
        assert plan.wake_at is None or plan.wake_at > self.now
        if not stored:
            return  # somebody wrote meanwhile: nothing is done
        over = self.job.status.phase in (Phase.Succeeded, Phase.Failed)
        self.job = self.job.model_copy(update={"status": plan.status})
        again = plan_job(self.job, observed, self.now)
        assert again.status == plan.status
        assert again.events == ()
        if not over:
            self.readable |= {pod.index for pod in observed.pods if pod.exit_code == 0}
        for step in plan.steps:
            self.do(step)

    def do(self, step: Any) -> None:
        match step:
            case MakePrepare():
                assert not self.prepare.exists
                self.prepare = PrepareOf(exists=True, name="job-prepare", uid=self.uid())
            case MakePolicy():
                assert not self.policy.exists
                self.policy = PolicyOf(exists=True, name="job-policy", uid=self.uid())
            case MakeWorkers(shards):
                assert self.workers is None
                assert (shards, self.policy.ready) == (3, True)
                self.workers = replace(WORKERS, uid=self.uid())
            case SetWorkers(_, _, parallelism, suspend):
                assert self.workers is not None
                self.workers = replace(self.workers, parallelism=parallelism, suspended=suspend)
                if suspend:
                    self.pods = {name: pod for name, pod in self.pods.items() if pod.over}
            case Remove("Job", "job-workers", _):
                assert self.job.status.completion_time is not None
                self.workers, self.pods, self.shown = None, {}, frozenset()
            case Remove("Job", _, _):
                self.prepare = PrepareOf()
            case Remove("ResourcePool", _, _):
                assert all(pod.over for pod in self.pods.values())
                self.policy = PolicyOf()

    def uid(self) -> str:
        self.made += 1
        return f"uid-{self.made}"

    @precondition(lambda self: self.prepare.exists and not self.prepare.complete)
    @rule(read=st.booleans())
    def prepared(self, read: bool) -> None:
        report = PREPARED.report if read else None
        self.prepare = replace(self.prepare, complete=True, report=report)

    @precondition(lambda self: self.policy.exists)
    @rule(ready=st.booleans())
    def policy_changes(self, ready: bool) -> None:
        self.policy = replace(self.policy, ready=ready)

    @precondition(lambda self: self.workers is not None and not self.workers.suspended)
    @rule(index=st.integers(0, 2), name=st.sampled_from("ab"))
    def pod_starts(self, index: int, name: str) -> None:
        if index not in self.shown and f"{name}{index}" not in self.pods:
            pod = live(index)
            self.pods[f"{name}{index}"] = replace(pod, name=f"{name}{index}", uid=self.uid())

    @rule(index=st.integers(0, 2), name=st.sampled_from("ab"), good=st.booleans())
    def pod_ends(self, index: int, name: str, good: bool) -> None:
        pod = self.pods.get(f"{name}{index}")
        if pod is None or pod.over:
            return
        end = finished(index, scored=10**index, total=10**index) if good else broken(index)
        self.pods[pod.name] = replace(end, name=pod.name, uid=pod.uid)
        self.published |= {index} if good else set()

    @rule(index=st.integers(0, 2), name=st.sampled_from("ab"))
    def pod_vanishes(self, index: int, name: str) -> None:
        self.pods.pop(f"{name}{index}", None)

    @precondition(lambda self: self.workers is not None)
    @rule()
    def job_is_told(self) -> None:
        self.shown = frozenset(self.published)

    @rule()
    def operator_starts_anew(self) -> None:
        self.unread_since = None

    @rule(suspend=st.booleans(), count=st.integers(0, 3))
    def person_changes_spec(self, suspend: bool, count: int) -> None:
        spec = make(suspend=suspend, workers={"count": count, "tasksPerShard": 2}).spec
        self.job = self.job.model_copy(update={"spec": spec})

    @invariant()
    def every_shard_is_counted_once_and_what_was_read_is_counted(self) -> None:
        shards, tasks = self.job.status.shards, self.job.status.tasks
        counted = indexes(shards.counted) if shards is not None else frozenset()
        assert counted <= self.published
        assert self.readable <= counted
        if tasks is not None:
            assert tasks.scored == sum(10**index for index in counted)

    def teardown(self) -> None:
        """Left alone, the job comes to its end, and nothing of it is left."""
        self.job = self.job.model_copy(update={"spec": make().spec})
        for _ in range(60):
            self.look_and_act(stored=True, seconds=20)
            if self.prepare.exists and not self.prepare.complete:
                self.prepared(read=True)
            if self.policy.exists:
                self.policy_changes(ready=True)
            if self.workers is not None and not self.workers.suspended:
                for index in range(3):
                    if (failed := self.pods.get(f"b{index}")) is not None and failed.exit_code:
                        self.pod_vanishes(index, "b")  # the next try has another name
                    self.pod_starts(index, "b")
                    self.pod_ends(index, "b", good=True)
                self.job_is_told()
            self.every_shard_is_counted_once_and_what_was_read_is_counted()
        assert self.job.status.phase is Phase.Succeeded
        assert (self.workers, self.policy.exists, self.prepare.exists) == (None, False, False)
        assert plan_job(self.job, self.look(), self.now).steps == ()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
