"""The folder of checkpoints, as verl lays it out: ``global_step_N`` and a file that names the newest.

Guarantees:
1. A checkpoint counts as complete only if verl has named it or a later one; without a readable name, if the
   last of its files was written to its end.
2. After a crash in the middle of a save the run resumes from the newest complete checkpoint.
3. The number of ranks that wrote a checkpoint is the one whose files are all there, of the actor and of a
   critic; files of another number, written in part, count for nothing.
4. Whoever shows, resumes or removes checkpoints decides by the same rule; without torch.
"""

import os
import re
import shutil
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from agentfly.api.trainingrun import CheckpointStatus

_TRACKER = "latest_checkpointed_iteration.txt"
# verl writes it after weights and optimizer, just before it names the checkpoint: a zip, whose end lists it
_LAST_FILE = "data.pt"
_PREFIX = "global_step_"
ACTOR = "actor"
_CRITIC = "critic"
_FIRST = re.compile(r"model_world_size_([1-9]\d{0,5})_rank_0\.pt")
KINDS = ("model", "optim", "extra_state")  # of files, one each for every rank


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    named = _named(folder)
    found = []
    for path in folder.glob(f"{_PREFIX}*/{_LAST_FILE}"):
        name = path.parent.name.removeprefix(_PREFIX)
        if name.isdigit() and (int(name) <= named if named is not None else zipfile.is_zipfile(path)):
            found.append(int(name))
    return sorted(found)


def stamp(folder: Path) -> tuple[int, int, int] | None:
    """Another value whenever verl has named another checkpoint; None while it has named none."""
    try:
        found = (folder / _TRACKER).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def path_of(folder: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return folder / f"{_PREFIX}{step}"


def written_at(folder: Path, step: int) -> float:
    """When a complete checkpoint was written, as Unix time."""
    return (path_of(folder, step) / _LAST_FILE).stat().st_mtime


def newest(folder: Path) -> CheckpointStatus | None:
    """The newest complete checkpoint: the one from which the trainer would go on."""
    complete = steps(folder)
    if not complete:
        return None
    step = complete[-1]
    return CheckpointStatus(
        latest_step=step,
        ranks=ranks(folder, step),
        path=str(path_of(folder, step)),
        time=datetime.fromtimestamp(written_at(folder, step), UTC),
    )


def rank_file(actor: Path, kind: str, ranks: int, rank: int) -> Path:
    """What one rank wrote, as verl calls it."""
    return actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def ranks(folder: Path, step: int) -> int | None:
    """For how many ranks a checkpoint is; None if that cannot be told."""
    return max(whole_sizes(path_of(folder, step)), default=None)


def parts(checkpoint: Path) -> list[Path]:
    """The folders that ranks write: the actor's, and the critic's where there is one."""
    critic = checkpoint / _CRITIC
    return [checkpoint / ACTOR, *([critic] if critic.exists() else [])]


def whole_sizes(checkpoint: Path) -> list[int]:
    """For how many ranks there are all files; more than one only after a rewrite that was cut short."""
    first, *others = (_whole_sizes(part) for part in parts(checkpoint))
    return [size for size in first if all(size in sizes for sizes in others)]


def _whole_sizes(actor: Path) -> list[int]:
    sizes = [int(found[1]) for path in actor.glob("*_rank_0.pt") if (found := _FIRST.fullmatch(path.name))]
    return [
        size
        for size in sizes
        if all(rank_file(actor, kind, size, rank).exists() for kind in KINDS for rank in range(size))
    ]


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
