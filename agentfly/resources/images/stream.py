"""The entries of one tar, read once and forwards, from bytes that may be compressed and may be hostile.

Guarantees:
1. Every fault of an archive is a ``ResourceError`` that names the file and the entry; reading always ends.
2. What is read is bounded: bytes after decompression and entries by the image's ``Budget``, what a header
   holds in memory by ``HEADER_MAX``, a decompressor's memory by its window.

Not here: compression (``compression``), where entries go (``tree``).
"""

import contextlib
import errno
import hashlib
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.compression import CHUNK, Reader

HEADER_MAX = 256 << 10
"""Paths end at 4 KiB; the rest is for extended attributes and maps of sparse files."""
_DIGITS = re.compile(rb"\d{256}")
"""tarfile searches extended headers in time quadratic in runs of digits; no name has one as long as this."""
ENTRIES_MAX = 1_000_000
SHOWN_MAX = 200
FAULTS = (
    *(tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(ValueError, OverflowError, IndexError, RecursionError),
)
"""What tarfile, the decompressors and the file system raise for archives that are not what they should be."""


@dataclass
class Budget:
    """What is left for one image, and the means to end its unpacking.

    ``check`` is called for every chunk and entry; it raises when time is up or nobody wants the image.
    """

    bytes: int
    check: Callable[[], None]
    entries: int = ENTRIES_MAX
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.limit = self.bytes

    def spend(self, count: int) -> None:
        """Count bytes after decompression.

        Raises:
            DoesNotFit: the image is larger than the cache may be.
        """
        self.check()
        self.bytes -= count
        if self.bytes < 0:
            raise too_large(self.limit)

    def enter(self) -> None:
        """Count an entry; raises as `spend` does."""
        self.check()
        self.entries -= 1
        if self.entries < 0:
            raise DoesNotFit(f"has more than {ENTRIES_MAX:,} entries", hints=["use an image of fewer files"])


class DoesNotFit(ResourceError):
    """An image is larger than it may be. The text begins after the image's name."""


def too_large(limit: int) -> DoesNotFit:
    """The error of an image that can never be kept."""
    return DoesNotFit(
        f"has more than {limit / 2**30:.3g} GiB, the limit of the image cache (AGENTFLY_IMAGE_CACHE_GIB)",
        hints=["use a smaller image, or raise AGENTFLY_IMAGE_CACHE_GIB"],
    )


class Hashed:
    """A reader that hashes what passes."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._hash = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """``sha256:`` of everything read so far."""
        return f"sha256:{self._hash.hexdigest()}"


class Stream:
    """The bytes of a tar as tarfile wants a file, for headers alone; ``chunks`` is for data."""

    def __init__(self, source: Reader, budget: Budget) -> None:
        self._source, self._budget = source, budget
        self._position = 0
        self._header = HEADER_MAX

    def begin_header(self) -> None:
        """Allow tarfile as much memory as one header may have."""
        self._header = HEADER_MAX

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        self._header -= size
        if not 0 <= size <= HEADER_MAX or self._header < 0:
            raise ValueError(f"its header has more than {HEADER_MAX >> 10} KiB")
        data = b""
        while len(data) < size and (more := self._some(size - len(data))):
            data += more
        if _DIGITS.search(data):
            raise ValueError("its header has a number of more than 255 digits")
        return data

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ValueError("its data overlap with other data")
        for _ in self.chunks(position - self._position):
            pass

    def chunks(self, size: int) -> Iterator[bytes]:
        """The next so many bytes, in pieces."""
        while size > 0:
            data = self._some(min(size, CHUNK))
            if not data:
                raise EOFError("the archive ends within its data")
            size -= len(data)
            yield data

    def drain(self) -> None:
        """Read what follows the last entry, so that all is hashed."""
        while self._some(CHUNK):
            pass

    def _some(self, size: int) -> bytes:
        data = self._source.read(size)
        self._budget.spend(len(data))
        self._position += len(data)
        return data


@contextlib.contextmanager
def blaming(archive: str, entry: str) -> Iterator[None]:
    """Turn whatever an archive causes into an error that names it."""
    try:
        yield
    except FAULTS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some disk" if full else "make or download the file again"
        raise ResourceError(f"image: {archive}: {entry}: {reason}", hints=[remedy]) from error


def shown(name: str) -> str:
    """A name of an entry as text that cannot steer a terminal."""
    text = ascii(name)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def entries(archive: str, stream: Stream, budget: Budget) -> Iterator[tarfile.TarInfo]:
    """Every entry of a tar; its data are what ``stream.chunks`` gives from ``offset_data`` on.

    Args:
        archive: its name, for errors.
    """
    with blaming(archive, "the first entry"):
        # tarfile takes whatever reads, seeks and tells.
        tar = tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
        info = tar.next()
    while info is not None:
        budget.enter()
        yield info
        with blaming(archive, f"the entry after {shown(info.name)}"):
            stream.begin_header()
            stream.seek(tar.offset)
            info = _following(tar)


def _following(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next entry. Unlike ``next`` it takes no damaged header for the end, and keeps no list."""
    try:
        return tarfile.TarInfo.fromtarfile(tar)
    except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
        return None
