"""Unpacked images on disk: each once, under its digest, shared read-only by every sandbox of this user.

Guarantees:
1. An image appears as a whole or not at all. Of several processes that want it one unpacks, the others wait;
   what a killed one left is removed by the next that unpacks.
2. An image that a living process holds is never removed. Others go, least recently used first, when the sum
   of sizes would pass the limit. An image that does not fit is refused.
3. A file that has not changed is not read again: path, inode, size and times say whether it has. A file that
   is changed in place and given all of these back is not noticed.
4. Nobody but this user reaches what is in here, so that a set-user-ID file of an image is harmless.

Layout: ``HEX/root`` and ``HEX/image.json`` of an image, ``*.part`` of one in the making or on its way out,
``seen/*.json`` for guarantee 3. A lock on the folder itself says who uses it: shared to hold, exclusive to
make or to remove; after a lock was taken, the name must still lead to the folder that was locked.

Not here: what is unpacked (``layers``); loss of power, after which an image that was made in the half minute
before it may have empty files.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.layers import Source, unpack
from agentfly.resources.images.reference import Reference
from agentfly.resources.images.sources import opened
from agentfly.resources.images.stream import Budget, DoesNotFit, too_large
from agentfly.resources.runners.sandboxd.owner_dir import delete

PAUSE_S = 0.05
"""Between looks at what another process unpacks."""
BLOCK = 512
"""What ``st_blocks`` counts in, on every file system."""


@dataclass(eq=False)
class Image:
    """A root file system in use. ``digest`` is ``sha256:`` and 64 hex digits; ``lock`` holds it."""

    root: str
    digest: str
    env: Mapping[str, str]
    lock: int

    def release(self) -> None:
        """Stop holding it; once."""
        os.close(self.lock)


class ImageCache:
    """A folder of images.

    Args:
        folder: made if missing; for this user alone.
        limit: bytes on disk that all images together may have.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder.absolute(), limit

    def hold(self, reference: Reference, check: Callable[[], None], digest: str | None = None) -> Image:
        """An image, unpacked if it is not here.

        Args:
            reference: to anything but a folder.
            check: called often; what it raises ends the work, and nothing of it is left.
            digest: what the image must be.

        Raises:
            ResourceError: it cannot be read, is damaged, does not fit, or is another one than it must be.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            return self._hold(reference, check, digest)
        except DoesNotFit as error:
            raise ResourceError(f"image: {reference} {error.message}", hints=error.hints) from error
        except OSError as error:
            hints = ["make room there, or set XDG_CACHE_HOME to a folder on a local disk"]
            raise ResourceError(
                f"image: {reference}: cannot be kept in {self.folder}: {error}", hints=hints
            ) from error

    def _hold(self, reference: Reference, check: Callable[[], None], digest: str | None) -> Image:
        seen = self._seen(reference)
        known = digest or seen.digest()
        if known and (image := self._take(known)):
            return image
        with opened(reference, self.folder, Budget(self.limit, check)) as source:
            if digest not in (None, source.digest):
                raise ResourceError(
                    f"image: {reference} is now {source.digest}, and was {digest} when it was first used",
                    hints=["start anew to use the new one"],
                )
            image = self._take(source.digest) or self._make(source, Budget(self.limit, check))
        seen.remember(image.digest)
        return image

    def usage(self) -> tuple[int, int]:
        """How many images there are, and their bytes on disk."""
        sizes = [size for _, size, _ in self._images()]
        return len(sizes), sum(sizes)

    def _path(self, digest: str) -> Path:
        return self.folder / digest.removeprefix("sha256:")

    def _take(self, digest: str) -> Image | None:
        """Hold an image if it is here."""
        path = self._path(digest)
        while True:
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            if _locks(lock, path, fcntl.LOCK_SH):
                break
            os.close(lock)
            time.sleep(PAUSE_S)  # it is being renamed, to or from its place
        try:
            env = json.loads((path / "image.json").read_text())["env"]
            os.utime(lock)
        except BaseException as error:
            os.close(lock)
            if isinstance(error, (OSError, ValueError, KeyError)):
                hints = [f"rm -rf {path}"]
                raise ResourceError(f"image: {path}: is damaged: {error}", hints=hints) from error
            raise
        return Image(str(path / "root"), digest, env, lock)

    def _make(self, source: Source, budget: Budget) -> Image:
        final = self._path(source.digest)
        part = final.with_suffix(".part")
        while (image := self._take(source.digest)) is None:
            budget.check()
            self._sweep()
            with _building(part) as ours:
                if ours and not final.exists():
                    size = self._unpack(source, part, budget)
                    with _alone_in(self.folder, budget.check):  # else two would take the same room
                        self._make_room(size)
                        part.rename(final)
            if not ours:
                time.sleep(PAUSE_S)
        return image

    def _unpack(self, source: Source, part: Path, budget: Budget) -> int:
        """Make everything of an image; its bytes on disk."""
        root = part / "root"
        root.mkdir(mode=0o755)
        root.chmod(0o755)
        unpack(source, str(root), budget)
        size = _size(str(root))
        (part / "image.json").write_text(json.dumps({"env": dict(source.env), "size": size}))
        return size

    def _make_room(self, size: int) -> None:
        images = sorted(self._images()) if size <= self.limit else []
        total = sum(other for _, other, _ in images)
        for _, other, path in images:
            if total + size <= self.limit:
                return
            if _evict(path):
                total -= other
        if size > self.limit:
            raise too_large(self.limit)
        if total + size > self.limit:
            raise DoesNotFit(
                f"has {size / 2**30:.3g} GiB and finds no room in the image cache: of its limit of "
                f"{self.limit / 2**30:.3g} GiB, {total / 2**30:.3g} are images in use",
                hints=["end what uses them, or raise AGENTFLY_IMAGE_CACHE_GIB"],
            )

    def _images(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, folder) of every image."""
        for facts in self.folder.glob("*/image.json"):
            path = facts.parent
            with contextlib.suppress(OSError, ValueError, KeyError):
                if path.suffix != ".part":
                    yield path.stat().st_mtime, int(json.loads(facts.read_text())["size"]), path

    def _sweep(self) -> None:
        """Remove what killed processes left."""
        for part in self.folder.glob("*.part"):
            with _exclusive(part) as folder:
                if folder is not None:
                    delete([str(part)])

    def _seen(self, reference: Reference) -> "_Seen":
        name = hashlib.sha256(str(reference).encode(errors="surrogateescape")).hexdigest()[:32]
        return _Seen(self.folder / "seen" / f"{name}.json", reference)


