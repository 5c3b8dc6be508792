"""A cluster with one training run, small enough to be tried in every order: it obeys the planner's steps.

KubeRay, if it is there, is quick: between two looks of the operator it has put another pod in the place of
each that has ended, and has forgotten those. What the operator saw of them it keeps, until `forgets`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from agentfly.api import PoolUse, TrainingRun
from agentfly.api.reasons import ConditionType, EventReason
from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.roles.launch import Report
from agentfly_operator.names import cluster_name, launch_name, trainer_name, trainer_pod
from agentfly_operator.plan.queue_seen import QueueSeen, WorkloadOf
from agentfly_operator.plan.queue_steps import (
    FinishWorkload,
    GiveBack,
    MakeWorkload,
    QueueStep,
    SwitchWorkload,
    TellReady,
)
from agentfly_operator.plan.run import plan_run
from agentfly_operator.plan.run_engine import by_kuberay
from agentfly_operator.plan.run_seen import (
    NO_INDEX,
    Child,
    ClusterOf,
    PodOf,
    PolicyOf,
    PrepareOf,
    RunObserved,
)
from agentfly_operator.plan.run_steps import (
    AskSuspend,
    MakeAttempt,
    MakeNetwork,
    MakePolicy,
    MakePrepare,
    Remove,
    RunPlan,
    Step,
)
from agentfly_operator.plan.run_todo import GRACE_S
from tests.unit.operator.make import NOW
from tests.unit.operator.make_work import META, SPEC

NAME = META["name"]


def saved(step: int, ranks: int = 1) -> CheckpointStatus:
    """The checkpoint of a step."""
    return CheckpointStatus(latest_step=step, ranks=ranks, path=f"/c/global_step_{step}", time=NOW)


@dataclass
class World:
    """The cluster.

    Args:
        nodes: trainer pods of an attempt.
        policy: of the run, as in its spec.
        engine: of the run, as in its spec.
        kuberay: it is installed.
        queue: of Kueue, that the run is put into.
    """

    nodes: int = 1
    engine: str = "Auto"
    kuberay: bool = False
    policy: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""

    def __post_init__(self) -> None:
        trainer = {"nodes": self.nodes, "engine": self.engine}
        whole = {**SPEC, "trainer": trainer, "runPolicy": dict(self.policy), **self.spec}
        self.now = NOW
        self.uids = 0
        self.labels = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue else {}
        self.run = TrainingRun.model_validate({"metadata": self.metadata(1), "spec": whole})
        self.pods: dict[str, PodOf] = {}
        self.gone: list[PodOf] = []
        self.clusters: dict[str, ClusterOf] = {}
        self.kuberay_works = True
        self.others: dict[tuple[str, str], Child] = {}
        self.prepare = PrepareOf()
        self.pool = PolicyOf()
        self.head_says: Report | None = None
        self.missing: tuple[str, ...] = ()
        self.conflicts: tuple[str, ...] = ()
        self.refused = ""
        self.heard = True
        self.silent = False
        self.leaving = ""
        self.kueue = QueueSeen(served=bool(self.queue))
        self.told: list[EventReason] = []
        self.notes: list[str] = []

    # What is seen, and what is done about it.

    def seen(self) -> RunObserved:
        return RunObserved(
            prepare=self.prepare,
            policy=self.pool,
            pods=tuple(self.pods.values()),
            gone=tuple(self.gone),
            clusters=tuple(self.clusters.values()) if self.kuberay else (),
            kuberay=self.kuberay,
            others=tuple(self.others.values()),
            missing=self.missing,
            conflicts=self.conflicts,
            refused=self.refused,
            head=self.head_says,
            heard=self.heard,
            silent=self.silent,
            leaving=self.leaving,
            pools={"tools": PoolUse(ready=2, max=4)},
            queue=self.kueue,
        )

    def metadata(self, generation: int) -> dict[str, Any]:
        return {**META, "generation": generation, "labels": self.labels}

    def plan(self) -> RunPlan:
        return plan_run(self.run, self.seen(), self.now)

    def write(self, plan: RunPlan) -> None:
        if plan.status is not None:
            self.run = self.run.model_copy(update={"status": plan.status})
        self.told += [event.reason for event in plan.events]
        self.notes += [event.note for event in plan.events]

    def carry_out(self, step: Step) -> None:
        match step:
            case MakePrepare():
                if not self.prepare.exists:
                    self.prepare = PrepareOf(exists=True, name=f"{NAME}-prepare", uid=self._uid())
            case MakePolicy():
                if not self.pool.exists:
                    self.pool = PolicyOf(exists=True, name=f"{NAME}-policy", uid=self._uid())
                    self.kueue = replace(self.kueue, servers=self.run.spec.inference.replicas)
            case MakeAttempt(attempt, kuberay):
                self._other("ConfigMap", launch_name(NAME, attempt))
                self._network()
                if kuberay:
                    assert self.kuberay
                    name = cluster_name(NAME, attempt)
                    self.clusters.setdefault(name, ClusterOf(name, self._uid(), attempt))
                    return
                for index in range(self.run.spec.trainer.nodes):
                    name = trainer_pod(NAME, attempt, index)
                    if name not in self.pods:
                        self.pods[name] = PodOf(name, self._uid(), attempt, index)
            case MakeNetwork():
                self._network()
            case Remove(kind, name, uid):
                self._remove(kind, name, uid)
            case AskSuspend(name, uid):
                pod = self.pods.get(name)
                if pod is not None and pod.uid == uid:
                    self.pods[name] = replace(pod, asked=True)
            case _:
                self._tell_kueue(step)

    def _tell_kueue(self, step: QueueStep) -> None:
        match step:
            case MakeWorkload():
                if self.kueue.workload is None:
                    self.workload(WorkloadOf(NAME, self._uid()))
            case SwitchWorkload(active=active):
                self.changes(active=active, paused=not active)
            case TellReady(ready=ready):
                self.changes(pods_ready=ready)
            case GiveBack():
                self.changes(reserved=False, admitted=False, pods_ready=False, pending=self.of_kueue.why)
            case FinishWorkload():
                self.changes(finished=True)

    # What Kueue does.

    def workload(self, workload: WorkloadOf | None) -> None:
        self.kueue = replace(self.kueue, workload=workload)

    @property
    def of_kueue(self) -> WorkloadOf:
        assert self.kueue.workload is not None
        return self.kueue.workload

    def changes(self, **words: Any) -> None:
        """The Workload changes."""
        self.workload(replace(self.of_kueue, **words))

    def reacts(self) -> None:
        """Kueue asks back what a Workload has that was switched off."""
        workload = self.kueue.workload
        if workload is not None and not workload.active and workload.reserved and not workload.evicted:
            self.changes(evicted="Deactivated", why="The workload is deactivated")

    def admits(self) -> None:
        self.settle()
        self.changes(reserved=True, admitted=True, evicted="", why="", pending="")
        self.settle()

    def evicts(self, reason: str = "Preempted", why: str = "Preempted for a better one") -> None:
        self.changes(evicted=reason, why=why)
        self.settle()

    def _remove(self, kind: str, name: str, uid: str) -> None:
        if kind == "Pod" and name in self.pods and self.pods[name].uid == uid:
            cluster = self.clusters.get(self.pods[name].cluster)
            assert cluster is None or cluster.deleting, "KubeRay would replace it"
            self.pods[name] = replace(self.pods[name], deleting=True, grace_s=GRACE_S)
        elif kind == "RayCluster" and name in self.clusters and self.clusters[name].uid == uid:
            self.clusters[name] = replace(self.clusters[name], deleting=True)
        elif kind == "ResourcePool" and self.pool.uid == uid:
            self.pool = replace(self.pool, deleting=True)
        elif kind == "Job" and self.prepare.uid == uid:
            self.prepare = PrepareOf()
        elif kind == "Workload" and self.of_kueue.uid == uid:
            self.workload(None)
        elif (kind, name) in self.others and self.others[kind, name].uid == uid:
            del self.others[kind, name]

    def _network(self) -> None:
        for kind in ("Service", "NetworkPolicy"):
            self._other(kind, trainer_name(NAME))

    def _other(self, kind: str, name: str) -> None:
        self.others.setdefault((kind, name), Child(kind, name, self._uid()))

    def _uid(self) -> str:
        self.uids += 1
        return f"uid-{self.uids}"

    def turn(self) -> RunPlan:
        plan = self.plan()
        self.write(plan)
        for step in plan.steps:
            self.carry_out(step)
        self.kuberay_acts()
        return plan

    # What KubeRay does.

    def kuberay_acts(self) -> None:
        """It has seen everything."""
        for name, cluster in list(self.clusters.items()) if self.kuberay_works else []:
            mine = [pod for pod in self.pods.values() if pod.cluster == name]
            if cluster.deleting:  # the garbage collector, rather
                for pod in mine:
                    if not pod.deleting:
                        self.pods[pod.name] = replace(pod, deleting=True, grace_s=930)
                if not mine:
                    del self.clusters[name]
                continue
            self.clusters[name] = replace(cluster, taken=True)
            for pod in mine:
                if pod.over:
                    self.goes(pod)
            left = [pod.index for pod in mine if not pod.over]
            wanted = [0, *[NO_INDEX] * (self.run.spec.trainer.nodes - 1)]
            for index in (0, NO_INDEX):
                for _ in range(wanted.count(index) - left.count(index)):
                    self._pod_of(self.clusters[name], index)

    def _pod_of(self, cluster: ClusterOf, index: int) -> None:
        uid, group = self._uid(), "head" if index == 0 else "nodes-worker"
        name = f"{cluster.name}-{group}-{uid}"
        self.pods[name] = PodOf(
            name, uid, cluster.attempt, index, cluster.name, created=self.now, phase="Pending"
        )

    def goes(self, pod: PodOf) -> None:
        """A pod is gone."""
        del self.pods[pod.name]
        if pod.cluster:
            self.gone.append(pod)

    def forgets(self) -> None:
        """The operator is another process."""
        self.gone, self.head_says, self.heard = [], None, False

    def settle(self) -> None:
        """Until nothing follows any more."""
        for _ in range(20):
            before = (self.run, self.seen())
            self.turn()
            if before == (self.run, self.seen()):
                return
        raise AssertionError(f"it does not come to rest: {self.run.status.to_json()}")

    # What happens by itself.

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.settle()

    def set(self, **spec: Any) -> None:
        """Somebody changes the spec."""
        generation = (self.run.metadata.generation or 0) + 1
        self.run = TrainingRun.model_validate(
            {
                "metadata": self.metadata(generation),
                "spec": {**self.run.spec.to_json(), **spec},
                "status": self.run.status.to_json(),
            }
        )
        self.settle()

    def prepared(self) -> None:
        self.settle()
        self.prepare = replace(self.prepare, complete=True)
        self.settle()

    def pod(self, index: int = 0) -> PodOf:
        """A pod of the newest attempt; of a RayCluster the one that has been there longest."""
        attempt = self.run.status.attempt
        if not by_kuberay(self.run.status):
            return self.pods[trainer_pod(NAME, attempt, index)]
        kind = NO_INDEX if index else 0
        alike = [pod for pod in self.pods.values() if (pod.attempt, pod.index) == (attempt, kind)]
        return alike[max(0, index - 1)]

    def change(self, index: int = 0, **words: Any) -> None:
        pod = self.pod(index)
        self.pods[pod.name] = replace(pod, **words)
        self.settle()

    def starts(self) -> None:
        """All pods of the attempt run."""
        for index in range(self.run.spec.trainer.nodes):
            pod = self.pod(index)
            self.pods[pod.name] = replace(
                pod, phase="Running", ready=True, node=f"node-{index}", ip=f"10.0.0.{index}"
            )
        self.settle()

    def steps(self, step: int, checkpoint: int | None = None, *, at: datetime | None = None) -> None:
        """The head says that it made a step."""
        self.head_says = self.report(step, checkpoint, at=at)
        self.settle()

    def report(
        self, step: int, checkpoint: int | None = None, *, at: datetime | None = None, **words: Any
    ) -> Report:
        return Report(
            **{
                "attempt": self.run.status.attempt,
                "phase": "Running",
                "progress": Progress(step=step, total_steps=self.run.spec.steps),
                "step_time": (at or self.now).timestamp(),
                "checkpoint": None if checkpoint is None else saved(checkpoint),
                **words,
            }
        )

    def exits(self, code: int, index: int = 0, *, report: Report | None = None, **words: Any) -> None:
        """A pod ends; a head with exit code 0 says so too."""
        if code == 0 and index == 0 and report is None:
            report = self.report(self.run.spec.steps, phase="Ended", exit_code=0)
        phase = "Failed" if code else "Succeeded"
        more = {"reason": "Completed" if code == 0 else "Error", "finished": self.now, **words}
        self.change(index, phase=phase, ready=False, exit_code=code, report=report, **more)

    def vanish(self) -> None:
        """What is being deleted is gone, and what goes after it."""
        for _ in range(2):
            for pod in [each for each in self.pods.values() if each.deleting]:
                self.goes(pod)
            self.kuberay_acts()
            if self.pool.deleting:
                self.pool = PolicyOf()
                self.kueue = replace(self.kueue, servers=0)
            self.settle()

    def trains(self, step: int = 1, checkpoint: int | None = None) -> None:
        """From whatever it waits for to a step of the next attempt."""
        if not self.prepare.complete:
            self.prepared()
        self.vanish()
        self.wait(400)
        self.starts()
        self.steps(step, checkpoint)

    # What is said of it.

    @property
    def phase(self) -> str | None:
        return self.run.status.phase

    def condition(self, kind: ConditionType) -> tuple[str, str, str]:
        found = next(each for each in self.run.status.conditions if each.type == kind)
        return found.status, found.reason, found.message
