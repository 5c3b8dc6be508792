"""Which engine is taken, with command lines that only pretend; and what an image is made of."""

import asyncio
import io
import json
import os
import shlex
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import ResourceError, StartFailed
from agentfly.resources.images.reference import Reference
from agentfly.resources.runners.container import cli as container_cli
from agentfly.resources.runners.container import engine as container_cli_engine
from agentfly.resources.runners.container.attached import reason
from agentfly.resources.runners.container.cli import ContainerCLIRunner, remove_left
from agentfly.resources.runners.container.command import Engine
from agentfly.resources.runners.container.engine import (
    CallFailed,
    call,
    call_async,
    candidates,
    docker_archive,
    find,
)
from agentfly.resources.runners.container.images import Images, Once, digest_of, located
from agentfly.resources.spec import ContainerSpec, PoolSpec

SANDBOXD = Path("/bin/true")


def pretend(folder: Path, name: str, body: str) -> list[str]:
    """A command that notes how it was called, and then does this."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(path))}.calls\n{body}\n')
    path.chmod(0o755)
    return [str(path)]


def calls(command: list[str]) -> list[str]:
    return Path(f"{command[0]}.calls").read_text().splitlines()


# 1. Which one.


def test_order_is_docker_podman_nerdctl_unless_one_is_named() -> None:
    assert candidates({}) == [["docker"], ["podman"], ["nerdctl"]]
    assert candidates({"AGENTFLY_CONTAINER_CLI": "docker --context 'a b'"}) == [
        ["docker", "--context", "a b"]
    ]


def test_first_that_works_is_taken_and_the_others_say_why_not(tmp_path: Path) -> None:
    dead = pretend(tmp_path, "docker", 'echo "warning" >&2; echo "Cannot connect to the daemon" >&2; exit 1')
    works = pretend(tmp_path, "podman", "exit 0")
    found = find(SANDBOXD, [dead, ["no-such-cli"], works])
    assert found.engine == Engine((works[0],))
    assert found.refused == ((dead[0], "Cannot connect to the daemon"), ("no-such-cli", "not found on PATH"))
    assert calls(dead) == ["version"]


def test_probe_image_is_loaded_only_where_it_is_missing(tmp_path: Path) -> None:
    command = pretend(tmp_path, "docker", 'case "$1" in image) exit 1;; load) cat > /dev/null;; esac')
    find(SANDBOXD, [command])
    assert calls(command)[:3] == ["version", "image inspect localhost/agentfly-probe:1", "load"]
    there = pretend(tmp_path, "podman", "exit 0")
    find(SANDBOXD, [there])
    assert "load" not in calls(there)


# 2. Flags by trying.


def test_limits_of_this_process_are_given_where_the_engine_raises_them(tmp_path: Path) -> None:
    body = 'case "$*" in run*--ulimit*) ;; run*) echo "Error: setting rlimit 7" >&2; exit 126;; esac'
    found = find(SANDBOXD, [pretend(tmp_path, "podman", body)])
    assert found.engine is not None
    assert found.engine.limits
    assert found.engine.flags[::2] == ("--ulimit", "--ulimit")
    assert [value.split("=")[0] for value in found.engine.flags[1::2]] == ["nofile", "nproc"]


def test_engine_without_control_groups_works_without_limits(tmp_path: Path) -> None:
    body = 'case "$*" in run*--memory*) echo "no cgroup" >&2; exit 1;; esac'
    found = find(SANDBOXD, [pretend(tmp_path, "podman", body)])
    assert found.engine is not None
    assert not found.engine.limits


def test_disk_is_bounded_only_where_that_works(tmp_path: Path) -> None:
    body = 'case "$*" in *--storage-opt*) exit 1;; esac'
    refuses = find(SANDBOXD, [pretend(tmp_path, "docker", body)])
    takes = find(SANDBOXD, [pretend(tmp_path, "podman", "exit 0")])
    assert refuses.engine is not None
    assert takes.engine is not None
    assert (refuses.engine.disk, takes.engine.disk) == (False, True)


def test_reason_is_that_of_the_first_attempt(tmp_path: Path) -> None:
    body = 'case "$*" in run*crun*) echo "no crun" >&2; exit 1;; run*) echo "no memory" >&2; exit 1;; esac'
    command = pretend(tmp_path, "docker", body)
    assert find(SANDBOXD, [command]).refused == ((command[0], "no memory"),)


def test_engine_that_hangs_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_cli_engine, "PROBE_S", 0.2)
    command = pretend(tmp_path, "docker", 'case "$1" in run) exec sleep 60;; esac')
    assert find(SANDBOXD, [command]).refused == ((command[0], "no answer in 0.2 s"),)
    assert sum(line.startswith("run") for line in calls(command)) == 1


# 3. Deadlines and reasons.


def hanging(folder: Path) -> list[str]:
    return pretend(folder, "docker", f"echo $$ > {folder}/pid; exec sleep 60")


def lives(folder: Path) -> bool:
    """Whether the command that hangs is there."""
    pid = folder / "pid"
    return pid.exists() and Path("/proc", pid.read_text().strip() or "none").exists()


def test_command_that_hangs_is_killed(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=r"no answer in 0\.2 s"):
        call(hanging(tmp_path), "version", deadline=0.2)
    assert not lives(tmp_path)


async def test_command_that_hangs_in_a_loop_is_killed(tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=r"no answer in 0\.2 s"):
        await call_async(hanging(tmp_path), "version", deadline=0.2)
    assert not lives(tmp_path)


async def test_cancelled_call_leaves_no_process(tmp_path: Path) -> None:
    waiting = asyncio.create_task(call_async(hanging(tmp_path), "pull", deadline=60))
    while not lives(tmp_path):  # noqa: ASYNC110 -- another process's doing
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not lives(tmp_path)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("docker: Error response from daemon: no space.\nSee 'docker run --help'.\n", "no space."),
        ("Error: initializing source: refused\n", "initializing source: refused"),
        ("one\ntwo\n\nRun 'docker run --help' for more information\n", "two"),
        ("sandboxd: config: adminToken is empty\n", "sandboxd: config: adminToken is empty"),
        ("See 'x'\n", "See 'x'"),
        ("", ""),
        ("x" * 2000, "x" * 500),
    ],
)
def test_reason_is_the_last_line_that_gives_one(said: str, why: str) -> None:
    assert reason(said) == why


# The runner without an engine.


def test_pool_is_refused_with_the_reason_of_every_engine(tmp_path: Path) -> None:
    dead = pretend(tmp_path, "docker", 'echo "Cannot connect to the daemon" >&2; exit 1')
    runner = ContainerCLIRunner(tmp_path / "r", SANDBOXD, dead)
    pool = PoolSpec(name="swe", resource=ContainerSpec(runtime="container-cli", image="debian:12"))
    with pytest.raises(ResourceError) as caught:
        ResourceEngine([runner]).add_pool(pool)
    assert str(caught.value) == (
        "pool swe: runner container-cli cannot work here: no container engine works "
        f"({dead[0]}: Cannot connect to the daemon); start one, or name it in AGENTFLY_CONTAINER_CLI"
    )
    assert runner.notes() == ()


async def test_image_that_cannot_be_pulled_is_told_in_the_engines_words(tmp_path: Path) -> None:
    body = 'case "$1" in image) exit 1;; pull) echo "Error: manifest unknown" >&2; exit 1;; esac'
    images = Images(Engine(tuple(pretend(tmp_path, "docker", body))))
    with pytest.raises(StartFailed) as caught:
        await images.get("debian:nope")
    assert str(caught.value) == "image: debian:nope: manifest unknown"
    assert caught.value.reason == "manifest unknown"
    assert caught.value.hints == ("see what docker says: docker pull debian:nope",)


async def test_one_pull_serves_all_who_wait_and_a_cancelled_one_does_not_end_it(tmp_path: Path) -> None:
    body = f"""