class _Seen:
    """What a file was when its image's digest was last found out; other forms are cheap to look at."""

    def __init__(self, record: Path, reference: Reference) -> None:
        self._record = record
        self._facts: list[object] = []
        if reference.form in ("tar", "oci-archive", "docker-archive"):
            with contextlib.suppress(OSError):
                found = os.stat(reference.path)
                self._facts = [str(reference), found.st_dev, found.st_ino, found.st_size]
                self._facts += [found.st_mtime_ns, found.st_ctime_ns]

    def digest(self) -> str | None:
        """The digest, if the file is still the same."""
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(self._record.read_text())
            if self._facts and record["facts"] == self._facts:
                return str(record["digest"])
        return None

    def remember(self, digest: str) -> None:
        """Record what was found out about the file as it was before it was read."""
        if self._facts and self.digest() != digest:
            self._record.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = self._record.with_suffix(f".{secrets.token_hex(4)}")
            fresh.write_text(json.dumps({"facts": self._facts, "digest": digest}))
            fresh.rename(self._record)


def _locks(lock: int, path: Path, how: int) -> bool:
    """Lock an open folder, if nobody is in the way and its name still leads to it."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        return _leads_to(path, lock)
    except BlockingIOError:
        pass
    return False


def _leads_to(path: Path, folder: int) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(folder))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[int | None]:
    """The folder, open and ours alone within the block; or None."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        yield lock if _locks(lock, path, fcntl.LOCK_EX) else None
    finally:
        os.close(lock)


@contextlib.contextmanager
def _alone_in(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Wait for the folder and keep it within the block."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while not _locks(lock, folder, fcntl.LOCK_EX):
            check()
            time.sleep(PAUSE_S)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _building(part: Path) -> Iterator[bool]:
    """Whether a fresh folder is ours alone within the block; what is left of it at the end is removed."""
    part.mkdir(mode=0o700, exist_ok=True)
    with _exclusive(part) as folder:
        if folder is None or any(part.iterdir()):  # a killed one's, for the next sweep
            yield False
            return
        try:
            yield True
        finally:
            if _leads_to(part, folder):
                delete([str(part)])


def _evict(path: Path) -> bool:
    with _exclusive(path) as folder:
        if folder is not None:
            gone = path.with_suffix(f".{secrets.token_hex(4)}.part")
            path.rename(gone)
            delete([str(gone)])
    return folder is not None


def _size(root: str) -> int:
    """Bytes on disk of a tree; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root):
        for path in (folder, *(f"{folder}/{file}" for file in files)):
            found = os.lstat(path)
            seen[found.st_dev, found.st_ino] = found.st_blocks * BLOCK
    return sum(seen.values())
