"""A child of a pod's main process. Numbers are those of child.py."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.launch.child import running

DEADLINE = 30.0
# Leaves a process in a group of its own, as Ray's daemons are, and one that ignores SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
print(child.pid, flush=True)
time.sleep(600 if sys.argv[1] == "stay" else 0)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(holds, deadline_s: float = DEADLINE) -> None:
    async with asyncio.timeout(deadline_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def run(code: str, tmp_path: Path, *arguments: str) -> int:
    argv = [sys.executable, "-c", code, *arguments]
    async with running(argv, env={}, log=tmp_path / "logs" / "log", cwd=tmp_path) as child:
        return await child.wait(DEADLINE)


# 1. What it prints is at once in the pod's own output and in its log.


async def test_what_it_prints_is_in_both_before_it_ends(tmp_path, capfd):
    log = tmp_path / "logs" / "log"
    code = "import sys, time; print('to all', flush=True); print('bad', file=sys.stderr); time.sleep(600)"
    async with running([sys.executable, "-c", code], env={}, log=log, cwd=tmp_path):
        await until(lambda: log.exists() and "bad" in log.read_text())
    assert log.read_text() == "to all\nbad\n"
    assert capfd.readouterr().out == "to all\nbad\n"


async def test_a_log_is_appended_to(tmp_path):
    await run("print(1)", tmp_path)
    await run("print(2)", tmp_path)
    assert (tmp_path / "logs" / "log").read_text() == "1\n2\n"


async def test_a_log_that_cannot_be_written_does_not_stop_the_output(tmp_path, capfd):
    (tmp_path / "logs").write_text("no folder")
    assert await run("print('x' * 300000)", tmp_path) == 0
    assert "x" * 300000 in capfd.readouterr().out


async def test_a_log_that_is_full_does_not_stop_the_child(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log").symlink_to("/dev/full")
    assert await run("print('x' * 300000)", tmp_path) == 0
    assert "x" * 300000 in capfd.readouterr().out


# 2. When the block is left, nothing is left of its session.


@pytest.mark.parametrize("how", ["stay", "go"])
async def test_nothing_is_left_of_its_session(tmp_path, how):
    log = tmp_path / "logs" / "log"
    async with running([sys.executable, "-c", TREE, how], env={}, log=log, cwd=tmp_path) as child:
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        if how == "go":
            assert await child.wait(DEADLINE) == 0
        grandchild = int(log.read_text())
        assert alive(grandchild)
    assert not alive(child.pid)
    assert not alive(grandchild)


async def test_an_error_in_the_block_ends_it_too(tmp_path):
    with pytest.raises(KeyError):
        async with running(["sleep", "600"], env={}, log=tmp_path / "log", cwd=tmp_path) as child:
            raise KeyError
    assert not alive(child.pid)


async def test_a_program_that_is_not_there_is_an_error_and_leaves_no_file_open(tmp_path):
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        async with running(["/no/such/program"], env={}, log=tmp_path / "log", cwd=tmp_path):
            pass
    await until(lambda: len(os.listdir("/proc/self/fd")) <= len(open_before))


# 3. Its exit code is that of a shell.


@pytest.mark.parametrize(("command", "code"), [("exit 85", 85), ("kill -9 $$", 137), ("exit 0", 0)])
async def test_its_exit_code_is_that_of_a_shell(tmp_path, command, code):
    async with running(["sh", "-c", command], env={}, log=tmp_path / "log", cwd=tmp_path) as child:
        assert await child.wait(DEADLINE) == code
        assert child.exit_code == code


async def test_one_that_runs_on_is_told_apart_from_one_that_ended(tmp_path):
    async with running(["sleep", "600"], env={}, log=tmp_path / "log", cwd=tmp_path) as child:
        assert not await child.ends_within(0.05)
        assert child.exit_code is None
        with pytest.raises(TimeoutError):
            await child.wait(0.05)


async def test_variables_are_added_to_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    code = "import os; print(os.environ['OURS'], os.environ['ITS'])"
    argv = [sys.executable, "-c", code]
    async with running(argv, env={"ITS": "2"}, log=tmp_path / "log", cwd=tmp_path) as child:
        await child.wait(DEADLINE)
    assert (tmp_path / "log").read_text() == "1 2\n"


# 4. reap_orphans collects what nobody else does, and no child of ours.

ADOPTER = """
import ctypes, os, subprocess, sys, time
from agentfly.launch.child import reap_orphans
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come here, as to a container's first process
ours = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
parent = subprocess.Popen(["sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
orphan = int(parent.stdout.readline()); parent.wait()
state = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
while state(orphan) != "Z" or state(ours.pid) != "Z":
    time.sleep(0.02)
reap_orphans()
assert not os.path.exists(f"/proc/{orphan}"), "the orphan is still there"
assert ours.wait() == 7, "our own child was taken away"
"""


def test_orphans_are_collected_and_our_own_children_are_not():
    done = subprocess.run(
        [sys.executable, "-c", ADOPTER], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
