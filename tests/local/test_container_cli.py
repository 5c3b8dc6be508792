"""Containers of a real engine: the contract of every runner, and what this one promises beside it."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.api import ResourcePool
from agentfly.broker.client import BrokerClient
from agentfly.local.paths import run_dir as local_run_dir
from agentfly.local.plane import data_plane
from agentfly.resources.errors import Infra, ResourceError, StartFailed
from agentfly.resources.runners.base import Unclean
from agentfly.resources.runners.container.cli import ContainerCLIRunner, remove_left
from agentfly.resources.runners.container.engine import find
from agentfly.resources.runners.sandboxd.owner_dir import LOCK, OwnerDir, sweep
from agentfly.resources.spec import ContainerSpec, ResetSpec
from agentfly.sandbox import SandboxClient
from tests.local import engine_fixture
from tests.local.engine_fixture import BARE, FULL, SHELL, USER
from tests.unit.resources.runner_contract import RunnerContract

TOKEN = "token-of-a-lease"
SHARED = {"etc", "trash", "containers.json", LOCK}


@pytest.fixture(scope="module", params=engine_fixture.ENGINES)
def cli(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    with engine_fixture.engine(request.param) as command:
        yield command


@pytest.fixture(scope="module")
def runner(run_dir: Path, sandboxd: Path, cli: list[str]) -> Iterator[ContainerCLIRunner]:
    runner = ContainerCLIRunner(run_dir.with_name("c"), sandboxd, cli)
    if (reason := runner.check()) is not None:
        pytest.fail(reason)
    yield runner
    asyncio.run(runner.close())
    assert not run_dir.with_name("c").exists()
    assert containers(cli) == set()


def containers(cli: list[str], label: str = "agentfly.owner") -> set[str]:
    """Names of all containers with this label, in any state."""
    return set(output(cli, "ps", "-a", "--filter", f"label={label}", "--format", "{{.Names}}").split())


def output(cli: Sequence[str], *arguments: str) -> str:
    return subprocess.check_output([*cli, *arguments], text=True, timeout=60, stderr=subprocess.DEVNULL)


def spec(image: str = SHELL, **fields: Any) -> ContainerSpec:
    return ContainerSpec(runtime="container-cli", image=image, **fields)


class Box:
    """A leased container."""

    def __init__(self, runner: ContainerCLIRunner, member: Any) -> None:
        self.runner, self.member = runner, member
        self.client = SandboxClient(member.address, TOKEN)

    async def sh(self, line: str, **options: Any) -> str:
        result = await self.client.exec(line, **options)
        assert result.exit_code == 0, result
        return result.stdout

    async def next_lease(self) -> bool:
        """What the next holder gets; whether it is the same container."""
        before = self.member.handle
        member = await self.runner.reset(self.member)
        assert member is not None
        assert member.incarnation == self.member.incarnation + 1
        await self.client.close()
        self.member, self.client = member, SandboxClient(member.address, TOKEN)
        await self.runner.lease(member, "next", 0, TOKEN, 60)
        return member.handle is before


def shell_folder(root: Path) -> Path:
    """A root file system with a shell and nothing else."""
    (root / "bin").mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", root / "bin/sh")
    return root


@asynccontextmanager
async def box(runner: ContainerCLIRunner, wanted: ContainerSpec | None = None) -> AsyncIterator[Box]:
    member = await runner.start(wanted or spec(), "m-0")
    made = Box(runner, member)
    try:
        await runner.lease(member, "first", 0, TOKEN, 60)
        yield made
    finally:
        await made.client.close()
        await runner.stop(made.member)


class TestContract(RunnerContract):
    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return spec()

    @pytest.fixture(autouse=True)
    def _engine(self, run_dir: Path, cli: list[str]) -> None:
        self.folder, self.cli = run_dir.with_name("c"), cli

    def left(self, runner: Any) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - SHARED | containers(self.cli)


# 1. Start.


async def test_image_that_cannot_be_pulled_says_why(runner: ContainerCLIRunner) -> None:
    with pytest.raises(StartFailed) as caught:
        await runner.start(spec("127.0.0.1:9/nothing:1"), "m-1")
    assert "image: 127.0.0.1:9/nothing:1: " in str(caught.value)
    assert "connection refused" in caught.value.reason
    assert "pull 127.0.0.1:9/nothing:1" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (spec("host"), "image: host is for sandboxes on this machine's own files"),
        (spec("tar:/nowhere.tar"), "image: tar:/nowhere.tar is not a file"),
        (spec(workdir="/proc/x"), "workdir: /proc/x lies inside /proc"),
        (spec(workdir="/tmp/x"), "workdir: /tmp/x lies inside /tmp"),
        (spec(env={"A": "x" * 70_000}), "m-1"),
        (spec(memory_mb=1), "m-1"),
    ],
)
async def test_failed_start_leaves_nothing(
    runner: ContainerCLIRunner, cli: list[str], wanted: ContainerSpec, words: str
) -> None:
    with pytest.raises(StartFailed, match=words):
        await runner.start(wanted, "m-1")
    assert containers(cli) == set()


async def test_many_start_side_by_side(runner: ContainerCLIRunner, cli: list[str]) -> None:
    members = await asyncio.gather(*(runner.start(spec(), f"m-{number}") for number in range(6)))
    try:
        assert all(found.alive for found in await asyncio.gather(*(runner.probe(m) for m in members)))
        assert len(containers(cli)) == 6
        assert containers(cli, "agentfly.member=m-3") < containers(cli)
    finally:
        await asyncio.gather(*(runner.stop(member) for member in members))
    assert containers(cli) == set()


async def test_image_file_is_imported_once(
    runner: ContainerCLIRunner, cli: list[str], tmp_path: Path
) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(next(iter(engine_fixture.images())))
    for _ in range(2):
        async with box(runner, spec(f"docker-archive:{archive}")) as made:
            assert await made.sh("echo $FROM_IMAGE") == "yes\n"
    folder = shell_folder(tmp_path / "root")
    async with box(runner, spec(f"dir:{folder}")) as made:
        assert await made.sh("echo from a folder") == "from a folder\n"
    names = output(cli, "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    assert sum(name.startswith("localhost/agentfly:") for name in names) == 2


# 2. Reset.


async def test_clean_reset_keeps_the_container(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        await made.sh("echo x | tee /tmp/x /run/x /workspace/x > /dev/shm/x; sleep 60 & true")
        assert await made.next_lease()
        assert await made.sh("ls -A /tmp /run /workspace /dev/shm | grep x || true") == ""
        assert await made.sh("grep -hs sleep /proc/[0-9]*/comm || true") == ""


CANARIES = {
    "file": ("echo canary > /etc/canary", "cat /etc/canary"),
    "undone": ("touch /bin/canary; rm /bin/canary", "false"),
    "owner of a folder": ("chown 7:7 /etc", "stat -c %u /etc | grep 7"),
    "deleted": ("rm /etc/group", "test ! -e /etc/group"),
    "device folder": ("echo canary > /dev/canary", "cat /dev/canary"),
    "mode of a device": ("chmod 600 /dev/zero", "stat -c %a /dev/zero | grep 600"),
    "mode of a file of the kernel": ("chmod 640 /proc/meminfo", "stat -c %a /proc/meminfo | grep 640"),
}


async def test_what_a_holder_leaves_is_not_seen_by_the_next(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        for name, (leave, look) in CANARIES.items():
            await made.sh(leave)
            assert not await made.next_lease(), name
            assert (await made.client.exec(look)).exit_code != 0, name


PLACES = ("/etc", "/bin", "/home", "/tmp/a", "/run/a", "/dev/shm", "/dev", "/workspace", "/")
DEEDS = (
    "echo canary > {0}/canary",
    "echo canary >> /etc/passwd",
    "mkdir -p {0}/d/e && chmod 0 {0}/d/e {0}/d",
    "chmod 700 {0}",
    "chown 7:7 {0}",
    "mv /etc {0}/moved",
    "rm -rf {0}/*",
    "ln -s /etc/passwd {0}/link; ln /etc/group {0}/hard",
    "mkfifo {0}/pipe",
    "touch -d @1 {0}",
    "(while true; do echo canary > {0}/late; sleep 0.01; done) > /dev/null 2>&1 &",
)
LOOK = (
    "find / -path /proc -prune -o -path /sys -prune -o -exec stat -c '%n %F %a %u %g' {} +; "
    "cat /etc/passwd /etc/group; grep -hs . /proc/[0-9]*/comm"
)


@given(deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(PLACES)), min_size=1, max_size=5))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_nothing_that_a_holder_does_is_seen_by_the_next(
    runner: ContainerCLIRunner, deeds: list[tuple[str, str]]
) -> None:
    async def scenario() -> None:
        async with box(runner) as made:
            fresh = (await made.client.exec(LOOK, output_limit=1 << 20)).stdout
            for deed, place in deeds:
                await made.client.exec(f"mkdir -p {place}; {deed.format(place)}")
            await made.next_lease()
            assert (await made.client.exec(LOOK, output_limit=1 << 20)).stdout == fresh

    asyncio.run(scenario())


async def test_files_that_engines_mount_cannot_be_written(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        for name in ("hosts", "hostname", "resolv.conf"):
            assert (await made.client.exec(f"echo canary >> /etc/{name}")).exit_code != 0


async def test_content_of_an_image_is_kept_and_watched(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(FULL, workdir="/work")) as made:
        assert await made.sh("cat file /tmp/of-the-image") == "of the imagex"
        await made.sh("echo x > /run/x")
        assert await made.next_lease()
        await made.sh("echo canary > file")
        assert not await made.next_lease()
        assert await made.sh("cat file") == "of the image"
        await made.sh("echo canary > /data/v")  # a volume, outside the writable layer
        assert not await made.next_lease()
        assert await made.sh("cat /data/v") == "volume"


async def test_declared_folders_are_put_back_in_the_same_container(runner: ContainerCLIRunner) -> None:
    wanted = spec(FULL, workdir="/work", reset=ResetSpec(paths=("/work",)))
    async with box(runner, wanted) as made:
        for _ in range(2):
            await made.sh("echo canary > file; mkdir new")
            assert await made.next_lease()
            assert await made.sh("cat file; ls") == "of the imagefile\n"
        await made.sh("echo canary > /etc/canary")  # not declared
        assert not await made.next_lease()
        assert (await made.client.exec("cat /etc/canary")).exit_code != 0


async def test_unclean_container_is_kept_for_a_look(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        await made.sh("echo canary > /etc/canary")
        made.member.keep_unclean = True
        with pytest.raises(Unclean, match="member m-0: /etc/canary was written"):
            await runner.reset(made.member)
        assert (await runner.probe(made.member)).alive


async def test_recreate_is_a_new_container_each_time(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(reset=ResetSpec(method="recreate"))) as made:
        assert not await made.next_lease()


async def test_dead_container_is_replaced_by_a_reset(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        await made.sh("chmod 640 /proc/meminfo")
        os.kill(made.member.handle.process.pid, signal.SIGKILL)
        assert await made.member.handle.dies_within(5)
        assert not (await runner.probe(made.member)).alive
        with pytest.raises(Infra, match="the sandbox died: its first process was killed"):
            await runner.lease(made.member, "first", 0, TOKEN, 30)
        assert not await made.next_lease()
        assert await made.sh("stat -c %a /proc/meminfo") == "444\n"


# 3. Owners.

OWNER = """
import asyncio, sys
from pathlib import Path
from agentfly.resources.runners.base import Unclean
from agentfly.resources.runners.container.cli import ContainerCLIRunner
from agentfly.resources.spec import ContainerSpec

