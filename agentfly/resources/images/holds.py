"""The images that one runner's sandboxes use.

Guarantees:
1. However many sandboxes start at once, an image is looked up and unpacked once; it is held until the last of
   them has given it back.
2. A reference means the same content for the runner's whole life, or the start fails and says so.
3. Work that nobody waits for any more ends soon and leaves nothing; ``take`` and ``close`` await that.
4. The content that a reference stands for is logged whenever it is taken into use.

Not here: a folder or this machine's own root, which are used as they are, without a digest.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.images.cache import Image, ImageCache
from agentfly.resources.images.reference import HOST, Reference, locate

logger = logging.getLogger(__name__)

UNPACK_S = 900.0
"""A few GiB through Python on a busy disk; another process may have begun, and failed, before."""


@dataclass(eq=False)
class ImageRoot:
    """The root file system of a sandbox: ``host`` or a folder, and the environment that comes with it."""

    path: str
    env: Mapping[str, str] = field(default_factory=dict)
    use: "_Use | None" = None


@dataclass(eq=False)
class _Use:
    """One image that is in use, or being got."""

    reference: Reference
    task: "asyncio.Task[Image]"
    unwanted: threading.Event
    users: int = 0


class ImageHolds:
    """The images in use by one runner.

    Args:
        cache: where images are kept; None serves folders and this machine's own root only.
    """

    def __init__(self, cache: ImageCache | None) -> None:
        self._cache = cache
        self._uses: dict[str, _Use] = {}
        self._digests: dict[str, str] = {}

    async def take(self, image: str) -> ImageRoot:
        """The root that a spec's image stands for. Give it back.

        Raises:
            StartFailed: there is no such image, or it cannot be unpacked; with hints.
        """
        try:
            reference = locate(image, Path.cwd())
            if reference.form == "host":
                return ImageRoot(HOST)
            if reference.form == "dir":
                return ImageRoot(reference.path)
            return await self._take(reference)
        except ResourceError as error:
            raise StartFailed(error.message, hints=error.hints) from error

    async def _take(self, reference: Reference) -> ImageRoot:
        if self._cache is None:
            raise ResourceError(f"image: {reference} needs an image cache, and this runner has none")
        use = self._uses.get(str(reference))
        if use is None:
            unwanted = threading.Event()
            task = asyncio.create_task(self._hold(self._cache, reference, unwanted))
            use = self._uses[str(reference)] = _Use(reference, task, unwanted)
        use.users += 1
        try:
            found = await asyncio.shield(use.task)
        except BaseException:
            self._leave(use)
            if use.users == 0:
                await asyncio.wait([use.task])
            raise
        return ImageRoot(found.root, found.env, use)

    def give_back(self, root: ImageRoot) -> None:
        """End a use; once for each that was taken."""
        if root.use is not None:
            self._leave(root.use)

    async def close(self) -> None:
        """End all work. Give back every root first."""
        for use in list(self._uses.values()):
            use.unwanted.set()
        if working := [use.task for use in self._uses.values() if not use.task.done()]:
            await asyncio.wait(working)

    def _leave(self, use: _Use) -> None:
        use.users -= 1
        if use.users > 0:
            return
        if self._uses.get(str(use.reference)) is use:
            del self._uses[str(use.reference)]
        use.unwanted.set()
        if use.task.done():
            _release(use.task)
        else:
            use.task.add_done_callback(_release)

    async def _hold(self, cache: ImageCache, reference: Reference, unwanted: threading.Event) -> Image:
        deadline = time.monotonic() + UNPACK_S

        def check() -> None:
            if unwanted.is_set():
                raise ResourceError(f"image: {reference}: nobody waits for it any more")
            if time.monotonic() > deadline:
                raise ResourceError(f"image: {reference}: was not unpacked in {UNPACK_S:g} s")

        name = str(reference)
        image = await asyncio.to_thread(cache.hold, reference, check, self._digests.get(name))
        self._digests[name] = image.digest
        logger.info("image %s is %s, in %s", name, image.digest, image.root)
        return image


def _release(task: "asyncio.Task[Image]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()
