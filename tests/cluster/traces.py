"""What a cluster can leave on this machine, to be compared with nothing."""

import os
import subprocess
from pathlib import Path

from tests.cluster import state
from tests.cluster.groups import hierarchies


def traces(folder: Path) -> dict[str, list[str]]:
    """All that a cluster in this folder can leave on this machine."""
    name = state.group_name(folder)
    places = [f"{root}/{name}" for root in hierarchies() if (root / name).exists()]
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                commands.append(line)
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    links = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True).stdout
    interfaces = [line for line in links.splitlines() if "10.250." in line or "br0" in line]
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    return {
        "groups": places,
        "processes": commands,
        "mounts": mounts,
        "interfaces": interfaces,
        "routes": [line for line in routes.splitlines() if line.startswith("10.")],
        "files": [str(folder)] if folder.exists() else [],
    }


KINDS = ("groups", "processes", "mounts", "interfaces", "routes", "files")
NOTHING: dict[str, list[str]] = {kind: [] for kind in KINDS}
