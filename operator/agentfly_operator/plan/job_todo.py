"""The steps of a rollout job: what must be made, changed and removed.

Guarantees:
1. A step follows from the stored status, and is right after the new one is stored too.
2. What was seen to be on its way out is not removed again, and what exists is not made again.
3. Of a finished job everything goes that was made for it, workers before the servers that they use.

Not here: what the job is (`plan.job`).
"""

from collections.abc import Iterator

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.api.rolloutjob import ShardStatus
from agentfly_operator.plan.job_queue import is_held, is_queued, switch
from agentfly_operator.plan.job_seen import JobObserved, JobStep, MakeWorkers, SetWorkers
from agentfly_operator.plan.run_seen import PodOf
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from agentfly_operator.plan.said import is_true

OVER = frozenset({Phase.Succeeded, Phase.Failed})


def steps(job: RolloutJob, after: RolloutJobStatus, seen: JobObserved) -> tuple[JobStep, ...]:
    """What to do; ``job.status`` is the stored status."""
    before = job.status
    if after.phase in OVER:
        return tuple(_everything(seen)) if before.phase in OVER else ()
    if job.spec.suspend:
        return tuple(_suspension(job, seen))
    if is_true(after, Type.Stalled):
        evicted = seen.workers is not None and is_held(job, seen) and not live(seen)
        return tuple(_policy_goes(seen)) if evicted else ()
    shards = before.shards or ShardStatus()
    return tuple(_serving(job, shards.total, seen) if shards.total else _preparation(seen))


def waits(job: RolloutJob, seen: JobObserved) -> str:
    """What workers wait for before they start, or are queued; "" if for nothing."""
    if not is_queued(job, seen) and (not seen.policy.exists or seen.policy.deleting):
        return seen.leaving or "the pool of the policy's servers is being made"
    if not is_queued(job, seen) and not seen.policy.ready:
        return f"the policy's servers: {seen.policy.message or 'are being started'}"
    for name in job.spec.pools:
        pool = seen.pools.get(name)
        if pool is None or not pool.ready:
            return f"pool {name}: {pool.message if pool is not None and pool.message else 'is not ready'}"
    return ""


def live(seen: JobObserved) -> list[PodOf]:
    """Worker pods that have not ended."""
    return [pod for pod in seen.pods if not pod.over]


def _preparation(seen: JobObserved) -> Iterator[JobStep]:
    prepare = seen.prepare
    if not prepare.exists:
        yield MakePrepare()
    elif prepare.complete and not prepare.deleting and not (prepare.report and prepare.report.tasks):
        # Its pod went before anybody read how many tasks there are: it is done again, and finds all there.
        yield Remove("Job", prepare.name, prepare.uid)


def _serving(job: RolloutJob, shards: int, seen: JobObserved) -> Iterator[JobStep]:
    workers, wanted, queued = seen.workers, job.spec.workers.count, is_queued(job, seen)
    if not is_held(job, seen):
        if not seen.policy.exists:
            yield MakePolicy()
    elif not live(seen):
        yield from _policy_goes(seen)
    yield from switch(seen, suspend=False)
    if workers is None:
        if not waits(job, seen):
            yield MakeWorkers(shards)
    elif workers.deleting or workers.complete or workers.failed:
        return
    elif workers.suspended and not queued:
        if not waits(job, seen):
            yield SetWorkers(workers.name, workers.uid, wanted, suspend=False)
    elif workers.parallelism != wanted:
        yield SetWorkers(workers.name, workers.uid, wanted, suspend=None if queued else False)


def _suspension(job: RolloutJob, seen: JobObserved) -> Iterator[JobStep]:
    workers, managed = seen.workers, is_queued(job, seen) and seen.queue.workload is not None
    if managed:
        yield from switch(seen, suspend=True)
    if (
        workers is not None
        and not managed
        and not (workers.suspended or workers.deleting or workers.complete or workers.failed)
    ):
        yield SetWorkers(workers.name, workers.uid, job.spec.workers.count, suspend=True)
    elif not live(seen):
        yield from _policy_goes(seen)


def _everything(seen: JobObserved) -> Iterator[JobStep]:
    if seen.workers is not None and not seen.workers.deleting:
        yield Remove("Job", seen.workers.name, seen.workers.uid)
    yield from _policy_goes(seen)
    if seen.prepare.exists and not seen.prepare.deleting:
        yield Remove("Job", seen.prepare.name, seen.prepare.uid)
    for child in seen.others:
        yield Remove(child.kind, child.name, child.uid)


def _policy_goes(seen: JobObserved) -> Iterator[JobStep]:
    policy = seen.policy
    if policy.exists and not policy.deleting:
        yield Remove("ResourcePool", policy.name, policy.uid)
