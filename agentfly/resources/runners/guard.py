"""Start a process so that nothing of it outlives its owner.

Guarantees:
1. When the guarded process ends, or its guard is killed, every descendant is killed by the kernel, whatever
   session, process group or signal handler it has.
2. The same happens when the process that started the guard dies, even by SIGKILL, at any moment.
3. The guarded process sees this machine's files and network unchanged, and a private /dev/shm that is gone
   with it: shared memory cannot be left behind.

4. A container is the guard of all in it where its first process says so: then 1 is for the process and what
   stays in its session, 2 for all, and /dev/shm is the container's.

A guard is bubblewrap with a pid namespace of its own. It dies with the THREAD that started it (the kernel's
parent-death signal follows threads): start guards from the main thread.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from agentfly.resources.finish import finished
from agentfly.resources.runners.bubblewrap.check import find_bubblewrap

__all__ = ["end_guard", "find_bubblewrap", "guarded", "kill_guard", "start_guarded", "without"]

logger = logging.getLogger(__name__)

END_S = 10.0

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


def without(environment: Mapping[str, str], hidden: Collection[str]) -> dict[str, str]:
    """An environment but for the variables of these names."""
    return {name: value for name, value in environment.items() if name not in hidden}


async def start_guarded(
    argv: Sequence[str], *, contained: bool = False, **options: Any
) -> asyncio.subprocess.Process:
    """Start ``argv`` inside a guard; ``options`` are those of ``create_subprocess_exec``.

    Args:
        contained: this process is the first of a container, which is the guard.

    A cancelled start leaves no process: asyncio's own way out of it kills the guard alone, and can wait for
    ever.

    Raises:
        AgentflyError: there is no bubblewrap.
    """
    # A session of its own: a Ctrl-C is for the owner, which stops what it started in order.
    command = argv if contained else guarded(argv)
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await finished(_end_late(starting))
        raise


async def _end_late(starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
    """End what a start comes to that nobody waits for any more."""
    await asyncio.wait({starting})
    if starting.exception() is None:
        await end_guard(starting.result())


async def end_guard(process: asyncio.subprocess.Process) -> None:
    """Kill a guard and all that it guards, and wait until it is gone."""
    kill_guard(process)
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        logger.error("process %d does not end after SIGKILL", process.pid)


def kill_guard(process: asyncio.subprocess.Process) -> None:
    """Kill a guard that was started with ``start_new_session=True``, and all that it guards.

    The whole group, because a guard that is killed in its first milliseconds has a child that does not know
    yet that it must die with it.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
