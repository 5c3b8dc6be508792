"""A training run in a queue, where anything may happen at any time, and Kueue does as it likes."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from agentfly.api import TrainingRunStatus
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly_operator.plan.queue_steps import FinishWorkload, GiveBack, MakeWorkload, TellReady
from agentfly_operator.plan.run_attempt import in_attempt
from agentfly_operator.plan.run_seen import PolicyOf
from agentfly_operator.plan.run_steps import MakeAttempt, MakePolicy, MakePrepare, Remove, RunPlan
from tests.unit.operator.run_world import World
from tests.unit.operator.test_run_world import OVER, AnyWorld, _Late

NEEDS_QUOTA = (MakePrepare, MakePolicy, MakeAttempt)


class AnyQueue(AnyWorld):
    """The same world, where a queue of Kueue decides what a run may have."""

    @initialize(
        nodes=st.sampled_from([1, 2]),
        engine=st.sampled_from(["Native", "KubeRay"]),
        late=st.booleans(),
        backoff=st.sampled_from([0, 1, 3]),
    )
    def begin(self, nodes: int, engine: str, late: bool, backoff: int) -> None:
        kind = _Late if late else World
        limits = {"backoffLimit": backoff, "stallTimeoutSeconds": 1300, "activeDeadlineSeconds": 20000}
        self.world = kind(nodes=nodes, engine=engine, kuberay=True, policy=limits, queue="team-a")
        self.heads = {}
        self.words = {}
        self.attempt = 0
        self.over: TrainingRunStatus | None = None
        self.step = 0
        self.evictions = 0
        self.works()
        self.kueue_admits()
        self.works()
        self.the_preparation_ends(0)
        self.works()

    def check(self, plan: RunPlan, stored: TrainingRunStatus) -> None:
        super().check(plan, stored)
        world = self.world
        queue, workload = world.kueue, world.kueue.workload
        steps = plan.steps
        if any(isinstance(step, NEEDS_QUOTA) for step in steps):
            assert queue.served
            assert workload is not None
            assert workload.may_run
        returned = [
            step
            for step in steps
            if isinstance(step, (GiveBack, FinishWorkload))
            or (isinstance(step, Remove) and step.kind == "Workload")
        ]
        if returned:
            assert not world.pods
            assert not world.clusters
            assert not world.pool.exists
            assert not queue.servers
            assert not in_attempt(stored)
        if any(isinstance(step, MakeWorkload) for step in steps):
            assert workload is None
            assert not world.run.spec.suspend
        assert len([step for step in steps if isinstance(step, TellReady)]) <= 1

    @rule()
    def kueue_admits(self) -> None:
        workload = self.world.kueue.workload
        if workload is not None and workload.active and not workload.reserved and not workload.finished:
            self.world.changes(reserved=True, admitted=True, evicted="", why="", pending="")

    @rule(reason=st.sampled_from(["Preempted", "PodsReadyTimeout", "ClusterQueueStopped"]))
    def kueue_evicts(self, reason: str) -> None:
        workload = self.world.kueue.workload
        if workload is not None and workload.reserved and not workload.finished:
            self.world.changes(evicted=reason, why="because")

    @rule()
    def kueue_reacts(self) -> None:
        self.world.reacts()

    @rule()
    def somebody_switches_the_workload_off(self) -> None:
        workload = self.world.kueue.workload
        if workload is not None:
            self.world.changes(active=False)

    @rule()
    def somebody_removes_the_workload(self) -> None:
        self.world.workload(None)

    @rule(served=st.booleans())
    def kueue_comes_and_goes(self, served: bool) -> None:
        self.world.kueue = replace(self.world.kueue, served=served, absent="" if served else "gone")
        if not served:
            self.world.workload(None)

    @rule()
    def what_is_deleted_is_gone(self) -> None:
        super().what_is_deleted_is_gone()
        if not self.world.pool.exists:
            self.world.kueue = replace(self.world.kueue, servers=0)

    @invariant()
    def an_eviction_costs_nothing(self) -> None:
        world = getattr(self, "world", None)
        if world is not None and world.run.status.last_failure is not None:
            assert world.run.status.last_failure.reason != "Evicted"

    def teardown(self) -> None:
        """From wherever it is, a run that is let be comes to its end, and returns its quota."""
        world = getattr(self, "world", None)
        if world is None:
            return
        world.missing, world.heard, world.silent = (), True, False
        world.kueue = replace(world.kueue, served=True, absent="")
        world.kuberay = world.kuberay_works = True
        run = world.run
        world.run = run.model_copy(update={"spec": run.spec.model_copy(update={"suspend": False})})
        if world.kueue.workload is not None:
            world.changes(active=True, paused=False)
        for _ in range(90):
            self.works()
            self.kueue_admits()
            self.what_is_deleted_is_gone()
            self.the_preparation_ends(0)
            self.pods_run()
            if world.seen().pods:
                self.a_pod_ends(0, 0, True)
            world.now += timedelta(seconds=400)
        assert world.phase in OVER
        assert (world.pods, world.clusters, world.others, world.pool) == ({}, {}, {}, PolicyOf())
        workload = world.kueue.workload
        assert workload is None or workload.finished
        assert world.phase in (Phase.Succeeded, Phase.Failed)


AnyQueue.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyQueue = AnyQueue.TestCase
