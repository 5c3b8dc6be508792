"""Layers of an image applied to a folder, one after the other.

Guarantees:
1. The result is what the OCI image specification says: later layers replace and merge, ``.wh.NAME`` hides a
   name of the layers below, ``.wh..wh..opq`` all names there; never one of the same layer, in any order.
2. Nothing outside the folder is read, written or linked to, whatever names, links and types an entry has.
3. A file that a layer replaces is a new file: hard links of it in layers below keep their content.
4. Everything belongs to the user who unpacks, who may read and write it: a sandbox knows one user, root, and
   that one has no capabilities to reach what is somebody else's. All other mode bits are kept. Files keep
   their time (compiled Python is valid for one); owners and extended attributes are dropped.
5. Devices are left out, since a sandbox has its own ``/dev``; FIFOs are made.

Not here: who else could use a set-user-ID file that is kept; ``cache`` lets nobody in.
"""

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from typing import cast

from agentfly.resources.images.inside import follow, refuse
from agentfly.resources.images.stream import Budget, Stream, blaming, entries, shown

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
AUFS = ".wh..wh."
"""Begins the names of what an old storage driver wrote for itself."""
FOLDER_MODE = 0o755
LATEST = 1 << 33
"""Seconds; file systems end some time after this."""


class Tree:
    """A root file system in the making.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: str, budget: Budget) -> None:
        self._root, self._budget = root, budget
        self._layer: dict[str, bool] = {}  # path in this layer -> whether it is an entry, or above one
        self._folders: dict[str, str] = {}  # folder as entries name it -> where it really is

    def apply(self, archive: str, stream: Stream) -> None:
        """Apply a layer.

        Args:
            archive: its name, for errors.

        Raises:
            ResourceError: names the archive and the entry.
        """
        self._layer.clear()
        for info in entries(archive, stream, self._budget):
            with blaming(archive, f"entry {shown(info.name)}"):
                self._enter(info, stream)

    def _enter(self, info: tarfile.TarInfo, stream: Stream) -> None:
        parts = _parts(info.name)
        if not parts:
            if not info.isdir():
                raise ValueError("takes the place of the root itself")
            return
        *folder, name = parts
        if any(part.startswith(AUFS) for part in folder) or (name.startswith(AUFS) and name != OPAQUE):
            return
        if any(part.startswith(WHITEOUT) for part in folder):
            raise ValueError("lies below a whiteout")
        if name.startswith(WHITEOUT):
            self._white_out(folder, name)
        else:
            place = self._folder("/".join(folder))
            self._make(info, f"{place}/{name}" if place else name, stream)

    def _folder(self, named: str) -> str:
        """The real folder behind a name, made if it is missing."""
        if (known := self._folders.get(named)) is None:
            known = self._folders[named] = follow(self._root, named.split("/"), self._make_folder)
        return known

    def _make_folder(self, path: str) -> None:
        os.mkdir(self._at(path))
        os.chmod(self._at(path), FOLDER_MODE)  # whatever the umask is
        self._note(path, entry=False)

    def _note(self, path: str, *, entry: bool) -> None:
        """Record a path of this layer, and the folders above it."""
        self._layer[path] = entry or self._layer.get(path, False)
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in self._layer:
                return
            self._layer[path] = False

    def _white_out(self, folder: list[str], name: str) -> None:
        hidden = name.removeprefix(WHITEOUT)
        if hidden in ("", ".", ".."):
            raise ValueError("is a whiteout of no name")
        try:
            place = follow(self._root, folder, refuse)
        except (FileNotFoundError, NotADirectoryError):
            return  # the layers below have no such folder
        names = os.listdir(self._at(place)) if name == OPAQUE else [hidden]
        for each in names:
            self._hide(f"{place}/{each}" if place else each)

    def _hide(self, path: str) -> None:
        """Remove what layers below have at a path, and keep what this one has."""
        if path not in self._layer:
            self._remove(path)
        elif _is_folder(self._at(path)):
            for name in os.listdir(self._at(path)):
                self._hide(f"{path}/{name}")
            if not self._layer[path]:
                os.chmod(self._at(path), FOLDER_MODE)

    def _remove(self, path: str) -> None:
        try:
            mode = os.lstat(self._at(path)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(self._at(path))
        else:
            os.unlink(self._at(path))
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            self._folders.clear()

    def _make(self, info: tarfile.TarInfo, path: str, stream: Stream) -> None:
        at = self._at(path)
        target = self._linked(info.linkname) if info.islnk() else ""
        if target == path:
            return
        if not (info.isdir() and _is_folder(at)):
            self._remove(path)
        self._note(path, entry=True)
        if info.isdir():
            os.makedirs(at, exist_ok=True)
            os.chmod(at, info.mode & 0o7777 | 0o700)
        elif info.issym():
            os.symlink(info.linkname, at)
        elif info.islnk():
            os.link(self._at(target), at, follow_symlinks=False)
        elif info.isfifo():
            os.mkfifo(at)
            os.chmod(at, info.mode & 0o7777 | 0o600)
        elif info.isreg():
            self._write(info, at, stream)
        elif not info.isdev():
            raise ValueError(f"is of the unknown type {info.type!a}")

    def _linked(self, name: str) -> str:
        """The real place of what a hard link names; a link there is linked to, not followed."""
        parts = _parts(name)
        if not parts:
            raise ValueError("is a hard link to the root itself")
        folder = follow(self._root, parts[:-1], refuse)
        target = f"{folder}/{parts[-1]}" if folder else parts[-1]
        if not os.path.lexists(self._at(target)):
            raise ValueError(f"is a hard link to {shown(name)}, which is not in the image")
        return target

    def _write(self, info: tarfile.TarInfo, at: str, stream: Stream) -> None:
        fd = os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            position = info.offset_data
            for offset, size in _regions(info):
                stream.seek(position)
                file.seek(offset)
                for data in stream.chunks(size):
                    file.write(data)
                position += size
            file.truncate(info.size)
            os.fchmod(fd, info.mode & 0o7777 | 0o600)
            seconds = min(max(int(info.mtime), 0), LATEST)
            os.utime(fd, (seconds, seconds))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{shown(name)} leads upwards with '..'")
    return parts


def _regions(info: tarfile.TarInfo) -> Iterator[tuple[int, int]]:
    """Where in the file the stored bytes go: (offset, size), in the order in which they are stored."""
    stored = cast("list[tuple[int, int]] | None", info.sparse)  # its stub says bytes
    for offset, size in [(0, info.size)] if stored is None else stored:
        if offset < 0 or size < 0 or offset + size > info.size:
            raise ValueError("has data beyond its end")
        if size:
            yield offset, size


def _is_folder(at: str) -> bool:
    return os.path.isdir(at) and not os.path.islink(at)
