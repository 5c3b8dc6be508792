"""Start a process so that nothing of it outlives its owner.

Guarantees:
1. When the guarded process ends, or its guard is killed, every descendant is killed by the kernel, whatever
   session, process group or signal handler it has.
2. The same happens when the process that started the guard dies, even by SIGKILL, at any moment.
3. The guarded process sees this machine's files and network unchanged, and a private /dev/shm that is gone
   with it: shared memory cannot be left behind.

A guard is bubblewrap with a pid namespace of its own. It dies with the THREAD that started it (the kernel's
parent-death signal follows threads): start guards from the main thread.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from agentfly.resources.runners.bubblewrap_check import find_bubblewrap

__all__ = ["find_bubblewrap", "guarded", "kill_guard"]

_OWNER = "/dev/shm/.owner"
"""The arguments of the owner: empty once it is dying, also while nobody has collected it."""
# Whoever dies first tells nobody: bubblewrap's own processes ask to die with their parents when they are
# already running. Once they all have, which is before this runs, the owner must still have been there.
_BEGIN = f'read -r owner < {_OWNER}; [ -n "$owner" ] && exec "$@"'


def guarded(argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` inside a guard of this process; its exit code is that of ``argv``.

    Raises:
        AgentflyError: there is no bubblewrap.
    """
    return [
        str(find_bubblewrap()),
        *("--dev-bind", "/", "/"),
        "--unshare-pid",
        *("--proc", "/proc"),
        *("--tmpfs", "/dev/shm"),
        *("--ro-bind", f"/proc/{os.getpid()}/cmdline", _OWNER),
        "--die-with-parent",
        "--",
        *("/bin/sh", "-c", _BEGIN, "guard"),
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
