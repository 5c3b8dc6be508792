"""The folder of checkpoints, as verl lays it out: ``global_step_N`` and a file that names the newest.

Guarantees:
1. A checkpoint counts as complete only if verl has named it or a later one; without a readable name, if the
   last of its files was written to its end.
2. After a crash in the middle of a save the run resumes from the newest complete checkpoint.
3. Whoever shows, resumes or removes checkpoints decides by the same rule; without torch.
"""

import os
import shutil
import zipfile
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
# verl writes it after weights and optimizer, just before it names the checkpoint: a zip, whose end lists it
_LAST_FILE = "data.pt"
_PREFIX = "global_step_"


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    named = _named(folder)
    found = []
    for path in folder.glob(f"{_PREFIX}*/{_LAST_FILE}"):
        name = path.parent.name.removeprefix(_PREFIX)
        if name.isdigit() and (int(name) <= named if named is not None else zipfile.is_zipfile(path)):
            found.append(int(name))
    return sorted(found)


def path_of(folder: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return folder / f"{_PREFIX}{step}"


def written_at(folder: Path, step: int) -> float:
    """When a complete checkpoint was written, as Unix time."""
    return (path_of(folder, step) / _LAST_FILE).stat().st_mtime


def _named(folder: Path) -> int | None:
    """The step that verl named last; None if there is no name, or half of one."""
    try:
        return int((folder / _TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def repair(folder: Path) -> int | None:
    """Make verl resume from the newest complete checkpoint; returns its step, None for none.

    A folder that is not complete is removed: verl would load the half of it that is there.
    """
    complete = steps(folder)
    whole = {path_of(folder, step) for step in complete}
    for path in folder.glob(f"{_PREFIX}*"):
        if path not in whole:
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
        shutil.rmtree(path_of(folder, step), ignore_errors=True)
