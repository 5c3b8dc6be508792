"""The algorithms in the trainer environment: with the real verl, without servers and rollouts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agentfly.local.environments import agentfly_path

CASES = Path(__file__).parent / "algorithm_cases.py"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("case", ["composes", "agrees", "equal", "trainer", "updates", "sampler", "refill"])
def test_algorithms(trainer_python: Path, tiny_model: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [trainer_python, CASES, case, tmp_path],
        env={**environment, "PYTHONPATH": str(agentfly_path())},
        timeout=500,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
