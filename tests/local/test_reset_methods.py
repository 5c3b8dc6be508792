"""Methods of a reset as an owner of containers meets them: the real daemon, as first process of a real one.

1. The method is chosen and proved at the start, published, and told with each reset.
2. What cannot work here is said at the start: field, value, remedy.
3. What nobody declared, and nobody empties, must not change.
4. A spec's method reaches the daemon of a bubblewrap sandbox; an upper comes before what is declared.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.owner_dir import delete
from agentfly.resources.spec import ContainerSpec, ResetSpec
from agentfly.sandbox import SandboxAdmin, SandboxClient, SandboxUnreachable
from agentfly.sandbox.types import ResetReport
from tests.local.boxes import TOKEN, box
from tests.local.container import ADMIN, container
from tests.local.tenant import root


def run(*argv: str) -> None:
    """Run a program outside."""
    subprocess.run(argv, check=True)


REPOSITORY = "cd {} && git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm first"


@pytest.fixture(scope="module")
def image(run_dir: Path) -> Path:
    if (part := root.missing()) is not None:
        pytest.skip(f"a small root cannot be made here: no {part}")
    target = run_dir.with_name("image")
    return _with_work(target, with_python=False)


@pytest.fixture(scope="module")
def image_with_python(run_dir: Path, image: Path) -> Path:
    return _with_work(run_dir.with_name("python"), with_python=True)


def _with_work(target: Path, *, with_python: bool) -> Path:
    root.build(target, with_python=with_python)
    (target / "workspace/src").mkdir()
    (target / "workspace/src/main.py").write_text("print(1)\n")
    (target / "backup").mkdir()
    (target / "backup/main.py").write_text("print(1)\n")
    return target


@pytest.fixture
def fresh(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root of its own for one container."""
    yield from _copied(image, tmp_path_factory)