case "$1" in
  image) test -e {tmp_path}/there || exit 1; echo '[{{"Id": "sha256:1", "Config": {{"User": "7:8"}}}}]';;
  pull) sleep 0.2; touch {tmp_path}/there;;
esac"""
    command = pretend(tmp_path, "docker", body)
    images = Images(Engine(tuple(command)))
    waiting = [asyncio.create_task(images.get("debian:12")) for _ in range(4)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    got = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(image.id, image.user, image.is_roots) for image in got[1:]] == [("sha256:1", "7:8", False)] * 3
    assert sum(line.startswith("pull") for line in calls(command)) == 1
    await images.close()


async def test_what_failed_is_tried_again_and_close_ends_the_rest() -> None:
    once = Once[str, int]()
    tries = []

    async def work() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError
        return len(tries)

    with pytest.raises(ValueError):
        await once.get("k", work)
    assert await once.get("k", work) == await once.get("k", work) == 2
    once.forget("k")
    assert await once.get("k", work) == 3
    waiting = asyncio.create_task(once.get("other", lambda: asyncio.sleep(60, 1)))
    await asyncio.sleep(0)
    await once.close()
    assert (await asyncio.gather(waiting, return_exceptions=True))[0].__class__ is asyncio.CancelledError


def test_names_are_the_engines_and_paths_are_files(tmp_path: Path) -> None:
    (tmp_path / "image.tar").touch()
    assert located("debian:12") is None
    assert located("registry.example/team/image") is None
    archive = f"docker-archive:{tmp_path}/image.tar"
    assert located(archive) == Reference("docker-archive", f"{tmp_path}/image.tar")
    assert located(str(tmp_path)) == Reference("dir", str(tmp_path))
    for refused in ("host", "packages:bookworm", f"tar:{tmp_path}/none.tar"):
        with pytest.raises(StartFailed, match=f"image: {refused}"):
            located(refused)


def test_digest_follows_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    file, folder = digest_of(tmp_path / "a"), digest_of(tmp_path)
    assert digest_of(tmp_path / "a") == file
    assert digest_of(tmp_path / "a", "other") != file
    (tmp_path / "a").write_text("y")
    assert digest_of(tmp_path / "a") != file
    os.utime(tmp_path / "a", ns=(0, time.time_ns() + 1))
    assert digest_of(tmp_path) != folder


def test_image_in_the_form_that_every_engine_loads() -> None:
    layer = b"\0" * 1024
    with tarfile.open(fileobj=io.BytesIO(docker_archive("localhost/x:1", layer, {"User": "7"}))) as archive:
        content: dict[str, Any] = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            content[member.name] = file.read()
    (manifest,) = json.loads(content["manifest.json"])
    config = json.loads(content[manifest["Config"]])
    assert (manifest["RepoTags"], content[manifest["Layers"][0]]) == (["localhost/x:1"], layer)
    assert config["config"] == {"User": "7"}
    assert config["rootfs"]["diff_ids"][0].startswith("sha256:")


# Sweeping.


def test_containers_of_a_dead_owner_are_removed_by_their_label(tmp_path: Path) -> None:
    body = (
        f'case "$1" in ps) test -e {tmp_path}/removed || echo one two;; rm) touch {tmp_path}/removed;; esac'
    )
    command = pretend(tmp_path, "docker", body)
    (tmp_path / "containers.json").write_text(json.dumps({"command": command, "owner": "9-ab"}))
    assert remove_left(tmp_path)
    assert calls(command)[0] == "ps --all --quiet --filter label=agentfly.owner=9-ab"
    assert "rm --force --volumes one two" in calls(command)


@pytest.mark.parametrize("body", ["exit 1", 'case "$1" in ps) echo one;; esac'])
def test_containers_that_may_be_left_keep_the_folder(
    tmp_path: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_cli, "SETTLE_S", 0.2)
    record = {"command": pretend(tmp_path, "docker", body), "owner": "9-ab"}
    (tmp_path / "containers.json").write_text(json.dumps(record))
    assert not remove_left(tmp_path)


def test_owner_without_containers_or_engine_has_none_left(tmp_path: Path) -> None:
    assert remove_left(tmp_path)
    (tmp_path / "containers.json").write_text(json.dumps({"command": ["/gone"], "owner": "9-ab"}))
    assert remove_left(tmp_path)
