"""Checkpoints of FSDP2 for another number of ranks, in the trainer environment."""

import os
import subprocess
from pathlib import Path

import pytest

from agentfly.local.environments import agentfly_path

CASES = Path(__file__).parent / "reshard_cases.py"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", ["back", "critic", "short", "layouts", "meshes"])
def test_reshard(trainer_python: Path, tmp_path: Path, case: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [trainer_python, CASES, case, tmp_path],
        env={**environment, "PYTHONPATH": str(agentfly_path())},
        timeout=200,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
