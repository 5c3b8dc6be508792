"""Trajectories in a file, one JSON line each.

Guarantees:
1. A line is written whole, by one system call, when its rollout is finished; a file may have several writers.
2. A writer that finds an unfinished last line (its predecessor was killed) removes that line.
3. A trajectory of another schema version, or a line that is none, is refused with file and line number.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from agentfly.errors import AgentflyError
from agentfly.rollout.trajectory import SCHEMA, Trajectory


class TrajectoryFileError(AgentflyError):
    """A file of trajectories cannot be read."""


class TrajectoryWriter:
    """Appends trajectories to a file; created with its folders if it is not there."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _drop_unfinished_line(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finished(self) -> Iterator[Trajectory]:
        """What the file holds already."""
        return read_trajectories(self.path)

    def write(self, trajectory: Trajectory) -> None:
        """Append one trajectory; it is with the operating system when this returns."""
        line = trajectory.model_dump_json().encode() + b"\n"
        written = os.write(self._file, line)
        while written < len(line):
            # Only a full disk or a signal splits a write; the rest then follows or raises.
            written += os.write(self._file, line[written:])

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def read_trajectories(path: Path | str) -> Iterator[Trajectory]:
    """Trajectories of a file, one at a time; an unfinished last line is left out.

    A rollout that failed and was played again has several lines; the newest one counts.

    Raises:
        TrajectoryFileError: a line is of another version, or no trajectory.
    """
    # Bytes: an unfinished line may end in the middle of a character.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> Trajectory:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise TrajectoryFileError(f"{where}: is not a line of JSON ({error})") from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise TrajectoryFileError(
            f"{where}: schema {schema!r} is not {SCHEMA!r}",
            hints=["read it with the release of agentfly that wrote it, or roll out again into a new file"],
        )
    try:
        return Trajectory.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise TrajectoryFileError(f"{where}: {place}: {problem['msg']}") from error


def _drop_unfinished_line(file: int) -> None:
    size = os.fstat(file).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
