"""What is kept of Workloads, whose they are; the numbers are those of the guarantees of `plan.workloads`."""

from typing import Any

from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.queue_seen import WorkloadOf
from agentfly_operator.plan.workloads import work_of_workload, workload_of

Obj = dict[str, Any]
RUN: WorkKey = ("TrainingRun", "team", "first")


def a_workload(name: str = "first", owner: Obj | None = None, **status: Any) -> Obj:
    reference = {"kind": "TrainingRun", "name": "first", "uid": "run-1", "controller": True}
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {
        "metadata": {**meta, "ownerReferences": [owner or reference]},
        "spec": {"active": True},
        "status": status,
    }


def true(kind: str, reason: str = "R", message: str = "") -> Obj:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def test_whose_a_workload_is() -> None:
    assert work_of_workload(a_workload()) == RUN
    job = {"kind": "Job", "name": "first-workers", "uid": "j", "controller": True}
    assert work_of_workload(a_workload("a", job)) == ("RolloutJob", "team", "first")
    assert work_of_workload(a_workload("a", {**job, "name": "mine"})) is None
    assert work_of_workload({"metadata": {"name": "a", "namespace": "team"}}) is None


def test_what_kueue_says_in_words() -> None:
    assert workload_of({"metadata": {"name": "w", "uid": "u"}}) == WorkloadOf("w", "u")
    live = a_workload(
        admission={
            "podSetAssignments": [
                {"name": "trainer", "flavors": {"cpu": "b", "nvidia.com/gpu": "a", "memory": "b"}},
                {"name": "inference"},
            ]
        },
        conditions=[true("QuotaReserved"), true("Admitted"), true("PodsReady")],
    )
    live["metadata"]["annotations"] = {"agentfly.dev/shape": "abc"}
    found = workload_of(live)
    assert found == WorkloadOf(
        "first", "uid-first", "run-1", "abc", reserved=True, admitted=True, pods_ready=True,
        flavors=(("trainer", ("a", "b")), ("inference", ())),
    )  # fmt: skip
    assert found.may_run
    live["status"]["conditions"].append(true("Evicted", "Deactivated", "it is deactivated"))
    live["spec"]["active"] = False
    live["metadata"]["annotations"]["agentfly.dev/paused"] = "true"
    found = workload_of(live)
    assert (found.may_run, found.active, found.paused) == (False, False, True)
    pending = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "8 more needed"}
    assert workload_of(a_workload(conditions=[pending])).pending == "8 more needed"
    ended = {**a_workload(conditions=[true("Finished")])}
    ended["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    found = workload_of(ended)
    assert (found.finished, found.deleting, found.may_run) == (True, True, False)