@pytest.fixture
def fresh_with_python(image_with_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from _copied(image_with_python, tmp_path_factory)


def _copied(image: Path, numbers: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy beside the image: sockets need a short path."""
    target = image.with_name(f"c{numbers.mktemp('n').name[1:]}")
    subprocess.run(["cp", "-a", str(image), str(target)], check=True)
    yield target
    assert delete([str(target), f"{target}.run"])


class Held:
    """A container under lease."""

    def __init__(self, address: str) -> None:
        self.admin, self.client = SandboxAdmin(address, ADMIN), SandboxClient(address, TOKEN)

    async def sh(self, line: str) -> str:
        result = await self.client.exec(line)
        assert result.exit_code == 0, result
        return result.stdout

    async def next(self) -> ResetReport:
        report = await self.admin.reset(30)
        if report.clean:
            await self.lease()
        return report

    async def lease(self) -> None:
        await self.admin.lease("tenant", 0, TOKEN, 60)


@asynccontextmanager
async def held(
    fresh: Path,
    sandboxd: Path,
    reset: Mapping[str, object],
    volumes: list[str] | None = None,
    files: list[str] | None = None,
    privileged: bool = False,
    overlay: bool = False,
) -> AsyncIterator[Held]:
    reset = {"timeoutSeconds": 20} | reset
    with container(fresh, sandboxd, reset, volumes, files or [], privileged, overlay) as started:
        made = Held(started.address)
        async with made.admin, made.client:
            try:
                await made.lease()
            except SandboxUnreachable:
                pytest.fail(started.last_words())
            yield made


def refused(
    fresh: Path, sandboxd: Path, reset: Mapping[str, object], volumes: list[str] | None = None
) -> str:
    """What a daemon says that does not start."""
    with container(fresh, sandboxd, {"timeoutSeconds": 20} | reset, volumes) as made:
        return made.last_words()


# 1. The method is chosen, proved, published, told.

COMMAND = ["sh", "-c", "rm -rf /workspace/src/* && cat /backup/main.py > /workspace/src/main.py"]


@pytest.mark.parametrize(
    ("reset", "method"),
    [
        ({"method": "auto", "paths": ["/workspace"], "git": "/workspace"}, "paths"),
        ({"method": "auto", "git": "/workspace"}, "git"),
        ({"method": "command", "paths": ["/workspace/src"], "command": COMMAND}, "command"),
    ],
)
async def test_method_brings_back_what_was_declared(
    fresh: Path, sandboxd: Path, reset: dict[str, object], method: str
) -> None:
    if method == "git":
        run("sh", "-c", REPOSITORY.format(fresh / "workspace"))
    async with held(fresh, sandboxd, reset) as made:
        assert (await made.admin.health()).reset_method == method
        for _ in range(3):
            await made.sh("echo evil > /workspace/src/main.py; touch /workspace/src/new /tmp/x; sleep 600 &")
            report = await made.next()
            assert (report.clean, report.reason, report.method) == (True, None, method)
            assert report.wall_s is not None
            assert 0 < report.wall_s < 20
            left = await made.sh("cat /workspace/src/*; ls -A /tmp /workspace/src")
            assert left == "print(1)\n/tmp:\n\n/workspace/src:\nmain.py\n"


async def test_without_anything_declared_there_is_only_a_new_one(fresh: Path, sandboxd: Path) -> None:
    async with held(fresh, sandboxd, {"method": "auto"}) as made:
        assert (await made.admin.health()).reset_method == "recreate"
        report = await made.next()
        assert (report.clean, report.reason, report.method) == (
            False,
            "reset: the method is recreate",
            "recreate",
        )


async def test_read_only_root_with_a_volume_needs_no_privilege(fresh: Path, sandboxd: Path) -> None:
    (fresh / "volume/work/deep").mkdir(parents=True)
    async with held(fresh, sandboxd, {"method": "paths", "paths": ["/volume/work"]}, ["/volume"]) as made:
        await made.sh("rm -rf /volume/work/deep; echo x > /volume/work/new")
        assert (await made.next()).clean
        assert await made.sh("ls -A /volume/work") == "deep\n"
        assert (
            await made.client.exec("ls /volume/.agentfly-work")
        ).exit_code != 0  # the copies cannot be listed


# 2. What cannot work here is said at the start.


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        ({"method": "overlay"}, ["reset.method", "overlay", "use paths, git, command or recreate"]),
        (
            {"method": "magic"},
            ["reset.method", '"magic"', "auto, overlay, paths, git, command, scratch, recreate"],
        ),
        ({"method": "paths"}, ["reset.paths", "is empty", "declare the folders"]),
        ({"method": "paths", "paths": ["/none"]}, ["reset.paths", "/none", "declare an existing folder"]),
        (
            {"method": "paths", "paths": ["/tmp/x"]},
            ["reset.paths", '"/tmp/x"', "overlap", "declare one of them"],
        ),
        ({"method": "paths", "paths": ["/bin"]}, ["reset.paths", '"/bin', "by its real path"]),
        ({"method": "paths", "paths": ["/dev"]}, ["reset.paths", '"/dev', "overlap"]),
        ({"method": "git", "git": "/workspace"}, ["reset.git", '"/workspace"', "no folder .git"]),
        ({"method": "command"}, ["reset.command", "is empty", "give the program"]),
        (
            {"method": "command", "command": ["/none"]},
            ["reset.command", "/none", "command not found", "must exit 0"],
        ),
        (
            {"method": "command", "command": ["sleep", "9"], "timeoutSeconds": 0.2},
            ["reset.command", "sleep was not done after 200ms"],
        ),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    image: Path, sandboxd: Path, reset: dict[str, object], words: list[str]
) -> None:
    said = refused(image, sandboxd, reset)
    assert delete([f"{image}.run"])
    assert all(word in said for word in words), said


def test_missing_git_and_read_only_folders_are_said_at_the_start(fresh: Path, sandboxd: Path) -> None:
    subprocess.run(["sh", "-c", REPOSITORY.format(fresh / "workspace")], check=True)
    said = refused(fresh, sandboxd, {"method": "paths", "paths": ["/workspace"]}, [])
    assert "reset.paths" in said
    assert "the folder above must be writable" in said
    assert delete([f"{fresh}.run", str(fresh / "usr/bin/git")])
    said = refused(fresh, sandboxd, {"method": "git", "git": "/workspace"})
    assert "git must be in the image" in said


async def test_second_daemon_does_not_trust_the_volume_of_the_first(fresh: Path, sandboxd: Path) -> None:
    reset = {"method": "paths", "paths": ["/workspace"]}
    async with held(fresh, sandboxd, reset) as made:
        await made.sh("touch /workspace/left")  # and then the daemon dies
    assert delete([f"{fresh}.run"])
    assert "may have been used: start from a fresh volume" in refused(fresh, sandboxd, reset)


# 3. What nobody declared must not change.

UNDECLARED = {
    "new file": "touch /etc/new",
    "changed file": "echo x >> /etc/passwd",
    "mode": "chmod 600 /etc/passwd",
    "undone": "touch /etc/new; rm /etc/new",
    "time": "touch -d @12345 /usr",
    "beside the folder": "touch /new",
    "mode of the folder above": "chmod 700 /",
    "removed": "rm /usr/bin/cat",
    "the copies": "chmod 700 /.agentfly-workspace",
    "program of a reset": "cp /usr/bin/cat /usr/bin/git",
}


@pytest.mark.parametrize("change", UNDECLARED)
async def test_what_nobody_declared_must_not_change(fresh: Path, sandboxd: Path, change: str) -> None:
    async with held(fresh, sandboxd, {"method": "paths", "paths": ["/workspace"]}) as made:
        await made.sh(UNDECLARED[change])
        report = await made.next()
        assert (report.clean, report.method) == (False, "paths")
        assert report.reason is not None
        assert "undeclared" in report.reason or "was changed" in report.reason


async def test_folders_of_an_image_below_an_overlay_are_swapped(fresh: Path, sandboxd: Path) -> None:
    async with held(fresh, sandboxd, {"method": "paths", "paths": ["/workspace"]}, overlay=True) as made:
        for _ in range(3):  # such a folder cannot be renamed: the first of its copies took its place
            await made.sh("cat /etc/* /usr/bin/* > /dev/null; rm -rf /workspace/src; touch /workspace/new")
            report = await made.next()
            assert (report.clean, report.reason) == (True, None)
            assert await made.sh("ls /workspace; cat /workspace/src/main.py") == "src\nprint(1)\n"
        await made.sh("touch /usr/new")
        assert "undeclared" in str((await made.next()).reason)


async def test_files_that_an_engine_mounts_are_put_back(fresh: Path, sandboxd: Path) -> None:
    (fresh / "etc/termination-log").touch()
    (fresh / "volume/work").mkdir(parents=True)
    files = ["/etc/hosts", "/etc/termination-log"]
    async with held(
        fresh, sandboxd, {"method": "paths", "paths": ["/volume/work"]}, ["/volume"], files
    ) as made:
        look = f"cat {' '.join(files)}; stat -c '%a %Y' {' '.join(files)}"
        before = await made.sh(look)
        await made.sh(
            f"for f in {' '.join(files)}; do echo evil >> $f; chmod 600 $f; touch -d @12345 $f; done"
        )
        report = await made.next()
        assert report.reason is None
        assert await made.sh(look) == before


PRIVILEGED = {
    "a setting of IPC": (["setting", "kernel/msgmax", "9000"], "settings: /proc/sys/kernel/msgmax"),
    "a setting of the network": (
        ["setting", "net/ipv4/ip_default_ttl", "77"],
        "settings: /proc/sys/net/ipv4",
    ),
    "the name of the host": (["host_name", "left"], "inherited: the name of the host"),
    "a mount": (["mount", "/home"], "mounts: "),
    "a mount taken away": (["umount", "/tmp"], "mounts: "),
}


@pytest.mark.parametrize("change", PRIVILEGED)
async def test_what_a_privileged_holder_changes_is_found(
    fresh_with_python: Path, sandboxd: Path, change: str
) -> None:
    operation, words = PRIVILEGED[change]
    reset = {"method": "paths", "paths": ["/workspace"]}
    async with held(fresh_with_python, sandboxd, reset, privileged=True) as made:
        await made.sh(f"python3 -S -B /srv/leave.py '{json.dumps([['write', '/workspace/x', 'x']])}'")
        report = await made.next()
        assert (report.clean, report.reason) == (True, None)
        await made.sh(f"python3 -S -B /srv/leave.py '{json.dumps([operation])}'")
        report = await made.next()
        assert report.reason is not None
        assert report.reason.startswith(words)


# 4. A spec's method reaches the daemon.


async def test_overlay_comes_before_what_is_declared(runner: BubblewrapRunner) -> None:
    spec = ContainerSpec(reset=ResetSpec(method="paths", paths=("/etc",)))
    async with box(runner, spec) as made:
        assert (await made.admin.health()).reset_method == "overlay"
        address = made.member.address
        await made.next_lease()
        assert made.member.address == address
        await made.client.exec("touch /etc/new")
        await made.next_lease()
        assert made.member.address != address
        assert (await made.client.exec("ls /etc/new")).exit_code != 0


async def test_recreate_starts_a_new_sandbox_each_time(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(reset=ResetSpec(method="recreate"))) as made:
        assert (await made.admin.health()).reset_method == "recreate"
        address = made.member.address
        await made.next_lease()
        assert made.member.address != address
