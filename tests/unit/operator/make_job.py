"""Rollout jobs, what is seen of them in a cluster, and what a plan says of them."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from agentfly.api import RolloutJob
from agentfly.roles.launch import Report
from agentfly.roles.worker import WorkerReport
from agentfly_operator.plan.children import JobOf, PoolOf
from agentfly_operator.plan.job import JobObserved, JobPlan, plan_job
from agentfly_operator.plan.run_seen import PodOf, PolicyOf, PrepareOf
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
