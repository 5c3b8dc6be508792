"""Pods of members, from their creation to their end.

Guarantees:
1. ``start`` returns a pod that is ready, or raises and leaves none; also when it is cancelled, and when the
   answer to the creation was lost: then the pod is removed as soon as it is seen.
2. A pod that waits for a node is kept until the deadline. What else keeps it from becoming ready ends the
   start at once, in Kubernetes' own words.
3. After ``leave`` a start that is cut short leaves its pod: a later process finds it.
4. Nothing is asked of the API server while one waits: the informer tells.
5. ``stop`` returns when the pod is gone, processes and all. A node that does not answer for ``STOP_S``
   seconds beyond the pod's grace loses its say: the pod's entry is removed, and the node ends the rest when
   it is back.
6. No node has more pods of a pool than its bound; who would exceed it waits for its turn.

Not here: what a pod looks like (``pod``), what runs in it (``runner``, ``model``).
"""

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from agentfly.kube import PODS, Conflict, Informer, Kube, KubeError, NotFound, Obj
from agentfly.kube.informer import Kind
from agentfly.resources.errors import Infra, StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.names import pool_of
from agentfly.resources.runners.kubernetes import identity
from agentfly.resources.runners.kubernetes.facts import Failed, Ready, look, refusal
from agentfly.resources.runners.kubernetes.placement import Occupancy, excluded_nodes
from agentfly.resources.runners.kubernetes.pod import GRACE_S, Start

logger = logging.getLogger(__name__)

START_S = 840.0
"""For a node to have room, and an image to be pulled."""
SEEN_S = 10.0
"""After so long without a word from the informer, the API server is asked."""
STOP_S = 14.0
FORCED_S = 5.0
_RETRY_S = 5.0


@dataclass(frozen=True)
class PodCluster:
    """Where members run.

    Args:
        pods: the members of the namespace (``identity.MEMBER_LABELS``), entered by the caller for as long as
            the runners work.
        owner: the ownerReference of a pool; None if it is gone or being deleted.
        per_node: how many members of a pool one node may have; None is any number.
    """

    kube: Kube
    pods: Informer
    namespace: str
    owner: Callable[[str], dict[str, Any] | None]
    per_node: Callable[[str], int | None] = lambda pool: None


@dataclass(frozen=True, slots=True)
class Life:
    """A pod that exists."""

    name: str
    uid: str
    address: str


