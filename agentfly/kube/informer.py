"""What exists of one kind, kept up to date by a list and a watch.

Guarantees:
1. ``items`` holds what the server has, and nothing that it has no more: after every new list, what is missing
   in it is dropped. Subscribers are told of each change once, of those deletions too.
2. List and watch are one stream where the server can, else pages followed by a watch of the same version: no
   change falls between the two.
3. A watch that falls silent, breaks or is refused is opened again from the version it had come to, or with a
   new list if that is too old. This never ends, and never faster than every ``PAUSES_S[0]`` seconds.
4. Only what ``project`` returns is kept of an object.
5. A subscriber that raises costs only its own notice.

Not here: what the objects mean (``pods`` for one kind of them).
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

from agentfly.kube.answers import Obj
from agentfly.kube.client import Kube
from agentfly.kube.errors import Gone, KubeError, Unreachable
from agentfly.kube.resources import Resource

logger = logging.getLogger(__name__)

Kind = Literal["ADDED", "MODIFIED", "DELETED"]
Callback = Callable[[Kind, Obj], None]

WATCH_S = 60
"""After so long the server ends a watch by itself, and the next one begins where it ended."""
SILENCE_S = WATCH_S + 10.0
"""Longer than any watch lasts: a server that sends no bookmarks is silent while nothing changes."""
PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
TURN = 200
"""Events after which others get their turn on the event loop."""
_STREAM = {
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
    "timeoutSeconds": str(WATCH_S),
}
_END_OF_LIST = "k8s.io/initial-events-end"
_OVERLOAD = frozenset({429, 503})


def trimmed(obj: Obj) -> Obj:
    """The object without the record of who manages which field: two fifths of a pod, and nobody reads it."""
    obj["metadata"].pop("managedFields", None)
    return obj


class Informer:
    """The objects of one kind in a namespace, or in all. It works for as long as it is entered.

    Args:
        namespace: None is all namespaces.
        labels: a selector, as ``kubectl -l`` takes it; ``fields`` likewise.
        project: what to keep of an object; at least ``uid``, ``namespace``, ``name`` and ``resourceVersion``
            of its metadata. It may change the object that it is given.
    """

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        namespace: str | None = None,
        labels: str | None = None,
        *,
        fields: str | None = None,
        project: Callable[[Obj], Obj] = trimmed,
    ) -> None:
        self.items: dict[str, Obj] = {}
        self._kube = kube
        self._resource = resource
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._project = project
        self._uids: dict[tuple[str, str], str] = {}
        self._callbacks: list[Callback] = []
        self._version = ""
        self._streams = True
        self._synced = asyncio.Event()
        self._failure = ""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"agentfly informer {self._resource.plural}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def synced(self, timeout: float = 30.0) -> None:
        """Wait for the end of the first list.

        Raises:
            Unreachable: it did not come in ``timeout`` seconds; the message says why not.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._synced.wait()
        except TimeoutError:
            raise Unreachable(
                f"kubernetes: {self._resource.plural} could not be listed in {timeout:g} s: "
                f"{self._failure or 'no answer yet'}"
            ) from None

    def find(self, name: str, namespace: str = "") -> Obj | None:
        """The object of this name, if it exists; ``namespace`` is "" for a kind that has none."""
        uid = self._uids.get((namespace, name))
        return None if uid is None else self.items[uid]

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call it for every change from now on; what exists already is in ``items``.

        Returns:
            what ends the subscription.
        """
        self._callbacks.append(callback)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return end

    async def _run(self) -> None:
        failures = 0
        while True:
            before = self._version
            try:
                await (self._resume() if self._version else self._begin())
                failures = 0
                continue
            except Gone:
                self._version = ""
                failures = failures + 1 if not before else 0  # a list that is too old at once is no progress
            except KubeError as error:
                failures = 1 if self._version != before else failures + 1
                self._failure = str(error)
                if error.status and error.status not in _OVERLOAD:
                    self._version = ""  # it answers, but not to this: ask for everything
                log = logger.warning if failures > 1 else logger.info
                log("%s: %s", self._resource.plural, error)
            except Exception:
                self._version = ""
                failures += 1
                logger.exception("informer of %s: will list anew", self._resource.plural)
            pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))

    async def _begin(self) -> None:
        """List everything, and follow what changes where that is one stream."""
        if self._streams:
            try:
                await self._follow(_STREAM, listing=set())
                return
            except KubeError as error:
                if error.status not in (400, 422):
                    raise
                self._streams = False  # a server before 1.32, or one that was told not to
        seen: set[str] = set()
        version = ""
        async for page in self._kube.pages(
            self._resource, self._namespace, labels=self._labels, fields=self._fields
        ):
            for obj in page["items"]:
                seen.add(obj["metadata"]["uid"])
                self._put(obj)
            version = page["metadata"]["resourceVersion"]
            await asyncio.sleep(0)
        self._listed(seen, version)

    async def _resume(self) -> None:
        await self._follow(
            {
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": str(WATCH_S),
            },
            listing=None,
        )

    async def _follow(self, params: dict[str, str], listing: set[str] | None) -> None:
        """One watch to its end; ``listing`` collects what is in the list that it begins with, if it does."""
        given = {"labelSelector": self._labels, "fieldSelector": self._fields}
        params = params | {name: value for name, value in given.items() if value}
        path, count = self._resource.path(self._namespace), 0
        async with self._kube.watch(path, params, silence_s=SILENCE_S) as events:
            async for event in events:
                obj, kind = event["object"], event["type"]
                meta = obj["metadata"]
                if kind == "BOOKMARK":
                    if listing is not None and (meta.get("annotations") or {}).get(_END_OF_LIST) == "true":
                        self._listed(listing, meta["resourceVersion"])
                        listing = None
                elif kind == "DELETED":
                    self._drop(meta["uid"], obj)
                else:
                    if listing is not None:
                        listing.add(meta["uid"])
                    self._put(obj)
                if listing is None:  # before its end, a list cannot be resumed
                    self._version = meta["resourceVersion"]
                count += 1
                if count % TURN == 0:
                    await asyncio.sleep(0)

    def _listed(self, seen: set[str], version: str) -> None:
        for uid in [uid for uid in self.items if uid not in seen]:
            self._drop(uid, None)
        self._version = version
        self._failure = ""
        self._synced.set()

    def _put(self, obj: Obj) -> None:
        meta = obj["metadata"]
        uid, name = meta["uid"], (meta.get("namespace", ""), meta["name"])
        known = self.items.get(uid)
        if known is not None and known["metadata"]["resourceVersion"] == meta["resourceVersion"]:
            return
        before = self._uids.get(name)
        if before is not None and before != uid:
            self._drop(before, None)  # of two objects of one name, the first is gone
        kept = self._project(obj)
        self.items[uid] = kept
        self._uids[name] = uid
        self._tell("ADDED" if known is None else "MODIFIED", kept)

    def _drop(self, uid: str, last: Obj | None) -> None:
        known = self.items.pop(uid, None)
        if known is None:
            return
        meta = known["metadata"]
        name = (meta.get("namespace", ""), meta["name"])
        if self._uids.get(name) == uid:
            del self._uids[name]
        self._tell("DELETED", known if last is None else self._project(last))

    def _tell(self, kind: Kind, obj: Obj) -> None:
        for callback in list(self._callbacks):
            try:
                callback(kind, obj)
            except Exception:
                logger.exception("a subscriber of %s failed", self._resource.plural)
