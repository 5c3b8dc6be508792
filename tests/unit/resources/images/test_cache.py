"""Images on disk: made once, kept, evicted; the numbers are those of the module's guarantees."""

import gzip
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentfly.resources.errors import ResourceError
from agentfly.resources.images import cache as module
from agentfly.resources.images.cache import Image, ImageCache
from agentfly.resources.images.reference import Reference
from tests.unit.resources.images.archives import digest, docker_archive, file, tar

LIMIT = 2 << 20


class Held:
    """A cache, and every image taken from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self._taken = folder, ImageCache(folder, LIMIT), list[Image]()

    def hold(self, reference: Reference, **options: object) -> Image:
        image = self.cache.hold(reference, options.pop("check", lambda: None), **options)  # type: ignore[arg-type]
        self._taken.append(image)
        return image

    def release(self) -> None:
        while self._taken:
            self._taken.pop().release()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path / "images")
    yield made
    made.release()


def tarball(path: Path, size: int = 0, text: str = "") -> Reference:
    path.write_bytes(tar(file("a", text), file("big", os.urandom(size))))
    return Reference("tar", str(path))


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "seen")


class Reads:
    """How often files were opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, opened = 0, module.opened

        def counting(*arguments):  # type: ignore[no-untyped-def]
            self.count += 1
            return opened(*arguments)

        monkeypatch.setattr(module, "opened", counting)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


# 1. as a whole or not at all


def test_an_image_is_unpacked_once_and_shared(held, tmp_path, reads):
    reference = Reference(
        "docker-archive", str(docker_archive(tmp_path / "i.tar", tar(file("a", "1")), env=["K=v"]))
    )
    first, second = held.hold(reference), held.hold(reference)
    assert first.root == second.root
    assert (Path(first.root) / "a").read_text() == "1"
    assert first.env == second.env == {"K": "v"}
    assert reads.count == 1
    assert kept(held.folder) == [first.digest.removeprefix("sha256:")]
    assert held.cache.usage() == (1, 2 * 4096)  # a folder and a file


def test_threads_at_once_unpack_once(held, tmp_path, monkeypatch):
    reference, calls, unpack = tarball(tmp_path / "t.tar"), [], module.unpack

    def slow(*arguments):  # type: ignore[no-untyped-def]
        calls.append(1)
        time.sleep(0.2)
        unpack(*arguments)

    monkeypatch.setattr(module, "unpack", slow)
    with ThreadPoolExecutor(8) as pool:
        roots = {image.root for image in pool.map(lambda _: held.hold(reference), range(8))}
    assert len(roots) == len(calls) == 1
    assert kept(held.folder) == [Path(roots.pop()).parent.name]


PROGRAM = """
import sys, time
from pathlib import Path
from agentfly.resources.images import cache
from agentfly.resources.images.reference import Reference
unpack = cache.unpack
def told(*arguments):
    print("unpacks", flush=True)
    if sys.argv[3] == "hangs":
        Path(arguments[1], "half").touch()
        time.sleep(60)
    time.sleep(0.3)
    unpack(*arguments)
cache.unpack = told
image = cache.ImageCache(Path(sys.argv[1]), 1 << 21).hold(Reference("tar", sys.argv[2]), lambda: None)
print("holds", flush=True)
sys.stdin.read()
"""


def process(folder: Path, reference: Reference, how: str = "") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), reference.path, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_at_once_unpack_once(tmp_path):
    reference = tarball(tmp_path / "t.tar")
    both = [process(tmp_path / "images", reference) for _ in range(2)]
    said = [each.communicate("")[0].split() for each in both]
    assert sorted(said) == [["holds"], ["unpacks", "holds"]]


def test_a_killed_ones_half_is_swept_and_made_anew(held, tmp_path):
    reference = tarball(tmp_path / "t.tar", text="1")
    with process(held.folder, reference, "hangs") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "unpacks\n"
        while not list(held.folder.glob("*.part/root/half")):
            time.sleep(0.01)
        with pytest.raises(ResourceError, match="enough"):  # while it lives it is waited for
            held.hold(reference, check=_after(0.2))
        assert list(held.folder.glob("*.part/root/half"))
        killed.send_signal(signal.SIGKILL)
    image = held.hold(reference)
    assert sorted(os.listdir(image.root)) == ["a", "big"]
    assert kept(held.folder) == [Path(image.root).parent.name]


def _after(seconds: float):  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise ResourceError("enough")

    return check


