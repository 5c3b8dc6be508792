"""The pods, Jobs, pools, RayClusters and Workloads of all runs and jobs, as far as they matter: seen by
watches, without a list for each of them.

Guarantees:
1. Of an object a few words are kept; whoever it belongs to is told when they change, and only then.
2. What is gone is gone here too, however its deletion became known.
3. What was made a moment ago is seen at once, before any watch shows it. If none does in `EXPECTED_S`
   seconds, the API server is asked for it, and it is lost only if that has it no more.
4. What a head said at its end outlives its pod, which may be gone before anybody looks; so does all that is
   known of a pod of a RayCluster, which KubeRay removes and replaces as soon as it has ended. Of the heads of
   an attempt the first one counts.
5. A kind that another operator defines is watched as long as it is there. With it all its objects are gone.

Not here: what the words mean (`plan`). Of all pools words are kept, also of those that people made; of
Workloads only of those that a run, or the Job of a job's workers, controls.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from agentfly.kube import (
    JOBS,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_POOLS,
    WORKLOADS,
    Informer,
    Kube,
    NotFound,
    Resource,
)
from agentfly.roles.launch import Report
from agentfly_operator.names import CHILD_SELECTOR
from agentfly_operator.plan.children import (
    JobOf,
    PoolOf,
    WorkKey,
    belongs_to,
    cluster_of,
    job_of,
    pod_of,
    pool_of,
    role_of,
    work_of,
)
from agentfly_operator.plan.queue_seen import WorkloadOf
from agentfly_operator.plan.run_seen import ClusterOf, PodOf
from agentfly_operator.plan.workloads import work_of_workload, workload_of

EXPECTED_S = 10.0
FOLLOW_S = 30.0
GONE_MAX = 512  # pods of one attempt; there are at most 256, and then some that replaced them

Object = dict[str, Any]
Words = PodOf | JobOf | PoolOf | ClusterOf | WorkloadOf

_KINDS: Mapping[str, tuple[Resource, Callable[[Object], Words]]] = {
    "Pod": (PODS, pod_of),
    "Job": (JOBS, job_of),
    "ResourcePool": (RESOURCE_POOLS, pool_of),
    "RayCluster": (RAY_CLUSTERS, cluster_of),
    "Workload": (WORKLOADS, workload_of),
}
OPTIONAL = (RAY_CLUSTERS, WORKLOADS)
"""The kinds that other operators define."""
_UNMARKED = ("ResourcePool", "Workload")
"""Kinds of which those without a label of ours matter, too: pools of people, Workloads that Kueue makes."""
_WORK, _KIN = "work", "kin"


@dataclass(frozen=True, slots=True)
class _Kin:
    """What is kept of one object."""

    kind: str
    owner: str
    role: str
    words: Words


@dataclass(slots=True)
class _Expected:
    kin: _Kin
    until: float


class Children:
    """Knows them for as long as it is entered.

    Args:
        namespaces: those to look at; empty is all.
        changed: called with the run or job that has news.
    """

    def __init__(self, kube: Kube, namespaces: Sequence[str], changed: Callable[[WorkKey], None]) -> None:
        self._kube = kube
        self._namespaces = tuple(namespaces)
        self._changed = changed
        self._seen: dict[WorkKey, dict[str, _Kin]] = {}
        self._expected: dict[WorkKey, dict[str, _Expected]] = {}
        self._pools: dict[tuple[str, str], PoolOf] = {}
        self._ended: dict[WorkKey, tuple[str, PodOf]] = {}
        self._gone: dict[WorkKey, list[tuple[str, PodOf]]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._optional: dict[Resource, contextlib.AsyncExitStack] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stack in self._optional.values():
            await stack.aclose()
        await self._stack.aclose()

    async def begin(self, timeout: float) -> None:
        """Watch, and wait until everything was listed once.

        Raises:
            Unreachable: it could not be in ``timeout`` seconds.
        """
        kinds = [kind for kind, (resource, _) in _KINDS.items() if resource not in OPTIONAL]
        await self._watch(self._stack, kinds, timeout)

    async def follow(self, resource: Resource) -> None:
        """Watch a kind of `OPTIONAL` too, and wait until all of it was listed once.

        Raises:
            Unreachable: it could not be.
        """
        stack = contextlib.AsyncExitStack()
        kinds = [kind for kind, (each, _) in _KINDS.items() if each == resource]
        try:
            await self._watch(stack, kinds, FOLLOW_S)
        except BaseException:
            await stack.aclose()
            raise
        self._optional[resource] = stack

    async def leave(self, resource: Resource) -> None:
        """Watch it no more; its definition is gone, and all its objects."""
        await self._optional.pop(resource).aclose()
        kinds = {kind for kind, (each, _) in _KINDS.items() if each == resource}
        for work in {*self._seen, *self._expected}:
            expected = {uid: each.kin for uid, each in self._expected.get(work, {}).items()}
            known = {**self._seen.get(work, {}), **expected}
            gone = [uid for uid, kin in known.items() if kin.kind in kinds]
            for uid in gone:
                self._met(work, uid)
                self._lost(work, uid)
            if gone:
                self._changed(work)

    async def _watch(self, stack: contextlib.AsyncExitStack, kinds: Sequence[str], timeout: float) -> None:
        informers: list[Informer] = []
        for namespace in self._namespaces or (None,):
            for kind in kinds:
                labels = None if kind in _UNMARKED else CHILD_SELECTOR
                informer = Informer(self._kube, _KINDS[kind][0], namespace, labels, project=_projection(kind))
                informer.subscribe(self.heard)
                informers.append(await stack.enter_async_context(informer))
        for informer in informers:
            await informer.synced(timeout)

    def pods(self, work: WorkKey, role: str, owner: str) -> list[PodOf]:
        """The pods of one role that belong to this uid, by name."""
        found = (kin.words for kin in self._kin(work) if kin.role == role and kin.owner == owner)
        return sorted((each for each in found if isinstance(each, PodOf)), key=lambda pod: pod.name)

    def jobs(self, work: WorkKey, role: str, owner: str) -> list[JobOf]:
        """The Jobs of one role that this uid controls; there may be two while one goes."""
        found = (kin.words for kin in self._kin(work) if kin.role == role and kin.owner == owner)
        return [each for each in found if isinstance(each, JobOf)]

    def clusters(self, work: WorkKey, owner: str) -> list[ClusterOf]:
        """The RayClusters that this uid controls, by name; none where their kind is not watched."""
        found = (kin.words for kin in self._kin(work) if kin.owner == owner)
        return sorted((each for each in found if isinstance(each, ClusterOf)), key=lambda each: each.name)

    def workload(self, work: WorkKey, owner: str) -> WorkloadOf | None:
        """The Workload that this uid controls; of several the one that is neither over nor going."""
        words = (kin.words for kin in self._kin(work) if kin.owner == owner)
        found = (each for each in words if isinstance(each, WorkloadOf))
        return min(found, key=lambda each: (each.deleting, each.finished, each.name), default=None)

    def alive(self, work: WorkKey, role: str) -> int:
        """How many pods of one role have not ended, whoever controls them."""
        pods = (kin.words for kin in self._kin(work) if kin.role == role)
        return sum(isinstance(pod, PodOf) and not pod.over for pod in pods)

    def ended(self, work: WorkKey, owner: str, attempt: int) -> Report | None:
        """What the head of an attempt said at its end; None: nothing yet."""
        controller, head = self._ended.get(work, ("", None))
        return head.report if head and controller == owner and head.attempt == attempt else None

    def gone(self, work: WorkKey, owner: str, attempt: int) -> list[PodOf]:
        """The pods of an attempt's RayCluster that went, as they were last, in their order of going."""
        kept = self._gone.get(work, [])
        return [pod for controller, pod in kept if controller == owner and pod.attempt == attempt]

    def forget(self, work: WorkKey) -> None:
        """The run or job is gone: nobody will ask any more what its pods said."""
        self._ended.pop(work, None)
        self._gone.pop(work, None)

    def pool(self, namespace: str, name: str) -> PoolOf | None:
        """Any pool of this name."""
        return self._pools.get((namespace, name))

    def saw(self, obj: Object) -> None:
        """The API server answered with this object; of no meaning for kinds that are not followed."""
        kind, work = str(obj["kind"]), _work_of(str(obj["kind"]), obj)
        if kind not in _KINDS or work is None:
            return
        uid = str(obj["metadata"]["uid"])
        if uid not in self._seen.get(work, {}):
            self._expect(work, kind, uid, obj)
            self._changed(work)

    async def confirm(self, work: WorkKey) -> None:
        """Ask for what was made and that no watch has shown in all that time.

        Raises:
            KubeError: the API server does not say.
        """
        now = asyncio.get_running_loop().time()
        for uid, expected in list(self._expected.get(work, {}).items()):
            if expected.until > now:
                continue
            kind, name = expected.kin.kind, expected.kin.words.name
            try:
                obj = await self._kube.get(_KINDS[kind][0], name, work[1])
            except NotFound:
                obj = None
            self._met(work, uid)
            if obj is None or obj["metadata"]["uid"] != uid:
                self._unpool((work[1], name), uid)
            elif uid not in self._seen.get(work, {}):
                self._expect(work, kind, uid, obj)

    def heard(self, change: str, obj: Object) -> None:
        """One change, told by an informer."""
        meta, work, kin = obj["metadata"], obj[_WORK], obj[_KIN]
        uid, place = str(meta["uid"]), (str(meta["namespace"]), str(meta["name"]))
        if kin is None:
            return  # somebody else's
        if isinstance(kin.words, PoolOf):
            if change == "DELETED":
                self._unpool(place, uid)
            else:
                self._pools[place] = kin.words
        if work is None:
            return
        self._met(work, uid)
        self._keep_last_words(work, kin)
        if change == "DELETED":
            self._keep_gone(work, kin)
        before = self._lost(work, uid)
        if change != "DELETED":
            self._seen.setdefault(work, {})[uid] = kin
        if change == "DELETED" or before != kin:
            self._changed(work)

    def _keep_last_words(self, work: WorkKey, kin: _Kin) -> None:
        pod = kin.words
        if isinstance(pod, PodOf) and kin.role == "trainer" and pod.index == 0 and pod.report is not None:
            owner, before = self._ended.get(work, (kin.owner, pod))
            same = pod.attempt == before.attempt and pod.uid == before.uid
            if owner != kin.owner or pod.attempt > before.attempt or same:
                self._ended[work] = kin.owner, pod

    def _keep_gone(self, work: WorkKey, kin: _Kin) -> None:
        pod = kin.words
        if not isinstance(pod, PodOf) or not pod.cluster or kin.role != "trainer":
            return
        kept = self._gone.get(work, [])
        if any(owner == kin.owner and each.attempt > pod.attempt for owner, each in kept):
            return
        kept = [(owner, each) for owner, each in kept if owner == kin.owner and each.attempt == pod.attempt]
        self._gone[work] = [*kept, (kin.owner, pod)][:GONE_MAX]

    def _kin(self, work: WorkKey) -> list[_Kin]:
        expected = self._expected.get(work, {}).values()
        return [*self._seen.get(work, {}).values(), *(each.kin for each in expected)]

    def _expect(self, work: WorkKey, kind: str, uid: str, obj: Object) -> None:
        kin, now = _kin_of(kind, obj), asyncio.get_running_loop().time()
        self._expected.setdefault(work, {})[uid] = _Expected(kin, now + EXPECTED_S)
        if isinstance(kin.words, PoolOf):
            self._pools.setdefault((work[1], kin.words.name), kin.words)

    def _met(self, work: WorkKey, uid: str) -> None:
        expected = self._expected.get(work, {})
        expected.pop(uid, None)
        if not expected:
            self._expected.pop(work, None)

    def _lost(self, work: WorkKey, uid: str) -> _Kin | None:
        seen = self._seen.get(work, {})
        before = seen.pop(uid, None)
        if not seen:
            self._seen.pop(work, None)
        return before

    def _unpool(self, place: tuple[str, str], uid: str) -> None:
        if place in self._pools and self._pools[place].uid == uid:
            del self._pools[place]


def _kin_of(kind: str, obj: Object) -> _Kin:
    return _Kin(kind, belongs_to(obj), role_of(obj), _KINDS[kind][1](obj))


def _work_of(kind: str, obj: Object) -> WorkKey | None:
    return work_of_workload(obj) if kind == "Workload" else work_of(obj)


def _projection(kind: str) -> Callable[[Object], Object]:
    def project(obj: Object) -> Object:
        meta = obj["metadata"]
        kept = {name: meta[name] for name in ("uid", "namespace", "name", "resourceVersion")}
        work = _work_of(kind, obj)
        kin = None if work is None and kind == "Workload" else _kin_of(kind, obj)
        return {"metadata": kept, _WORK: work, _KIN: kin}

    return project
