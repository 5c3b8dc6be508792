"""Whatever a holder left, the next one sees what the first of all saw.

1. In a sandbox of bubblewrap, whose method is ``overlay``.
2. In an ordinary container without an overlay, by the methods ``paths`` and ``git``.

A sequence of operations (``tenant/leave.py``) runs in a leased sandbox; after the reset everything that can
be seen inside (``tenant/look.py``) is as in a sandbox that nobody ever held.
"""

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.owner_dir import delete
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxAdmin, SandboxClient
from tests.local.boxes import TOKEN, Box
from tests.local.container import ADMIN, container
from tests.local.tenant import root
from tests.local.tenant.sequences import sequences

PYTHON = ["/usr/bin/python3", "-S", "-B"]


def examples(count: int) -> settings:
    """The same sequences on every run: what fails once fails again."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[
            Phase.generate
        ],  # five steps can be read as they are, and a smaller one takes minutes to find
        suppress_health_check=list(HealthCheck),
    )


class Tenancy:
    """A sandbox that is leased, dirtied and reset again and again, with what a fresh one shows."""

    client: SandboxClient

    def __init__(self, loop: asyncio.Runner, folders: tuple[str, ...] = ()) -> None:
        self.loop, self.folders = loop, folders
        self.since = time.time() - 2
        self.kept = self.replaced = 0

    def leave(self, sequence: list[Any]) -> None:
        """Be a holder that does all this."""
        self.loop.run(self.client.exec([*PYTHON, "/srv/leave.py", json.dumps(sequence)], timeout=60))

    def seen(self) -> dict[str, Any]:
        """Look at everything."""
        argv = [*PYTHON, "/srv/look.py", str(self.since), *self.folders]
        result = self.loop.run(self.client.exec(argv, output_limit=1 << 20, timeout=60))
        assert (result.exit_code, result.stdout_truncated) == (0, False), result.text[-2000:]
        seen: dict[str, Any] = json.loads(result.stdout)
        return seen

    def next(self) -> bool:
        """Be the next holder; whether there is something to compare."""
        raise NotImplementedError

    def property(self, sequence: list[Any]) -> None:
        self.leave(sequence)
        if self.next():
            found = differences(self.pristine, self.seen())  # type: ignore[attr-defined]
            assert not found, "\n".join(found)


class OfBubblewrap(Tenancy):
    """By the runner, which starts a fresh sandbox where the daemon does not find it clean."""

    def __init__(self, loop: asyncio.Runner, runner: BubblewrapRunner, spec: ContainerSpec) -> None:
        super().__init__(loop)
        member = loop.run(runner.start(spec, "m-0"))
        admin, self.client = (
            SandboxAdmin(member.address, member.admin_token),
            SandboxClient(member.address, TOKEN),
        )
        self.box = Box(member, self.client, admin, runner)
        loop.run(runner.lease(member, "first", 0, TOKEN, 600))
        self.pristine = self.seen()

    def next(self) -> bool:
        address = self.box.member.address
        self.loop.run(self.box.next_lease())
        self.client = self.box.client
        self.kept += address == self.box.member.address
        self.replaced += address != self.box.member.address
        return True

    def close(self) -> None:
        self.loop.run(self.box.client.close())
        self.loop.run(self.box.admin.close())
        self.loop.run(self.box.runner.stop(self.box.member))


class OfContainer(Tenancy):
    """By the daemon alone; where it does not find it clean, a new container takes over."""

    numbers = itertools.count()

    def __init__(
        self,
        loop: asyncio.Runner,
        image: Path,
        sandboxd: Path,
        reset: dict[str, object],
        folders: tuple[str, ...],
    ) -> None:
        super().__init__(loop, folders)
        self.image, self.sandboxd, self.reset = image, sandboxd, reset
        self.running = contextlib.ExitStack()
        self.reasons: list[str] = []
        self.start()

    def start(self) -> None:
        fresh = self.image.with_name(f"root{next(self.numbers)}")
        subprocess.run(["cp", "-a", str(self.image), str(fresh)], check=True)
        self.running.callback(delete, [str(fresh), f"{fresh}.run"])
        made = self.running.enter_context(container(fresh, self.sandboxd, self.reset))
        self.admin, self.client = SandboxAdmin(made.address, ADMIN), SandboxClient(made.address, TOKEN)
        self.lease()
        self.pristine = self.seen()  # of this one: a start refreshes the index of a repository

    def lease(self) -> None:
        self.loop.run(self.admin.lease("tenant", 0, TOKEN, 600))

    def next(self) -> bool:
        report = self.loop.run(self.admin.reset(30))
        if report.clean:
            self.kept += 1
            self.lease()
            return True
        self.replaced += 1
        self.reasons.append(str(report.reason))
        self.close()
        self.start()
        return False

    def close(self) -> None:
        self.loop.run(self.client.close())
        self.loop.run(self.admin.close())
        self.running.close()


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Where two accounts differ, a line each."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted(before.keys() | after.keys())
        return [
            line
            for name in names
            for line in differences(before.get(name), after.get(name), f"{place}.{name}")
        ]
    return [] if before == after else [f"{place}: {before!r:.200} became {after!r:.200}"]


@pytest.fixture(scope="module")
def image(run_dir: Path) -> Path:
    if (part := root.missing()) is not None:
        pytest.skip(f"a small root cannot be made here: no {part}")
    target = run_dir.with_name("image")
    root.build(target)
    return target


@pytest.fixture(scope="module")
def daemon(run_dir: Path, sandboxd: Path) -> Path:
    """A copy of the binary: every sandbox shows it, and another build may change it meanwhile."""
    copy = run_dir.with_name("sandboxd")
    shutil.copy(sandboxd, copy)
    return copy


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


# 1. In a sandbox of bubblewrap.

FOLDERS = ["/", "/usr", "/usr/bin", "/etc", "/home", "/tmp", "/workspace", "/dev/shm", "/run", "/srv", "/dev"]
FILES = ["/usr/bin/cat", "/etc/passwd", "/etc/hosts", "/usr/bin/sleep", "/srv/look.py"]


@pytest.fixture(scope="module")
def runner(loop: asyncio.Runner, run_dir: Path, daemon: Path) -> Iterator[BubblewrapRunner]:
    runner = BubblewrapRunner(run_dir, daemon)
    if (reason := runner.check()) is not None:
        pytest.fail(reason)
    yield runner
    loop.run(runner.close())


@pytest.fixture(scope="module")
def tenancy(loop: asyncio.Runner, runner: BubblewrapRunner, image: Path) -> Iterator[OfBubblewrap]:
    made = OfBubblewrap(loop, runner, ContainerSpec(image=str(image)))
    yield made
    made.close()


@pytest.mark.timeout(300)  # half a minute, on a machine that is not busy
@examples(80)
@given(sequence=sequences(FOLDERS, FILES))
def test_nothing_of_a_holder_is_left_in_a_sandbox(tenancy: OfBubblewrap, sequence: list[Any]) -> None:
    tenancy.property(sequence)


# An account that sees nothing would prove nothing: what each operation leaves is in it.
VISIBLE = {
    "processes": [["background", 1], ["daemon", 1], ["respawn", 1]],
    "kernel": [
        *(["tcp", 1], ["connected", 1], ["abstract", "left"], ["shm", 1], ["msg", 1], ["sem", 1]),
        ["held", "/home"],
    ],
    "own": [["affinity", 1]],  # the daemon's limits and priority a tenant may not change
    "space": [["held", "/tmp"]],
    "tree": [
        *(["write", "/usr/bin/cat", "x"], ["store_and_hide", "/etc/hosts", "!"], ["odd_names", "/home"]),
        *(
            ["deep", "/tmp"],
            ["closed_folder", "/tmp"],
            ["xattr", "/etc/passwd", "left"],
            ["times", "/tmp", 12345],
        ),
        *(["chmod", "/tmp", 0o700], ["mqueue", "left"], ["terminal", 0], ["link", "/usr/bin/cat", "/a"]),
        *(["remove", "/etc/hosts"], ["fifo", "/dev/shm/a"], ["unix", "/run/a"]),
        ["replace_by_link", "/etc/group", "/tmp"],
    ],
}


@pytest.mark.parametrize("part", VISIBLE)
def test_account_shows_what_is_left(tenancy: OfBubblewrap, part: str) -> None:
    before = tenancy.pristine
    for operation in VISIBLE[part]:  # type: ignore[attr-defined]
        tenancy.leave([operation])
        after = tenancy.seen()
        assert before[part] != after[part], operation
        before = after
    tenancy.next()


# 2. In an ordinary container.

DECLARED = ("/workspace", "/home/dev")
EMPTIED = ("/tmp", "/run", "/dev/shm", "/dev/mqueue")
IN_DECLARED = ["/workspace/src", "/workspace/src/deep", "/tmp", "/dev/shm"]
DECLARED_FILES = ["/workspace/main.py", "/workspace/src/deep/x", "/workspace/.git/config"]


@pytest.fixture(scope="module")
def project(image: Path) -> Path:
    """The image with a repository, and a home with something in it."""
    work, home = image / "workspace", image / "home/dev"
    (work / "src/deep").mkdir(parents=True)
    home.mkdir()
    for path in (work / "main.py", work / "src/deep/x", home / ".profile"):
        path.write_text(f"# {path.name}\n")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *step], check=True)
    return image


@pytest.fixture(scope="module")
def by_paths(loop: asyncio.Runner, project: Path, daemon: Path) -> Iterator[OfContainer]:
    reset: dict[str, object] = {"method": "auto", "paths": DECLARED, "timeoutSeconds": 30}
    made = OfContainer(loop, project, daemon, reset, (*DECLARED, *EMPTIED))
    yield made
    made.close()
    assert made.kept > made.replaced, made.reasons  # what is always replaced proves nothing


@pytest.fixture(scope="module")
def by_git(loop: asyncio.Runner, project: Path, daemon: Path) -> Iterator[OfContainer]:
    reset: dict[str, object] = {"method": "git", "git": "/workspace", "timeoutSeconds": 30}
    made = OfContainer(loop, project, daemon, reset, ("/workspace", *EMPTIED))
    yield made
    made.close()
    assert made.kept > made.replaced, made.reasons


@pytest.mark.timeout(300)  # half a minute, on a machine that is not busy
@examples(40)
@given(sequence=sequences([*IN_DECLARED, "/workspace", "/home/dev"], DECLARED_FILES))
def test_nothing_of_a_holder_is_left_in_declared_folders(by_paths: OfContainer, sequence: list[Any]) -> None:
    by_paths.property(sequence)


@pytest.mark.timeout(300)  # half a minute, on a machine that is not busy
@examples(40)
@given(sequence=sequences([*IN_DECLARED, "/workspace"], DECLARED_FILES))
def test_nothing_of_a_holder_is_left_in_a_repository(by_git: OfContainer, sequence: list[Any]) -> None:
    by_git.property(sequence)
