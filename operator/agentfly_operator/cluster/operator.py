"""The operator at work: watches, loops, and what wakes what.

Guarantees:
1. A pool is looked at when it changes, when a pod of it changes, when its broker says something new, when
   its plan asked for it, and every 20 s.
2. A run or job is looked at when it changes, when a pod, Job, pool, RayCluster or Workload of it changes,
   when its head says something new, and when its plan asked for it.
3. An object that no watch told of is found by a survey every `SURVEY_S` seconds. None is looked at before
   all of its children were listed.
4. Everything that is started is stopped when it is left, however it is left.
5. A definition of one of our kinds that is not there yet is waited for; one that is taken away ends the
   process, and the next one waits. One of another operator may come and go: runs and jobs are looked at then.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from agentfly.kube import (
    PODS,
    RESOURCE_POOLS,
    ROLLOUT_JOBS,
    TRAINING_RUNS,
    Informer,
    Kube,
    KubeError,
    NotFound,
    Resource,
)
from agentfly.kube.access import Login
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.brokers import Brokers
from agentfly_operator.cluster.children import OPTIONAL, Children
from agentfly_operator.cluster.discovery import Discovery
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.heads import Heads
from agentfly_operator.cluster.jobs import RolloutJobs
from agentfly_operator.cluster.leader import LeaderLease
from agentfly_operator.cluster.loops import Loops
from agentfly_operator.cluster.members import Members, project
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.namespaces import Namespaces
from agentfly_operator.cluster.passes import Means
from agentfly_operator.cluster.pools import Key, Pools
from agentfly_operator.cluster.queues import Queues
from agentfly_operator.cluster.runs import Runs
from agentfly_operator.cluster.secrets import BrokerSecrets
from agentfly_operator.config import Config
from agentfly_operator.handlers import listen
from agentfly_operator.names import MEMBER_SELECTOR
from agentfly_operator.plan.children import WorkKey

logger = logging.getLogger(__name__)

SURVEY_S = 30.0
DEFINITION_S = 2.0
SYNC_S = 120.0

_RESOURCES: Mapping[str, Resource] = {
    "ResourcePool": RESOURCE_POOLS,
    "TrainingRun": TRAINING_RUNS,
    "RolloutJob": ROLLOUT_JOBS,
}


class Operator:
    """Acts for as long as it is entered; ``ended`` tells that it cannot go on.

    Args:
        namespaces: those to act in; empty is all.
    """

    def __init__(
        self,
        kube: Kube,
        login: Login,
        config: Config,
        namespaces: Sequence[str],
        lease: LeaderLease,
        metrics: Metrics,
    ) -> None:
        self._kube = kube
        self._login = login
        self._config = config
        self._namespaces = tuple(namespaces)
        self._metrics = metrics
        secrets = BrokerSecrets(kube)
        self._brokers = Brokers(config, secrets.token, self._broker_changed, metrics)
        self._members = Members(self._pods_changed)
        events = Events(kube, config.identity, metrics)
        pools = Pools(
            kube,
            self._members,
            self._brokers,
            events,
            metrics,
            lease.is_held,
            self._space_changed,
            config,
        )
        spaces = Namespaces(kube, config, secrets, self._brokers, metrics, lease.is_held)
        self._children = Children(kube, namespaces, self._work_changed)
        self._discovery = Discovery(kube, OPTIONAL, self._children, self._kind_changed, metrics)
        self._heads = Heads(self._work_changed, metrics)
        hand, absent = Hand(kube, self._children, metrics, lease.is_held), Absent(kube, self._children)
        queues = Queues(kube, hand, self._children, self._members, self._discovery, absent, config)
        means = Means(kube, hand, self._children, absent, queues, events, config)
        runs = Runs(means, metrics.runs, self._heads, self._discovery.has)
        jobs = RolloutJobs(means, metrics.jobs)
        self._pools: Loops[Key] = Loops("ResourcePool", pools.run, metrics)
        self._loops: Mapping[str, Loops[Key]] = {
            "ResourcePool": self._pools,
            "TrainingRun": Loops("TrainingRun", runs.run, metrics),
            "RolloutJob": Loops("RolloutJob", jobs.run, metrics),
        }
        self._spaces: Loops[str] = Loops("Namespace", spaces.run, metrics)
        self._listening = threading.Event()
        self._kopf: asyncio.Task[None] | None = None
        self._survey: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    @property
    def synced(self) -> bool:
        """Whether everything was listed once."""
        return self._listening.is_set()

    async def ended(self) -> str:
        """Wait until one of its parts ended, and say which; it should not."""
        assert self._kopf is not None
        assert self._survey is not None
        tasks = {self._kopf, self._survey}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        error = None if task.cancelled() else task.exception()
        return f"{task.get_name()} ended: {error or 'without an error'}"

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _begin(self) -> None:
        for resource in _RESOURCES.values():
            await self._defined(resource)
        for namespace in self._namespaces or (None,):
            informer = Informer(self._kube, PODS, namespace, MEMBER_SELECTOR, project=project)
            informer.subscribe(self._members.heard)
            await self._stack.enter_async_context(informer)
            await informer.synced(SYNC_S)
        await self._stack.enter_async_context(self._children)
        await self._children.begin(SYNC_S)
        await self._stack.enter_async_context(self._discovery)
        # Not before all is listed: what was not seen yet would be taken for lost, or made again.
        for kind in _RESOURCES:
            await self._find(kind)
        self._survey = asyncio.create_task(self._survey_on(), name="survey")
        self._kopf = asyncio.create_task(
            listen(self._heard, self._login, self._namespaces, self._listening),
            name="kopf",
        )

    async def _end(self) -> None:
        tasks = {task for task in (self._kopf, self._survey) if task is not None}
        for task in tasks:
            task.cancel()
        for loops in self._loops.values():
            await loops.close()
        await self._spaces.close()
        await self._heads.close()
        await self._brokers.close()
        if tasks:
            await asyncio.wait(tasks)
        await self._stack.aclose()

    async def _defined(self, resource: Resource) -> None:
        told = False
        while True:
            try:
                for namespace in self._namespaces or (None,):
                    await self._kube.request("GET", resource.path(namespace), params={"limit": "1"})
                return
            except NotFound:
                if not told:
                    logger.warning(
                        "%s.agentfly.dev: is not defined in this cluster yet, waiting", resource.plural
                    )
                told = True
            await asyncio.sleep(DEFINITION_S)

    async def _survey_on(self) -> None:
        while True:
            await asyncio.sleep(SURVEY_S)
            for kind in _RESOURCES:
                try:
                    await self._find(kind)
                except NotFound:
                    raise  # the kind itself is gone
                except KubeError as error:
                    logger.warning("survey of %s: %s", kind, error)

    async def _find(self, kind: str) -> None:
        """Look for objects that have no loop yet."""
        known = set(self._loops[kind].keys)
        for namespace in self._namespaces or (None,):
            for obj in await self._kube.list(_RESOURCES[kind], namespace):
                meta = obj["metadata"]
                if (meta["namespace"], meta["name"]) not in known:
                    self._heard(kind, meta["namespace"], meta["name"])

    def _heard(self, kind: str, namespace: str, name: str) -> None:
        self._loops[kind].wake((namespace, name))

    def _work_changed(self, work: WorkKey) -> None:
        kind, *place = work
        key = place[0], place[1]
        if key in self._loops[kind]:
            self._loops[kind].wake(key)

    def _kind_changed(self, _: Resource) -> None:
        for kind in ("TrainingRun", "RolloutJob"):
            for key in self._loops[kind].keys:
                self._loops[kind].wake(key)

    def _pods_changed(self, key: Key) -> None:
        self._metrics.members.set(len(self._members))
        if not self._members.held(key):  # the quota of a run may be free now
            self._work_changed(("TrainingRun", key[0], key[1].removesuffix(policy_name(""))))
        if key in self._pools:
            self._brokers.poke(key[0])
            self._pools.wake(key)

    def _broker_changed(self, namespace: str) -> None:
        for key in self._pools.keys:
            if key[0] == namespace:
                self._pools.wake(key)
        if self._brokers.seen(namespace).error:
            self._spaces.wake(namespace)  # is it still there?

    def _space_changed(self, namespace: str) -> None:
        self._spaces.wake(namespace)
