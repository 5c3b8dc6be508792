"""The metrics file of a training run, as everybody reads it."""

import json
from pathlib import Path
from typing import Any


def read_steps(path: Path) -> list[dict[str, Any]]:
    """One record for each step, in order; of a step that was trained again the last one counts."""
    if not path.exists():
        return []
    steps = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line being written when the trainer was killed
        steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)]
