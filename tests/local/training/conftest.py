"""The two environments, a tiny random model and one vLLM server, made once for all tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agentfly.local import environments
from agentfly.resources.runners.base import Member
from tests.local.training.lab import make_model, served


@pytest.fixture(scope="session")
def trainer_python() -> Path:
    return environments.build("trainer")


@pytest.fixture(scope="session")
def inference_python() -> Path:
    return environments.build("inference")


@pytest.fixture(scope="session")
def tiny_model(trainer_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(trainer_python, "tiny_model.py", tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(
    inference_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Member]:
    async with served(inference_python, tiny_model, tmp_path_factory.mktemp("vllm")) as member:
        yield member
