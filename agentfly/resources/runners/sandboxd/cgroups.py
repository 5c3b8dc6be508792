"""Limits that the kernel holds for a whole sandbox: control groups, version 1 or 2, whatever can be written.

Guarantees:
1. A group is made below the group of this process, or where version 2 forbids that, beside or above it, so
   that a limit on this process also bounds its sandboxes.
2. A controller that cannot be written is left out and named by ``missing``; the others still work.
3. The paths of a group are known before it is made: whoever records them first can always remove it.
4. A group is removed only when it is empty; processes left in it are killed first.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
"""The kernel's default period of processor time, in microseconds."""
OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes")
SOCKET_SHARE = 8
"""Version 1 does not count what waits in sockets as memory: they get this part of it on top."""
DAEMON_TASKS = 20
"""Threads of sandboxd and room for the commands it starts, on top of what a spec allows its commands."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``cpu`` in cores, ``memory_mb`` in MiB, ``pids`` in processes and threads of the commands."""

    cpu: float
    memory_mb: int
    pids: int


@dataclass(frozen=True, slots=True)
class Group:
    """One sandbox's directory in each hierarchy that it uses. ``paths`` is all that a sweep needs."""

    paths: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Move a process in; what it starts from now on is in as well.

        Raises:
            OSError: the kernel refuses, or the process is gone.
        """
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    @property
    def oom_file(self) -> Path | None:
        """The file with the line ``oom_kill N``, or None if memory is not limited here."""
        names = ("memory.events", "memory.oom_control")
        return next((path / name for path in self.paths for name in names if (path / name).exists()), None)

    def oom_kills(self) -> int:
        """How many processes of this group the kernel has killed for memory."""
        with contextlib.suppress(OSError):
            if (file := self.oom_file) is not None:
                return sum(int(n) for word, n in _pairs(file.read_text()) if word == "oom_kill")
        return 0

    def kill(self) -> None:
        """Send SIGKILL to every process in the group."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                for pid in (path / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group. False while a process is still leaving it: try again."""
        gone = True
        for path in self.paths:
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                gone = False
        return gone


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The directories below which groups can be made. ``bases`` maps a controller to its directory."""

    bases: dict[str, Path]
    unified: bool

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Self:
        """What this process may use: version 2 if it has the controllers, else version 1."""
        memberships = dict(_memberships((proc / "cgroup").read_text()))
        mounts = list(_mounts((proc / "mountinfo").read_text()))
        for mount in mounts:
            if mount.unified and "" in memberships and (base := _unified_base(mount, memberships[""])):
                usable = _words(base / "cgroup.subtree_control") & set(CONTROLLERS)
                return cls({name: base for name in CONTROLLERS if name in usable}, unified=True)
        bases: dict[str, Path] = {}
        for mount in mounts:
            for name in mount.options & set(CONTROLLERS) - bases.keys():
                if not mount.unified and name in memberships:
                    base = mount.below(memberships[name])
                    if os.access(base, os.W_OK):
                        bases[name] = base
        return cls(bases, unified=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """The limits that cannot be set here."""
        return tuple(name for name in CONTROLLERS if name not in self.bases)

    def plan(self, name: str) -> Group:
        """The group that ``create`` would make."""
        return Group(tuple(sorted({base / name for base in self.bases.values()})))

    def create(self, group: Group, limits: Limits) -> None:
        """Make a planned group, empty and with these limits.

        Raises:
            OSError: nothing of it is left then.
        """
        try:
            for path in group.paths:
                path.mkdir()
            for controller, file, value in self._settings(limits):
                target = self.bases[controller] / group.paths[0].name / file
                # Swap may be compiled out, or not accounted: then there is no file, and nothing to bound.
                if target.exists() or file not in OPTIONAL:
                    target.write_text(value)
        except BaseException:
            group.remove()
            raise

    def _settings(self, limits: Limits) -> Iterator[tuple[str, str, str]]:
        memory, tasks = str(limits.memory_mb << 20), str(limits.pids + DAEMON_TASKS)
        quota = max(1000, round(limits.cpu * PERIOD_US))
        if self.unified:
            settings = [
                ("memory", "memory.max", memory),
                ("memory", "memory.swap.max", "0"),
                ("pids", "pids.max", tasks),
                ("cpu", "cpu.max", f"{quota} {PERIOD_US}"),
            ]
        else:
            settings = [
                ("memory", "memory.limit_in_bytes", memory),
                ("memory", "memory.memsw.limit_in_bytes", memory),
                ("memory", "memory.kmem.tcp.limit_in_bytes", str((limits.memory_mb << 20) // SOCKET_SHARE)),
                ("pids", "pids.max", tasks),
                ("cpu", "cpu.cfs_period_us", str(PERIOD_US)),
                ("cpu", "cpu.cfs_quota_us", str(quota)),
            ]
        yield from (setting for setting in settings if setting[0] in self.bases)


def memory_group(pid: int, proc: Path = Path("/proc")) -> Group:
    """The group that bounds the memory of another process; an empty one if none is seen from here."""
    memberships = dict(_memberships((proc / str(pid) / "cgroup").read_text()))
    for mount in _mounts((proc / "self/mountinfo").read_text()):
        name = "" if mount.unified else "memory"
        if name in memberships and (mount.unified or name in mount.options):
            group = Group((mount.below(memberships[name]),))
            if group.oom_file is not None:
                return group
    return Group(())


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    point: Path
    unified: bool
    options: frozenset[str]

    def below(self, membership: str) -> Path:
        """The directory of a group: inside a container the mount may show only a part of the tree."""
        inside = membership.removeprefix(self.root.rstrip("/")) if membership.startswith(self.root) else "/"
        return self.point / inside.lstrip("/")


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            yield _Mount(fields[3], Path(fields[4]), kind == "cgroup2", frozenset(options.split(",")))


def _unified_base(mount: _Mount, membership: str) -> Path | None:
    own = mount.below(membership)
    for base in dict.fromkeys((own, own.parent if own != mount.point else own, mount.point)):
        offered = _words(base / "cgroup.controllers") & set(CONTROLLERS)
        if not offered or not (os.access(base, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK)):
            continue
        missing = offered - _words(base / "cgroup.subtree_control")
        # Refused where the group itself has processes, which version 2 allows the root alone.
        with contextlib.suppress(OSError):
            if missing:
                (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(missing)))
            return base
    return None


def _words(file: Path) -> set[str]:
    try:
        return set(file.read_text().split())
    except OSError:
        return set()


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        word, _, number = line.partition(" ")
        yield word, number
