"""The bytes behind a compressed file, read forwards in bounded memory.

Guarantees:
1. gzip, xz, bzip2 and zstd are told by their first bytes, not by names; anything else passes as it is.
2. No file makes a decompressor hold more than ``WINDOW_MAX``; several compressed streams in a row are one.

Not here: how much may come out (``stream``).
"""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Protocol

from agentfly.resources.errors import ResourceError

CHUNK = 1 << 20
WINDOW_MAX = 256 << 20
"""``xz -9`` needs 65 MiB and ``zstd --ultra`` 128 to unpack; a header may ask for gigabytes."""


class Reader(Protocol):
    """Whatever gives at most so many bytes, and none at its end."""

    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    def decompress(self, data: bytes, max_length: int) -> bytes: ...
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...


_MAGIC = {"gzip": b"\x1f\x8b", "xz": b"\xfd7zXZ\0", "bzip2": b"BZh", "zstd": b"\x28\xb5\x2f\xfd"}
MAGIC_MAX = 6
"""Bytes that tell a compression."""


def compression(start: bytes) -> str:
    """The compression that a file's first bytes show; empty for none."""
    return next((name for name, magic in _MAGIC.items() if start.startswith(magic)), "")


def inflate(source: Reader) -> Reader:
    """The bytes behind whatever compression the first ones show.

    Raises:
        ResourceError: it is zstd, and nothing here reads that.
    """
    start = b""
    while len(start) < MAGIC_MAX and (more := source.read(MAGIC_MAX - len(start))):
        start += more
    whole = _Prefixed(start, source)
    match compression(start):
        case "gzip":
            return _Inflated(whole, _Gzip)
        case "xz":
            return _Inflated(whole, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW_MAX))
        case "bzip2":
            return _Inflated(whole, bz2.BZ2Decompressor)
        case "zstd":
            return _Zstd(whole)
    return whole


class _Prefixed:
    """A reader with its first bytes put back."""

    def __init__(self, start: bytes, source: Reader) -> None:
        self._start, self._source = start, source

    def read(self, size: int, /) -> bytes:
        if self._start:
            data, self._start = self._start[:size], self._start[size:]
            return data
        return self._source.read(size)


class _Inflated:
    """A reader of one or more compressed streams in a row."""

    def __init__(self, source: Reader, make: Callable[[], _Decompressor]) -> None:
        self._source, self._make = source, make
        self._open = make()

    def read(self, size: int, /) -> bytes:
        while True:
            data = b""
            if self._open.eof:
                # Zeros pad the end of a stream.
                data = self._open.unused_data.lstrip(b"\0")
                while not data:
                    if not (data := self._source.read(CHUNK)):
                        return b""
                    data = data.lstrip(b"\0")
                self._open = self._make()
            elif self._open.needs_input and not (data := self._source.read(CHUNK)):
                raise EOFError("the compressed data end early")
            if found := self._open.decompress(data, size):
                return found


class _Gzip:
    """zlib's decompressor with the interface of lzma's."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


class _Zstd:
    """Builders write zstd by now, and Python reads it from 3.14 on only: hence a package, if it is there."""

    def __init__(self, source: Reader) -> None:
        try:
            import zstandard
        except ImportError:
            raise ResourceError(
                "image: a file is compressed with zstd, which needs the package zstandard",
                hints=["pip install 'agentfly[local]'", "zstd -d FILE, and name what it writes"],
            ) from None
        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX)
        self._reader = decompressor.stream_reader(source, read_size=CHUNK, read_across_frames=True)  # type: ignore[arg-type]

    def read(self, size: int, /) -> bytes:
        try:
            return self._reader.read(size)
        except self._error as error:
            raise ValueError(str(error)) from error
