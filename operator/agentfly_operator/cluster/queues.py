"""Kueue as passes over runs and jobs see it, and what they tell it.

Guarantees:
1. A run or job that has nothing to do with a queue costs no request.
2. What quota is of is looked at anew every `KNOWN_S` seconds, what could not be read every `MISSING_S`.
3. A status of a Workload is written over the very version that it was made of, and only if that is the one
   that is meant.

Not here: what follows from what (`plan.queue`), whether Kueue is there (`cluster.discovery`), how Workloads
are watched (`cluster.children`).
"""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from agentfly.api import RolloutJob, TrainingRun
from agentfly.errors import AgentflyError
from agentfly.kube import (
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Conflict,
    Kube,
    KubeError,
    NotFound,
    Resource,
)
from agentfly.roles.plan import policy_name
from agentfly_operator.cluster.absent import MISSING_S, Absent
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.discovery import Discovery
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.members import Members
from agentfly_operator.config import Config
from agentfly_operator.names import priority_of, queue_of
from agentfly_operator.plan.children import JobOf, WorkKey
from agentfly_operator.plan.queue_seen import QueueSeen, WorkloadOf
from agentfly_operator.plan.queue_steps import (
    FinishWorkload,
    GiveBack,
    MakeWorkload,
    QueueStep,
    SwitchWorkload,
    TellReady,
)
from agentfly_operator.plan.run_attempt import OVER, in_attempt
from agentfly_operator.render.workload import (
    finished,
    given_back,
    placed,
    placings,
    shape,
    switched,
    told_ready,
    workload,
)

KNOWN_S = 60.0

Object = dict[str, Any]


