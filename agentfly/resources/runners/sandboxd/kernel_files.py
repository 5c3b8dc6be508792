"""Modes and owners of the files of /proc that are the whole machine's.

An engine that runs as root gives a container a /proc that can be written, and its root owns what is in there.
Who changes the mode of such a file changes it for every container that is ever started after.

Guarantees:
1. Any change of mode or owner that a container made and that others can see is found, and named.
2. It is undone if this process may; either way it is told.
3. Only what the kernel shares is looked at: nothing of processes, of networks, or behind another mount.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

OWN = ("net", "self", "thread-self", "mounts", "sys")
"""Links, and what belongs to the namespaces of a container and dies with it; sys is never writable in one."""
DEPTH = 3

Modes = dict[str, tuple[int, int, int]]
"""Path below /proc: mode, user, group."""


def read(proc: Path) -> Modes:
    """The files of a mounted /proc; none if it is read-only.

    Raises:
        OSError: it cannot be seen from here.
    """
    if _sealed(str(proc)):
        return {}
    return dict(_walk(str(proc), "", os.lstat(proc).st_dev, DEPTH))


def changed(before: Modes, proc: Path, machine: Path = Path("/proc")) -> str | None:
    """What is not as it was, once it was put back; None if nothing.

    Args:
        machine: the /proc of this process, through which it is put back.
    """
    if not before:
        return None
    try:
        now = read(proc)
    except OSError as error:
        return f"/proc cannot be read: {error.strerror}"
    paths = [path for path, was in before.items() if now.get(path, was) != was]
    put_back({path: before[path] for path in paths}, machine)
    return f"/proc/{paths[0]} was changed, for the whole machine" if paths else None


def put_back(before: Modes, machine: Path = Path("/proc")) -> None:
    """Undo what may have been changed, as far as this process may.

    Whether it was changed cannot be asked here: each mount of /proc remembers what it showed before.
    """
    for path, (mode, user, group) in before.items():
        with contextlib.suppress(OSError):
            os.chown(machine / path, user, group)
            os.chmod(machine / path, stat.S_IMODE(mode))


def _walk(proc: str, below: str, device: int, depth: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for name in os.listdir(f"{proc}/{below}"):
        if not below and (name.isdigit() or name in OWN):
            continue
        path = f"{below}/{name}".lstrip("/")
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(f"{proc}/{path}")
            folder = stat.S_ISDIR(status.st_mode)
            if (
                status.st_dev != device
                or stat.S_ISLNK(status.st_mode)
                or (folder and _sealed(f"{proc}/{path}"))
            ):
                continue
            yield path, (status.st_mode, status.st_uid, status.st_gid)
            if folder and depth > 1:
                with contextlib.suppress(PermissionError):
                    yield from _walk(proc, path, device, depth - 1)


def _sealed(folder: str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
