"""What the pods of one attempt of a training run have in common: its files, and where they are.

Guarantees:
1. Paths do not depend on where a process runs, also where the manifest's folder is one of the image.
2. Each process of an attempt has a log of its own.
"""

import os
import shutil
from pathlib import Path

from agentfly.launch.ray import Place
from agentfly.roles.trainer import TrainerConfig

ENV_POD, ENV_IP, ENV_UID = "POD_NAME", "POD_IP", "POD_UID"
SHARED_MEMORY = Path("/dev/shm")


def resolved(config: TrainerConfig) -> TrainerConfig:
    """The config with absolute paths."""
    paths = {"base_dir": config.base_dir, "model_path": config.model_path, "tasks_path": config.tasks_path}
    return config.model_copy(update={name: path and path.absolute() for name, path in paths.items()})


def log_file(config: TrainerConfig, name: str) -> Path:
    """Where a process of this attempt leaves what it prints."""
    return config.run_dir / "logs" / f"{name}-{config.attempt}.log"


def this_pod(config: TrainerConfig) -> Place:
    """The pod of this process."""
    shm_bytes = shutil.disk_usage(SHARED_MEMORY).total
    return Place(
        os.environ[ENV_POD], os.environ[ENV_IP], config.gpus, shm_bytes, uid=os.environ.get(ENV_UID, "")
    )