@pytest.mark.parametrize("fault", [ResourceError("enough"), KeyboardInterrupt()])
def test_failure_leaves_nothing(held, tmp_path, fault):
    calls = iter(range(1000))

    def check() -> None:
        if next(calls) == 6:
            raise fault

    with pytest.raises(type(fault)):
        held.hold(tarball(tmp_path / "t.tar", 15 << 15), check=check)
    assert kept(held.folder) == []
    assert not list(held.folder.glob("seen/*"))


def test_a_damaged_archive_leaves_nothing(held, tmp_path):
    (tmp_path / "t.tar").write_bytes(tar(file("a", "1" * 5000))[:2000])
    with pytest.raises(ResourceError, match="entry 'a': the archive ends within its data"):
        held.hold(Reference("tar", str(tmp_path / "t.tar")))
    assert kept(held.folder) == []


def test_an_image_that_another_just_made_is_taken(held, tmp_path, monkeypatch):
    reference, take, misses = tarball(tmp_path / "t.tar"), ImageCache._take, iter(range(3))
    first = held.hold(reference)
    late = lambda *arguments: take(*arguments) if next(misses, None) is None else None  # noqa: E731
    monkeypatch.setattr(ImageCache, "_take", late)
    assert held.hold(reference).root == first.root
    assert not list(held.folder.glob("*.part"))


# 2. the limit


def test_the_least_recently_used_goes_first(held, tmp_path):
    images = [held.hold(tarball(tmp_path / f"{n}.tar", 15 << 15)) for n in range(4)]
    roots = [Path(image.root).parent for image in images]
    for age, root in zip((40, 10, 30, 20), roots, strict=True):
        os.utime(root, (time.time() - age, time.time() - age))
    held.release()
    held.hold(tarball(tmp_path / "new.tar", 25 << 15))
    assert [root.exists() for root in roots] == [False, True, False, True]


def test_use_makes_an_image_recent(held, tmp_path):
    references = [tarball(tmp_path / f"{n}.tar", 25 << 15) for n in range(2)]
    roots = [Path(held.hold(reference).root).parent for reference in references]
    for root in roots:
        os.utime(root, (1, 1))
    held.release()
    held.hold(references[0])
    held.release()
    held.hold(tarball(tmp_path / "new.tar", 25 << 15))
    assert [root.exists() for root in roots] == [True, False]


def test_an_image_in_use_stays_in_this_process_and_in_others(held, tmp_path):
    ours = held.hold(tarball(tmp_path / "ours.tar", 25 << 15))
    other = tarball(tmp_path / "theirs.tar", 25 << 15)
    with process(held.folder, other) as theirs:
        assert theirs.stdout is not None
        assert [theirs.stdout.readline() for _ in range(2)] == ["unpacks\n", "holds\n"]
        with pytest.raises(ResourceError) as caught:
            held.hold(tarball(tmp_path / "new.tar", 25 << 15))
        assert f"image: tar:{tmp_path}/new.tar has 0.0" in str(caught.value)
        assert "of its limit of 0.00195 GiB, 0.00153 are images in use" in str(caught.value)
        assert "AGENTFLY_IMAGE_CACHE_GIB" in caught.value.hints[0]
        assert len(kept(held.folder)) == 2
        theirs.kill()
    held.hold(tarball(tmp_path / "new.tar", 25 << 15))
    assert Path(ours.root).exists()
    assert len(kept(held.folder)) == 2


