"""A run whose trainer serves the policy, as far as it goes without a GPU: verl's own classes, no vLLM."""

import os
import subprocess
from pathlib import Path

import pytest

from agentfly.local.environments import agentfly_path

CASES = Path(__file__).parent / "colocated_cases.py"
pytestmark = pytest.mark.timeout(600)


def test_verl_takes_the_configuration_and_its_client_plays_rollouts(
    trainer_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    done = subprocess.run(
        [trainer_python, CASES, tiny_model, tmp_path],
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(agentfly_path())},
        timeout=560,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
