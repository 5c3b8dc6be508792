"""Archives that may be damaged, hostile or endless; the numbers are those of the module's guarantees."""

import bz2
import contextlib
import gzip
import io
import lzma
import random
import struct
import tarfile
import tempfile

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentfly.resources.errors import ResourceError
from agentfly.resources.images import compression
from agentfly.resources.images.compression import inflate
from agentfly.resources.images.layers import Layer, Source, unpack
from agentfly.resources.images.stream import Budget, Stream, entries
from tests.unit.resources.images.archives import digest, file, folder, tar
from tests.unit.resources.images.test_tree import Reading

PLAIN = tar(folder("a"), file("a/b", "content" * 300), file("c", b"\0" * 5000))
PACKED = {
    "plain": PLAIN,
    "gzip": gzip.compress(PLAIN),
    "xz": lzma.compress(PLAIN),
    "bzip2": bz2.compress(PLAIN),
    "zstd": zstandard.ZstdCompressor().compress(PLAIN),
}


def read(data: bytes, limit: int = 1 << 26) -> list[str]:
    """Names of all entries, with their data read."""
    budget = Budget(limit, lambda: None)
    stream = Stream(inflate(Reading(data)), budget)
    names = []
    for info in entries("file", stream, budget):
        names.append(info.name)
        if info.isreg() and not info.sparse:
            stream.seek(info.offset_data)
            for _ in stream.chunks(info.size):
                pass
    stream.drain()
    return names


def refused(data: bytes, tmp_path, **limits: int) -> str:
    """The error of an image of this one layer."""
    layer = Layer("file", lambda: io.BytesIO(data))
    with pytest.raises(ResourceError) as caught:
        unpack(
            Source("sha256:0", (layer,)), str(tmp_path), Budget(limits.get("limit", 1 << 26), lambda: None)
        )
    return caught.value.render()


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED.keys())
def test_every_compression_is_told_by_its_first_bytes(packed):
    assert read(packed) == ["a", "a/b", "c"]


def test_several_compressed_streams_are_one():
    halves = PLAIN[:700], PLAIN[700:]
    assert read(gzip.compress(halves[0]) + gzip.compress(halves[1]) + b"\0" * 512) == ["a", "a/b", "c"]
    assert read(lzma.compress(halves[0]) + lzma.compress(halves[1])) == ["a", "a/b", "c"]


def test_zstd_without_its_package_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ResourceError) as caught:
        read(PACKED["zstd"])
    assert "pip install 'agentfly[local]'" in caught.value.hints


# 1. faults


