"""The order in which tasks are trained on.

Guarantees:
1. Every attempt of a run sees the same tasks in the same order: the file is written once.
2. Nothing is repeated before everything was seen once; the first pass keeps the given order, later passes are
   shuffled by the seed.
3. A source without a single task, or with one that is no JSON object, is an error that names the source.
"""

import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.refs import load
from agentfly.training.config import TrainerConfig


def write_tasks(config: TrainerConfig) -> int:
    """Write the tasks of the run unless an earlier attempt did; returns how many there are.

    No more are taken from the source than the run can train on: a generator may be endless.
    """
    path = config.tasks_file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        source = config.tasks_entrypoint or str(config.tasks_path)
        lines = [_line(task, source) for task in itertools.islice(_tasks(config), config.rows)]
        if not lines:
            raise AgentflyError(f"tasks: {source} has no tasks")
        fresh = path.with_suffix(".partial")
        fresh.write_text("".join(lines))
        os.replace(fresh, path)
    with path.open() as handle:
        return sum(1 for _ in handle)


def task_index(position: int, count: int, seed: int) -> int:
    """Which of ``count`` tasks stands at ``position`` of the endless sequence."""
    turn, offset = divmod(position, count)
    if turn == 0:
        return offset
    order = list(range(count))
    random.Random(f"{seed}/{turn}").shuffle(order)
    return order[offset]


def _tasks(config: TrainerConfig) -> Iterator[Any]:
    if config.tasks_entrypoint is not None:
        make = load(config.tasks_entrypoint, config.base_dir)
        produced: Iterable[Any] = make(seed=config.seed)
        yield from produced
    else:
        yield from _read(config.base_dir / str(config.tasks_path))


def _read(path: Path) -> Iterator[Any]:
    with path.open() as handle:
        for number, line in enumerate(handle, start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except json.JSONDecodeError as error:
                raise AgentflyError(f"tasks: {path}:{number} is no JSON: {error}") from None


def _line(task: object, source: str) -> str:
    if not isinstance(task, dict):
        raise AgentflyError(f"tasks: {source} gave a {type(task).__name__}, not an object with fields")
    try:
        return json.dumps(task) + "\n"
    except TypeError as error:
        raise AgentflyError(f"tasks: {source} gave a task that is no JSON: {error}") from None
