"""The tasks of a rollout job as its shards read them: one file on the claim, written once.

Guarantees:
1. The file appears whole or not at all. One that is there already stays as it is: every shard, whenever it is
   played, cuts its rows from the same tasks.
2. A row keeps its place in the whole job.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.tasks import read_tasks


def tasks_file(run_dir: Path) -> Path:
    """JSON lines, one task each."""
    return run_dir / "tasks.jsonl"


def freeze(rows: Iterable[Mapping[str, Any]], path: Path, writer: str) -> None:
    """Write the tasks, unless they are there.

    Args:
        writer: no other one that may write at the same time has this name.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{writer}")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def count(path: Path) -> int:
    """How many tasks a file has."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def cut(path: Path, first: int, number: int) -> tuple[list[dict[str, Any]], int]:
    """So many rows from the place ``first`` on, and how many the file has in all.

    Raises:
        AgentflyError: there are no tasks, or none from that place on.
    """
    if not path.exists():
        raise AgentflyError(f"{path}: is not there", hints=["the job that prepares it must have ended well"])
    rows, total = [], 0
    for row in read_tasks(None, path, path.parent, seed=0):
        if first <= total < first + number:
            rows.append(row)
        total += 1
    if not rows:
        raise AgentflyError(f"{path}: has {total} tasks, none from place {first} on")
    return rows, total
