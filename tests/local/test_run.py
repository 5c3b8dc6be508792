"""The whole line, by the command line alone: real vLLM, verl and sandboxes, the quickstart's own manifest.

Guarantees under test (`agentfly.local.training`):
1. However the run ends, its processes, sandboxes and servers end with it.
2. Asked to stop, it ends the step, writes a checkpoint and stops; the same command goes on from there.
3. A runner that is killed leaves nothing behind; the same command resumes from the last checkpoint.
4. A finished run stays finished: running it again starts nothing.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.local.paths import cache_dir

REPOSITORY = Path(__file__).parents[2]
STEPS, STEP_LIMIT_S, GONE_S = 7, 420, 20
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cache() -> Iterator[Path]:
    """A cache of its own, with the environments that are built: what the run leaves in it is all its own."""
    path = Path(tempfile.mkdtemp(prefix="af-"))  # short: it will hold sockets
    (path / "agentfly").mkdir()
    (path / "agentfly" / "env").symlink_to(cache_dir() / "env")
    yield path
    shutil.rmtree(path)


def agentfly(runs: Path, cache: Path) -> subprocess.Popen:
    sets = [f"steps={STEPS}", "checkpoint.everySteps=2"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "agentfly.cli", "run", "-f", "examples/quickstart/run.yaml"),
            *("--runs", str(runs), "--name", "line"),
            *(word for assignment in sets for word in ("--set", assignment)),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps(folder: Path) -> list[int]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + STEP_LIMIT_S
    while step not in steps(folder):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} was not done in {STEP_LIMIT_S} s"
        time.sleep(0.2)


def traces(runs: Path, cache: Path, pid: int) -> set[str]:
    """What a runner of this pid has on this machine: processes, mounts, control groups, scratch folders."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(runs) in command or str(cache) in command:
                    found.add(f"process {entry.name}: {command[:200]}")
    found |= {line for line in Path("/proc/mounts").read_text().splitlines() if str(cache) in line}
    found |= {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/agentfly-{pid}-*")}
    return found | {str(path) for path in cache.glob("agentfly/run/*")}


def assert_gone(runs: Path, cache: Path, pid: int, only: str = "") -> None:
    """Nothing of the runner is left; ``only`` limits it to traces that begin so."""
    deadline = time.monotonic() + GONE_S
    while found := {trace for trace in traces(runs, cache, pid) if trace.startswith(only)}:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def test_a_run_that_is_stopped_killed_and_continued_twice_succeeds(tmp_path, cache):
    folder = tmp_path / "line"

    # 2. asked to stop after the first step
    process = agentfly(tmp_path, cache)
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    status = json.loads((folder / "status.json").read_text())
    assert process.returncode == 130, output
    assert status["phase"] == "Suspended"
    suspended_at = status["checkpoint"]["latestStep"]
    assert suspended_at == steps(folder)[-1]
    assert_gone(tmp_path, cache, process.pid)

    # 3. killed in the middle of the second life
    process = agentfly(tmp_path, cache)
    wait_for_step(process, folder, suspended_at + 2)
    process.kill()
    process.communicate(timeout=30)
    assert_gone(tmp_path, cache, process.pid, only="process")

    # the third life goes on from the last checkpoint, and succeeds
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= suspended_at
    known = len(steps(folder))
    process = agentfly(tmp_path, cache)
    output, _ = process.communicate(timeout=STEP_LIMIT_S)
    assert process.returncode == 0, output
    assert steps(folder)[known:] == list(range(saved + 1, STEPS + 1))
    last = output.splitlines()[-1]
    assert last.startswith(f"line: Succeeded steps={STEPS} reward_first5="), output
    status = json.loads((folder / "status.json").read_text())
    assert (status["phase"], status["attempt"], status["progress"]["step"]) == ("Succeeded", 3, STEPS)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert_gone(tmp_path, cache, process.pid)
    assert_every_rollout_is_whole(folder)

    # 4. finished is finished
    process = agentfly(tmp_path, cache)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (0, last)


def assert_every_rollout_is_whole(folder: Path) -> None:
    """Every step trained on all its rollouts, all scored, on the very tokens that were sampled."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in metrics:
        assert record["rollouts"] == {"scored": 64, "masked": 0, "failed": 0}
        assert record["drift_fraction"] < 0.01  # a policy may spell a word in tokens that no tokenizer would
        assert record["prob_diff_max"] < 1e-3
