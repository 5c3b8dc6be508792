"""Passes over TrainingRuns: what is looked at, and how the steps of a plan are done.

Guarantees:
1. The status is all that is remembered: what must be known after a crash is written before it is acted upon.

Not here: what a pass is (`cluster.passes`), what follows from what (`plan.run`), what its objects are
(`render.run`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.kube import RAY_CLUSTERS, TRAINING_RUNS, Resource
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.absent import Ref
from agentfly_operator.cluster.figures import RunFigures
from agentfly_operator.cluster.heads import Heads
from agentfly_operator.cluster.passes import Key, Kind, Means, Memory, Passes, is_over
from agentfly_operator.cluster.works import named, policy_of, prepare_of
from agentfly_operator.names import launch_name, prepare_name, roles_name, trainer_name
from agentfly_operator.plan.children import WorkKey
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
)
from agentfly_operator.render.run import (
    attempt_objects,
    network_objects,
    policy_pool,
    prepare_job,
    roles_policy,
)

Object = dict[str, Any]
_KIND = Kind(
    TRAINING_RUNS, TrainingRun, TrainingRunStatus, progress=("progress", "stepTime", "pools", "checkpoint")
)


@dataclass
class _Memory(Memory):
    """Of one run.

    Attributes:
        asked: uid of the head that was asked for a checkpoint.
    """

    asked: str = ""


class Runs(Passes[TrainingRun, TrainingRunStatus, _Memory, RunObserved, RunPlan]):
    """Passes over TrainingRuns.

    Args:
        has: whether a kind that another operator defines is there.
    """

    def __init__(
        self, means: Means, figures: RunFigures, heads: Heads, has: Callable[[Resource], bool]
    ) -> None:
        super().__init__(_KIND, _Memory, plan_run, means, figures)
        self._heads = heads
        self._has = has

    @staticmethod
    def _work(key: Key) -> WorkKey:
        return "TrainingRun", *key

    def _forget(self, key: Key) -> None:
        super()._forget(key)
        self._heads.forget(self._work(key))

    async def _observe(self, key: Key, run: TrainingRun, memory: _Memory, now: datetime) -> RunObserved:
        work, attempt, children = self._work(key), run.status.attempt, self._means.children
        pods = children.pods(work, "trainer", memory.uid)
        engine = run.status.engine
        first = engine.head if engine is not None else None
        heads = (pod for pod in pods if pod.index == 0 and pod.attempt == attempt)
        head = next((pod for pod in heads if first in (None, pod.uid)), None)
        if head is not None and head.phase == "Running" and head.ip and not head.over:
            self._heads.follow(work, head)
        else:
            self._heads.rest(work)
        pools = {name: children.pool(key[0], name) for name in run.spec.pools}
        told = await memory.refused.told(self._means.hand, run.metadata.generation or 0)
        return RunObserved(
            prepare=prepare_of(children, work, memory.uid),
            policy=policy_of(children, key[0], policy_name(key[1]), memory.uid),
            pods=tuple(pods),
            gone=tuple(children.gone(work, memory.uid, attempt)),
            clusters=tuple(children.clusters(work, memory.uid)),
            kuberay=self._has(RAY_CLUSTERS),
            others=await self._others(key, run, memory),
            missing=await self._means.absent.of(key[0], named(run)),
            conflicts=told.conflicts,
            refused=told.refused,
            leaving=told.leaving,
            head=children.ended(work, memory.uid, attempt) or self._heads.report(work, attempt),
            heard=self._heads.heard(work),
            silent=self._heads.silent(work),
            pools={name: pool.use for name, pool in pools.items() if pool is not None},
            queue=await self._means.queues.of_run(work, run, memory.uid),
        )

    async def _others(self, key: Key, run: TrainingRun, memory: _Memory) -> tuple[Child, ...]:
        name, attempt = key[1], run.status.attempt
        refs: list[Ref] = [("Service", trainer_name(name)), ("NetworkPolicy", trainer_name(name))]
        refs += [("ConfigMap", prepare_name(name)), ("NetworkPolicy", roles_name(name))]
        refs += [("ConfigMap", launch_name(name, n)) for n in (attempt - 1, attempt) if n > 0]
        return await memory.others.seen(self._means.kube, key[0], refs, memory.uid, over=is_over(run.status))

    async def _act(self, run: TrainingRun, plan: RunPlan, seen: RunObserved, memory: _Memory) -> None:
        namespace, config = run.metadata.namespace or "", self._means.config
        for step in plan.steps:
            match step:
                case MakePrepare():
                    await self._make(run, (roles_policy(run), *prepare_job(run, config)), seen, memory)
                case MakePolicy():
                    await self._make(run, [policy_pool(run, config)], seen, memory)
                case MakeAttempt(attempt, kuberay):
                    there = {("Pod", pod.name) for pod in seen.pods}
                    there |= {("RayCluster", cluster.name) for cluster in seen.clusters}
                    there |= {(child.kind, child.name) for child in seen.others}
                    whole = attempt_objects(run, attempt, config, kuberay=kuberay)
                    await self._make(run, _unseen(whole, there), seen, memory)
                case MakeNetwork():
                    await self._make(run, network_objects(run, config), seen, memory)
                case Remove(kind, name, uid, grace_s):
                    await self._means.hand.remove(kind, namespace, name, uid, grace_s)
                    memory.others.removed(kind, name)
                case AskSuspend(name, uid):
                    if memory.asked != uid:
                        await self._means.hand.ask_suspend(namespace, name, uid)
                        memory.asked = uid
                case _:
                    await self._means.queues.act(run, step)

    async def _make(
        self, run: TrainingRun, manifests: Sequence[Object], seen: RunObserved, memory: _Memory
    ) -> None:
        for manifest in await self._means.queues.place(run, seen.queue, manifests):
            memory.others.made(str(manifest["kind"]), await self._means.hand.make(manifest))

    @staticmethod
    def _left(seen: RunObserved) -> bool:
        made = seen.pods or seen.clusters or seen.others
        return bool(made or seen.prepare.exists or seen.policy.exists)


def _unseen(manifests: Sequence[Object], there: Collection[Ref]) -> list[Object]:
    return [each for each in manifests if (each["kind"], each["metadata"]["name"]) not in there]