async def main():
    runner = ContainerCLIRunner(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:])
    for number in range(2):
        spec = ContainerSpec(runtime="container-cli", image=sys.argv[3])
        await runner.start(spec, f"m-{number}")
    print("ready", flush=True)
    while True:  # whenever it is killed, one is being started or stopped
        await runner.stop(await runner.start(spec, "more"))

asyncio.run(main())
"""


def test_killed_owner_leaves_no_container(run_dir: Path, sandboxd: Path, cli: list[str]) -> None:
    home = run_dir.with_name("k") / "k"
    home.parent.mkdir()
    command = [sys.executable, "-c", OWNER, str(home), str(sandboxd), SHELL, *cli]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert sweep(home.parent, remove_left) == []
            assert len(containers(cli)) >= 2
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while len(containers(cli)) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    # The one that was being started may be left as it was made, without a process.
    assert len(containers(cli)) <= 1
    assert sweep(home.parent, remove_left) == ["k"]
    assert containers(cli) == set()
    home.parent.rmdir()


async def test_sweep_removes_what_a_dead_owner_left_and_nothing_else(
    run_dir: Path, sandboxd: Path, cli: list[str]
) -> None:
    parent = run_dir.with_name("sweep")
    living, dead = OwnerDir(parent / "living"), OwnerDir(parent / "dead")
    engine = find(sandboxd, [cli]).engine
    assert engine is not None
    for owner in (living, dead):
        record = {"command": list(engine.command), "owner": owner.name}
        (owner.path / "containers.json").write_text(json.dumps(record))
        for number in range(2):
            name = f"agentfly-{owner.name}-{number}"
            names = ["--name", name, "--label", f"agentfly.owner={owner.name}"]
            run = ["run", "-d", "--network", "none", *names, *engine.flags, SHELL, "/bin/sleep", "600"]
            output(engine.command, *run)
    os.close(dead._lock)  # as its end would
    try:
        assert sweep(parent, remove_left) == ["dead"]
        assert containers(cli) == {f"agentfly-{living.name}-{number}" for number in range(2)}
    finally:
        os.close(living._lock)
        assert sweep(parent, remove_left) == ["living"]
        parent.rmdir()
    assert containers(cli) == set()


async def test_close_removes_what_a_failed_stop_left(
    run_dir: Path, sandboxd: Path, cli: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ContainerCLIRunner(run_dir.with_name("f"), sandboxd, cli)
    member = await runner.start(spec(), "m-1")
    with monkeypatch.context() as broken:
        broken.setattr(member.handle, "remove", _fails)
        with pytest.raises(Infra, match="cannot be removed"):
            await runner.stop(member)
    assert len(containers(cli)) == 1
    await runner.close()
    assert containers(cli) == set()
    await member.handle.process.end()  # type: ignore[attr-defined]
    assert sweep(run_dir.parent, remove_left) == ["f"]  # the folder of the member that was not removed


async def _fails() -> None:
    raise TimeoutError


# 4. Any image.


async def test_image_without_a_shell_runs_programs(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(BARE)) as made:
        result = await made.client.exec(["/busybox", "echo", "no shell here"])
        assert (result.exit_code, result.stdout) == (0, "no shell here\n")
        refused = await made.client.exec("echo hello")
        assert refused.exit_code == 127
        assert "/bin/sh" in refused.stderr
        await made.client.write_file("/workspace/x", b"content")
        assert await made.client.read_file("/workspace/x") == b"content"
        assert await made.next_lease()


async def test_user_of_the_image_is_kept(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(USER)) as made:
        assert await made.sh("id -u; id -g; pwd; echo $HOME") == "1000\n1000\n/workspace\n/workspace\n"
        await made.sh("echo x > x; mkdir -p /tmp/a/b; chmod 0 /tmp/a/b /tmp/a; echo x > /dev/shm/x")
        assert (await made.client.exec("echo x > /etc/x")).exit_code != 0
        assert await made.next_lease()
        assert await made.sh("ls -A /workspace /tmp /dev/shm | grep -v : | grep . || true") == ""


# 5. Limits.


async def test_memory_and_processes_are_bounded(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(memory_mb=64, pids=16)) as made:
        result = await made.client.exec("dd if=/dev/zero of=/dev/null bs=200M count=1")
        assert (result.exit_code, result.oom) == (137, True)
        assert "out of memory" in result.text
        assert "1+0 records out" in await made.sh("dd if=/dev/zero of=/dev/null bs=10M count=1 2>&1")
        forked = await made.client.exec("for i in $(seq 80); do sleep 5 & done")
        assert "can't fork" in forked.stderr
        assert await made.next_lease()


async def test_processor_is_bounded(runner: ContainerCLIRunner) -> None:
    async with box(runner, spec(cpu=0.5)) as made:
        result = await made.client.exec("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
        assert result.cpu_s / result.wall_s < 0.75


async def test_network_and_privileges_are_none(runner: ContainerCLIRunner) -> None:
    async with box(runner) as made:
        assert await made.sh("grep -c : /proc/net/dev") == "1\n"
        status = await made.sh("cat /proc/self/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["CapEff"] == fields["CapBnd"] == "00000000000000fb"
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert (await made.client.exec("cat /proc/1/environ")).exit_code != 0
        assert await made.sh("env | grep -ci token || true") == "0\n"


async def test_notes_say_what_is_not_bounded(runner: ContainerCLIRunner, cli: list[str]) -> None:
    assert runner.notes()[0] == " ".join(cli)
    assert "disk of a container: the engine's storage driver cannot bound it" in runner.notes()
    async with box(runner, spec(disk_mb=10)) as made:
        assert await made.sh("echo started") == "started\n"


# A pool of a manifest.


def pool(image: str) -> ResourcePool:
    return ResourcePool.model_validate(
        {
            "apiVersion": "agentfly.dev/v1alpha1",
            "kind": "ResourcePool",
            "metadata": {"name": "containers"},
            "spec": {
                "type": "Container",
                "container": {"runtime": "ContainerCLI", "image": image, "memory": "64Mi"},
                "capacity": {"min": 1, "max": 2},
            },
        },
        by_alias=True,
    )


async def test_data_plane_serves_a_pool_of_containers(
    run_dir: Path, tmp_path: Path, cli: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_dir.parent / "x"))
    monkeypatch.setenv("AGENTFLY_CONTAINER_CLI", shlex.join(cli))
    python = Path(sys.executable)
    async with (
        data_plane([pool(SHELL)], logs_in=tmp_path, inference_python=python, start_timeout_s=10) as plane,
        BrokerClient(plane.broker) as client,
    ):
        for owner in ("first", "second"):
            async with await client.acquire("containers", owner, deadline=60) as lease:
                seen = await lease.sandbox.exec("ls /tmp; echo $FROM_IMAGE > /tmp/x; cat /tmp/x")
                assert seen.text == "yes"
    assert containers(cli) == set()
    assert list(local_run_dir().iterdir()) == []


async def test_data_plane_refuses_the_pool_where_no_engine_works(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(run_dir.parent / "x"))
    monkeypatch.setenv("AGENTFLY_CONTAINER_CLI", "no-such-engine")
    plane = data_plane(
        [pool(SHELL)], logs_in=tmp_path, inference_python=Path(sys.executable), start_timeout_s=10
    )
    with pytest.raises(ResourceError, match="no-such-engine: not found on PATH"):
        await plane.__aenter__()
    assert list(local_run_dir().iterdir()) == []
