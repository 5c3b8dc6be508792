"""The real environments."""

import subprocess
import time
from pathlib import Path

import pytest

from agentfly.local import environments

pytestmark = pytest.mark.timeout(900)


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
        env={"PYTHONPATH": str(environments.agentfly_path()), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_cuda_build_of_torch_computes_on_this_cpu(trainer_python: Path) -> None:
    code = "import torch; x = torch.ones(3, 3); print((x @ x).sum().item(), torch.cuda.is_available())"
    assert run(trainer_python, code) == "27.0 False"


def test_agentfly_runs_in_both_from_the_folder_on_the_path(
    trainer_python: Path, inference_python: Path
) -> None:
    for python in (trainer_python, inference_python):
        code = "import agentfly.roles.trainer, agentfly.models; print(agentfly.__file__)"
        assert run(python, code).startswith(str(environments.agentfly_path()))


def test_the_packages_are_the_pinned_ones(trainer_python: Path, inference_python: Path) -> None:
    code = "from importlib.metadata import version as v; print(v('verl'), v('transformers'), v('torch'))"
    assert run(trainer_python, code) == "0.9.1 5.10.4 2.13.0"
    code = "from importlib.metadata import version as v; print(v('vllm'), v('transformers'), v('torch'))"
    assert run(inference_python, code) == "0.32.0+cpu 5.19.0 2.13.0"


def test_an_environment_that_is_there_is_found_in_50_ms(trainer_python: Path) -> None:
    started = time.perf_counter()
    assert environments.build("trainer") == trainer_python
    assert time.perf_counter() - started < 0.05