def test_an_image_that_is_evicted_while_it_is_taken_is_made_again(held, tmp_path, monkeypatch):
    reference = tarball(tmp_path / "t.tar", text="1")
    first = held.hold(reference)
    held.release()
    lock, evict = module.fcntl.flock, [Path(first.root).parent]

    def late(fd: int, how: int) -> None:
        if how & module.fcntl.LOCK_SH and evict:
            evict.pop().rename(tmp_path / "elsewhere")
        lock(fd, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    assert (Path(held.hold(reference).root) / "a").read_text() == "1"
    assert Path(first.root).exists()


def test_an_image_above_the_limit_is_refused_and_evicts_nothing(held, tmp_path):
    small = held.hold(tarball(tmp_path / "small.tar", 1 << 15))
    held.release()
    many = tar(*(file(f"{n:05}", "x") for n in range(600)))  # 0.6 MiB of tar, 2.4 of blocks
    (tmp_path / "many.tar").write_bytes(many)
    for reference in (
        tarball(tmp_path / "large.tar", 65 << 15),
        Reference("tar", str(tmp_path / "many.tar")),
    ):
        with pytest.raises(
            ResourceError, match=r"\.tar has more than 0\.00195 GiB, the limit of the image cache"
        ):
            held.hold(reference)
    assert kept(held.folder) == [Path(small.root).parent.name]


def test_room_is_made_for_one_at_a_time(held, tmp_path, monkeypatch):
    make, within, most = ImageCache._make_room, [], []

    def slow(*arguments):  # type: ignore[no-untyped-def]
        within.append(1)
        most.append(len(within))
        time.sleep(0.1)
        make(*arguments)
        within.pop()

    monkeypatch.setattr(ImageCache, "_make_room", slow)
    references = [tarball(tmp_path / f"{n}.tar", 25 << 15) for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for image in pool.map(
            lambda reference: ImageCache(held.folder, LIMIT).hold(reference, _after(30)), references[:2]
        ):
            image.release()
    assert most == [1, 1]
    with pytest.raises(ResourceError, match="enough"), module._alone_in(held.folder, lambda: None):
        held.hold(references[2], check=_after(0.3))


def test_eviction_and_use_at_once_never_take_an_image_from_its_user(held, tmp_path):
    """Threads take images of which three fit and five are wanted."""
    references = [tarball(tmp_path / f"{n}.tar", 20 << 15, str(n)) for n in range(4)]
    wrong: list[str] = []

    def use(number: int) -> None:
        for turn in range(6):
            which = (number + turn) % 4
            try:
                image = ImageCache(held.folder, LIMIT).hold(references[which], lambda: None)
            except ResourceError as error:
                if "images in use" not in str(error):
                    wrong.append(str(error))
                continue
            if (Path(image.root) / "a").read_text() != str(which) or not (Path(image.root) / "big").exists():
                wrong.append(f"{which} is not whole")
            image.release()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not list(held.folder.glob("*.part"))
    assert held.cache.usage()[1] <= LIMIT


def test_a_compressed_archive_has_the_limit_twice_once_as_it_is_and_once_unpacked(held, tmp_path):
    path = docker_archive(tmp_path / "i.tar", tar(file("a", os.urandom(40 << 15))))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert Path(held.hold(Reference("docker-archive", str(path))).root, "a").stat().st_size == 40 << 15


def test_a_cache_that_cannot_be_written_says_so(held, tmp_path):
    (tmp_path / "images").write_text("")
    with pytest.raises(ResourceError, match=f"t.tar: cannot be kept in {tmp_path}/images: ") as caught:
        held.hold(tarball(tmp_path / "t.tar"))
    assert "XDG_CACHE_HOME" in caught.value.hints[0]


# 3. files that have not changed


@pytest.mark.parametrize("change", ["content", "time", "replaced", "content of the same size and time"])
def test_a_changed_file_is_read_again(held, tmp_path, reads, change):
    path = tmp_path / "t.tar"
    first = held.hold(tarball(path, text="1"))
    if change == "content":
        path.write_bytes(tar(file("a", "2"), file("big", "")))
    elif change == "time":
        os.utime(path, (1, 1))
    elif change != "replaced":
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(b"1" + b"\0" * 511, b"2" + b"\0" * 511))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
    else:
        tarball(tmp_path / "other.tar", text="2")
        os.utime(tmp_path / "other.tar", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        (tmp_path / "other.tar").rename(path)
    second = held.hold(Reference("tar", str(path)))
    assert reads.count == 2
    assert second.digest == digest(path.read_bytes())
    assert (first.root == second.root) == (change == "time")


def test_an_evicted_image_is_made_again(held, tmp_path, reads):
    reference = tarball(tmp_path / "t.tar", 40 << 15)
    first = held.hold(reference)
    held.release()
    held.hold(tarball(tmp_path / "u.tar", 40 << 15))
    assert not Path(first.root).exists()
    held.release()
    assert held.hold(reference).digest == first.digest
    assert reads.count == 3


def test_an_image_must_be_the_one_that_was_used_before(held, tmp_path):
    path = tmp_path / "t.tar"
    first = held.hold(tarball(path, text="1"))
    reference = tarball(path, text="2")
    assert held.hold(reference, digest=first.digest).root == first.root
    with pytest.raises(ResourceError, match=f"is now {digest(path.read_bytes())}, and was sha256:0"):
        held.hold(reference, digest="sha256:0")


# 4. nobody else


def test_nobody_else_gets_in(held, tmp_path):
    held.folder.mkdir(mode=0o777)
    held.folder.chmod(0o777)
    held.hold(tarball(tmp_path / "t.tar"))
    assert stat.S_IMODE(held.folder.stat().st_mode) == 0o700


def test_a_damaged_record_is_an_error_with_its_remedy(held, tmp_path):
    image = held.hold(tarball(tmp_path / "t.tar"))
    home = Path(image.root).parent
    (home / "image.json").write_text("")
    with pytest.raises(ResourceError, match="is damaged") as caught:
        held.hold(Reference("tar", str(tmp_path / "t.tar")))
    assert caught.value.hints == (f"rm -rf {home}",)
