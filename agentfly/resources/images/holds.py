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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.images.cache import Image, ImageCache
from agentfly.resources.images.reference import HOST, Reference, locate

logger = logging.getLogger(__name__)

UNPACK_S = 900.0
"""A few GiB through Python on a busy disk; another process may have begun, and failed, before."""
AT_ONCE = 2
"""Images unpacked at the same time: more only take the interpreter from each other, and from leases."""


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
    work: "Future[Image]"
    unwanted: threading.Event
    users: int = 0


class ImageHolds:
    """The images in use by one runner.

    Args:
        cache: where images are kept; None serves folders and this machine's own root only.
    """

    def __init__(self, cache: ImageCache | None) -> None:
        self._cache = cache
        self._threads = ThreadPoolExecutor(AT_ONCE, "image")
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
            work = self._threads.submit(self._hold, self._cache, reference, unwanted)
            use = self._uses[str(reference)] = _Use(reference, work, unwanted)
        use.users += 1
        try:
            found = await asyncio.shield(asyncio.wrap_future(use.work))
        except BaseException:
            self._leave(use)
            if use.users == 0:
                await _end_of(use.work)
            raise
        return ImageRoot(found.root, found.env, use)

    def give_back(self, root: ImageRoot) -> None:
        """End a use; once for each that was taken."""
        if root.use is not None:
            self._leave(root.use)

    async def close(self) -> None:
        """End all work. Give back every root first."""
        uses = list(self._uses.values())
        for use in uses:
            use.unwanted.set()
        for use in uses:
            await _end_of(use.work)

    def _leave(self, use: _Use) -> None:
        use.users -= 1
        if use.users > 0:
            return
        if self._uses.get(str(use.reference)) is use:
            del self._uses[str(use.reference)]
        use.unwanted.set()
        use.work.cancel()  # if it has not begun
        use.work.add_done_callback(_release)

    def _hold(self, cache: ImageCache, reference: Reference, unwanted: threading.Event) -> Image:
        deadline = time.monotonic() + UNPACK_S

        def check() -> None:
            if unwanted.is_set():
                raise ResourceError(f"image: {reference}: nobody waits for it any more")
            if time.monotonic() > deadline:
                raise ResourceError(f"image: {reference}: was not unpacked in {UNPACK_S:g} s")

        name = str(reference)
        image = cache.hold(reference, check, self._digests.get(name))
        self._digests[name] = image.digest
        logger.info("image %s is %s, in %s", name, image.digest, image.root)
        return image


async def _end_of(work: "Future[Image]") -> None:
    future = asyncio.wrap_future(work)
    await asyncio.wait([future])
    if not future.cancelled():
        future.exception()  # somebody else was told


def _release(work: "Future[Image]") -> None:
    if not work.cancelled() and work.exception() is None:
        work.result().release()