class PodLives:
    """Starts and stops pods in a cluster; it must be closed."""

    def __init__(self, cluster: PodCluster, *, start_s: float = START_S) -> None:
        self._cluster = cluster
        self._start_s = start_s
        self._waiters: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._excluded: dict[str, frozenset[str]] = {}  # of each start, by name: nodes that it may not go to
        self._known: set[str] = set()  # pods that are members of ours
        self._unwanted: set[str] = set()  # starts that failed, and of which a pod may still turn up
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._nodes = Occupancy()
        self._unsubscribe = cluster.pods.subscribe(self._changed)
        for pod in cluster.pods.items.values():
            self._changed("ADDED", pod)

    def leave(self) -> None:
        """From now on what is cut short is left as it is."""
        self._leaving = True

    async def close(self) -> None:
        """Follow no more. Pods live on."""
        self._unsubscribe()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def strangers(self) -> list[Obj]:
        """The pods of pools that are there, which were neither started here nor adopted, and which stay.

        Raises:
            Infra: it is not known which there are.
        """
        try:
            await self._cluster.pods.synced()
        except KubeError as error:
            raise Infra(error.message, hints=error.hints) from error
        return [
            pod
            for uid, pod in self._cluster.pods.items.items()
            if uid not in self._known and pod["metadata"]["name"] not in self._excluded and self._stays(pod)
        ]

    def adopt(self, name: str, uid: str, address: str) -> Life:
        """A pod that an earlier process started."""
        self._known.add(uid)
        return Life(name, uid, address)

    async def ready(self, life: Life) -> Life:
        """Wait until a pod that an earlier process started is ready.

        Raises:
            StartFailed: with the reason; it is still there.
        """
        end = asyncio.get_running_loop().time() + self._start_s
        return Life(life.name, life.uid, await self._ready(life.name, life.uid, end))

    def find(self, name: str, uid: str) -> Obj | None:
        """The pod as it was last seen; None if it is gone."""
        pod = self._cluster.pods.find(name, self._cluster.namespace)
        return pod if pod is not None and pod["metadata"]["uid"] == uid else None

    def death(self, life: Life) -> str | None:
        """Why a pod is of no more use; None while it is."""
        state = look(self.find(life.name, life.uid))
        return state.why if isinstance(state, Failed) else None

    async def start(self, member_id: str, render: Callable[[Start], Obj], *, incarnation: int = 1) -> Life:
        """Create a pod and wait until it is ready.

        Args:
            render: the pod of a start.
            incarnation: the member's first in this pod.

        Raises:
            StartFailed: with the reason; nothing of it is left.
        """
        pool, end = pool_of(member_id), asyncio.get_running_loop().time() + self._start_s
        try:
            excluded = await self._turn(pool, member_id, end)
            owner = self._cluster.owner(pool)
            if owner is None:
                raise _failed(member_id, f"PoolDeleting: pool {pool} is gone or being deleted")
            nonce = secrets.token_hex(8)
            start = Start(pool, member_id, self._cluster.namespace, owner, nonce, incarnation, excluded)
            uid = await self._created(start, render(start))
            try:
                return self.adopt(member_id, uid, await self._ready(member_id, uid, end))
            except BaseException:
                if not self._leaving:
                    await finished(self._removed(member_id, uid))
                raise
        finally:
            self._excluded.pop(member_id, None)
            self._wake(pool)

    async def stop(self, name: str, uid: str, grace_s: int = GRACE_S) -> None:
        """End a pod and wait until it is gone.

        Args:
            grace_s: for it to end by itself.

        Raises:
            Infra: it is still there; call again.
        """
        for grace, seconds in ((grace_s, grace_s + STOP_S), (0, FORCED_S)):
            try:
                if not await self._delete(name, uid, grace):
                    break
                await self._gone(name, uid, seconds)
                break
            except KubeError as error:
                raise Infra(f"pod {name}: cannot be deleted: {error.message}") from error
            except TimeoutError:
                logger.warning("pod %s: still there %g s after its deletion", name, seconds)
        else:
            raise Infra(f"pod {name}: is still there {grace_s + STOP_S + FORCED_S:g} s after its deletion")
        self._known.discard(uid)

    async def removed(self, life: Life) -> None:
        """Stop a pod whose start failed after all: what fails now goes on in the background."""
        if not self._leaving:
            await self._removed(life.name, life.uid)

    def discard(self, name: str, uid: str, why: str) -> None:
        """Remove a pod that is of no use, without waiting for it."""
        logger.warning("pod %s: is removed: %s", name, why)
        self._known.add(uid)  # it is nobody's to find
        task = asyncio.get_running_loop().create_task(self._until_stopped(name, uid), name=f"remove {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _created(self, start: Start, pod: Obj) -> str:
        """Create the pod; its uid."""
        creation = asyncio.ensure_future(self._create(start, pod))
        try:
            return await asyncio.shield(creation)
        except asyncio.CancelledError:
            if not self._leaving:
                await finished(self._undone(start, creation))
            raise

    async def _create(self, start: Start, pod: Obj) -> str:
        name = start.member_id
        try:
            try:
                found = await self._cluster.kube.create(PODS, pod)
            except Conflict:  # an earlier try of this very creation, or somebody else's
                found = await self._cluster.kube.get(PODS, name, start.namespace)
                if _start_of(found) != start.nonce:
                    raise
        except KubeError as error:
            if not error.status:
                self._remove_when_seen(start)
            raise _failed(name, refusal(error.reason or "Unreachable", error.message)) from error
        return str(found["metadata"]["uid"])

    async def _undone(self, start: Start, creation: "asyncio.Future[str]") -> None:
        await asyncio.wait({creation})
        if creation.exception() is None:
            await self._removed(start.member_id, creation.result())

    def _remove_when_seen(self, start: Start) -> None:
        self._unwanted.add(start.nonce)
        pod = self._cluster.pods.find(start.member_id, start.namespace)
        if pod is not None:
            self._changed("MODIFIED", pod)

    async def _removed(self, name: str, uid: str) -> None:
        """Stop the pod of a start that failed: what fails now is told, and hides no reason."""
        try:
            await self.stop(name, uid)
        except Infra as error:
            self.discard(name, uid, error.message)

    async def _until_stopped(self, name: str, uid: str) -> None:
        while True:
            try:
                await self.stop(name, uid)
                return
            except Infra as error:
                logger.error("%s", error)
            await asyncio.sleep(_RETRY_S)

    async def _turn(self, pool: str, name: str, end: float) -> frozenset[str]:
        """Wait until a place for one more pod can be promised; the nodes that it may not go to."""
        while True:
            with self._told_of(pool) as told:
                limit = self._cluster.per_node(pool)
                excluded = frozenset[str]() if limit is None else self._excluded_for(pool, limit)
                if excluded is not None:
                    self._excluded[name] = excluded
                    return excluded
                try:
                    async with asyncio.timeout_at(end):
                        await told.wait()
                except TimeoutError:
                    why = f"perNode: {limit} on each node, and members that wait for a node may be anywhere"
                    raise _failed(name, f"Unschedulable: {why}") from None

    def _excluded_for(self, pool: str, limit: int) -> frozenset[str] | None:
        waiting = {name: self._excluded.get(name, frozenset[str]()) for name in self._nodes.waiting(pool)}
        for name, excluded in self._excluded.items():  # of which nobody has seen a pod yet, too
            if pool_of(name) == pool and not self._nodes.has_node(name):
                waiting[name] = excluded
        return excluded_nodes(limit, self._nodes.placed(pool), waiting.values())

    async def _ready(self, name: str, uid: str, end: float) -> str:
        """Wait until a pod is ready; its address."""
        loop, seen, why = asyncio.get_running_loop(), False, "the pod was not seen yet"
        while True:
            with self._told_of(name) as told:
                pod = self.find(name, uid)
                seen = seen or pod is not None
                state = look(pod)
                if isinstance(state, Ready):
                    return state.address
                if seen and isinstance(state, Failed):
                    raise _failed(name, state.why)
                why = state.why if seen else why
                try:
                    async with asyncio.timeout_at(end if seen else min(end, loop.time() + SEEN_S)):
                        await told.wait()
                    continue
                except TimeoutError:
                    if loop.time() >= end:
                        raise _failed(name, f"{why} (after {self._start_s:g} s)") from None
            if not await self._exists(name, uid):
                raise _failed(name, "Deleted: the pod is gone")

    async def _gone(self, name: str, uid: str, seconds: float) -> None:
        """Wait until a pod is gone.

        Raises:
            TimeoutError: it is not.
            KubeError: nobody knows.
        """
        seen = self.find(name, uid) is not None
        async with asyncio.timeout(seconds):
            while True:
                with self._told_of(name) as told:
                    if self.find(name, uid) is None and (seen or not await self._exists(name, uid)):
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0 if not seen else None):
                            await told.wait()

    async def _exists(self, name: str, uid: str) -> bool:
        try:
            pod = await self._cluster.kube.get(PODS, name, self._cluster.namespace)
        except NotFound:
            return False
        except KubeError as error:
            logger.warning("pod %s: cannot be looked at: %s", name, error.message)
            return True
        return bool(pod["metadata"]["uid"] == uid)

    async def _delete(self, name: str, uid: str, grace_s: int) -> bool:
        try:
            return await self._cluster.kube.delete(
                PODS, name, self._cluster.namespace, uid=uid, grace_s=grace_s
            )
        except Conflict:  # another has its name, or the server could not do it now
            if await self._exists(name, uid):
                raise
            return False

    def _stays(self, pod: Obj) -> bool:
        """Whether nobody deletes it, nor is about to because its pool is gone."""
        meta = pod["metadata"]
        owner = self._cluster.owner((meta.get("labels") or {}).get(identity.POOL, ""))
        owners = {each["uid"] for each in meta.get("ownerReferences", ())}
        return owner is not None and owner["uid"] in owners and not meta.get("deletionTimestamp")

    def _changed(self, kind: Kind, pod: Obj) -> None:
        meta = pod["metadata"]
        name, pool = meta["name"], (meta.get("labels") or {}).get(identity.POOL, "")
        if kind == "DELETED":
            self._nodes.drop(name)
            self._known.discard(meta["uid"])
        else:
            self._nodes.put(name, pool, pod.get("spec", {}).get("nodeName", ""))
            if (nonce := _start_of(pod)) in self._unwanted:
                self._unwanted.discard(nonce)
                self.discard(name, meta["uid"], "nobody knew whether it had been created")
        self._wake(name)
        self._wake(pool)

    @contextlib.contextmanager
    def _told_of(self, what: str) -> Iterator[asyncio.Event]:
        """An event that is set by the next change of a pod, or of any pod of a pool."""
        told = asyncio.Event()
        self._waiters[what].add(told)
        try:
            yield told
        finally:
            self._waiters[what].discard(told)
            if not self._waiters[what]:
                del self._waiters[what]

    def _wake(self, what: str) -> None:
        for told in self._waiters.get(what, ()):
            told.set()


def url(address: str, port: int) -> str:
    """The URL of a server in a pod."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _start_of(pod: Obj) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(identity.START, ""))


def _failed(member_id: str, why: str) -> StartFailed:
    return StartFailed(f"member {member_id}: {why}", reason=why)
