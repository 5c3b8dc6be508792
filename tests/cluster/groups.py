"""Control groups of one cluster, in every hierarchy of this machine.

Guarantees:
1. Every process of a cluster, pods and shims too, is in its groups: they are how all of it is found again.
2. `sweep` ends when no process is left and removes the groups, also after a crash of whoever made them.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.machine import ClusterError, Unavailable
from tests.cluster.processes import reap

SWEEP_S = 60.0
PLAIN_S = 3.0  # after which it is assumed that they multiply faster than they are killed
PAUSE_S = 0.05


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups called ``name``, one in each hierarchy."""

    name: str

    def make(self, child: str) -> tuple[Path, ...]:
        """Makes a group below this one and says where a process joins it.

        Raises:
            Unavailable: this machine does not allow it.
        """
        made = []
        for root in hierarchies():
            for path in (root / self.name, root / self.name / child):
                try:
                    path.mkdir(exist_ok=True)
                except OSError as error:
                    raise Unavailable(
                        f"cgroup: {path} cannot be made: {error.strerror}",
                        hints=["run on a machine, or in a container, whose /sys/fs/cgroup can be written"],
                    ) from error
                _inherit_cpuset(path)
            made.append(root / self.name / child)
        return tuple(made)

    def pids(self) -> set[int]:
        """Every process in these groups and below."""
        return {
            int(line)
            for root in hierarchies()
            for file in _walk(root / self.name)
            for line in _lines(file / "cgroup.procs")
        }

    def exist(self) -> bool:
        """Whether any of them is there."""
        return any((root / self.name).exists() for root in hierarchies())

    def sweep(self) -> None:
        """Kills every process in these groups and removes them.

        Raises:
            ClusterError: something is still there after 60 s.
        """
        begun = time.monotonic()
        deadline = begun + SWEEP_S
        while self.exist():
            multiply = time.monotonic() > begun + PLAIN_S and os.getpid() not in self.pids()
            if multiply:
                self._freeze(True)
            for pid in self.pids() - {os.getpid()}:
                _kill(pid)
            if multiply:
                self._freeze(False)
            reap()
            for root in hierarchies():
                for path in reversed(list(_walk(root / self.name))):
                    try:
                        path.rmdir()
                    except OSError:
                        break
            if time.monotonic() > deadline:
                raise ClusterError(f"cgroup: {self.name} still has processes {sorted(self.pids())}")
            time.sleep(PAUSE_S)

    def _freeze(self, still: bool) -> None:
        """Lets none of these processes do anything, or all go on; what was killed meanwhile ends then."""
        for root in hierarchies():
            for name, words in (("freezer.state", ("THAWED", "FROZEN")), ("cgroup.freeze", ("0", "1"))):
                file = root / self.name / name
                with contextlib.suppress(OSError):
                    if file.exists():
                        file.write_text(words[still])


def hierarchies() -> list[Path]:
    """Where control groups are mounted: one for each controller of version 1, one for version 2."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    found = {Path(target) for _, target, kind, *_ in mounts if kind in ("cgroup", "cgroup2")}
    return sorted(path.resolve() for path in found)


def _inherit_cpuset(path: Path) -> None:
    """A new group of the version 1 cpuset controller takes no process before it has CPUs."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = path / name
        if (path / "cpuset.sched_load_balance").exists() and not file.read_text().strip():
            file.write_text((path.parent / name).read_text())


def _walk(path: Path) -> Iterator[Path]:
    """A group and those below it, parents first. The kubelet removes groups meanwhile."""
    try:
        children = sorted(child for child in path.iterdir() if child.is_dir())
    except OSError:
        return
    yield path
    for child in children:
        yield from _walk(child)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
