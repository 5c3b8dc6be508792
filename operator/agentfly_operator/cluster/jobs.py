"""Passes over RolloutJobs: what is looked at, and how the steps of a plan are done.

Guarantees:
1. What a finished shard brought is added to the status in one write, over the object that it was planned
   from: two operators cannot both add it, and a write that failed adds nothing.

Not here: what a pass is (`cluster.passes`), what follows from what (`plan.job`), what its objects are
(`render.job`).
"""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.kube import ROLLOUT_JOBS
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.figures import JobFigures
from agentfly_operator.cluster.passes import Key, Kind, Means, Memory, Passes, is_over
from agentfly_operator.cluster.works import named, policy_of, prepare_of
from agentfly_operator.names import launch_name, prepare_name, roles_name
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.job import plan_job, unread
from agentfly_operator.plan.job_seen import JobObserved, JobPlan, MakeWorkers, SetWorkers
from agentfly_operator.plan.queue_steps import SwitchWorkload
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.run import policy_pool, prepare_job, roles_policy

Object = dict[str, Any]
_KIND = Kind(ROLLOUT_JOBS, RolloutJob, RolloutJobStatus, progress=("pools",))


@dataclass
class _Memory(Memory):
    """Of one job.

    Attributes:
        unread_since: since when there are finished shards that no pod tells of.
    """

    unread_since: datetime | None = None


class RolloutJobs(Passes[RolloutJob, RolloutJobStatus, _Memory, JobObserved, JobPlan]):
    """Passes over RolloutJobs."""

    def __init__(self, means: Means, figures: JobFigures) -> None:
        super().__init__(_KIND, _Memory, plan_job, means, figures)

    @staticmethod
    def _work(key: Key) -> WorkKey:
        return "RolloutJob", *key

    async def _observe(self, key: Key, job: RolloutJob, memory: _Memory, now: datetime) -> JobObserved:
        namespace, name = key
        work, children = self._work(key), self._means.children
        found = children.jobs(work, "worker", memory.uid)
        workers = min(found, key=lambda each: each.deleting, default=None)
        pods = children.pods(work, "worker", workers.uid) if workers is not None else []
        pools = {each: children.pool(namespace, each) for each in job.spec.pools}
        told = await memory.refused.told(self._means.hand, job.metadata.generation or 0)
        refs = [("ConfigMap", prepare_name(name)), ("ConfigMap", launch_name(name))]
        refs.append(("NetworkPolicy", roles_name(name)))
        over = is_over(job.status)
        others = await memory.others.seen(self._means.kube, namespace, refs, memory.uid, over=over)
        seen = JobObserved(
            prepare=prepare_of(children, work, memory.uid),
            policy=policy_of(children, namespace, policy_name(name), memory.uid),
            workers=workers,
            pods=tuple(pods),
            others=others,
            missing=await self._means.absent.of(namespace, named(job)),
            conflicts=told.conflicts,
            refused=told.refused,
            leaving=told.leaving,
            pools={each: pool for each, pool in pools.items() if pool is not None},
            queue=await self._means.queues.of_job(work, job, workers),
        )
        memory.unread_since = (memory.unread_since or now) if unread(job, seen) else None
        return replace(seen, unread_since=memory.unread_since)

    async def _act(self, job: RolloutJob, plan: JobPlan, seen: JobObserved, memory: _Memory) -> None:
        namespace, config = job.metadata.namespace or "", self._means.config
        for step in plan.steps:
            match step:
                case MakePrepare():
                    await self._make((roles_policy(job), *prepare_job(job, config)), memory)
                case MakePolicy():
                    await self._make((policy_pool(job, config),), memory)
                case MakeWorkers(shards):
                    made = launch_config(job, config), workers_job(job, shards, config)
                    await self._make(made, memory)
                case SetWorkers(name, uid, parallelism, suspend):
                    await self._means.hand.set_workers(namespace, name, uid, parallelism, suspend)
                case SwitchWorkload():
                    await self._means.queues.act(job, step)
                case Remove(kind, name, uid, grace_s):
                    await self._means.hand.remove(kind, namespace, name, uid, grace_s)
                    memory.others.removed(kind, name)

    async def _make(self, manifests: tuple[Object, ...], memory: _Memory) -> None:
        for manifest in manifests:
            memory.others.made(str(manifest["kind"]), await self._means.hand.make(manifest))

    @staticmethod
    def _left(seen: JobObserved) -> bool:
        return bool(seen.workers or seen.others or seen.prepare.exists or seen.policy.exists)
