"""A guard against processes that try to outlive it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from agentfly.resources.runners.guard import guarded, kill_guard

# Leaves the session and ignores every signal that can be ignored.
STUBBORN = """
import os, signal, sys, time
if os.fork(): time.sleep(300)
os.setsid()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
open(sys.argv[1], "w").write("up")
time.sleep(300)
"""


def alive(mark: str) -> list[int]:
    """Processes of the whole machine that have ``mark`` among their arguments."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and mark.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + 5
    while alive(mark):
        assert time.monotonic() < deadline, f"still there: {alive(mark)}"
        time.sleep(0.05)


@pytest.fixture
def up(tmp_path: Path) -> Path:
    """A path that no other process has among its arguments."""
    return tmp_path / f"up-{uuid.uuid4().hex}"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 4, 6, 8, 12])
async def test_a_guard_that_is_killed_while_it_starts_leaves_nothing(up: Path, milliseconds: int) -> None:
    for _ in range(10):
        command = guarded([sys.executable, "-c", "import time; time.sleep(300)", str(up)])
        guard = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        await asyncio.sleep(milliseconds / 1000)
        kill_guard(guard)
        await asyncio.wait_for(guard.wait(), 5)
    wait_until_gone(str(up))


def test_killing_the_guard_kills_every_descendant(up: Path) -> None:
    guard = subprocess.Popen(guarded([sys.executable, "-c", STUBBORN, str(up)]), start_new_session=True)
    wait_for(up)
    assert len(alive(str(up))) >= 3
    guard.kill()
    guard.wait(5)
    wait_until_gone(str(up))


def test_a_killed_owner_takes_its_guards_along(up: Path) -> None:
    code = (
        "import subprocess, sys, time; from agentfly.resources.runners.guard import guarded;"
        f"subprocess.Popen(guarded([sys.executable, '-c', {STUBBORN!r}, {str(up)!r}])); time.sleep(300)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])
    wait_for(up)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(5)
    wait_until_gone(str(up))


# Each forks, starts a guard and kills itself a moment later; the moments differ by fractions of the start.
SHORT_LIVED = """
import os, signal, subprocess, sys, time
from agentfly.resources.runners.guard import guarded
for number in range(120):
    if os.fork() == 0:
        guard = guarded([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]])
        subprocess.Popen(guard, stderr=subprocess.DEVNULL)
        time.sleep(number / 10_000)
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 2:
        os.wait()  # the others stay for a while as what a killed process is until its parent looks
"""


def test_an_owner_that_is_killed_while_its_guard_starts_leaves_nothing(up: Path) -> None:
    subprocess.run([sys.executable, "-c", SHORT_LIVED, str(up)], timeout=60, check=True)
    wait_until_gone(str(up))


def test_the_end_of_the_process_is_the_end_of_what_it_started(up: Path) -> None:
    child = f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}, {str(up)!r}], start_new_session=True)"
    wait = f"while not os.path.exists({str(up)!r}): time.sleep(0.02)"
    code = f"import os, subprocess, sys, time\n{child}\n{wait}\nsys.exit(7)"
    assert subprocess.run(guarded([sys.executable, "-c", code]), timeout=10, check=False).returncode == 7
    wait_until_gone(str(up))


def test_shared_memory_is_private_and_gone(up: Path) -> None:
    name = f"/dev/shm/{up.name}"
    done = subprocess.run(
        guarded(["sh", "-c", f"echo x > {name} && cat {name}"]), capture_output=True, timeout=10, check=True
    )
    assert done.stdout == b"x\n"
    assert not Path(name).exists()


def test_the_files_of_the_machine_are_seen_and_written_as_they_are(tmp_path: Path) -> None:
    target = tmp_path / "out"
    subprocess.run(guarded(["sh", "-c", f"echo hello > {target}"]), timeout=10, check=True)
    assert target.read_text() == "hello\n"
