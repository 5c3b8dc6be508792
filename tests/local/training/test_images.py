"""A policy that sees: real verl, real vLLM, and a random Qwen2.5-VL that is shown pictures by its tool."""

import io
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from agentfly.models.images import from_data_url
from agentfly.resources.runners.base import Member
from agentfly.roles.trainer import EXIT_INVALID
from tests.local.training.lab import Lab, lines, make_model, served
from tests.local.training.test_training import batch_key, row_key

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def seeing_model(trainer_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(trainer_python, "tiny_vlm.py", tmp_path_factory.mktemp("vlm"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seeing_server(
    inference_python: Path, seeing_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Member]:
    async with served(inference_python, seeing_model, tmp_path_factory.mktemp("vllm")) as member:
        yield member


async def test_algorithm_with_a_critic_is_refused(
    trainer_python: Path, seeing_model: Path, tmp_path: Path
) -> None:
    lab = Lab(trainer_python, seeing_model, "http://127.0.0.1:9", tmp_path)
    config = lab.config(1, steps=1, algorithm={"name": "ppo"})
    for program in (lab.program, (*lab.program, "--check")):
        lab.program = program
        assert await lab.run(config) == EXIT_INVALID, lab.tail()
        assert "ppo needs a critic, and transformers has none for qwen2_5_vl" in lab.tail()


async def test_what_a_tool_shows_is_seen_and_trained_on(
    trainer_python: Path, seeing_model: Path, seeing_server: Member, tmp_path: Path
) -> None:
    """Three steps. The trainer computes what the server computed, also with weights that changed."""
    lab = Lab(trainer_python, seeing_model, seeing_server.address, tmp_path)
    lab.modules, lab.broker = ["recorder"], "http://127.0.0.1:9"
    config = lab.config(
        1, steps=3, agent_entrypoint="pictures.py:agent", tasks_entrypoint="pictures.py:tasks", max_turns=2
    )
    assert await lab.run(config) == 0, lab.tail()
    steps = lab.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["rollouts"]["failed"] == 0 for step in steps)
    assert all(step["prob_diff_max"] < 1e-4 for step in steps)
    # A random policy writes placeholders too, one token in a hundred and fifty.
    assert {reason for step in steps for reason in step["reasons"]} <= {"placeholder"}
    trajectories = [item for path in (lab.run_dir / "trajectories").iterdir() for item in lines(path)]
    rows = [row for item in trajectories if item["outcome"]["type"] == "scored" for row in item["rows"]]
    trained = [item for item in lines(lab.run_dir / "batches.jsonl") if any(item["response_mask"])]
    # A group of which a single rollout was scored teaches nothing.
    assert len(trained) > len(rows) / 2
    assert Counter(batch_key(item) for item in trained) <= Counter(map(row_key, rows))
    # One in its prompt and one from its tool, one of the two, none: rows of a batch differ.
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    files = {from_data_url(image) for item in trajectories for image in item["images"]}
    assert {Image.open(io.BytesIO(file)).mode for file in files} == {"RGB"}
