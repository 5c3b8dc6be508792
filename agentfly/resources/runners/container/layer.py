"""Whether a container was written to, seen from outside: the writable layer of its root, and its volumes.

The daemon inside empties its scratch folders and sees mounts, processes and queues. It cannot tell the
writable layer of its own root from the image below; from this machine they are two folders.

Guarantees:
1. Every folder of a container that a tenant can write to is either one of the daemon's, or watched here.
2. Any write to a watched folder is found, also one that was undone: the kernel's change time cannot be set.
3. The work is bounded by ``ENTRIES_MAX``; at the start there are a few entries.
4. What cannot be seen, read, or be walked within that is not called unchanged.
"""

import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ENTRIES_MAX = 4096
SAFE_TYPES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")
"""File systems of the kernel: no files can be made there, or the daemon looks after them."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where, whether it can be written, and the options of the file system."""

    point: str
    kind: str
    writable: bool
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes with any write to a file or folder."""

    mode: int
    uid: int
    gid: int
    inode: int
    changed_ns: int


def mounts(mountinfo: str) -> Iterator[Mount]:
    """The lines of a process's ``mountinfo``, in order: of two on one point the later one counts."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        writable = "rw" in fields[5].split(",") and "rw" in options.split(",")
        yield Mount(_plain(fields[4]), kind, writable, tuple(_plain(one) for one in options.split(",")))


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder or file to watch: where it is on this machine, and where in the container."""

    path: str
    point: str


def watched(mountinfo: str, scratch: Sequence[str], root: str) -> list[Tree]:
    """What a tenant can write to and the daemon does not look after.

    Args:
        mountinfo: of the container's first process.
        scratch: the folders that the daemon empties.
        root: the path of the container's root on this machine (``/proc/PID/root``).

    Raises:
        OSError: the writable layer of the root cannot be told from the image.
    """
    seen = {mount.point: mount for mount in mounts(mountinfo)}
    trees = []
    for point, mount in seen.items():
        if not mount.writable or mount.kind in SAFE_TYPES or point in scratch or _is_mask(point):
            continue
        trees.append(Tree(_upper(mount), "") if point == "/" else Tree(root + point, point))
    return trees


Stamps = dict[tuple[str, str], Stamp]
"""By the path of a tree in the container, and the path below it."""


def stamps(trees: Sequence[Tree]) -> Stamps:
    """A stamp of everything in these trees, other mounts left out.

    Raises:
        OSError: something cannot be read, or there is too much of it.
    """
    found: Stamps = {}
    for point, below, stamp in _walk(trees):
        found[point, below] = stamp
        if len(found) > ENTRIES_MAX:
            raise OSError(f"{point + below}: there are more than {ENTRIES_MAX} files in volumes or devices")
    return found


def difference(before: Stamps, trees: Sequence[Tree]) -> str | None:
    """An entry that is new, gone or changed; None if there is none.

    A write into a folder changes the folder too: what is named is the last below the first.
    """
    seen, found = 0, ""
    try:
        for point, below, stamp in itertools.islice(_walk(trees), ENTRIES_MAX):
            path = point + below or "/"
            if before.get((point, below)) == stamp:
                seen += 1
            elif not found or PurePosixPath(path).is_relative_to(found):
                found = path
            else:
                break
    except OSError as error:
        found = found or f"{error.filename}, which cannot be read,"
    if found:
        return f"{found} was written"
    return None if seen == len(before) else "something was removed"


def _walk(trees: Sequence[Tree]) -> Iterator[tuple[str, str, Stamp]]:
    """Folders before what is in them: a write into a folder changes the folder."""
    for tree in trees:
        device = os.lstat(tree.path).st_dev
        pending = [""]
        while pending:
            below = pending.pop()
            status = os.lstat(tree.path + below)
            if status.st_dev != device:
                continue  # another mount, watched by itself if it can be written
            stamp = Stamp(status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_ctime_ns)
            yield tree.point, below, stamp
            if stat.S_ISDIR(status.st_mode):
                pending += (f"{below}/{name}" for name in sorted(os.listdir(tree.path + below), reverse=True))


def _upper(mount: Mount) -> str:
    upper = [value for name, _, value in (one.partition("=") for one in mount.options) if name == "upperdir"]
    if not upper or not upper[0].startswith("/"):
        raise OSError(f"the root is a {mount.kind} that does not tell where its writable layer is")
    return upper[0]


def _is_mask(point: str) -> bool:
    """Engines hide files of /proc behind /dev/null, which is watched in /dev."""
    return PurePosixPath(point).parts[1:2] in (("proc",), ("sys",))


def _plain(escaped: str) -> str:
    """mountinfo writes blanks and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)


def scratch_in(root: Path, wanted: Sequence[str], own: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Which of these folders of an image hold nothing, so that a folder in memory hides nothing.

    Args:
        root: of a container of the image, as this machine sees it.
        wanted: absolute paths in the container.
        own: names that the engine puts there itself.
    """
    return tuple(folder for folder in wanted if _holds_nothing(root, folder, own))


def _holds_nothing(root: Path, folder: str, own: frozenset[str]) -> bool:
    path = root
    for part in PurePosixPath(folder).parts[1:]:
        path /= part
        try:
            if path.is_symlink():
                return False  # where it leads is for the container to say
            if not path.exists():
                return True
            if not path.is_dir():
                return False
        except OSError:
            return False
    try:
        return set(os.listdir(path)) <= own
    except OSError:
        return False
