"""What the kernel counts for a whole user of this machine, and how much of it one sandbox may take.

All sandboxes of one owner are one user to the kernel: a tenant that takes all of what a user may have takes
it from its neighbours and from the owner. Control groups do not divide these.

Guarantees:
1. One sandbox takes at most an eighth of the user's inotify instances and watches, pending signals, bytes of
   message queues, and of this machine's open files.
2. Nobody inside can raise that: what namespaces bound is set before bubblewrap gives up its capabilities, the
   rest are hard limits set from outside.
3. Where this machine runs out of memory, sandboxes are ended before anything else of it.

Not here: memory, processes, processor time (``cgroups``). Pipe buffers, descriptors on their way through
sockets, watches of epoll and terminals are counted for a user too, and the kernel divides them in no way.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

SHARE = 8
LEAST_FILES = 1024
"""The customary soft limit of open files, which programs rely on."""
OOM_SCORE_ADJ = 1000
"""The highest: such a process is the first to be ended. Raising one's own needs no privilege."""

# (what a user may have, the same for one user namespace)
_CEILINGS = (
    ("fs/inotify/max_user_instances", "user/max_inotify_instances"),
    ("fs/inotify/max_user_watches", "user/max_inotify_watches"),
)


def ceilings(sysctls: Path = Path("/proc/sys")) -> Iterator[tuple[str, int]]:
    """(file below /proc/sys, value) for a sandbox's own user namespace."""
    for whole, own in _CEILINGS:
        if (sysctls / whole).exists() and (sysctls / own).exists():
            yield own, max(1, int((sysctls / whole).read_text()) // SHARE)


def limits(tasks: int, sysctls: Path = Path("/proc/sys")) -> dict[int, int]:
    """Limits of each process in a sandbox with at most ``tasks`` of them, by the numbers of ``resource``."""
    shares = {
        kind: _share(resource.getrlimit(kind)[1])
        for kind in (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)
    }
    files = int((sysctls / "fs/file-max").read_text()) // SHARE // tasks
    shares[resource.RLIMIT_NOFILE] = _least(
        max(LEAST_FILES, files), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    )
    return shares


def bound(pid: int, tasks: int) -> None:
    """Bound the first process of a sandbox before it runs; whatever it starts inherits that.

    Raises:
        OSError: the process is gone, or is not ours.
    """
    for kind, most in limits(tasks).items():
        resource.prlimit(pid, kind, (most, most))
    Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


def _share(whole: int) -> int:
    return whole if whole == resource.RLIM_INFINITY else max(1, whole // SHARE)


def _least(wanted: int, allowed: int) -> int:
    return wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed)
