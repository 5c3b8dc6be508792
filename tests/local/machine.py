"""Counting what sandboxes may leave on this machine."""

import os
from collections import Counter
from pathlib import Path

from agentfly.resources.runners.sandboxd.cgroups import Cgroups


def descendants() -> Counter[str]:
    """Names of the processes below this one."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
            except OSError:
                continue
            parents[int(entry.name)] = (int(rest.split()[1]), name)
    found: Counter[str] = Counter()
    for pid, (_, name) in parents.items():
        above = pid
        while above in parents and above != os.getpid():
            above = parents[above][0]
        if above == os.getpid() and pid != os.getpid():
            found[name] += 1
    return found


def groups(owner: int) -> set[str]:
    """Control groups of the sandboxes of one process."""
    bases = Cgroups.find().bases.values()
    return {str(path) for base in bases for path in base.glob(f"agentfly-{owner}-*")}


def footprint(run_dir: Path) -> dict[str, object]:
    """Everything that must be the same before and after: processes, groups, mounts, descriptors, files."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()  # others of this machine come and go
    return {
        "processes": descendants(),
        "groups": groups(os.getpid()),
        "mounts": [line for line in mounts if str(run_dir.parent) in line or "/newroot" in line],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(str(path) for path in run_dir.parent.rglob("*")),
    }