@pytest.mark.parametrize("name", PACKED)
def test_an_archive_that_ends_early_is_refused(name, tmp_path):
    packed = PACKED[name]
    for size in sorted({1, 7, 100, 513, 1500, len(packed) // 2, len(packed) - 200}):
        if 0 < size < len(packed) and not (name == "plain" and size > 9000):  # there the end marks begin
            assert refused(packed[:size], tmp_path / f"{size}").startswith("image: file: ")


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    damaged = bytearray(tar(file("a", "1"), file("b", "2")))
    damaged[1024 + 100] ^= 1
    assert refused(bytes(damaged), tmp_path).startswith("image: file: the entry after 'a': bad checksum")


def negative_size() -> bytes:
    header = bytearray(tar(file("a", "1"))[:512])
    header[124:136] = struct.pack(">BBBBq", 255, 255, 255, 255, -1024)
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"\0" * 4096


def extended(*records: bytes, type: bytes = b"x", size: int | None = None) -> bytes:
    """An extended header with any content, before a file."""
    data = b"".join(records)
    header = tarfile.TarInfo("header")
    header.type, header.size = type, len(data) if size is None else size
    return header.tobuf() + data + b"\0" * (-len(data) % 512)


HOSTILE = {
    "empty": b"",
    "no tar": b"hello world" * 100,
    "negative size": negative_size(),
    "header of a gigabyte": extended(b"", size=1 << 30),
    "header of a megabyte": extended(b"x" * (1 << 20)) + PLAIN,
    "headers of a megabyte": extended(b"x" * 50_000) * 20 + PLAIN,
    "long name of a gigabyte": extended(b"", type=b"L", size=1 << 30),
    "headers in headers": extended(b"11 a=b\n") * 600 + PLAIN,
    "global headers in headers": extended(b"11 a=b\n", type=b"g") * 600 + PLAIN,
    "digits": extended(b"1" * 200_000) + PLAIN,
    "record of no length": extended(b"0 a=b\n") + PLAIN,
    "size that is no number": extended(b"15 size=later!\n") + tar(file("a", "x")),
    "size beyond the end": extended(b"19 size=1000000000\n") + tar(file("a", "x")),
    "time that is no number": extended(b"13 mtime=nan\n") + tar(file("a")),
    "sparse map of nothing": extended(b"22 GNU.sparse.major=1\n", b"22 GNU.sparse.minor=0\n")
    + tar(file("a", "x\n")),
    "sparse map that overlaps": extended(b"28 GNU.sparse.map=0,900,0,9\n", b"22 GNU.sparse.size=900\n")
    + tar(file("a", "x" * 600)),
    "sparse map before the start": extended(b"25 GNU.sparse.map=-512,5\n", b"22 GNU.sparse.size=900\n")
    + tar(file("a", "x" * 600)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused_at_once(data, tmp_path):
    assert refused(data, tmp_path).startswith("image: file: ")


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(PACKED)))
def test_damage_is_an_error_or_nothing(chance: random.Random, name: str) -> None:
    data = bytearray(PACKED[name])
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(min(len(data), 2048))
        data[place] = chance.randrange(256)
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    layer = Layer("file", lambda: io.BytesIO(data))
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(ResourceError):
        unpack(Source("sha256:0", (layer,)), root, Budget(1 << 26, lambda: None))


# 2. bounds


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstandard.ZstdCompressor().compress])
def test_a_bomb_ends_at_the_limit(pack, tmp_path):
    bomb = pack(tar(file("zeros", b"\0" * (12 << 20))))
    assert len(bomb) < 1 << 20
    assert "has more than 0.000977 GiB, the limit of the image cache (AGENTFLY_IMAGE_CACHE_GIB)" in refused(
        bomb, tmp_path, limit=1 << 20
    )
    assert (tmp_path / "zeros").stat().st_size <= 1 << 20


def test_a_bomb_after_the_last_entry_ends_at_the_limit(tmp_path):
    bomb = gzip.compress(tar(file("a")) + b"\0" * (12 << 20))
    assert "the limit of the image cache" in refused(bomb, tmp_path, limit=1 << 20)


def test_entries_are_counted(monkeypatch):
    budget = Budget(1 << 20, lambda: None, entries=3)
    stream = Stream(Reading(tar(*(file(f"{n}") for n in range(5)))), budget)
    with pytest.raises(ResourceError, match="has more than 1,000,000 entries"):
        list(entries("file", stream, budget))


def test_headers_have_their_limit_each():
    assert len(read(tar(*(file(f"{n}") for n in range(2000))))) == 2000


def test_a_window_of_gigabytes_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(compression, "WINDOW_MAX", 1 << 20)
    for packed in (PACKED["xz"], zstandard.ZstdCompressor(level=19).compress(PLAIN * 300)):
        assert refused(packed, tmp_path).startswith("image: file: ")


def test_time_and_interest_are_asked_for_all_along(tmp_path):
    class Over(Exception):
        pass

    left = [20]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Over

    layer = Layer("file", lambda: io.BytesIO(gzip.compress(tar(file("zeros", b"\0" * (1 << 25))))))
    with pytest.raises(Over):
        unpack(Source("sha256:0", (layer,)), str(tmp_path), Budget(1 << 40, check))


def test_digests_are_of_all_that_was_read(tmp_path):
    packed = gzip.compress(PLAIN) + b"\0" * 100
    right = Layer("file", lambda: io.BytesIO(packed), digest(packed), digest(PLAIN))
    unpack(Source("sha256:0", (right,)), str(tmp_path), Budget(1 << 20, lambda: None))
    for wrong in (
        Layer("file", right.open, digest(b""), digest(PLAIN)),
        Layer("file", right.open, digest(packed), digest(b"")),
    ):
        with pytest.raises(ResourceError, match=r"file: has the digest .*, and should have sha256:e3b0"):
            unpack(Source("sha256:0", (wrong,)), str(tmp_path), Budget(1 << 20, lambda: None))
