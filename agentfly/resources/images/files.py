"""The files of a saved image by their names: in a folder, or in a tar that is read in any order.

Guarantees:
1. A name leads to a file of this folder or archive, never outside; links within an archive are followed
   (older writers link layers that are the same).
2. A compressed archive is unpacked once, to a file without a name that ends with the block.
"""

import contextlib
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.compression import CHUNK, MAGIC_MAX, Reader, compression, inflate
from agentfly.resources.images.inside import LINKS_MAX
from agentfly.resources.images.stream import Budget, Stream, blaming, entries


class Files(Protocol):
    """Files by name; ``place`` is where, for errors."""

    @property
    def place(self) -> str: ...

    def open(self, name: str) -> contextlib.AbstractContextManager[Reader]:
        """A file's bytes.

        Raises:
            ResourceError: there is no such file.
        """
        ...


@dataclass(frozen=True)
class Folder:
    """Files below a folder. Names come from digests alone, so none of them climbs."""

    place: str

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with read(f"{self.place}/{name}") as file:
            yield file


@dataclass(frozen=True)
class _Slice:
    """A part of a file that others read other parts of."""

    file: IO[bytes]
    start: int
    size: int


class _SliceReader:
    def __init__(self, part: _Slice) -> None:
        self._part, self._done = part, 0

    def read(self, size: int, /) -> bytes:
        self._part.file.seek(self._part.start + self._done)
        data = self._part.file.read(min(size, self._part.size - self._done))
        self._done += len(data)
        return data


@dataclass(frozen=True)
class Archive:
    """Files of a tar: each a slice of it, or the name of another one."""

    place: str
    index: dict[str, _Slice | str]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        found: _Slice | str | None = name
        for _ in range(LINKS_MAX):
            if not isinstance(found, str):
                break
            found = self.index.get(found)
        if not isinstance(found, _Slice):
            raise ResourceError(
                f"image: {self.place}: has no file {name!a}", hints=["write the whole image again"]
            )
        yield _SliceReader(found)


@contextlib.contextmanager
def opened_archive(path: str, scratch: Path, budget: Budget) -> Iterator[Archive]:
    """A tar's files.

    Args:
        scratch: a folder for the unpacked form of a compressed one.
    """
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(read(path))
        if compression(file.read(MAGIC_MAX)):
            file.seek(0)
            file = stack.enter_context(_unpacked(path, file, scratch, budget))
        file.seek(0)
        yield Archive(path, dict(_index(path, file, budget)))


def read(path: str) -> IO[bytes]:
    """Open a file for reading; an error names it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for a writer
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
        problem = "is not a file"
    except OSError as error:
        problem = error.strerror or str(error)
    hints = ["name a file that you may read", "write the whole image again"]
    raise ResourceError(f"image: {path}: {problem}", hints=hints)


@contextlib.contextmanager
def _unpacked(path: str, file: IO[bytes], scratch: Path, budget: Budget) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=scratch) as plain:
        with blaming(path, "its compressed data"):
            source = inflate(file)
            while data := source.read(CHUNK):
                budget.spend(len(data))
                plain.write(data)
        yield plain


class _Seekable(Stream):
    """A stream that passes over data instead of reading them."""

    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        super().__init__(file, budget)
        self._file = file

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ValueError("its data overlap with other data")
        self._position = self._file.seek(position)


def _index(path: str, file: IO[bytes], budget: Budget) -> Iterator[tuple[str, _Slice | str]]:
    for info in entries(path, _Seekable(file, budget), budget):
        name = posixpath.normpath(info.name)
        if info.issym():
            yield name, posixpath.normpath(posixpath.join(posixpath.dirname(name), info.linkname))
        elif info.islnk():
            yield name, posixpath.normpath(info.linkname)
        elif info.isreg() and info.sparse is None:
            yield name, _Slice(file, info.offset_data, info.size)
