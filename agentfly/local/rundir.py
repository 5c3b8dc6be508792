"""The folder of one run: where everything about it is found afterwards, and how it is found again to go on.

Guarantees:
1. One living runner for each folder: a second one is refused while the first lives, not after it has died.
2. ``status.json`` and ``manifest.json`` are replaced as a whole: nobody ever meets half a file.
3. A folder is continued only with the spec it was started with; what differs is named.
4. A refused runner leaves the folder as it was.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfly.api.problems import shown
from agentfly.errors import AgentflyError
from agentfly.roles.steps import read_steps

CHANGEABLE = ("runPolicy",)  # it does not alter what the steps so far mean


class FolderRefused(AgentflyError):
    """The folder belongs to another run, or to another process."""


@dataclass(frozen=True)
class RunDir:
    """Paths of ``runs/<name>/``; none of them needs to exist."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        return self.root / "reward.png"

    @property
    def trajectories(self) -> Path:
        return self.root / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def suspend_request(self) -> Path:
        return self.root / "control" / "suspend"

    @property
    def _lock(self) -> Path:
        return self.root / ".lock"

    @contextmanager
    def claim(self, spec: Mapping[str, Any]) -> Iterator[None]:
        """Hold the folder for this process, for a run with this spec, which the folder remembers.

        What agentfly logs meanwhile goes to ``logs/agentfly.log``.

        Raises:
            FolderRefused: another living process holds it, or it belongs to a run with another spec.
        """
        if not self._lock.exists():  # a lock made for the comparison below would be left by a refusal
            self._compare(spec)
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock:
            self._compare(spec)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            for folder in (self.logs, self.trajectories, self.checkpoints, self.suspend_request.parent):
                folder.mkdir(exist_ok=True)
            write_whole(self.manifest, json.dumps({"spec": spec}, indent=2) + "\n")
            with _logging_to(self.logs / "agentfly.log"):
                yield

    @contextmanager
    def _locked(self) -> Iterator[int]:
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(lock, 32, 0).decode().strip() or "unknown"
                raise FolderRefused(
                    f"run {self.name}: process {owner} is running it",
                    hints=[f"wait for it, or stop it with `kill -INT {owner}`", "or use another --name"],
                ) from None
            yield lock
        finally:
            os.close(lock)

    def read_status(self) -> dict[str, Any] | None:
        """The last status written, or None for a folder that never ran."""
        if not self.status.exists():
            return None
        status: dict[str, Any] = json.loads(self.status.read_text())
        return status

    def write_status(self, status: Mapping[str, Any]) -> None:
        write_whole(self.status, json.dumps(status, indent=2) + "\n")

    def metrics_size(self) -> int:
        """Bytes of the metrics file; it grows with every finished step."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def read_metrics(self) -> list[dict[str, Any]]:
        """One record for each step, in order; of a step that was trained again the last one counts."""
        return read_steps(self.metrics)

    def _compare(self, spec: Mapping[str, Any]) -> None:
        """Refuse a spec that is not the one the run in this folder was started with."""
        if not self.manifest.exists():
            return
        stored = json.loads(self.manifest.read_text())
        changed = [
            f"{path}: {_shown(before)} is now {_shown(after)}"
            for path, before, after in differences(stored["spec"], spec)
            if path.split(".")[0] not in CHANGEABLE
        ]
        if changed:
            raise FolderRefused(
                f"run {self.name}: spec.{changed[0]}; a run is continued with the spec it was started with",
                hints=[
                    *(f"also changed: spec.{line}" for line in changed[1:]),
                    "give the new run a name of its own: --name NAME",
                    f"or start over: rm -r {self.root}",
                ],
            )


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    log = logging.FileHandler(path, delay=True)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("agentfly")
    logger.addHandler(log)
    try:
        yield
    finally:
        logger.removeHandler(log)
        log.close()


def was_finished(folder: RunDir, how: str) -> AgentflyError:
    """What whoever starts a run again is told, if nothing of it is left to do."""
    return AgentflyError(
        f"run {folder.name}: was finished before, and nothing was started: {how}",
        hints=["give a new run a name of its own: --name NAME", f"or start over: rm -r {folder.root}"],
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _shown(value: Any) -> str:
    """A value as in YAML, in full where `shown` would only say that it is a list."""
    if isinstance(value, Mapping | list):
        return json.dumps(value, ensure_ascii=False)
    return "absent" if value is None else shown(value)


def differences(before: Any, after: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every leaf in which two JSON values differ, as ``(dotted path, before, after)``."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        found = []
        for key in sorted({*before, *after}):
            found += differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if before == after else [(path, before, after)]
