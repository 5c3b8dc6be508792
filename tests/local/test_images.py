"""Sandboxes of images of every form, shared by all that run from them; links that lead out."""

import asyncio
import contextlib
import gzip
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.api import ResourcePool
from agentfly.local.paths import image_cache
from agentfly.local.plane import data_plane
from agentfly.resources.errors import StartFailed
from agentfly.resources.images.cache import ImageCache
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from tests.local.boxes import box
from tests.local.machine import footprint
from tests.unit.resources.images.archives import (
    Entry,
    Layout,
    docker_archive,
    file,
    folder,
    hard,
    hide,
    link,
    oci_layout,
    opaque,
    tar,
)

ENV = ["GREETING=of the image", "PATH=/usr/local/bin:/bin"]


def shell() -> list[Entry]:
    """This machine's /bin/sh, cat and stat, with the libraries that they need."""
    entries = [folder("bin"), folder("etc"), file("etc/passwd", "root:x:0:0::/:/bin/sh\n")]
    wanted = ["/bin/sh", "/bin/cat", "/bin/stat", "/bin/ls"]
    for program in list(wanted):
        linked = subprocess.check_output(["ldd", program], text=True).split()
        wanted += [word for word in linked if word.startswith("/") and word not in wanted]
    for path in wanted:
        entries.append(file(path[1:], Path(path).read_bytes(), 0o755))
    return entries


@pytest.fixture(scope="module")
def layers() -> list[bytes]:
    lower = [
        *shell(),
        *(
            file("app/config", "old"),
            file("app/gone", "x"),
            file("data/a", "x"),
            file("tool", "tool", 0o4755),
        ),
        *(link("usr/local/bin", "/bin"), folder("shut", 0o700)),
    ]
    upper = [
        *(hide("app/gone"), file("app/config", "new"), hard("app/linked", "tool")),
        *(opaque("data"), file("data/b", "y"), file("shut/in", "z")),
    ]
    return [tar(*lower), tar(*upper)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ImageCache:
    return ImageCache(tmp_path_factory.mktemp("cache") / "images", 1 << 30)


@pytest.fixture(scope="module")
def runner(run_dir: Path, sandboxd: Path, cache: ImageCache) -> Iterator[BubblewrapRunner]:
    made = BubblewrapRunner(run_dir, sandboxd, images=cache)
    if (reason := made.check()) is not None:
        pytest.fail(reason)
    yield made
    asyncio.run(made.close())


@pytest.mark.parametrize("form", ["oci", "oci-archive", "docker-archive", "tar", "tar.gz", "dir"])
async def test_a_sandbox_starts_from_every_form(
    runner: BubblewrapRunner, layers: list[bytes], tmp_path: Path, form: str
) -> None:
    match form:
        case "oci":
            image = f"oci:{oci_layout(tmp_path / 'layout', *layers, env=ENV)}"
        case "oci-archive":
            layout = Layout(tmp_path / "layout")
            layout.index(layout.image(layers, env=ENV))
            image = f"oci-archive:{layout.archive(tmp_path / 'i.tar')}"
        case "docker-archive":
            image = f"docker-archive:{docker_archive(tmp_path / 'i.tar', *layers, env=ENV, tags=['a:1'])}:a:1"
        case _:
            plain = tar(*shell(), file("app/config", "new"), file("app/linked", "tool", 0o4755))
            (tmp_path / "root.tar").write_bytes(gzip.compress(plain) if form == "tar.gz" else plain)
            image = f"tar:{tmp_path}/root.tar"
    if form == "dir":
        (tmp_path / "root").mkdir()
        unpack = ["tar", "-C", str(tmp_path / "root"), "-xpf", str(tmp_path / "root.tar")]
        await asyncio.to_thread(subprocess.run, unpack, check=True)
        image = f"dir:{tmp_path}/root"
    spec = ContainerSpec(image=image, workdir="/app", env={"OWN": "of the spec"})
    async with box(runner, spec) as made:
        assert await made.sh("pwd; cat config linked; echo; stat -c %a linked; echo $OWN") == (
            "/app\nnewtool\n4755\nof the spec\n"
        )
        if form not in ("tar", "tar.gz", "dir"):
            assert await made.sh("ls . /data /shut; echo $GREETING") == (
                ".:\nconfig\nlinked\n\n/data:\nb\n\n/shut:\nin\nof the image\n"
            )
        await made.sh("echo changed > config; echo left > /left")
        await made.next_lease()
        assert (await made.client.exec("cat /left")).exit_code == 1
        assert await made.sh("cat config") == "new"


async def test_the_specs_environment_is_above_the_images(
    runner: BubblewrapRunner, layers: list[bytes], tmp_path: Path
) -> None:
    image = f"oci:{oci_layout(tmp_path / 'layout', *layers, env=ENV)}"
    async with box(runner, ContainerSpec(image=image, env={"GREETING": "hello"})) as made:
        assert await made.sh("pwd; echo $GREETING $PATH") == "/workspace\nhello /usr/local/bin:/bin\n"


async def test_many_sandboxes_share_one_copy(
    runner: BubblewrapRunner, cache: ImageCache, layers: list[bytes], tmp_path: Path
) -> None:
    spec = ContainerSpec(image=f"oci:{oci_layout(tmp_path / 'layout', *layers, env=ENV)}", workdir="/app")
    async with contextlib.AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(box(runner, spec)) for _ in range(8)]
        (root,) = {made.member.handle.image.path for made in boxes}  # type: ignore[attr-defined]
        inode = (Path(root) / "app/config").stat().st_ino
        for made in boxes:
            assert await made.sh("stat -c %i /app/config") == f"{inode}\n"
        await boxes[0].sh("echo mine > config")
        assert await boxes[1].sh("cat config") == "new"
        assert (Path(root) / "app/config").read_text() == "new"
        assert held(cache) == [str(Path(root).parent)]
    assert held(cache) == []


