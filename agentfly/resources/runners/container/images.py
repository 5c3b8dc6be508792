"""Images of containers: what a spec names, present in the engine's own store before a container is started.

Guarantees:
1. A name is looked up, and pulled only if the engine does not have it; a file or folder is imported once,
   under its digest as name. Many starts of one image at the same time cause one pull.
2. What cannot be had is ``StartFailed`` with the engine's words and what to try.
3. A pull goes on when the start that wanted it is cancelled; ``close`` ends it.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.images.reference import Reference, is_on_disk, locate
from agentfly.resources.runners.container.command import Engine
from agentfly.resources.runners.container.engine import CallFailed, call_async

LOOK_S = 30.0
PULL_S = 900.0
"""An image of a task may have 10 GB."""
CHUNK = 1 << 20
LOADED = re.compile(r"^Loaded image(?: ID|\(s\))?: (.+)$", re.MULTILINE)


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Image:
    """An image in the store: its id, the user whom its commands run as, and their environment."""

    id: str
    user: str
    env: dict[str, str]

    @property
    def is_roots(self) -> bool:
        """Whether commands run as root."""
        return self.user.partition(":")[0] in ("", "0", "root")


class Once(Generic[K, V]):
    """Results that are worked out once for each key, however many ask at the same time.

    One that failed is tried again by the next who asks. A cancelled caller leaves the work to the others.
    """

    def __init__(self) -> None:
        self._known: dict[K, V] = {}
        self._coming: dict[K, asyncio.Task[V]] = {}

    async def get(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The result for a key, from ``work`` if there is none yet."""
        if key not in self._known:
            if (task := self._coming.get(key)) is None:
                self._coming[key] = task = asyncio.create_task(work())
                task.add_done_callback(lambda _: self._coming.pop(key, None))
            self._known[key] = await asyncio.shield(task)
        return self._known[key]

    def forget(self, key: K) -> None:
        """Work it out again for the next who asks."""
        self._known.pop(key, None)

    async def close(self) -> None:
        """End what is still coming."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Images:
    """The images that one runner has asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._once = Once[str, Image]()

    async def get(self, text: str) -> Image:
        """The image that a spec names.

        Raises:
            StartFailed: it cannot be had.
        """
        return await self._once.get(text, lambda: self._fetch(text))

    def forget(self, text: str) -> None:
        """Look an image up again at the next start: somebody may have removed it."""
        self._once.forget(text)

    async def close(self) -> None:
        """End what is still coming."""
        await self._once.close()

    async def _fetch(self, text: str) -> Image:
        reference = located(text)
        try:
            if reference is None:
                return await self._look(text) or await self._pull(text)
            digest = await asyncio.to_thread(digest_of, Path(reference.path), reference.name)
            name = f"localhost/agentfly:{digest}"
            return await self._look(name) or await self._import(reference, name)
        except (CallFailed, OSError) as error:
            name = self._engine.name
            hints = [f"see what {name} says: {name} pull {text}"] if reference is None else []
            raise StartFailed(f"image: {text}: {error}", reason=str(error), hints=hints) from error

    async def _look(self, name: str) -> Image | None:
        try:
            found = await call_async(self._engine.command, "image", "inspect", name, deadline=LOOK_S)
        except CallFailed:
            return None
        image = json.loads(found)[0]
        config = image.get("Config") or {}
        env = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
        return Image(image["Id"], config.get("User") or "", env)

    async def _pull(self, name: str) -> Image:
        await call_async(self._engine.command, "pull", "--quiet", name, deadline=PULL_S)
        return await self._present(name)

    async def _import(self, reference: Reference, name: str) -> Image:
        path = Path(reference.path)
        if reference.form in ("tar", "dir"):
            with _content(path) as source:
                await call_async(self._engine.command, "import", "-", name, deadline=PULL_S, stdin=source)
        else:
            with _content(path) as source:
                said = await call_async(self._engine.command, "load", deadline=PULL_S, stdin=source)
            loaded = [part for line in LOADED.findall(said) for part in line.split(",")]
            if not loaded:
                raise CallFailed(f"load says nothing of an image: {said[-200:]}")
            await call_async(self._engine.command, "tag", reference.name or loaded[-1], name, deadline=LOOK_S)
        return await self._present(name)

    async def _present(self, name: str) -> Image:
        image = await self._look(name)
        if image is None:
            raise CallFailed(f"{name} is not in the store, although {self._engine.name} reported success")
        return image


def located(text: str) -> Reference | None:
    """The file or folder that a spec names as image; None if it is a name for the engine.

    Raises:
        StartFailed: nothing is there, or it is an image that no engine takes.
    """
    if text == "host" or text.startswith("packages:"):
        raise StartFailed(
            f"image: {text} is for sandboxes on this machine's own files, not for containers",
            hints=["name an image, as in debian:12, or a file, as in docker-archive:image.tar"],
        )
    if not is_on_disk(text):
        return None
    try:
        return locate(text, Path.cwd())
    except ResourceError as error:
        raise StartFailed(error.message, hints=error.hints) from error


def digest_of(path: Path, name: str = "") -> str:
    """32 hex digits of what is at a path: the content of a file, names, sizes and times in a folder."""
    digest = hashlib.sha256(name.encode())
    if path.is_file():
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()[:32]
    for folder, folders, files in os.walk(path):
        folders.sort()
        for entry in sorted([*files, *folders]):
            status = os.lstat(os.path.join(folder, entry))
            told = (os.path.relpath(os.path.join(folder, entry), path), status.st_mode, status.st_size)
            digest.update(repr((*told, status.st_mtime_ns)).encode(errors="replace"))
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _content(path: Path) -> Iterator[int]:
    """A descriptor from which the file, or a tar of the folder, can be read."""
    if path.is_file():
        with path.open("rb") as file:
            yield file.fileno()
        return
    command = ["tar", "-C", str(path), "--numeric-owner", "-c", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
        assert tar.stdout is not None
        try:
            yield tar.stdout.fileno()
        finally:
            tar.kill()
