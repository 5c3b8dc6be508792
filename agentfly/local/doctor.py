"""What works on this machine and what does not, with the reason and the remedy.

Guarantees:
1. A check says what it found by doing the thing, not by guessing from versions.
2. A part that is missing is named with what it would be good for and how to get it.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentfly.errors import AgentflyError
from agentfly.local import environments
from agentfly.local.paths import cache_dir, image_cache, run_dir
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.container.cli import ContainerCLIRunner
from agentfly.resources.runners.container.enroot import EnrootRunner
from agentfly.sandbox.binary import find_sandboxd

DISK_NEEDED = 8 << 30  # two environments, their download cache, and a run
MEMORY_NEEDED = 6 << 30  # trainer 3.6 GB, server 1.4 GB, sandboxes


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``needed`` says what does not work without it."""

    part: str
    state: Literal["ok", "missing", "optional"]
    detail: str
    needed: str = ""


def examine() -> list[Finding]:
    """Every check, in the order in which a run needs them."""
    sandboxes = [_sandboxd(), _sandboxes(), _images(), _containers(), _enroot()]
    return [_python(), *sandboxes, *_tools(), *_environments(), _gpu(), _memory(), _disk()]


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding(
        "Python",
        "ok" if good else "missing",
        version if good else f"{version}; needs 3.11 or newer",
        "agentfly",
    )


def _sandboxd() -> Finding:
    return _try("sandboxd", "sandboxes", lambda: str(find_sandboxd()))


def _sandboxes() -> Finding:
    def check() -> str:
        runner = BubblewrapRunner(run_dir(), find_sandboxd())
        if problem := runner.check():
            raise AgentflyError(problem)
        return "; ".join(["bubblewrap, overlay root, user namespaces", *runner.notes()])

    return _try("sandboxes", "pools of type Container", check)


def _images() -> Finding:
    def check() -> str:
        cache = image_cache()
        count, size = cache.usage()
        return f"{count} unpacked, {size / 2**30:.1f} of {cache.limit / 2**30:.0f} GiB, in {cache.folder}"

    return _try("images", "pools with an image other than host", check)


def _containers() -> Finding:
    runner = "pools of type Container with runtime ContainerCLI"
    return _runner("container-cli", runner, lambda: ContainerCLIRunner(run_dir(), find_sandboxd()))


def _enroot() -> Finding:
    runner = "pools of type Container with runtime Enroot"
    return _runner("enroot", runner, lambda: EnrootRunner(run_dir(), find_sandboxd()))


def _runner(part: str, needed: str, make: Callable[[], ContainerCLIRunner | EnrootRunner]) -> Finding:
    """A runner that a machine need not have: nothing is wrong without it."""

    def check() -> str:
        runner = make()
        if problem := runner.check():
            raise AgentflyError(problem)
        return "; ".join(runner.notes())

    found = _try(part, needed, check)
    return found if found.state == "ok" else replace(found, state="optional")


def _tools() -> list[Finding]:
    found = []
    for tool, package in (("cc", "gcc"), ("readelf", "binutils"), ("objdump", "binutils")):
        path = shutil.which(tool)
        found.append(
            Finding(
                tool,
                "ok" if path else "missing",
                path or f"install {package}",
                "building the CPU environments",
            )
        )
    return found


def _environments() -> list[Finding]:
    names: tuple[environments.Name, ...] = ("trainer", "inference")
    found = []
    for name in names:
        python = environments.find(name)
        detail = (
            str(python.parent.parent)
            if python
            else f"not built yet; `agentfly env {name}` builds it, as does a run"
        )
        found.append(Finding(f"environment {name}", "ok" if python else "optional", detail))
    return found


def _gpu() -> Finding:
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    detail = f"{len(devices)} NVIDIA" if devices else "none: runs use the CPU"
    return Finding("GPU", "ok" if devices else "optional", detail)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _amount("memory", total, MEMORY_NEEDED, "a run on the CPU")


def _disk() -> Finding:
    place = next(path for path in (cache_dir(), *cache_dir().parents) if path.exists())
    return _amount(f"disk at {place}", shutil.disk_usage(place).free, DISK_NEEDED, "the environments")


def _amount(part: str, have: int, need: int, needed: str) -> Finding:
    text = f"{have / 2**30:.0f} GiB"
    return Finding(
        part,
        "ok" if have >= need else "missing",
        text if have >= need else f"{text}; {need / 2**30:.0f} GiB wanted",
        needed,
    )


def _try(part: str, needed: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(part, "ok", check(), needed)
    except AgentflyError as error:
        return Finding(part, "missing", error.render(), needed)
