"""Two nodes of Ray on this machine, as two pods have them, then the trainer: ``two_nodes.py --config FILE``.

The nodes know nothing of the run: what verl's processes need there, they get from the trainer.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from agentfly.launch.ray import PYTHON, Place, head_command, node_command
from agentfly.roles.trainer import TrainerConfig
from agentfly.training.verl_config import environment

START_S = 120.0
HEAD, NODE = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the address of the machine
SHM_BYTES = 400_000_000
RAY_DIR = Path("/dev/shm/agentfly-ray")


def main() -> int:
    """The exit code of the trainer."""
    path = Path(sys.argv[2])
    config = TrainerConfig.model_validate_json(path.read_text())
    address, _ = start(environment(config, path, {}), config.run_dir)
    trainer = [*PYTHON, "agentfly.training.main", "--config", str(path)]
    return subprocess.run(trainer, env={**os.environ, "RAY_ADDRESS": address}, check=False).returncode


def start(variables: dict[str, str], folder: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Ray on both nodes; its address, and the second node."""
    with socket.create_server((HEAD, 0)) as free:
        port = free.getsockname()[1]
    own = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
    own |= {key: text for key, text in variables.items() if key.startswith("RAY_")}
    own |= {"GLOO_SOCKET_IFNAME": "lo"}
    subprocess.Popen(head_command(Place("head", HEAD, 0, SHM_BYTES, port, RAY_DIR)), env=own)
    answers(port)
    address = f"{HEAD}:{port}"
    join(address, folder, "head")  # a node that asks earlier may be refused
    node = subprocess.Popen(node_command(Place("node", NODE, 0, SHM_BYTES, port), HEAD), env=own)
    join(address, folder, "head", "node")
    return address, node


def join(address: str, folder: Path, *pods: str) -> None:
    """Wait until they are nodes."""
    joined = [*PYTHON, "agentfly.launch.joined", "--pods", *pods]
    joined += ["--missing", str(folder / "missing"), "--deadline", str(START_S)]
    subprocess.run(joined, env={**os.environ, "RAY_ADDRESS": address}, check=True)


def answers(port: int) -> None:
    """Wait until somebody listens."""
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((HEAD, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
