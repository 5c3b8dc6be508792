"""A rollout job whatever happens in whatever order: guarantees 3, 4, 5 and 9 of `plan.job`."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly_operator.plan.children import JobOf
from agentfly_operator.plan.job import JobObserved, plan_job, unread
from agentfly_operator.plan.job_counts import indexes, ranges
from agentfly_operator.plan.job_seen import MakeWorkers, SetWorkers
from agentfly_operator.plan.run_seen import PodOf, PolicyOf, PrepareOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from tests.unit.operator.make import NOW
from tests.unit.operator.make_job import PREPARED, WORKERS, broken, finished, live, make


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
