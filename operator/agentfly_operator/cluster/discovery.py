"""Which kinds there are that other operators define: these may be installed or taken away at any time.

Guarantees:
1. Each kind is looked for at the start, and then every `LOOK_S` seconds, where every client may look: no
   right is needed, and no definition is read. A kind that one of its versions does not serve is not there.
2. To ask costs no request. A kind is there for whoever asks when its objects were listed: what is not seen of
   them does not exist.
3. A kind that comes or goes is told once, when the answer to whoever asks has changed.
4. What an API server that does not answer, or does not say, has defined is what it had.
5. Of a kind that is not there it is said why: it is not served, or its objects could not be listed.

Not here: what follows from it (`plan`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from agentfly.kube import Kube, KubeError, NotFound, Resource
from agentfly_operator.cluster.metrics import Metrics

logger = logging.getLogger(__name__)

LOOK_S = 10.0


class Follower(Protocol):
    """Who watches the objects of a kind as long as it is there."""

    async def follow(self, resource: Resource) -> None:
        """The kind is there: watch its objects, and return when all were listed.

        Raises:
            KubeError: they could not be; it is tried again.
        """

    async def leave(self, resource: Resource) -> None:
        """The kind is gone, and its objects with it."""


class Discovery:
    """Looks for as long as it is entered.

    Args:
        kinds: to look for.
        changed: called when one of them came or went.
    """

    def __init__(
        self,
        kube: Kube,
        kinds: Sequence[Resource],
        follower: Follower,
        changed: Callable[[Resource], None],
        metrics: Metrics,
    ) -> None:
        self._kube = kube
        self._kinds = tuple(kinds)
        self._follower = follower
        self._changed = changed
        self._metrics = metrics
        self._there: set[Resource] = set()
        self._unlisted: dict[Resource, str] = {}
        self._looking: asyncio.Task[None] | None = None

    def has(self, resource: Resource) -> bool:
        """Whether the kind is there."""
        return resource in self._there

    def why_not(self, resource: Resource) -> str:
        """Why the kind is not there, for people; "" if it is."""
        if self.has(resource):
            return ""
        absent = f"{resource.plural} of {resource.api_version} are not served by this cluster"
        return self._unlisted.get(resource) or absent

    async def __aenter__(self) -> Self:
        for resource in self._kinds:
            there = await self._look(resource)
            logger.info("%s: is %s", name_of(resource), "there" if there else "not defined in this cluster")
        self._looking = asyncio.create_task(self._look_on(), name="discovery")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for resource in self._kinds:
                before = self.has(resource)
                if await self._look(resource) != before:
                    logger.info("%s: is %s", name_of(resource), "gone" if before else "there now")
                    self._changed(resource)

    async def _look(self, resource: Resource) -> bool:
        """See whether the kind is there, and have it followed, or left."""
        try:
            served = await self._served(resource)
            if served and resource not in self._there:
                await self._follow(resource)
        except KubeError as error:
            logger.warning("%s: %s", name_of(resource), error)
            served = self.has(resource)
        else:
            self._unlisted.pop(resource, None)
        if not served and resource in self._there:
            self._there.remove(resource)
            await self._follower.leave(resource)
        self._metrics.optional.labels(name_of(resource)).set(served)
        return served

    async def _follow(self, resource: Resource) -> None:
        try:
            await self._follower.follow(resource)
        except KubeError as error:
            self._unlisted[resource] = str(error)
            raise
        self._there.add(resource)

    async def _served(self, resource: Resource) -> bool:
        try:
            found = await self._kube.request("GET", f"/apis/{resource.api_version}")
        except NotFound:
            return False
        return any(each["name"] == resource.plural for each in found.get("resources") or ())


def name_of(resource: Resource) -> str:
    """The name of the definition of a kind."""
    return f"{resource.plural}.{resource.group}"
