"""Whatever a holder left, the next one sees what the first of all saw.

1. In a sandbox of bubblewrap, with the root of a folder and with this machine's own.

A sequence of operations (``tenant/leave.py``) runs in a leased sandbox; after the reset everything that can
be seen inside (``tenant/look.py``) is as in a sandbox that nobody ever held.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfly.resources.runners.bubblewrap import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxAdmin, SandboxClient
from tests.local.boxes import TOKEN, Box
from tests.local.tenant import root

PYTHON = ["/usr/bin/python3", "-S", "-B"]


def examples(count: int) -> settings:
    """The same sequences on every run: what fails once fails again."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


FOLDERS = ["/", "/usr", "/usr/bin", "/etc", "/home", "/tmp", "/workspace", "/dev/shm", "/run", "/srv", "/dev"]
FILES = ["/usr/bin/cat", "/etc/passwd", "/etc/hosts", "/usr/bin/sleep", "/srv/look.py"]
names = st.sampled_from(["a", "b", "cat", "passwd", ".hidden", "x/y", "workspace"])
inside = st.builds(lambda folder, name: f"{folder.rstrip('/')}/{name}", st.sampled_from(FOLDERS), names)
folders = st.sampled_from(FOLDERS)
files = st.sampled_from(FILES) | inside
paths = folders | files
texts = st.sampled_from(["", "#!/bin/sh\nexit 3\n", "x" * 5000])
modes = st.sampled_from([0, 0o111, 0o644, 0o700, 0o755, 0o1777, 0o4755, 0o2755])
numbers = st.integers(1, 5)
ONE_PATH = ["truncate", "mkdir", "remove", "undo", "fifo", "device", "umount", "mount"]
ONE_FOLDER = ["odd_names", "deep", "many", "closed_folder", "writer", "held"]
ONE_NUMBER = [
    *("background", "daemon", "respawn", "tcp", "connected", "shm", "msg", "sem", "priority", "affinity"),
    *("of_the_daemon", "sysctl", "namespaces", "stop"),
]
ONE_NAME = ["abstract", "mqueue", "key", "host_name"]
operations = st.one_of(
    st.tuples(st.sampled_from(["write", "append"]), files, texts),
    st.tuples(st.sampled_from(["store", "store_and_hide"]), files, st.just("!")),
    st.tuples(st.sampled_from(["rename", "replace_by_link", "symlink", "link"]), paths, paths),
    st.tuples(st.sampled_from(ONE_PATH), paths),
    st.tuples(st.sampled_from(ONE_FOLDER), folders),
    st.tuples(st.just("chmod"), paths, modes),
    st.tuples(st.just("chown"), paths, st.sampled_from([0, 1000, 65534])),
    st.tuples(st.just("xattr"), paths, st.just("left")),
    st.tuples(st.just("times"), paths, st.sampled_from([12345, 2_000_000_000])),
    st.tuples(st.just("flags"), paths, st.sampled_from([0x10, 0x20, 0x40, 0x80])),
    st.tuples(st.just("unix"), inside),
    st.tuples(st.just("terminal"), st.sampled_from([0, 0o666])),
    st.tuples(st.just("limit"), st.sampled_from([64, 1000, 1_000_000])),
    st.tuples(st.just("clock"), st.just(1_000_000_000)),
    st.tuples(st.sampled_from(ONE_NUMBER), numbers),
    st.tuples(st.sampled_from(ONE_NAME), st.sampled_from(["left", "other"])),
)
sequences = st.lists(operations, min_size=1, max_size=5)


class Tenancy:
    """A member that is leased, dirtied and reset again and again, with what a fresh one shows."""

    def __init__(
        self, loop: asyncio.Runner, runner: BubblewrapRunner, spec: ContainerSpec, look: list[str]
    ) -> None:
        self.loop, self.look = loop, look
        self.resets: dict[bool, int] = {True: 0, False: 0}
        self.since = time.time() - 2
        member = loop.run(runner.start(spec, "m-0"))
        admin, client = SandboxAdmin(member.address, member.admin_token), SandboxClient(member.address, TOKEN)
        self.box = Box(member, client, admin, runner)
        loop.run(runner.lease(member, "first", 0, TOKEN, 600))
        self.pristine = self.seen()

    def seen(self) -> dict[str, Any]:
        result = self.loop.run(
            self.box.client.exec([*PYTHON, *self.look, str(self.since)], output_limit=1 << 20, timeout=60)
        )
        assert (result.exit_code, result.stdout_truncated) == (0, False), result.text[-2000:]
        seen: dict[str, Any] = json.loads(result.stdout)
        return seen

    def leave(self, sequence: list[Any]) -> None:
        """Be a holder that does all this."""
        self.loop.run(self.box.client.exec([*PYTHON, "/srv/leave.py", json.dumps(sequence)], timeout=60))

    def next(self) -> None:
        """Be the next holder."""
        address = self.box.member.address
        self.loop.run(self.box.next_lease())
        self.resets[address == self.box.member.address] += 1

    def close(self) -> None:
        self.loop.run(self.box.client.close())
        self.loop.run(self.box.admin.close())
        self.loop.run(self.box.runner.stop(self.box.member))


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
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def runner(loop: asyncio.Runner, run_dir: Path, sandboxd: Path) -> Iterator[BubblewrapRunner]:
    daemon = run_dir.with_name("sandboxd")
    shutil.copy(sandboxd, daemon)  # every sandbox shows it, and another build may change it meanwhile
    runner = BubblewrapRunner(run_dir, daemon)
    if (reason := runner.check()) is not None:
        pytest.fail(reason)
    yield runner
    loop.run(runner.close())


# 1. In a sandbox of bubblewrap.


@pytest.fixture(scope="module")
def tenancy(loop: asyncio.Runner, runner: BubblewrapRunner, image: Path) -> Iterator[Tenancy]:
    made = Tenancy(loop, runner, ContainerSpec(image=str(image)), ["/srv/look.py"])
    yield made
    made.close()


@examples(80)
@given(sequence=sequences)
def test_nothing_of_a_holder_is_left_in_a_sandbox(tenancy: Tenancy, sequence: list[Any]) -> None:
    tenancy.leave(sequence)
    tenancy.next()
    found = differences(tenancy.pristine, tenancy.seen())
    assert not found, "\n".join(found)


# An account that sees nothing would prove nothing: what each operation leaves is in it.
VISIBLE = {
    "processes": [["background", 1], ["daemon", 1], ["respawn", 1]],
    "kernel": [
        ["tcp", 1],
        ["connected", 1],
        ["abstract", "left"],
        ["shm", 1],
        ["msg", 1],
        ["sem", 1],
        ["held", "/home"],
    ],
    "own": [["limit", 64], ["priority", 5], ["affinity", 1]],
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
        *(
            ["remove", "/etc/hosts"],
            ["fifo", "/dev/shm/a"],
            ["unix", "/run/a"],
            ["replace_by_link", "/etc/group", "/tmp"],
        ),
    ],
}


@pytest.mark.parametrize("part", VISIBLE)
def test_account_shows_what_is_left(tenancy: Tenancy, part: str) -> None:
    before = tenancy.pristine
    for operation in VISIBLE[part]:
        tenancy.leave([operation])
        after = tenancy.seen()
        assert before[part] != after[part], operation
        before = after
    tenancy.next()
