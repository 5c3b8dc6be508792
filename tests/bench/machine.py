"""The machine and the moment of a run, without names."""

import datetime
import os
import platform
from pathlib import Path

COMMAND = "`make bench` (`python -m tests.bench`)"


def facts(command: str = COMMAND) -> list[tuple[str, str]]:
    """What a reader needs to know about where the figures come from; the load average is the last of it."""
    return [
        ("date", datetime.datetime.now(datetime.UTC).date().isoformat()),
        ("command", command),
        (
            "processor",
            f"{len(os.sched_getaffinity(0))} cores, {processor(Path('/proc/cpuinfo').read_text())}",
        ),
        ("memory", f"{memory_gib(Path('/proc/meminfo').read_text()):.0f} GiB"),
        ("kernel", f"{platform.system()} {platform.release()}"),
        ("Python", platform.python_version()),
        ("load average of the minute before", f"{os.getloadavg()[0]:.1f}"),
    ]


def processor(cpuinfo: str) -> str:
    """The model of the first processor, or its architecture where that is not said."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def memory_gib(meminfo: str) -> float:
    """Total memory in GiB."""
    words = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(words["MemTotal"].split()[0]) / (1 << 20)
