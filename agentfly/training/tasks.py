"""The order in which tasks are trained on.

Guarantees:
1. Every attempt of a run sees the same tasks in the same order: the file is written once.
2. Nothing is repeated before everything was seen once; the first pass keeps the given order, later passes are
   shuffled by the seed.
3. No more are taken from the source than the run can train on: it may be endless.
"""

import itertools
import json
import os
import random

from agentfly.errors import AgentflyError
from agentfly.roles.trainer import TrainerConfig
from agentfly.tasks import read_tasks


def write_tasks(config: TrainerConfig) -> int:
    """Write the tasks of the run unless an earlier attempt did; returns how many there are.

    Raises:
        AgentflyError: the source has no task, or one that is no JSON object.
    """
    path = config.tasks_file
    if not path.exists():
        rows = read_tasks(config.tasks_entrypoint, config.tasks_path, config.base_dir, config.seed)
        lines = [json.dumps(row) + "\n" for row in itertools.islice(rows, config.rows)]
        if not lines:
            raise AgentflyError(f"tasks: {config.tasks_entrypoint or config.tasks_path} has no tasks")
        path.parent.mkdir(parents=True, exist_ok=True)
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
