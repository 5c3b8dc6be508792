"""What matters of the pods, Jobs, pools and RayClusters of a run or job: a few words of each.

Guarantees:
1. Equal objects give equal words; what always moves (probe times, versions) is not among them.
2. What a pod of a role said at its end is here whole: its report, or else its last lines. Its container is
   the one that is named after the role; what others that were put beside it do says nothing.
3. Reading never raises: what is absent is empty, and a number that is none is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentfly.api import PoolUse
from agentfly.roles.launch import SUSPEND_ANNOTATION, Report
from agentfly_operator.names import ATTEMPT, INDEX, JOB, QUEUE, ROLE, RUN, RUN_UID
from agentfly_operator.plan.facts import fact_of
from agentfly_operator.plan.run_seen import NO_INDEX, ClusterOf, PodOf

_COMPLETION = "batch.kubernetes.io/job-completion-index"

Object = Mapping[str, Any]
WorkKey = tuple[str, str, str]  # TrainingRun or RolloutJob, namespace, name


@dataclass(frozen=True, slots=True)
class JobOf:
    """A Job of a run or job; ``complete`` and ``failed`` are its own conditions, ``queue`` is that of Kueue
    in which it is.
    """

    name: str
    uid: str
    owner: str = ""
    deleting: bool = False
    suspended: bool = False
    parallelism: int = 0
    active: int = 0
    succeeded: int = 0
    failures: int = 0
    completed_indexes: str = ""
    failed_indexes: str = ""
    complete: bool = False
    failed: bool = False
    reason: str = ""
    message: str = ""
    queue: str = ""


@dataclass(frozen=True, slots=True)
class PoolOf:
    """A ResourcePool: ``ready``, ``reason`` and ``message`` are those of its condition Ready."""

    name: str
    uid: str
    owner: str = ""
    deleting: bool = False
    ready: bool = False
    stalled: bool = False
    reason: str = ""
    message: str = ""
    use: PoolUse = field(default_factory=PoolUse)


def work_of(obj: Object) -> WorkKey | None:
    """The run or job whose label an object has."""
    meta = obj["metadata"]
    marks = meta.get("labels") or {}
    for label, kind in ((RUN, "TrainingRun"), (JOB, "RolloutJob")):
        if name := marks.get(label):
            return kind, str(meta.get("namespace", "")), str(name)
    return None


def role_of(obj: Object) -> str:
    """The role that an object is part of; "" if its labels name none."""
    return str((obj["metadata"].get("labels") or {}).get(ROLE) or "")


def pod_of(pod: Object) -> PodOf:
    """The words for a pod of any role; the index of a Job's pod is that of its completion."""
    meta, status = pod["metadata"], pod.get("status") or {}
    marks = meta.get("labels") or {}
    role, containers = role_of(pod), status.get("containerStatuses") or ()
    container: Object = next((each for each in containers if each.get("name") == role), {})
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    said = str(ended.get("message") or "")
    report = Report.read(said) if said.startswith("{") else None
    fact = fact_of(pod)
    index = marks.get(INDEX, marks.get(_COMPLETION))
    grace = meta.get("deletionGracePeriodSeconds")
    over = status.get("phase") in ("Succeeded", "Failed") or bool(ended)
    return PodOf(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        attempt=_number(marks.get(ATTEMPT)),
        index=NO_INDEX if index is None else _number(index),
        cluster=_cluster_over(pod),
        phase=str(status.get("phase") or "Pending"),
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        ready=fact.ready,
        created=_time(meta.get("creationTimestamp")),
        deleting="deletionTimestamp" in meta,
        grace_s=int(grace) if "deletionTimestamp" in meta and grace is not None else None,
        asked=bool((meta.get("annotations") or {}).get(SUSPEND_ANNOTATION)),
        exit_code=int(ended["exitCode"]) if "exitCode" in ended else None,
        reason=str(status.get("reason") or ended.get("reason") or ""),
        waiting="" if over or fact.reason is None else f"{fact.reason}: {fact.message}",
        started=_time((state.get("running") or ended).get("startedAt")),
        finished=_time(ended.get("finishedAt")),
        report=report,
        message="" if report else said or str(status.get("message") or ""),
        queue=str(marks.get(QUEUE) or ""),
    )


def job_of(job: Object) -> JobOf:
    """The words for a Job."""
    meta, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or () if each["status"] == "True"}
    failed = conditions.get("Failed") or {}
    return JobOf(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        owner=controller_of(job),
        deleting="deletionTimestamp" in meta,
        suspended=bool(spec.get("suspend")),
        parallelism=_number(spec.get("parallelism", 1)),
        active=_number(status.get("active")),
        succeeded=_number(status.get("succeeded")),
        failures=_number(status.get("failed")),
        completed_indexes=str(status.get("completedIndexes") or ""),
        failed_indexes=str(status.get("failedIndexes") or ""),
        complete="Complete" in conditions,
        failed=bool(failed),
        reason=str(failed.get("reason") or ""),
        message=str(failed.get("message") or ""),
        queue=str((meta.get("labels") or {}).get(QUEUE) or ""),
    )


def pool_of(pool: Object) -> PoolOf:
    """The words for a ResourcePool."""
    meta, status = pool["metadata"], pool.get("status") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    members, queue = status.get("members") or {}, status.get("queue") or {}
    capacity = (pool.get("spec") or {}).get("capacity") or {}
    return PoolOf(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        owner=controller_of(pool),
        deleting="deletionTimestamp" in meta,
        ready=ready.get("status") == "True",
        stalled=(conditions.get("Stalled") or {}).get("status") == "True",
        reason=str(ready.get("reason") or ""),
        message=str(ready.get("message") or ""),
        use=PoolUse(
            ready=_number(members.get("ready")),
            leased=_number(members.get("leased")),
            queued=_number(queue.get("pending")),
            max=_number(capacity.get("max")),
        ),
    )


def cluster_of(cluster: Object) -> ClusterOf:
    """The words for a RayCluster."""
    meta, status = cluster["metadata"], cluster.get("status") or {}
    failing = [
        each
        for each in status.get("conditions") or ()
        if each.get("type") == "ReplicaFailure" and each.get("status") == "True"
    ]
    return ClusterOf(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        attempt=_number((meta.get("labels") or {}).get(ATTEMPT)),
        deleting="deletionTimestamp" in meta,
        taken="observedGeneration" in status,
        trouble="; ".join(f"{each.get('reason')}: {each.get('message')}" for each in failing),
        suspended=bool((cluster.get("spec") or {}).get("suspend")),
        queue=str((meta.get("labels") or {}).get(QUEUE) or ""),
    )


def controller_of(obj: Object) -> str:
    """The uid of what controls an object; "" if nothing does."""
    return str(_controller(obj).get("uid") or "")


def belongs_to(obj: Object) -> str:
    """The uid of the run, job or Job that an object is part of; "" if of none.

    A pod of a RayCluster is part of the run of which that is: the pod has it from its template.
    """
    if _cluster_over(obj):
        return str((obj["metadata"].get("labels") or {}).get(RUN_UID) or "")
    return controller_of(obj)


def _cluster_over(obj: Object) -> str:
    controller = _controller(obj)
    return str(controller["name"]) if controller.get("kind") == "RayCluster" else ""


def _controller(obj: Object) -> Object:
    owners: Sequence[Object] = obj["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), {})


def _number(value: object) -> int:
    text = str(value)
    return int(text) if text.isdecimal() else 0


def _time(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(value)) if value else None
    except ValueError:
        return None
