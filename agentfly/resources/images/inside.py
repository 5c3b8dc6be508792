"""Where a path leads inside a root file system that is only a folder here.

Guarantees:
1. Links, absolute ones and ``..`` included, are followed as a process in that root would see them: the result
   never lies outside.
2. It always ends: after ``LINKS_MAX`` links or below ``DEPTH_MAX`` folders with an ``OSError``.
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable

LINKS_MAX = 40
"""As in the kernel."""
DEPTH_MAX = 200
"""Folders below each other: no image has as many, and deletion recurses."""


def follow(root: str, parts: Iterable[str], missing: Callable[[str], None]) -> str:
    """The real folder that the parts of a path lead to, relative to the root and without links.

    Args:
        missing: called with the relative path of a part that does not exist; it makes the folder, or raises.

    Raises:
        OSError: a part is no folder, or there are too many links or folders.
    """
    done: list[str] = []
    rest, links = deque(parts), 0
    while rest:
        part = rest.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        relative = "/".join([*done, part])
        try:
            mode = os.lstat(f"{root}/{relative}").st_mode
        except FileNotFoundError:
            missing(relative)
            mode = stat.S_IFDIR
        if stat.S_ISLNK(mode):
            links += 1
            if links > LINKS_MAX:
                raise OSError(errno.ELOOP, f"more than {LINKS_MAX} links on the way")
            target = os.readlink(f"{root}/{relative}")
            if target.startswith("/"):
                done.clear()
            rest.extendleft(reversed(target.split("/")))
        elif stat.S_ISDIR(mode):
            done.append(part)
        else:
            raise NotADirectoryError(errno.ENOTDIR, f"{relative!a} is not a folder")
        if len(done) > DEPTH_MAX:
            raise OSError(errno.ENAMETOOLONG, f"lies more than {DEPTH_MAX} folders deep")
    return "/".join(done)


def refuse(path: str) -> None:
    """For ``missing``: make nothing."""
    raise FileNotFoundError(errno.ENOENT, f"{path!a} is not in the image")


def link_on_the_way(root: str, path: str) -> str | None:
    """The first part of a path that is a link inside the root, as an absolute path there; None if none is."""
    so_far = ""
    for part in path.strip("/").split("/"):
        so_far = f"{so_far}/{part}"
        if os.path.islink(f"{root}{so_far}"):
            return so_far
    return None
