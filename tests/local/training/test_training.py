"""Real jobs: verl, vLLM, broker and sandboxes, a random model. About a minute each."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.roles.trainer import EXIT_SUSPENDED
from agentfly.training import checkpoints
from tests.local.training.lab import HERE, JOB_S, TRAINER, Lab, broker, lines

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def lab(trainer_python: Path, tiny_model: Path, server: Member, tmp_path: Path) -> Lab:
    return Lab(trainer_python, tiny_model, server.address, tmp_path)


async def test_what_is_trained_on_is_what_was_sampled(
    lab: Lab, runner: BubblewrapRunner, run_dir: Path
) -> None:
    """Two steps in sandboxes; the rows in verl's loss are, bit for bit, what the server sampled."""
    lab.modules = ["recorder"]
    async with broker(runner, run_dir.parent / "broker") as engine:
        lab.broker = f"unix://{run_dir.parent}/broker"
        assert await lab.run(lab.config(1, steps=2)) == 0, lab.tail()
        assert (await engine.status())["shell"].leased == 0
    steps = lab.metrics()
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["rollouts"] == {"scored": 16, "masked": 0, "failed": 0} for step in steps)
    # The temperature is not 1: the server must give the log-probabilities after it, as the trainer does.
    assert all(step["prob_diff_max"] < 1e-4 for step in steps)
    trajectories = [item for path in (lab.run_dir / "trajectories").iterdir() for item in lines(path)]
    sampled = Counter(row_key(row) for item in trajectories for row in item["rows"])
    trained = [item for item in lines(lab.run_dir / "batches.jsonl") if any(item["response_mask"])]
    assert sampled.total() == 32
    assert Counter(batch_key(item) for item in trained) == sampled
    assert {version(item) for item in trajectories} == {"0", "1"}


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = tuple(f"{logprob:.6g}" for logprob in row["logprobs"])
    return tuple(row["prompt_ids"] + row["response_ids"]), tuple(row["response_mask"]), logprobs


def batch_key(item: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = tuple(f"{logprob:.6g}" for logprob in item["rollout_log_probs"])
    return tuple(item["input_ids"]), tuple(item["response_mask"]), logprobs


def version(trajectory: dict[str, Any]) -> str:
    (name,) = {span["version"] for row in trajectory["rows"] for span in row["weight_versions"]}
    return str(name)


async def test_rollouts_run_ahead_of_the_updates_as_far_as_they_may(
    lab: Lab, runner: BubblewrapRunner, run_dir: Path
) -> None:
    """Suspended on its way: what was played ahead is trained on afterwards, and nothing twice."""
    lab.modules = ["recorder"]
    ahead = {"asynchronous": {"max_staleness": 2}}
    async with broker(runner, run_dir.parent / "broker") as engine:
        lab.broker = f"unix://{run_dir.parent}/broker"
        first = lab.config(1, steps=7, **ahead)
        process = await lab.start(first)
        async with asyncio.timeout(JOB_S):
            while not lab.metrics() and process.returncode is None:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.2)
        first.suspend_file.touch()
        assert await lab.wait(process) == EXIT_SUSPENDED, lab.tail()
        first.suspend_file.unlink()
        assert await lab.run(lab.config(2, steps=7, **ahead)) == 0, lab.tail()
        assert (await engine.status())["shell"].leased == 0
    steps = lab.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert all(step["rollouts"] == {"scored": 16, "masked": 0, "failed": 0} for step in steps)
    assert all(0 < step["importance_max"] <= 2 for step in steps)
    assert (steps[0]["staleness_max"], max(step["staleness_max"] for step in steps)) == (0, 2)
    trained = [item for item in lines(lab.run_dir / "batches.jsonl") if any(item["response_mask"])]
    trajectories = [item for path in (lab.run_dir / "trajectories").iterdir() for item in lines(path)]
    sampled = Counter(row_key(row) for item in trajectories for row in item["rows"])
    rows = Counter(batch_key(item) for item in trained)
    assert rows.total() == 7 * 16
    assert rows <= sampled
    # Each step has its own tasks, in their order; a group that was cut short may have been played twice.
    assert {item["group_id"] for item in trajectories} == {f"s{1 + n // 4}-t{n}" for n in range(28)}


async def test_a_suspended_run_goes_on_where_it_stopped(
    lab: Lab, runner: BubblewrapRunner, run_dir: Path
) -> None:
    async with broker(runner, run_dir.parent / "broker"):
        lab.broker = f"unix://{run_dir.parent}/broker"
        first = lab.config(1, steps=60)
        process = await lab.start(first)
        async with asyncio.timeout(JOB_S):
            while not lab.metrics() and process.returncode is None:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.2)
        first.suspend_file.touch()
        assert await lab.wait(process) == EXIT_SUSPENDED, lab.tail()
        stopped = lab.metrics()[-1]["step"]
        assert checkpoints.steps(lab.run_dir / "checkpoints") == [stopped]
        first.suspend_file.unlink()
        assert await lab.run(lab.config(2, steps=stopped + 2)) == 0, lab.tail()
    assert [(step["attempt"], step["step"]) for step in lab.metrics()][-2:] == [
        (2, stopped + 1),
        (2, stopped + 2),
    ]
    assert checkpoints.steps(lab.run_dir / "checkpoints") == [stopped + 2]
    groups = {
        item["group_id"]
        for path in (lab.run_dir / "trajectories").glob("attempt-2-*")
        for item in lines(path)
    }
    next_task = stopped * 4
    assert groups == {f"s{stopped + 1 + n // 4}-t{next_task + n}" for n in range(8)}


@pytest.mark.timeout(1800)
async def test_ranks_on_two_nodes_train_together_and_one_goes_on_from_their_checkpoint(
    lab: Lab, runner: BubblewrapRunner, run_dir: Path
) -> None:
    async with broker(runner, run_dir.parent / "broker"):
        lab.broker = f"unix://{run_dir.parent}/broker"
        lab.program = (str(HERE / "two_nodes.py"),)
        both = lab.config(1, steps=2, nodes=2, ray_address="auto")
        assert await lab.run(both) == 0, lab.tail()
        assert checkpoints.ranks(both.checkpoint_dir, 2) == 2
        newest = str(checkpoints.path_of(both.checkpoint_dir, 2))
        cut = ("-m", "agentfly.training.reshard", "--checkpoint", newest, "--ranks", "1")
        assert await lab.wait(await lab.start_program(*cut)) == 0, lab.tail()
        assert checkpoints.ranks(both.checkpoint_dir, 2) == 1
        lab.program = TRAINER
        assert await lab.run(lab.config(2, steps=3)) == 0, lab.tail()
    steps = lab.metrics()
    assert [(step["attempt"], step["step"]) for step in steps] == [(1, 1), (1, 2), (2, 3)]
    assert all(step["rollouts"] == {"scored": 16, "masked": 0, "failed": 0} for step in steps)
    assert all(step["prob_diff_max"] < 1e-4 for step in steps)
    assert checkpoints.ranks(both.checkpoint_dir, 3) == 1


async def test_a_job_whose_server_is_gone_fails_with_its_name(lab: Lab, run_dir: Path) -> None:
    lab.url = "http://127.0.0.1:9"
    lab.broker = f"unix://{run_dir.parent}/nobody"
    assert await lab.run(lab.config(1, steps=2)) == 1
    last = lab.tail().splitlines()[-1]
    assert (
        "RuntimeError: weights: http://127.0.0.1:9/pause?mode=abort&clear_cache=true: Cannot connect to host"
        in last
    )
    assert last.endswith("rollouts of unfinished steps: none")
