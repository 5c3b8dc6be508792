"""Images in use by one runner; the numbers are those of the module's guarantees."""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.resources.errors import StartFailed
from agentfly.resources.images import cache as cache_module
from agentfly.resources.images.cache import ImageCache
from agentfly.resources.images.holds import ImageHolds
from tests.unit.resources.images.archives import docker_archive, file, tar


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ImageCache]:
    before = len(os.listdir("/proc/self/fd"))
    yield ImageCache(tmp_path / "images", 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def image(tmp_path: Path) -> str:
    return f"docker-archive:{docker_archive(tmp_path / 'i.tar', tar(file('a', '1')), env=['K=v'])}"


class Gate:
    """Unpacking that begins, then waits for the test, or for the end of interest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open, self.count = threading.Event(), threading.Event(), 0
        unpack = cache_module.unpack

        def gated(source, root, budget):  # type: ignore[no-untyped-def]
            self.count += 1
            self.begun.set()
            while not self.open.wait(0.01):
                budget.check()
            unpack(source, root, budget)

        monkeypatch.setattr(cache_module, "unpack", gated)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 5)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def in_use(cache: ImageCache) -> bool:
    (path,) = (path for _, _, path in cache._images())
    with cache_module._exclusive(path) as folder:
        return folder is None


# 1. once for all


async def test_many_starts_unpack_once_and_the_last_lets_go(cache, image, gate):
    holds = ImageHolds(cache)
    starts = [asyncio.create_task(holds.take(image)) for _ in range(20)]
    await gate.has_begun()
    gate.open.set()
    roots = await asyncio.gather(*starts)
    assert gate.count == 1
    assert {root.path for root in roots} == {roots[0].path}
    assert (Path(roots[0].path) / "a").read_text() == "1"
    assert roots[0].env == {"K": "v"}
    for root in roots:
        assert in_use(cache)
        holds.give_back(root)
    assert not in_use(cache)
    await holds.close()


async def test_folders_and_the_host_are_used_as_they_are(tmp_path):
    holds = ImageHolds(None)
    for text, expected in {
        "host": "host",
        str(tmp_path): str(tmp_path),
        f"dir:{tmp_path}": str(tmp_path),
    }.items():
        root = await holds.take(text)
        assert (root.path, dict(root.env)) == (expected, {})
        holds.give_back(root)
    await holds.close()


@pytest.mark.parametrize("text", ["python:3.12", "tar:/no/such", "packages:-/x"])
async def test_failure_is_a_failed_start_with_hints(cache, text):
    with pytest.raises(StartFailed, match=text) as caught:
        await ImageHolds(cache).take(text)
    assert caught.value.hints


async def test_an_image_without_a_cache_is_refused(image):
    with pytest.raises(StartFailed, match="needs an image cache"):
        await ImageHolds(None).take(image)


async def test_all_who_wait_get_the_failure_and_the_next_tries_anew(cache, image, tmp_path):
    holds, good = ImageHolds(cache), (tmp_path / "i.tar").read_bytes()
    (tmp_path / "i.tar").write_bytes(good[:3000])
    failed = await asyncio.gather(*(holds.take(image) for _ in range(5)), return_exceptions=True)
    assert {type(each) for each in failed} == {StartFailed}
    (tmp_path / "i.tar").write_bytes(good)
    holds.give_back(await holds.take(image))


# 2. the same content for life


async def test_a_changed_file_does_not_change_what_a_reference_means(cache, image, tmp_path):
    holds = ImageHolds(cache)
    first = await holds.take(image)
    docker_archive(tmp_path / "i.tar", tar(file("a", "2")))
    second = await holds.take(image)
    assert first.path == second.path
    holds.give_back(first)
    holds.give_back(second)
    third = await holds.take(image)
    assert third.path == first.path
    holds.give_back(third)
    for _, _, path in list(cache._images()):
        assert cache_module._evict(path)
    with pytest.raises(StartFailed, match=r"is now sha256:.*, and was sha256:"):
        await holds.take(image)
    fresh = ImageHolds(cache)
    root = await fresh.take(image)
    assert (Path(root.path) / "a").read_text() == "2"
    fresh.give_back(root)


# 3. nobody waits


async def test_work_ends_when_the_last_waiter_is_cancelled(cache, image, gate):
    holds = ImageHolds(cache)
    starts = [asyncio.create_task(holds.take(image)) for _ in range(3)]
    await gate.has_begun()
    starts[0].cancel()
    await asyncio.wait([starts[0]])
    assert list(cache.folder.glob("*.part"))
    starts[1].cancel()
    starts[2].cancel()
    await asyncio.wait(starts)
    assert all(start.cancelled() for start in starts)
    assert not list(cache.folder.glob("*.part"))
    gate.open.set()
    holds.give_back(await holds.take(image))
    assert gate.count == 2


async def test_an_image_that_comes_too_late_is_let_go(cache, image, monkeypatch):
    holds, hold, late, asked = ImageHolds(cache), ImageCache.hold, threading.Event(), threading.Event()
    holds.give_back(await holds.take(image))

    def slow(*arguments):  # type: ignore[no-untyped-def]
        asked.set()
        late.wait(5)
        return hold(*arguments)

    monkeypatch.setattr(ImageCache, "hold", slow)
    start = asyncio.create_task(holds.take(image))
    await asyncio.to_thread(asked.wait, 5)
    start.cancel()
    await asyncio.sleep(0)
    late.set()
    await asyncio.wait([start])
    assert start.cancelled()
    assert not in_use(cache)


async def test_work_that_has_not_begun_does_not_hold_up_a_cancel(cache, image, gate, tmp_path, monkeypatch):
    monkeypatch.setattr("agentfly.resources.images.holds.AT_ONCE", 1)
    holds = ImageHolds(cache)
    first = asyncio.create_task(holds.take(image))
    await gate.has_begun()
    (tmp_path / "t.tar").write_bytes(tar(file("b")))
    second = asyncio.create_task(holds.take(f"tar:{tmp_path}/t.tar"))
    await asyncio.sleep(0)
    second.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait([second])
    assert second.cancelled()
    assert not first.done()
    gate.open.set()
    holds.give_back(await first)
    assert gate.count == 1


async def test_close_ends_the_work(cache, image, gate):
    holds = ImageHolds(cache)
    start = asyncio.create_task(holds.take(image))
    await gate.has_begun()
    await holds.close()
    assert not list(cache.folder.glob("*.part"))
    with pytest.raises(StartFailed, match="nobody waits"):
        await start


async def test_time_is_bounded(cache, image, gate, monkeypatch):
    monkeypatch.setattr("agentfly.resources.images.holds.UNPACK_S", 0.1)
    with pytest.raises(StartFailed, match=r"was not unpacked in 0\.1 s"):
        await ImageHolds(cache).take(image)


async def test_a_cancel_at_any_moment_leaves_no_hold(cache, image):
    holds = ImageHolds(cache)
    holds.give_back(await holds.take(image))
    for turns in range(12):
        start = asyncio.create_task(holds.take(image))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        start.cancel()
        (ended,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(ended, BaseException):
            holds.give_back(ended)
        assert not in_use(cache)


def test_holds_outlive_an_event_loop(cache, image):
    holds = ImageHolds(cache)
    root = asyncio.run(holds.take(image))
    again = asyncio.run(holds.take(image))
    assert in_use(cache)
    holds.give_back(root)
    holds.give_back(again)
    assert not in_use(cache)
    asyncio.run(holds.close())


# 4. what ran


async def test_the_digest_is_logged(cache, image, caplog):
    with caplog.at_level(logging.INFO, "agentfly.resources.images.holds"):
        holds = ImageHolds(cache)
        root = await holds.take(image)
        holds.give_back(root)
    (line,) = caplog.messages
    assert line.startswith(f"image {image} is sha256:")
    assert line.endswith(root.path)


async def test_other_errors_pass(cache, image, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ImageCache, "hold", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await ImageHolds(cache).take(image)