class Queues:
    """Looks and writes for one operator."""

    def __init__(
        self,
        kube: Kube,
        hand: Hand,
        children: Children,
        members: Members,
        discovery: Discovery,
        absent: Absent,
        config: Config,
    ) -> None:
        self._kube = kube
        self._hand = hand
        self._children = children
        self._members = members
        self._discovery = discovery
        self._absent = absent
        self._config = config
        self._known: dict[tuple[str, str], tuple[Object | KubeError, float]] = {}

    @property
    def _served(self) -> bool:
        return self._discovery.has(WORKLOADS)

    async def of_run(self, work: WorkKey, run: TrainingRun, uid: str) -> QueueSeen:
        """What a run with this uid sees of Kueue."""
        served, found = self._served, self._children.workload(work, uid)
        if found is None and not queue_of(run):
            return QueueSeen(served=served)
        may_run = found is not None and found.may_run
        missing, refused = ((), "") if may_run else await self._missing(run)
        if may_run and not in_attempt(run.status):
            refused = await self._unreadable(found)
        jobs = self._children.jobs(work, "prepare", uid)
        pods = self._children.pods(work, "trainer", uid)
        clusters = self._children.clusters(work, uid)
        return QueueSeen(
            served=served,
            absent=self._discovery.why_not(WORKLOADS),
            workload=found,
            outdated=self._is_outdated(run, found),
            missing=missing,
            refused=refused,
            servers=self._members.held((work[1], policy_name(work[2]))),
            preparing=self._children.alive(work, "prepare"),
            taken=(
                *(f"Job {job.name}" for job in jobs if job.queue and job.suspended),
                *(f"RayCluster {each.name}" for each in clusters if each.queue and each.suspended),
                *(f"Pod {pod.name}" for pod in pods if pod.queue and pod.phase == "Pending"),
            ),
        )

    async def of_job(self, work: WorkKey, job: RolloutJob, workers: JobOf | None) -> QueueSeen:
        """What a job with this Job of its workers sees of Kueue."""
        if not queue_of(job) and (workers is None or not workers.queue):
            return QueueSeen(served=self._served)
        missing, _ = await self._missing(job) if workers is None else ((), "")
        return QueueSeen(
            served=self._served,
            absent=self._discovery.why_not(WORKLOADS),
            workload=None if workers is None else self._children.workload(work, workers.uid),
            missing=missing,
        )

    async def place(self, run: TrainingRun, queue: QueueSeen, manifests: Iterable[Object]) -> list[Object]:
        """Children of a run, kept to where the quota of its Workload is; as they are without one.

        Raises:
            Conflict: it has no quota any more.
            KubeError.
        """
        if queue.workload is None:
            return list(manifests)
        live = await self._live(run, queue.workload.name, queue.workload.uid)
        if live is None or not (live.get("status") or {}).get("admission"):
            raise Conflict(f"Workload {queue.workload.name}: was evicted meanwhile", status=409)
        flavors: dict[str, Object] = {}
        for _, names in queue.workload.flavors:
            for name in names:
                flavors[name] = await self._kube.get(RESOURCE_FLAVORS, name)
        where = placings(live, flavors)
        return [placed(each, where) for each in manifests]

    async def act(self, work: TrainingRun | RolloutJob, step: QueueStep) -> None:
        """Carry out a step.

        Raises:
            Refused: the API server does not accept a Workload.
            Conflict: it was changed since it was read.
            KubeError.
        """
        namespace = work.metadata.namespace or ""
        if isinstance(step, MakeWorkload):
            assert isinstance(work, TrainingRun)
            await self._hand.make(workload(work, await self._priority(work), self._config))
            return
        if isinstance(step, SwitchWorkload):
            body = switched(step.uid, active=step.active)
            await self._hand.merge(WORKLOADS, namespace, step.name, body)
            return
        live = await self._live(work, step.name, step.uid)
        if live is None:
            return
        now = datetime.now(UTC)
        match step:
            case TellReady():
                patch: Object | None = told_ready(live, step.ready, now)
            case GiveBack():
                patch = given_back(live, now)
            case FinishWorkload():
                patch = finished(live, step.succeeded, now)
        if patch is not None:
            await self._hand.merge(WORKLOADS, namespace, step.name, patch, subresource="status")

    async def _live(self, work: TrainingRun | RolloutJob, name: str, uid: str) -> Object | None:
        try:
            live = await self._kube.get(WORKLOADS, name, work.metadata.namespace)
        except NotFound:
            return None
        return live if live["metadata"]["uid"] == uid else None

    def _is_outdated(self, run: TrainingRun, found: WorkloadOf | None) -> bool:
        if found is None or run.status.phase in OVER or in_attempt(run.status) or run.spec.storage is None:
            return False
        return found.finished or found.shape != shape(run, self._config)

    async def _missing(self, work: TrainingRun | RolloutJob) -> tuple[tuple[str, ...], str]:
        """What its labels name and is not there, and why something of it cannot be read."""
        if not self._served or not queue_of(work):
            return (), ""
        missing = await self._absent.of(work.metadata.namespace or "", [("LocalQueue", queue_of(work))])
        if not (name := priority_of(work)):
            return missing, ""
        found = await self._look(WORKLOAD_PRIORITY_CLASSES, name)
        if isinstance(found, NotFound):
            return (*missing, f"WorkloadPriorityClass {name}"), ""
        return missing, _unread("WorkloadPriorityClass", name, found)

    async def _priority(self, run: TrainingRun) -> int:
        name = priority_of(run)
        found = await self._look(WORKLOAD_PRIORITY_CLASSES, name) if name else {}
        if isinstance(found, KubeError):
            raise found
        return int(found.get("value") or 0)

    async def _unreadable(self, found: WorkloadOf | None) -> str:
        """Why nobody can say where pods of this quota belong; "" if that can be said."""
        for _, names in found.flavors if found is not None else ():
            for name in names:
                if text := _unread("ResourceFlavor", name, await self._look(RESOURCE_FLAVORS, name)):
                    return text
        return ""

    async def _look(self, resource: Resource, name: str) -> Object | KubeError:
        """An object of the whole cluster, or why it cannot be read."""
        now, key = asyncio.get_running_loop().time(), (resource.plural, name)
        found, until = self._known.get(key, ({}, now))
        if now < until:
            return found
        try:
            found = await self._kube.get(resource, name)
        except KubeError as error:
            found = error
        lasts = MISSING_S if isinstance(found, KubeError) else KNOWN_S
        self._known[key] = found, now + lasts
        return found


def _unread(kind: str, name: str, found: Object | KubeError) -> str:
    if not isinstance(found, AgentflyError):
        return ""
    hint = "; ".join(found.hints)
    return f"{kind} {name} cannot be read: {found.message}{f' ({hint})' if hint else ''}"
