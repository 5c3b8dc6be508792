"""The two environments, a tiny random model and one vLLM server, made once for all tests of this folder."""

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentfly.local import environments
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.spec import ModelServiceSpec

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def trainer_python() -> Path:
    return environments.build("trainer")


@pytest.fixture(scope="session")
def inference_python() -> Path:
    return environments.build("inference")


@pytest.fixture(scope="session")
def tiny_model(trainer_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    command = [trainer_python, HERE / "tiny_model.py", folder]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, capture_output=True)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(
    inference_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Member]:
    runner = ModelServiceRunner(inference_python, tmp_path_factory.mktemp("vllm"), start_timeout_s=240)
    spec = ModelServiceSpec(model=str(tiny_model), max_model_len=512, max_num_seqs=64, dtype="float32")
    member = await runner.start(spec, "policy-0")
    try:
        yield member
    finally:
        await runner.stop(member)
