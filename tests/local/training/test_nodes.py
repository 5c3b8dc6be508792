"""Ray on two nodes, real but without verl."""

import os
import subprocess
from pathlib import Path

import pytest

from agentfly.local.environments import agentfly_path
from agentfly.resources.runners.guard import guarded

HERE = Path(__file__).parent


@pytest.mark.timeout(300)
def test_the_loop_is_on_the_head_and_a_lost_node_ends_it(trainer_python: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    done = subprocess.run(
        guarded([str(trainer_python), str(HERE / "lost_node.py"), str(tmp_path)]),
        env={**environment, "PYTHONPATH": f"{agentfly_path()}:{HERE}"},
        timeout=280,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == " ".join(["127.0.0.2"] * 4), done.stderr[-3000:]
    assert "1 of 2 Ray nodes are alive, ending" in done.stderr
    assert done.returncode == 1
