"""One run or job, its API server in memory, and watches that show what a test wants."""

from typing import Any, cast

from agentfly.kube import (
    CONFIG_MAPS,
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_POOLS,
    ROLLOUT_JOBS,
    TRAINING_RUNS,
    Kube,
    Resource,
)
from agentfly.roles.launch import Report
from agentfly.roles.worker import WorkerReport
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.children import Children, _projection
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.heads import Heads
from agentfly_operator.cluster.jobs import RolloutJobs
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.passes import Means
from agentfly_operator.cluster.runs import Runs
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.kueue import Kueue
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import META, SPEC

Obj = dict[str, Any]
KEY = ("team", "first")
FOLLOWED: dict[str, Resource] = {
    "Pod": PODS,
    "Job": JOBS,
    "ResourcePool": RESOURCE_POOLS,
    "RayCluster": RAY_CLUSTERS,
}
DONE = {"conditions": [{"type": "Complete", "status": "True"}]}
READY = {"type": "Ready", "status": "True", "reason": "MinAvailable", "message": ""}


class PassWorld:
    """What is the same for both kinds. `leads` is whether this operator may write."""

    kind: str
    resource: Resource
    looks: Runs | RolloutJobs

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.leads = True
        self.begin()
        self.kube.put(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"name": "runs", "namespace": "team"}})
        self.kube.put(CONFIG_MAPS, {"metadata": {"name": "quickstart", "namespace": "team"}})

    def begin(self) -> None:
        """An operator that remembers nothing."""
        kube, self.metrics = cast(Kube, self.kube), Metrics()
        self.children = Children(kube, (), lambda _: None)
        hand = Hand(kube, self.children, self.metrics, lambda: self.leads)
        absent, events = Absent(kube, self.children), Events(kube, "operator-0", self.metrics)
        self.kueue = Kueue(self.kube, hand, self.children, absent)
        self.looks = self.passes(Means(kube, hand, self.children, absent, self.kueue.queues, events, CONFIG))
        self.shown: dict[str, tuple[str, Obj]] = {}

    def passes(self, means: Means) -> Runs | RolloutJobs:
        raise AssertionError("is made for one of the kinds")

    def put(self, spec: Obj) -> None:
        """The object itself, as somebody applies it."""
        meta = {**META, "generation": 1}
        self.kube.put(self.resource, {"kind": self.kind, "metadata": meta, "spec": spec, "status": {}})

    def show(self) -> None:
        """The watches catch up."""
        there: dict[str, tuple[str, Obj]] = {}
        for kind, resource in FOLLOWED.items():
            for (plural, _, _), obj in self.kube.objects.items():
                if plural == resource.plural:
                    there[obj["metadata"]["uid"]] = kind, _projection(kind)(obj)
        for uid, (_, obj) in self.shown.items():
            if uid not in there:
                self.children.heard("DELETED", obj)
        for _, obj in there.values():
            self.children.heard("MODIFIED", obj)
        self.shown = there

    async def look(self, times: int = 1, *, shown: bool = True) -> float | None:
        after = None
        for _ in range(times):
            if shown:
                self.show()
            after = await self.looks.run(KEY)
        return after

    async def until(self, phase: str, passes: int = 12) -> None:
        for _ in range(passes):
            if self.status.get("phase") == phase:
                return
            await self.look()
        assert self.status.get("phase") == phase

    def live(self, resource: Resource, name: str) -> Obj:
        return self.kube.objects[resource.plural, "team", name]

    @property
    def status(self) -> Obj:
        return cast(Obj, self.live(self.resource, "first")["status"])

    def condition(self, kind: str) -> str:
        found = [each for each in self.status["conditions"] if each["type"] == kind]
        return f"{found[0]['status']} {found[0]['reason']}: {found[0]['message']}"

    def served(self) -> None:
        """The policy's server is ready."""
        self.live(RESOURCE_POOLS, "first-policy")["status"] = {"members": {"ready": 1}, "conditions": [READY]}


class OneRun(PassWorld):
    """A TrainingRun."""

    kind, resource = "TrainingRun", TRAINING_RUNS

    def __init__(self) -> None:
        self.defined: set[Resource] = set()
        super().__init__()

    def passes(self, means: Means) -> Runs | RolloutJobs:
        self.heads = Heads(lambda _: None, self.metrics, port=1)
        return Runs(means, self.metrics.runs, self.heads, self.defined.__contains__)

    def create(self, **spec: Any) -> None:
        self.put({**SPEC, **spec})

    def prepared(self) -> None:
        self.live(JOBS, "first-prepare")["status"] = DONE

    def pods(self, **status: Any) -> None:
        for name in self.kube.names(PODS):
            self.live(PODS, name)["status"] = {"phase": "Running", **status}

    async def to_pods(self) -> None:
        """As far as the first attempt's pods."""
        await self.look(3)
        self.prepared()
        await self.look(3)
        self.served()
        for _ in range(6):
            await self.look()
            if self.kube.names(PODS):
                return
        raise AssertionError(self.status)


class OneJob(PassWorld):
    """A RolloutJob."""

    kind, resource = "RolloutJob", ROLLOUT_JOBS

    def passes(self, means: Means) -> Runs | RolloutJobs:
        return RolloutJobs(means, self.metrics.jobs)

    def create(self, **spec: Any) -> None:
        workers = {"count": 2, "tasksPerShard": 2}
        self.put({**SPEC, "workers": workers, "rollout": {"groupSize": 2}, **spec})

    def pod(self, job: str, name: str, index: int, report: Report | None) -> None:
        """A pod of a Job, that ended with this report or still runs."""
        owner = self.live(JOBS, job)
        marks = {**owner["spec"]["template"]["metadata"]["labels"]}
        marks["batch.kubernetes.io/job-completion-index"] = str(index)
        meta = {
            "name": name,
            "namespace": "team",
            "labels": marks,
            "ownerReferences": [{"kind": "Job", "controller": True, "uid": owner["metadata"]["uid"]}],
        }
        status = {"phase": "Running"} if report is None else ended(report, marks["agentfly.dev/role"])
        self.kube.put(PODS, {"metadata": meta, "spec": {}, "status": status})

    def prepared(self, tasks: int = 5) -> None:
        self.pod("first-prepare", "prepare", 0, Report(phase="Ended", exit_code=0, tasks=tasks))
        self.live(JOBS, "first-prepare")["status"] = DONE

    def finished(self, index: int, scored: int = 4) -> None:
        shard = WorkerReport(total=4, scored=scored, reward_mean=0.5, reward_min=0.0, reward_max=1.0)
        self.pod("first-workers", f"pod-{index}", index, Report(phase="Ended", exit_code=0, shard=shard))

    async def to_workers(self) -> None:
        await self.look(2)
        self.prepared()
        await self.look(3)
        self.served()
        await self.look(3)
        assert self.status["phase"] == "Running"


def ended(report: Report, container: str = "trainer") -> Obj:
    """The status of a pod whose container left this report."""
    terminated = {
        "exitCode": report.exit_code,
        "reason": "Completed",
        "message": report.termination_message(),
    }
    return {
        "phase": "Failed" if report.exit_code else "Succeeded",
        "containerStatuses": [{"name": container, "state": {"terminated": terminated}}],
    }
