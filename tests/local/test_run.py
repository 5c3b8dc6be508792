"""The whole line, by the command line alone: real vLLM, real verl, real sandboxes, the quickstart's own manifest.

Guarantees under test (`agentfly.local.training`):
1. However the run ends, its processes, sandboxes and servers end with it.
2. Asked to stop, it ends the step, writes a checkpoint and stops; the same command goes on from there.
3. A runner that is killed leaves nothing behind; the same command resumes from the last checkpoint.
4. A finished run stays finished: running it again starts nothing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentfly.local.paths import run_dir

REPOSITORY = Path(__file__).parents[2]
STEPS, STEP_LIMIT_S, GONE_S = 7, 420, 20
pytestmark = pytest.mark.timeout(900)


def agentfly(runs: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "agentfly.cli", "run", "-f", "examples/quickstart/run.yaml", "--runs", str(runs)]
        + ["--name", "line", "--set", f"steps={STEPS}", "--set", "checkpoint.everySteps=2", *more],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def steps(folder: Path) -> list[int]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> None:
    deadline = time.monotonic() + STEP_LIMIT_S
    while step not in steps(folder):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"step {step} was not done in {STEP_LIMIT_S} s"
        time.sleep(0.2)


def left_behind(runs: Path) -> list[str]:
    """Processes of a run (they all name its folder or its scratch), mounts, control groups, and scratch folders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(runs) in command or f"{run_dir()}/" in command:
                found.append(f"process {entry.name}: {command[:200]}")
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(run_dir()) in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob("**/agentfly-*")]
    found += [str(path) for path in run_dir().iterdir()]
    return found


def assert_nothing_left(runs: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while (found := left_behind(runs)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == []


def test_a_run_that_is_stopped_killed_and_continued_twice_succeeds(tmp_path):
    folder = tmp_path / "line"

    # 2. asked to stop after the first step
    process = agentfly(tmp_path)
    wait_for_step(process, folder, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    status = json.loads((folder / "status.json").read_text())
    assert process.returncode == 130, output
    assert status["phase"] == "Suspended"
    suspended_at = status["checkpoint"]["latestStep"]
    assert suspended_at == steps(folder)[-1]
    assert_nothing_left(tmp_path)

    # 3. killed in the middle of the second life
    process = agentfly(tmp_path)
    wait_for_step(process, folder, suspended_at + 2)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + GONE_S
    while (found := [line for line in left_behind(tmp_path) if line.startswith("process")]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.2)
    assert found == []

    # the third life goes on from the last checkpoint, and succeeds
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= suspended_at
    before = len(steps(folder))
    process = agentfly(tmp_path)
    output, _ = process.communicate(timeout=STEP_LIMIT_S)
    assert process.returncode == 0, output
    assert steps(folder)[before:] == list(range(saved + 1, STEPS + 1))
    last = output.splitlines()[-1]
    assert last.startswith(f"line: Succeeded steps={STEPS} reward_first5="), output
    status = json.loads((folder / "status.json").read_text())
    assert (status["phase"], status["attempt"], status["progress"]["step"]) == ("Succeeded", 3, STEPS)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert_nothing_left(tmp_path)
    assert_every_rollout_is_whole(folder)

    # 4. finished is finished
    process = agentfly(tmp_path)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.splitlines()[-1]) == (0, last)


def assert_every_rollout_is_whole(folder: Path) -> None:
    """Every step trained on all its rollouts, all scored, on tokens whose drift is none."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in metrics:
        assert record["rollouts"] == {"scored": 64, "masked": 0, "failed": 0}
        assert record["drift_fraction"] == 0.0
        assert record["prob_diff_max"] < 1e-3