def held(cache: ImageCache) -> list[str]:
    """What this process has open in the cache."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(entry.readlink()))
    return [path for path in found if path.startswith(str(cache.folder))]


async def test_a_run_keeps_its_images_in_the_cache(
    layers: list[bytes], tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_dir.with_name("x")))
    path = docker_archive(tmp_path / "i.tar", *layers, env=ENV)
    spec = {"type": "Container", "container": {"image": f"docker-archive:{path}"}, "capacity": {"max": 2}}
    pool = ResourcePool.model_validate({"metadata": {"name": "box"}, "spec": spec})
    async with data_plane([pool], logs_in=tmp_path, inference_python=path, start_timeout_s=1) as plane:
        leases = [await plane.engine.acquire("box", "o", key=key, deadline=30) for key in ("a", "b")]
        for lease in leases:
            assert (await lease.sandbox.exec("cat /app/config; echo $GREETING")).stdout == "newof the image\n"
            await lease.release()
    assert image_cache().usage()[0] == 1


async def test_a_failed_image_leaves_nothing(
    runner: BubblewrapRunner, cache: ImageCache, layers: list[bytes], tmp_path: Path, run_dir: Path
) -> None:
    path = docker_archive(tmp_path / "i.tar", *layers)
    path.write_bytes(path.read_bytes()[:-20000])
    await runner.stop(await runner.start(ContainerSpec(), "warm"))
    await runner.close()
    before = footprint(run_dir)
    for image in (f"docker-archive:{path}", "python:3.12"):
        with pytest.raises(StartFailed, match="image: ") as caught:
            await runner.start(ContainerSpec(image=image), "m-1")
        assert caught.value.hints
    await runner.close()
    assert footprint(run_dir) == before
    assert not cache.folder.exists() or not list(cache.folder.glob("*.part"))


@pytest.mark.parametrize("place", [".agentfly", "proc", "dev", "tmp", "run", "workspace", "etc/resolv.conf"])
@pytest.mark.parametrize("up", ["/", "../", "../../"])
async def test_a_link_in_an_image_leads_nowhere(
    runner: BubblewrapRunner, tmp_path: Path, place: str, up: str
) -> None:
    """bubblewrap has this machine's root at /oldroot while it makes the sandbox."""
    victim = tmp_path / "victim"
    victim.mkdir()
    root = tmp_path / "root"
    (root / place).parent.mkdir(parents=True)
    (root / place).symlink_to(f"{up}oldroot{victim}{'/made' if '/' in place else ''}")
    with pytest.raises(StartFailed, match=f"has a link at /{place}") as caught:
        await runner.start(ContainerSpec(image=str(root), network=True), "m-1")
    assert caught.value.hints
    assert os.listdir(victim) == []


async def test_a_workdir_may_be_a_link_in_the_image(runner: BubblewrapRunner, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(
        tar(*shell(), link("app", "/srv/app"), file("srv/app/file", "x"), link("etc/resolv.conf", "../run/r"))
    )
    spec = ContainerSpec(image=f"tar:{tmp_path}/root.tar", workdir="/app", network=True)
    async with box(runner, spec) as made:
        assert await made.sh("cat file") == "x"
        await made.sh("cat /etc/resolv.conf")
