"""One pass over one TrainingRun: look, plan, write its status if that says something new, act.

Guarantees:
1. The status is all that is remembered: what must be known after a crash is written before it is acted upon.
2. A run that is being deleted gets nothing any more. One that is gone ends its loop.
3. What the API server refuses to make is told in the status, and made when it would be accepted.
4. A pass over a run of which all is known asks for the run alone: its children are seen by watches.
5. A status that cannot be read is never written over; a spec that cannot be is told in the status.

Not here: what follows from what (`plan.run`), what its objects are (`render.run`), when a status is written
(`cluster.works`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.kube import RAY_CLUSTERS, TRAINING_RUNS, Conflict, Kube, NotFound, Resource
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.absent import MISSING_S, Absent, Ref
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import Hand, Refused
from agentfly_operator.cluster.heads import Heads
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
from agentfly_operator.names import launch_name, prepare_name, roles_name, trainer_name
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.invalid import invalid_status, invalid_turns
from agentfly_operator.plan.run import plan_run
from agentfly_operator.plan.run_seen import Child, RunObserved
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
from agentfly_operator.plan.run_todo import NETWORK
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job, roles_policy

_PROGRESS = ("progress", "stepTime", "pools", "checkpoint")

Key = tuple[str, str]
Object = dict[str, Any]


@dataclass
class _Memory:
    """What one process remembers of one run; losing it costs a request or a write."""

    uid: str
    written: Written = field(default_factory=Written)
    others: Unwatched = field(default_factory=Unwatched)
    refused: Refusals = field(default_factory=Refusals)
    asked: str = ""


class Runs:
    """Passes over TrainingRuns."""

    def __init__(
        self,
        kube: Kube,
        hand: Hand,
        children: Children,
        heads: Heads,
        absent: Absent,
        queues: Queues,
        events: Events,
        metrics: Metrics,
        config: Config,
        has: Callable[[Resource], bool],
    ) -> None:
        self._kube = kube
        self._hand = hand
        self._children = children
        self._heads = heads
        self._absent = absent
        self._queues = queues
        self._statuses = Statuses(hand, events, TRAINING_RUNS, _PROGRESS)
        self._metrics = metrics
        self._config = config
        self._has = has
        self._memories: dict[Key, _Memory] = {}

    async def run(self, key: Key) -> float | None:
        """One pass; seconds until the next, None if the run is gone."""
        namespace, name = key
        try:
            obj = await self._kube.get(TRAINING_RUNS, name, namespace)
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
        before = read_status(TrainingRunStatus, obj)
        run = read(TrainingRun, obj, before)
        if isinstance(run, str):
            status = invalid_status(obj["metadata"]["generation"], run, before, now)
            told = invalid_turns(before, status)
            return await self._statuses.show(obj, status.to_json(), told, memory.written)
        await self._children.confirm(_work(key))
        seen = await self._observe(key, run, memory)
        plan = plan_run(run, seen, now)
        self._metrics.runs.put(key, plan.status or run.status)
        pause = QUIET_S
        if plan.status is not None:
            wanted = plan.status.to_json()
            pause = await self._statuses.show(obj, wanted, plan.events, memory.written)
        await self._act(run, plan.steps, seen, memory)
        return min(pause, _until(run, plan, seen))

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._heads.forget(_work(key))
        self._children.forget(_work(key))
        self._metrics.runs.drop(key)

    def _remember(self, key: Key, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            self._forget(key)
            memory = self._memories[key] = _Memory(uid)
        return memory

    async def _observe(self, key: Key, run: TrainingRun, memory: _Memory) -> RunObserved:
        work, attempt = _work(key), run.status.attempt
        pods = self._children.pods(work, "trainer", memory.uid)
        engine = run.status.engine
        first = engine.head if engine is not None else None
        heads = (pod for pod in pods if pod.index == 0 and pod.attempt == attempt)
        head = next((pod for pod in heads if first in (None, pod.uid)), None)
        if head is not None and head.phase == "Running" and head.ip and not head.over:
            self._heads.follow(work, head)
        else:
            self._heads.rest(work)
        pools = {name: self._children.pool(key[0], name) for name in run.spec.pools}
        if _is_over(run):
            memory.refused.forget()
        told = await memory.refused.told(self._hand, run.metadata.generation or 0)
        return RunObserved(
            prepare=prepare_of(self._children, work, memory.uid),
            policy=policy_of(self._children, key[0], policy_name(key[1]), memory.uid),
            pods=tuple(pods),
            gone=tuple(self._children.gone(work, memory.uid, attempt)),
            clusters=tuple(self._children.clusters(work, memory.uid)),
            kuberay=self._has(RAY_CLUSTERS),
            others=await self._others(key, run, memory),
            missing=await self._absent.of(key[0], named(run)),
            conflicts=told.conflicts,
            refused=told.refused,
            leaving=told.leaving,
            head=self._children.ended(work, memory.uid, attempt) or self._heads.report(work, attempt),
            heard=self._heads.heard(work),
            silent=self._heads.silent(work),
            pools={name: pool.use for name, pool in pools.items() if pool is not None},
            queue=await self._queues.of_run(work, run, memory.uid),
        )

    async def _others(self, key: Key, run: TrainingRun, memory: _Memory) -> tuple[Child, ...]:
        name, attempt = key[1], run.status.attempt
        refs: list[Ref] = [("Service", trainer_name(name)), ("NetworkPolicy", trainer_name(name))]
        refs += [("ConfigMap", prepare_name(name)), ("NetworkPolicy", roles_name(name))]
        refs += [("ConfigMap", launch_name(name, n)) for n in (attempt - 1, attempt) if n > 0]
        return await memory.others.seen(self._kube, key[0], refs, memory.uid, over=_is_over(run))

    async def _act(
        self, run: TrainingRun, steps: tuple[Step, ...], seen: RunObserved, memory: _Memory
    ) -> None:
        namespace = run.metadata.namespace or ""
        for step in steps:
            match step:
                case MakePrepare():
                    await self._make(run, (roles_policy(run), *prepare_job(run, self._config)), seen, memory)
                case MakePolicy():
                    await self._make(run, [policy_pool(run, self._config)], seen, memory)
                case MakeAttempt(attempt, kuberay):
                    there = {("Pod", pod.name) for pod in seen.pods}
                    there |= {("RayCluster", cluster.name) for cluster in seen.clusters}
                    there |= {(child.kind, child.name) for child in seen.others}
                    whole = attempt_objects(run, attempt, self._config, kuberay=kuberay)
                    await self._make(run, _unseen(whole, there), seen, memory)
                case MakeNetwork(attempt):
                    whole = attempt_objects(run, attempt, self._config)
                    made = [each for each in whole if each["kind"] in NETWORK]
                    await self._make(run, made, seen, memory)
                case Remove(kind, name, uid, grace_s):
                    await self._hand.remove(kind, namespace, name, uid, grace_s)
                    memory.others.removed(kind, name)
                case AskSuspend(name, uid):
                    if memory.asked != uid:
                        await self._hand.ask_suspend(namespace, name, uid)
                        memory.asked = uid
                case _:
                    await self._queues.act(run, step)

    async def _make(
        self, run: TrainingRun, manifests: Sequence[Object], seen: RunObserved, memory: _Memory
    ) -> None:
        for manifest in await self._queues.place(run, seen.queue, manifests):
            memory.others.made(str(manifest["kind"]), await self._hand.make(manifest))


def _work(key: Key) -> WorkKey:
    return "TrainingRun", *key


def _unseen(manifests: Sequence[Object], there: Collection[Ref]) -> list[Object]:
    return [each for each in manifests if (each["kind"], each["metadata"]["name"]) not in there]


def _is_over(run: TrainingRun) -> bool:
    return run.status.completion_time is not None


def _until(run: TrainingRun, plan: RunPlan, seen: RunObserved) -> float:
    """When to look again if nothing is heard before."""
    return look_again(
        over=_is_over(run),
        left=bool(seen.pods or seen.clusters or seen.others or seen.prepare.exists or seen.policy.exists),
        waits=bool(seen.missing or seen.conflicts or seen.refused),
        wake_at=plan.wake_at,
    )
