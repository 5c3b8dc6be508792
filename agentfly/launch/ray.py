"""Ray's command lines in trainer pods, as data.

Guarantees:
1. Every pod is a node of Ray with a resource of its own name, so that the missing ones can be named; the
   head's has ``HEAD_RESOURCE`` too.
2. A pod offers as many GPUs as it has ranks, on a CPU as a number, and logical CPUs enough for verl: with
   fewer than 6 it waits for ever, in silence.
3. Who joins or uses the Ray of a run must have its key, where the pod has the token of a broker: the key is
   made of that token, which Ray itself never has.
4. The object store leaves half of /dev/shm to others; it is never smaller than Ray accepts.

Only the port of the head is fixed: pods of one run reach each other at all ports.
"""

import hashlib
import hmac
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentfly.broker.access import TOKEN_FILE, TokenFile
from agentfly.roles.launch import HEAD_RESOURCE, RAY_PORT
from agentfly.roles.trainer import TrainerConfig

LOGICAL_CPUS: Final = 16
STORE_MIN: Final = 80 * 2**20  # Ray refuses less than 75 MiB
STORE_CPU: Final = 200_000_000  # a model that trains on a CPU is small
KEY_FOLDER: Final = Path("/tmp")  # the pod's own
PYTHON: Final = (sys.executable, "-m")
_POD: Final = "pod:"

# It ends when one of Ray's processes does, and they end with it.
_START = (*PYTHON, "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


@dataclass(frozen=True)
class Place:
    """A trainer pod, as Ray sees it.

    Attributes:
        pod: its name.
        gpus: ranks in the pod; 0 for one on the CPU.
        shm_bytes: size of its /dev/shm.
        port: of the head.
        temp_dir: Ray's files of the whole cluster, where they are not in Ray's own place.
        uid: of the pod, where its name may be that of another one before it.
    """

    pod: str
    ip: str
    gpus: int
    shm_bytes: int
    port: int = RAY_PORT
    temp_dir: Path | None = None
    uid: str = ""


def head_command(place: Place) -> list[str]:
    """Ray in the head's pod."""
    resources = {resource_of(place.pod): 1, HEAD_RESOURCE: 1}
    head = ["--head", f"--port={place.port}", "--include-dashboard=false"]
    where = [f"--temp-dir={place.temp_dir}"] if place.temp_dir is not None else []
    return [*_START, *head, *where, *_node(place, resources)]


def node_command(place: Place, head: str) -> list[str]:
    """Ray in another pod; ``head`` is the name of the head's pod in DNS."""
    return [*_START, f"--address={head}:{place.port}", *_node(place, {resource_of(place.pod): 1})]


def authentication(
    config: TrainerConfig, base: Mapping[str, str], folder: Path = KEY_FOLDER
) -> dict[str, str]:
    """The variables by which Ray asks for a key and has it; none where ``base`` names no token of a broker.

    It is another key for every run, and all pods of a run make the same one.

    Raises:
        ResourceError: the token cannot be read.
    """
    if TOKEN_FILE not in base:
        return {}
    token = TokenFile(Path(base[TOKEN_FILE])).token
    key = hmac.new(token.encode(), f"ray of {config.run_dir}".encode(), hashlib.sha256).hexdigest()
    file = folder / f"agentfly-ray-{os.getpid()}"
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
        handle.write(key)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def resource_of(pod: str) -> str:
    """The resource that only this pod has."""
    return f"{_POD}{pod}"


def is_pod(resources: Iterable[str]) -> bool:
    """Whether a node of Ray with these resources is a pod of an attempt."""
    return any(resource.startswith(_POD) for resource in resources)


def _node(place: Place, resources: dict[str, int]) -> list[str]:
    limit = place.shm_bytes if place.gpus else STORE_CPU
    return [
        f"--node-ip-address={place.ip}",
        f"--num-cpus={LOGICAL_CPUS}",
        f"--num-gpus={max(place.gpus, 1)}",
        f"--object-store-memory={max(STORE_MIN, min(place.shm_bytes // 2, limit))}",
        f"--resources={json.dumps(resources)}",
    ]
