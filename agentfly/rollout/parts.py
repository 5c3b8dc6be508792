"""A part of a job's rollouts: kept in a folder by whoever plays it, published as one file when complete.

Guarantees:
1. Each player writes a file of its own: two that play one part at the same time, as when a lost node comes
   back, spoil nothing.
2. What any player finished is finished for those that come after it.
3. The results appear whole or not at all, and have one line for each rollout of the part. They stay so: who
   finds them there counts them.
4. Of several outcomes of a rollout a finished one counts before one that failed, and then the newest.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from agentfly.errors import AgentflyError
from agentfly.rollout.jsonl import TrajectoryWriter, read_trajectories
from agentfly.rollout.many import is_finished
from agentfly.rollout.report import RolloutReport
from agentfly.rollout.trajectory import Trajectory


class PartWriter:
    """One player's way into the folder of a part; a ``Sink``.

    Args:
        player: no other one has this name.
    """

    def __init__(self, folder: Path, player: str) -> None:
        self._folder = folder
        self._own = TrajectoryWriter(folder / f"{player}.jsonl")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own.close()

    def finished(self) -> Iterator[Trajectory]:
        """What all players left."""
        for _, _, trajectory in _lines(self._folder):
            yield trajectory

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory to the player's own file."""
        self._own.write(trajectory)


def publish(folder: Path, target: Path, ids: Collection[str], player: str) -> RolloutReport:
    """Make the results of a part, and count them. The folder goes with that.

    Args:
        folder: of the part.
        target: the file to make; one that is there already is counted instead.
        ids: the rollouts of the part.
        player: who publishes; no other one has this name.

    Raises:
        AgentflyError: a rollout has no outcome yet.
    """
    if target.exists():
        return published(target, ids)
    chosen = _chosen(folder, ids)
    report = RolloutReport(total=len(ids))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{player}")
    with partial.open("wb") as file:
        for path, number, trajectory in _lines(folder):
            if chosen.get(trajectory.rollout_id) == (path, number):
                file.write(trajectory.model_dump_json().encode() + b"\n")
                report.add(trajectory)
        file.flush()
        os.fsync(file.fileno())
    if report.finished == report.total:
        partial.replace(target)
        shutil.rmtree(folder, ignore_errors=True)
        return report
    partial.unlink()
    if target.exists():  # another player was first, and cleared the folder meanwhile
        return published(target, ids)
    raise AgentflyError(f"{folder}: {report.finished} of {report.total} rollouts have an outcome")


def published(target: Path, ids: Collection[str]) -> RolloutReport:
    """The counts of results that are there."""
    report = RolloutReport(total=len(ids))
    for trajectory in read_trajectories(target):
        report.add(trajectory)
    return report


def _chosen(folder: Path, ids: Collection[str]) -> dict[str, tuple[Path, int]]:
    """Which line of which file counts, by rollout."""
    best: dict[str, tuple[bool, float, Path, int]] = {}
    wanted = set(ids)
    for path, number, trajectory in _lines(folder):
        if trajectory.rollout_id in wanted:
            ended = trajectory.started_at + trajectory.seconds
            rank = (is_finished(trajectory), ended, path, number)
            best[trajectory.rollout_id] = max(rank, best.get(trajectory.rollout_id, rank))
    return {rollout: (path, number) for rollout, (_, _, path, number) in best.items()}


def _lines(folder: Path) -> Iterator[tuple[Path, int, Trajectory]]:
    for path in sorted(folder.glob("*.jsonl")):
        with contextlib.suppress(FileNotFoundError):  # another player published the part and cleared it
            for number, trajectory in enumerate(read_trajectories(path)):
                yield path, number, trajectory
