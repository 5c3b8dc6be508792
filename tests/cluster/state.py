"""What a running cluster is, in a file: whoever has the file can stop it.

Guarantees:
1. The file is whole or absent, and names every process by pid and start.
2. Clusters whose owner died are found by a folder of all that live, whatever folder they were in.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.control_plane import Component
from tests.cluster.groups import Groups
from tests.cluster.machine import cache
from tests.cluster.node import Kind
from tests.cluster.processes import Process


@dataclasses.dataclass
class Running:
    """A component and the process that it is now."""

    component: Component
    process: Process


@dataclasses.dataclass
class State:
    """Everything that is needed to use a cluster and to stop it. The first node is number 1."""

    group: str
    port: int
    nodes: list[Kind]
    spaces: dict[str, Process] = dataclasses.field(default_factory=dict)
    running: dict[str, Running] = dataclasses.field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        document = dataclasses.asdict(self)
        _replace(path, json.dumps(document, indent=1))

    @classmethod
    def read(cls, path: Path) -> "State | None":
        """The state in a file, or nothing if there is none."""
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(
            document["group"],
            document["port"],
            document["nodes"],
            {name: Process(**process) for name, process in document["spaces"].items()},
            {
                name: Running(_component(entry["component"]), Process(**entry["process"]))
                for name, entry in document["running"].items()
            },
        )


def group_name(folder: Path) -> str:
    """The name of the groups of the cluster in a folder: always the same, so that stale ones are found."""
    return f"agentfly-cluster-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def register(folder: Path, owner: Process | None) -> None:
    """Notes that a cluster lives in a folder, and with whom it ends."""
    entry = {"folder": str(folder), "owner": dataclasses.asdict(owner) if owner else None}
    _replace(_live() / group_name(folder), json.dumps(entry))


def forget(folder: Path) -> None:
    """The cluster in a folder lives no more."""
    (_live() / group_name(folder)).unlink(missing_ok=True)


def orphans() -> Iterator[tuple[Path, Groups]]:
    """Clusters whose owner is gone."""
    for path in sorted(_live().iterdir()):
        with contextlib.suppress(OSError, ValueError):
            entry = json.loads(path.read_text())
            owner = entry["owner"] and Process(**entry["owner"])
            if owner and not owner.alive:
                yield Path(entry["folder"]), Groups(path.name)


def _live() -> Path:
    path = cache() / "live"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _component(entry: dict[str, object]) -> Component:
    return Component(**{**entry, "command": tuple(entry["command"])})  # type: ignore[arg-type]


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    fresh.write_text(text)
    fresh.rename(path)
