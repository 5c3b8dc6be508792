"""What this machine has, and how to say that it lacks something.

Guarantees:
1. A part that cannot run here is named, with the remedy, by `Unavailable`: tests skip with that reason.
2. Everything built or fetched lies below one cache folder, by a hash of what it was made from.
"""

import os
import shutil
from pathlib import Path

from agentfly.errors import AgentflyError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unavailable(AgentflyError):
    """A part of the test cluster that this machine cannot have."""


class ClusterError(AgentflyError):
    """A part of the test cluster that did not do what it must."""


def cache() -> Path:
    """``$XDG_CACHE_HOME/agentfly/cluster``, by default ``~/.cache/agentfly/cluster``."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "agentfly" / "cluster"


def tool(name: str, remedy: str) -> str:
    """Where a program of this machine is.

    Raises:
        Unavailable: it is not installed.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if found is None:
        raise Unavailable(f"{name}: is not installed", hints=[remedy])
    return found


def need_root() -> None:
    """Namespaces and cgroups of a cluster need root.

    Raises:
        Unavailable: this user is not root.
    """
    if os.geteuid() != 0:
        raise Unavailable(
            f"user: {os.geteuid()} is not root, and network namespaces and cgroups need it",
            hints=["run as root", "or set AGENTFLY_TEST_KUBECONFIG to the kubeconfig of another cluster"],
        )
