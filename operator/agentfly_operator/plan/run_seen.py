"""What is true of a TrainingRun's children now, as far as it is known: what `plan.run` decides on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from agentfly.api import PoolUse
from agentfly.roles.launch import Report
from agentfly_operator.plan.queue_seen import QueueSeen

NO_INDEX = -1


@dataclass(frozen=True, slots=True)
class PodOf:
    """One pod of a role.

    Attributes:
        attempt, index: as its labels say; index 0 of a run's trainer is the head. ``NO_INDEX`` where none is
            named: pods that a RayCluster controls are all alike, but for the head.
        cluster: name of the RayCluster that controls it; "" if none does.
        phase: the pod's own: Pending, Running, Succeeded, Failed or Unknown.
        ready: its containers run and answer.
        created: when it was made.
        deleting: it has a deletionTimestamp: whoever asked, it gets a SIGTERM and its grace.
        grace_s: seconds of that grace; None while it is not being deleted.
        asked: it bears the annotation that asks for a suspension.
        exit_code: of its container; None while it runs, or if it never did.
        reason: of its end, as the cluster has it: OOMKilled, Error, Evicted; "" before it.
        waiting: why it does not run yet, for people, as "Unschedulable: no node has ..."; "" if it does.
        started: when its container began to run; None if it never did.
        finished: when its container ended.
        report: its termination message, if that is one.
        message: its last words if they are no report.
        queue: of Kueue, in which it is by itself; "" if in none.
    """

    name: str
    uid: str
    attempt: int = 0
    index: int = 0
    cluster: str = ""
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    ready: bool = False
    deleting: bool = False
    grace_s: int | None = None
    asked: bool = False
    exit_code: int | None = None
    reason: str = ""
    waiting: str = ""
    created: datetime | None = None
    started: datetime | None = None
    finished: datetime | None = None
    report: Report | None = None
    message: str = ""
    queue: str = ""

    @property
    def over(self) -> bool:
        """It will not run again."""
        return self.exit_code is not None or self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PrepareOf:
    """The Job that prepares a run or job.

    Attributes:
        failed: for good: the Job itself does not try again.
        report: what one of its pods said at its end; the one that says why, if it failed.
        message: what holds it up or what it fails of, for people; "" if nothing does.
    """

    exists: bool = False
    complete: bool = False
    failed: bool = False
    deleting: bool = False
    name: str = ""
    uid: str = ""
    report: Report | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class PolicyOf:
    """The ResourcePool of the policy's servers; the words are those of its condition Ready."""

    exists: bool = False
    name: str = ""
    uid: str = ""
    deleting: bool = False
    ready: bool = False
    reason: str = ""
    message: str = ""
    use: PoolUse = field(default_factory=PoolUse)


@dataclass(frozen=True, slots=True)
class ClusterOf:
    """A RayCluster of a run.

    Attributes:
        attempt: as its label says.
        taken: KubeRay has looked at it.
        trouble: why it has not the pods it should have, in KubeRay's words; "" if it says nothing of it.
        suspended: KubeRay makes no pods of it.
        queue: of Kueue, in which it is by itself; "" if in none.
    """

    name: str
    uid: str
    attempt: int = 0
    deleting: bool = False
    taken: bool = False
    trouble: str = ""
    suspended: bool = False
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """Another object of the run: Service, NetworkPolicy, ConfigMap."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class RunObserved:
    """What is true of one run now.

    Attributes:
        pods: all its trainer pods, of any attempt, those that this process made and has not seen yet too.
        gone: pods of a RayCluster of the newest attempt that this process saw to go, as they were last: there
            KubeRay removes at once what has ended, and puts another one in its place.
        clusters: all its RayClusters, of any attempt; none where the kind is not defined.
        kuberay: the kind RayCluster is defined.
        others: what else of it is there, without pods, clusters, prepare Job and policy pool.
        missing: objects that its spec names and that are not there, each as "Secret name" or a sentence.
        conflicts: objects that have a name it needs and are somebody else's, each as a sentence.
        refused: what the API server refuses to make, and why, as a sentence; "" if nothing.
        leaving: what has a name it needs and goes by itself, as a sentence; "" if nothing.
        head: the newest that the head of the newest attempt said, by its state or its termination message;
            it may outlive the pod.
        heard: the head has answered this process, or had time enough to; without that its silence says
            nothing.
        silent: the head runs, was asked for long enough, and has not answered for as long.
        pools: the pools that its spec names, as a run sees them.
        queue: Kueue, as far as it is about this run.
    """

    prepare: PrepareOf = PrepareOf()
    policy: PolicyOf = PolicyOf()
    pods: tuple[PodOf, ...] = ()
    gone: tuple[PodOf, ...] = ()
    clusters: tuple[ClusterOf, ...] = ()
    kuberay: bool = False
    others: tuple[Child, ...] = ()
    missing: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    refused: str = ""
    leaving: str = ""
    head: Report | None = None
    heard: bool = True
    silent: bool = False
    pools: Mapping[str, PoolUse] = field(default_factory=dict)
    queue: QueueSeen = field(default_factory=QueueSeen)
