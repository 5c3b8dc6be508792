"""What matters of a Workload, whatever else Kueue writes into it.

Guarantees:
1. Equal Workloads give equal words; what always moves (versions, times) is not among them.
2. Reading never raises: what is absent is empty.
"""

from collections.abc import Mapping
from typing import Any

from agentfly_operator.names import PAUSED, SHAPE, job_of_workers
from agentfly_operator.plan.children import WorkKey, controller_of
from agentfly_operator.plan.queue_seen import WorkloadOf

Object = Mapping[str, Any]


def work_of_workload(obj: Object) -> WorkKey | None:
    """The run, or the job of whose workers' Job, a Workload may be; None of anybody else's."""
    meta = obj["metadata"]
    for owner in meta.get("ownerReferences") or ():
        kind, name = owner.get("kind"), str(owner.get("name"))
        if kind == "TrainingRun":
            return "TrainingRun", str(meta["namespace"]), name
        if kind == "Job" and (job := job_of_workers(name)):
            return "RolloutJob", str(meta["namespace"]), job
    return None


def workload_of(obj: Object) -> WorkloadOf:
    """The words for a Workload."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    marks = meta.get("annotations") or {}
    found = {str(each.get("type")): each for each in status.get("conditions") or ()}
    evicted, admission = _true(found, "Evicted"), status.get("admission") or {}
    reserved = found.get("QuotaReserved") or {}
    return WorkloadOf(
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        owner=controller_of(obj),
        shape=str(marks.get(SHAPE) or ""),
        deleting="deletionTimestamp" in meta,
        active=spec.get("active") is not False,
        paused=PAUSED in marks,
        reserved=bool(admission),
        admitted=bool(_true(found, "Admitted")),
        evicted=str(evicted.get("reason") or ""),
        why=str(evicted.get("message") or ""),
        pending="" if reserved.get("status") == "True" else str(reserved.get("message") or ""),
        pods_ready=bool(_true(found, "PodsReady")),
        finished=bool(_true(found, "Finished")),
        flavors=tuple(
            (str(each.get("name")), tuple(sorted(set(map(str, (each.get("flavors") or {}).values())))))
            for each in admission.get("podSetAssignments") or ()
        ),
    )


def _true(conditions: Mapping[str, Object], kind: str) -> Object:
    """A condition if it is true, else nothing."""
    found = conditions.get(kind) or {}
    return found if found.get("status") == "True" else {}
