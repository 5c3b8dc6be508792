"""One pass over one RolloutJob: look, plan, write its status if that says something new, act.

Guarantees:
1. What a finished shard brought is added to the status in one write, over the object that it was planned
   from: two operators cannot both add it, and a write that failed adds nothing.
2. A job that is being deleted gets nothing any more. One that is gone ends its loop.
3. What the API server refuses to make is told in the status, and made when it would be accepted.
4. A pass over a job of which all is known asks for the job alone: its children are seen by watches.
5. A status that cannot be read is never written over; a spec that cannot be is told in the status.

Not here: what follows from what (`plan.job`), what its objects are (`render.job`), when a status is written
(`cluster.works`).
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.kube import ROLLOUT_JOBS, Conflict, Kube, NotFound
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.absent import MISSING_S, Absent
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import Hand, Refused
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.queues import Queues
from agentfly_operator.cluster.read import read, read_status
from agentfly_operator.cluster.works import (
    AGAIN_S,
    QUIET_S,
    RESYNC_S,
    Refusals,
    Statuses,
    Unwatched,
    Written,
    look_again,
    named,
    policy_of,
    prepare_of,
)
from agentfly_operator.config import Config
from agentfly_operator.names import launch_name, prepare_name, roles_name
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.invalid import invalid_status, invalid_turns
from agentfly_operator.plan.job import plan_job, unread
from agentfly_operator.plan.job_seen import JobObserved, JobPlan, JobStep, MakeWorkers, SetWorkers
from agentfly_operator.plan.queue_steps import SwitchWorkload
from agentfly_operator.plan.run_steps import MakePolicy, MakePrepare, Remove
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.run import policy_pool, prepare_job, roles_policy

_PROGRESS = ("pools",)

Key = tuple[str, str]
Object = dict[str, Any]


@dataclass
class _Memory:
    """What one process remembers of one job; losing it costs a request, a write, or a wait.

    Attributes:
        unread_since: since when there are finished shards that no pod tells of.
    """

    uid: str
    written: Written = field(default_factory=Written)
    others: Unwatched = field(default_factory=Unwatched)
    refused: Refusals = field(default_factory=Refusals)
    unread_since: datetime | None = None


class RolloutJobs:
    """Passes over RolloutJobs."""

    def __init__(
        self,
        kube: Kube,
        hand: Hand,
        children: Children,
        absent: Absent,
        queues: Queues,
        events: Events,
        metrics: Metrics,
        config: Config,
    ) -> None:
        self._kube = kube
        self._hand = hand
        self._children = children
        self._absent = absent
        self._queues = queues
        self._statuses = Statuses(hand, events, ROLLOUT_JOBS, _PROGRESS)
        self._metrics = metrics
        self._config = config
        self._memories: dict[Key, _Memory] = {}

    async def run(self, key: Key) -> float | None:
        """One pass; seconds until the next, None if the job is gone."""
        namespace, name = key
        try:
            obj = await self._kube.get(ROLLOUT_JOBS, name, namespace)
        except NotFound:
            self._forget(key)
            return None
        if "deletionTimestamp" in obj["metadata"]:
            self._forget(key)
            return RESYNC_S
        memory = self._remember(key, obj["metadata"]["uid"])
        try:
            return await self._pass(key, obj, memory)
        except Conflict:
            return AGAIN_S  # it was changed since it was read
        except Refused as error:
            # News is told at once; what is tried in every pass, until its name is free, not in a circle.
            return AGAIN_S if memory.refused.put(error, obj["metadata"]["generation"]) else MISSING_S

    async def _pass(self, key: Key, obj: Object, memory: _Memory) -> float:
        now = datetime.now(UTC).replace(microsecond=0)
        before = read_status(RolloutJobStatus, obj)
        job = read(RolloutJob, obj, before)
        if isinstance(job, str):
            status = invalid_status(obj["metadata"]["generation"], job, before, now)
            told = invalid_turns(before, status)
            return await self._statuses.show(obj, status.to_json(), told, memory.written)
        await self._children.confirm(_work(key))
        seen = await self._observe(key, job, memory, now)
        plan = plan_job(job, seen, now)
        self._metrics.jobs.put(key, plan.status or job.status)
        pause = QUIET_S
        if plan.status is not None:
            wanted = plan.status.to_json()
            pause = await self._statuses.show(obj, wanted, plan.events, memory.written)
        await self._act(job, plan.steps, memory)
        return min(pause, _until(job, plan, seen))

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._children.forget(_work(key))
        self._metrics.jobs.drop(key)

    def _remember(self, key: Key, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            self._forget(key)
            memory = self._memories[key] = _Memory(uid)
        return memory

    async def _observe(self, key: Key, job: RolloutJob, memory: _Memory, now: datetime) -> JobObserved:
        namespace, name = key
        work, over = _work(key), job.status.completion_time is not None
        found = self._children.jobs(work, "worker", memory.uid)
        workers = min(found, key=lambda each: each.deleting, default=None)
        pods = self._children.pods(work, "worker", workers.uid) if workers is not None else []
        pools = {each: self._children.pool(namespace, each) for each in job.spec.pools}
        if over:
            memory.refused.forget()
        told = await memory.refused.told(self._hand, job.metadata.generation or 0)
        refs = [("ConfigMap", prepare_name(name)), ("ConfigMap", launch_name(name))]
        refs.append(("NetworkPolicy", roles_name(name)))
        seen = JobObserved(
            prepare=prepare_of(self._children, work, memory.uid),
            policy=policy_of(self._children, namespace, policy_name(name), memory.uid),
            workers=workers,
            pods=tuple(pods),
            others=await memory.others.seen(self._kube, namespace, refs, memory.uid, over=over),
            missing=await self._absent.of(namespace, named(job)),
            conflicts=told.conflicts,
            refused=told.refused,
            leaving=told.leaving,
            pools={each: pool for each, pool in pools.items() if pool is not None},
            queue=await self._queues.of_job(work, job, workers),
        )
        memory.unread_since = (memory.unread_since or now) if unread(job, seen) else None
        return replace(seen, unread_since=memory.unread_since)

    async def _act(self, job: RolloutJob, steps: tuple[JobStep, ...], memory: _Memory) -> None:
        namespace = job.metadata.namespace or ""
        for step in steps:
            match step:
                case MakePrepare():
                    await self._make((roles_policy(job), *prepare_job(job, self._config)), memory)
                case MakePolicy():
                    await self._make((policy_pool(job, self._config),), memory)
                case MakeWorkers(shards):
                    made = launch_config(job, self._config), workers_job(job, shards, self._config)
                    await self._make(made, memory)
                case SetWorkers(name, uid, parallelism, suspend):
                    await self._hand.set_workers(namespace, name, uid, parallelism, suspend)
                case SwitchWorkload():
                    await self._queues.act(job, step)
                case Remove(kind, name, uid, grace_s):
                    await self._hand.remove(kind, namespace, name, uid, grace_s)
                    memory.others.removed(kind, name)

    async def _make(self, manifests: tuple[Object, ...], memory: _Memory) -> None:
        for manifest in manifests:
            memory.others.made(str(manifest["kind"]), await self._hand.make(manifest))


def _work(key: Key) -> WorkKey:
    return "RolloutJob", *key


def _until(job: RolloutJob, plan: JobPlan, seen: JobObserved) -> float:
    """When to look again if nothing is heard before."""
    return look_again(
        over=job.status.completion_time is not None,
        left=bool(seen.workers or seen.others or seen.prepare.exists or seen.policy.exists),
        waits=bool(seen.missing or seen.conflicts or seen.refused),
        wake_at=plan.wake_at,
    )
