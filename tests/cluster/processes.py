"""Processes that outlive the launcher, and are never mistaken for others.

Guarantees:
1. A process is its pid and the moment it started: a pid that was given to another is not touched.
2. `stop` returns when it is gone.
"""

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.machine import SYSTEM_PATH, ClusterError

JOIN = (
    "sh",
    "-c",
    'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs"; shift; done; shift; exec "$@"',
    "join",
)
"""Takes groups, ``--`` and a command: joins them, and is that command then."""

_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of this machine: its pid, and when it started in clock ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The process that has this pid now."""
        started = _started(pid)
        return None if started is None else cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return _started(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Sends a signal, unless it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, *, kill_after_s: float = 0.0) -> None:
        """Ends it: SIGTERM first where it is given time, then SIGKILL; returns when it is gone.

        Raises:
            ClusterError: it is not gone 10 s after SIGKILL.
        """
        if kill_after_s > 0:
            self.signal(signal.SIGTERM)
            _until_gone(self, kill_after_s)
        self.signal(signal.SIGKILL)
        if not _until_gone(self, 10.0):
            raise ClusterError(f"process: {self.pid} is not gone 10 s after SIGKILL")


def start(
    command: Sequence[str],
    log: Path,
    *,
    groups: tuple[Path, ...],
    inside: Process | None = None,
    env: Mapping[str, str] | None = None,
) -> Process:
    """Starts a program in a session of its own, in these groups, in the namespaces of ``inside``."""
    full = [*JOIN, *(str(group) for group in groups), "--", *(enter(inside) if inside else ()), *command]
    with log.open("ab") as out:
        child = subprocess.Popen(
            full,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", **(env or {})},
            cwd="/",
        )
    _children[child.pid] = child
    found = Process.of(child.pid)
    if found is None:
        raise ClusterError(f"{command[0]}: ended at once", hints=[f"see {log}"])
    return found


def enter(holder: Process) -> tuple[str, ...]:
    """The beginning of a command that runs in the network and mount namespace of a process."""
    return ("nsenter", f"--target={holder.pid}", "--net", "--mount", "--")


def reap() -> None:
    """Waits for those of this process's children that ended."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def _started(pid: int) -> int | None:
    reap()
    state, started = _stat(pid)
    return None if state in "ZX" else started


def _stat(pid: int) -> tuple[str, int]:
    """Its state, X where there is none, and when it started."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def _until_gone(process: Process, within_s: float) -> bool:
    """Whether it is gone by then, with every thread: the last one closes what the process listens on."""
    try:
        ended = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if _stat(process.pid)[1] != process.started:  # the pid is another's
            return True
        return bool(select.select([ended], [], [], within_s)[0])
    finally:
        os.close(ended)
