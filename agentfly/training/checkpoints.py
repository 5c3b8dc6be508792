"""The folder of checkpoints, as verl lays it out: ``global_step_N`` and a file that names the newest.

Guarantees:
1. A checkpoint counts as complete only once verl has named it, or has written the last of its files.
2. After a crash in the middle of a save the run resumes from the newest complete checkpoint.
"""

import os
import shutil
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_LAST_FILE = "data.pt"  # verl writes it after weights and optimizer, just before it names the checkpoint
_PREFIX = "global_step_"


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    names = (path.parent.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*/{_LAST_FILE}"))
    return sorted(int(name) for name in names if name.isdigit())


def repair(folder: Path) -> int | None:
    """Make verl resume from the newest complete checkpoint; returns its step, None for none.

    A folder without it is removed: verl would load the half of it that is there.
    """
    complete = steps(folder)
    for path in folder.glob(f"{_PREFIX}*"):
        if not (path / _LAST_FILE).exists():
            shutil.rmtree(path)
    if not complete:
        (folder / _TRACKER).unlink(missing_ok=True)
        return None
    fresh = folder / f"{_TRACKER}.partial"
    fresh.write_text(str(complete[-1]))
    os.replace(fresh, folder / _TRACKER)
    return complete[-1]


def remove_old(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest ``keep``."""
    for step in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"{_PREFIX}{step}", ignore_errors=True)
