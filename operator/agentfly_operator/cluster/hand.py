"""What is written for runs and jobs: their children and their status.

Guarantees:
1. Nothing is written by a process that does not lead.
2. What exists already is made again by nobody: of the same owner it is taken as made, of another one it is an
   error that names it, and stays as it is. One that goes by itself is another error than one that stays.
3. An object is deleted only if it is the one that is meant; one that is gone already is no error.
4. A status is written only over the object that it was planned from: a run's status is all that is
   remembered of it.
5. What the API server answers is seen at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.kube import (
    CONFIG_MAPS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_POOLS,
    SERVICES,
    WORKLOADS,
    Conflict,
    Kube,
    KubeError,
    NotFound,
    Resource,
)
from agentfly.kube.client import Propagation
from agentfly.roles.launch import SUSPEND_ANNOTATION
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.pools import NotLeading
from agentfly_operator.plan.children import controller_of

RESOURCES: Mapping[str, Resource] = {
    "ConfigMap": CONFIG_MAPS,
    "Job": JOBS,
    "NetworkPolicy": NETWORK_POLICIES,
    "Pod": PODS,
    "RayCluster": RAY_CLUSTERS,
    "ResourcePool": RESOURCE_POOLS,
    "Service": SERVICES,
    "Workload": WORKLOADS,
}
"""The kinds of children of runs and jobs."""

Object = dict[str, Any]
_NEVER = frozenset({400, 403, 422})
"""Answers that trying again does not change: a quota, a policy of the namespace, a value that is none."""


class Refused(AgentflyError):
    """``manifest`` cannot be made as things are: somebody has to change something."""

    def __init__(self, manifest: Object, message: str, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.manifest = manifest


class Taken(Refused):
    """One of this name belongs to somebody else."""


class Leaving(Refused):
    """One of this name is on its way out: it has only to be waited for."""


class Hand:
    """Writes for one operator.

    Args:
        leads: whether this process may write.
    """

    def __init__(self, kube: Kube, children: Children, metrics: Metrics, leads: Callable[[], bool]) -> None:
        self._kube = kube
        self._children = children
        self._metrics = metrics
        self._leads = leads

    async def make(self, manifest: Object, *, trial: bool = False) -> Object:
        """Create an object, unless it is there; as the API server has it.

        Args:
            trial: only ask whether it could be made.

        Raises:
            Leaving: one of this name has another owner and goes.
            Taken: one of this name has another owner and stays.
            Refused: the API server does not accept it.
            KubeError.
        """
        kind, meta = str(manifest["kind"]), manifest["metadata"]
        self._must_lead()
        try:
            made = await self._kube.create(RESOURCES[kind], manifest, dry_run=trial)
        except Conflict:
            made = await self._kube.get(RESOURCES[kind], meta["name"], meta["namespace"])
            if controller_of(made) != controller_of(manifest):
                if _goes(made, manifest):
                    raise Leaving(
                        manifest, f"{kind} {meta['name']} of an older owner is still being removed"
                    ) from None
                raise Taken(
                    manifest,
                    f"{kind} {meta['name']} exists and belongs to somebody else",
                    hints=[f"kubectl -n {meta['namespace']} delete {kind.lower()} {meta['name']}"],
                ) from None
        except KubeError as error:
            if error.status not in _NEVER:
                raise
            raise Refused(
                manifest, f"{kind} {meta['name']} cannot be made: {error.message}", error.hints
            ) from None
        else:
            self._metrics.writes.labels("create").inc(not trial)
        if not trial:
            self._children.saw({"kind": kind, **made})
        return made

    async def remove(
        self, kind: str, namespace: str, name: str, uid: str, grace_s: int | None = None
    ) -> None:
        """Begin to delete an object and what it owns; another one of this name stays.

        A RayCluster stays until its pods are gone: for one that is being deleted KubeRay makes no new ones,
        but it would for one of whose end it has not heard yet.

        Args:
            grace_s: seconds that a pod has to end; None: its own.

        Raises:
            KubeError.
        """
        self._must_lead()
        propagation: Propagation = "Foreground" if kind == "RayCluster" else "Background"
        try:
            await self._kube.delete(
                RESOURCES[kind], name, namespace, uid=uid, grace_s=grace_s, propagation=propagation
            )
        except Conflict:
            return
        self._metrics.writes.labels("delete").inc()

    async def ask_suspend(self, namespace: str, pod: str, uid: str) -> None:
        """Annotate a head, so that it writes a checkpoint and ends.

        Raises:
            KubeError.
        """
        self._must_lead()
        body = {"metadata": {"uid": uid, "annotations": {SUSPEND_ANNOTATION: "true"}}}
        try:
            await self._kube.patch(PODS, pod, body, namespace)
        except (NotFound, Conflict):
            return  # it is gone: that too is seen
        self._metrics.writes.labels("patch").inc()

    async def set_workers(
        self, namespace: str, job: str, uid: str, parallelism: int, suspend: bool | None
    ) -> None:
        """Have a Job run so many pods at a time, or none while it is suspended; None leaves that as it is.

        Raises:
            KubeError.
        """
        self._must_lead()
        spec = {"parallelism": parallelism, **({} if suspend is None else {"suspend": suspend})}
        try:
            await self._kube.patch(JOBS, job, {"metadata": {"uid": uid}, "spec": spec}, namespace)
        except (NotFound, Conflict):
            return  # it is gone: that too is seen
        self._metrics.writes.labels("patch").inc()

    async def merge(
        self, resource: Resource, namespace: str, name: str, body: Object, *, subresource: str = ""
    ) -> None:
        """Merge a patch into an object that says which one it means; one that is gone is no error.

        Raises:
            Conflict: it is another one, or was changed meanwhile.
            KubeError.
        """
        self._must_lead()
        try:
            await self._kube.patch(resource, name, body, namespace, subresource=subresource)
        except NotFound:
            return  # that too is seen
        self._metrics.writes.labels("patch").inc()

    async def write_status(self, resource: Resource, obj: Mapping[str, Any], status: Object) -> None:
        """Make the status of an object this one, as far as it is ours.

        Args:
            obj: as the API server returned it, and as it still has to be.

        Raises:
            Conflict: it was changed meanwhile.
            KubeError.
        """
        self._must_lead()
        meta = {name: obj["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        body = {"apiVersion": resource.api_version, "kind": obj["kind"], "metadata": meta, "status": status}
        await self._kube.apply(resource, body, subresource="status")
        self._metrics.writes.labels("status").inc()

    def _must_lead(self) -> None:
        if not self._leads():
            raise NotLeading("lease: was lost, nothing is written any more")


def _goes(live: Mapping[str, Any], manifest: Object) -> bool:
    """Whether an object of another owner goes by itself.

    It is being deleted, or will be: where its owner has the name of the manifest's owner, its owner is gone.
    """
    if "deletionTimestamp" in live["metadata"]:
        return True
    return bool(_controllers(live) & _controllers(manifest))


def _controllers(obj: Mapping[str, Any]) -> set[tuple[str, str]]:
    owners = obj["metadata"].get("ownerReferences") or ()
    return {(owner["kind"], owner["name"]) for owner in owners if owner.get("controller")}
