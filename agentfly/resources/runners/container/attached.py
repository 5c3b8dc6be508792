"""A sandbox whose daemon is started by somebody else's command: a container engine's, or enroot's.

Guarantees:
1. The daemon gets its listening socket from its owner, over a socket that only its sandbox can see: no folder
   that a tenant could write to is shared, and no network is needed.
2. It ends with its owner: its standard input is a pipe whose other end only the owner holds.
3. Whether it lives is asked of the kernel by a handle (pidfd), never by a number that may be another's.
4. ``end`` returns when the daemon and the command are gone, however far the start had come, or raises.

Not here: the command line, and what else a sandbox consists of (the runners).
"""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.runners.bubblewrap.process import is_readable, readable, write_all
from agentfly.resources.runners.sandboxd.cgroups import memory_group

LOG_TAIL = 4000
"""Bytes of the command's and the daemon's last words that are looked at."""
REASON_MAX = 500
BACKLOG = 64
END_S = 20.0
"""An engine takes 0.1 s to clear up after a container; with a hundred ending at once, seconds."""
ADVICE = ("See '", "Run '", "For more help", "time=")
"""How lines begin that follow the reason in what the engines print."""


@dataclass(frozen=True, slots=True)
class Door:
    """The folder of one sandbox on this machine, and the sockets in it.

    Args:
        path: exists, short, readable by this user only.
    """

    path: Path

    @property
    def socket(self) -> Path:
        """Where the daemon answers; no sandbox can see it."""
        return self.path / "s"

    @property
    def shared(self) -> Path:
        """The folder to mount read-only into the sandbox."""
        return self.path / "o"

    @property
    def handover(self) -> Path:
        """Where the daemon fetches its listening socket; in ``shared``, and gone once it has."""
        return self.shared / "h"

    @property
    def log(self) -> Path:
        """What the command and the daemon write."""
        return self.path / "log"


class Attached:
    """A command with a daemon at its other end. Started by ``spawn``; the owner must ``end`` it."""

    def __init__(
        self, command: "subprocess.Popen[bytes]", listener: socket.socket, waiting: socket.socket, door: Door
    ) -> None:
        assert command.stdin is not None
        self._command = command
        self._stdin = command.stdin
        self._exit = os.pidfd_open(command.pid)  # not reaped yet: the pid is still its own
        self._listener, self._waiting = listener, waiting
        self._door = door
        self._daemon = -1  # pidfd
        self.pid = 0

    async def connected(self, joined: Callable[[int], None]) -> None:
        """Wait for the daemon and give it its socket.

        Args:
            joined: called with its pid while it does nothing yet but wait.

        Raises:
            ProcessLookupError: the command or the daemon ended first.
            OSError: it is in a process namespace that cannot be seen from here.
        """
        while not is_readable(self._waiting.fileno()):
            if is_readable(self._exit):
                raise ProcessLookupError("the command ended before its sandbox had started")
            await _either_readable(self._waiting.fileno(), self._exit)
        connection, _ = self._waiting.accept()
        with connection:
            packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            self.pid, _, _ = struct.unpack("3i", packed)
            if self.pid == 0:
                raise OSError(
                    "the sandbox's processes cannot be seen from here: run agentfly beside its engine"
                )
            self._daemon = os.pidfd_open(self.pid)
            joined(self.pid)
            counter = memory_group(self.pid).oom_file
            with Path(counter or os.devnull).open("rb") as oom:  # noqa: ASYNC230 -- a file of the kernel
                fds = [self._listener.fileno(), *([oom.fileno()] if counter else [])]
                socket.send_fds(connection, [b"x"], fds)
        self._door.handover.unlink()
        self._waiting.close()
        self._listener.close()

    async def configure(self, line: bytes) -> None:
        """Write the daemon's configuration; the pipe stays open as the sign of our life."""
        await write_all(self._stdin.fileno(), line)

    @property
    def alive(self) -> bool:
        """Whether the daemon, and so the sandbox, lives."""
        return self._daemon >= 0 and not is_readable(self._daemon)

    async def dies_within(self, seconds: float) -> bool:
        """Whether the daemon is dead, now or in a moment."""
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await readable(self._daemon)
        return not self.alive

    def last_words(self) -> str:
        """The reason in what the command and the daemon wrote."""
        with contextlib.suppress(OSError):
            return reason(self._door.log.read_bytes()[-LOG_TAIL:].decode(errors="replace"))
        return ""

    async def end(self) -> None:
        """End the daemon by the end of its input, and wait until it and the command are gone.

        Raises:
            TimeoutError: one of them is still there; may be called again.
        """
        self._stdin.close()
        # A daemon that comes only now finds nobody to give it a socket, and ends.
        self._waiting.close()
        self._listener.close()
        async with asyncio.timeout(END_S):
            if self._daemon >= 0:
                await readable(self._daemon)
            if self._exit >= 0:
                await readable(self._exit)
        self._command.wait()
        self._daemon, self._exit = _close(self._daemon), _close(self._exit)

    def kill(self) -> None:
        """Kill the command; what it started may be left."""
        self._command.kill()


def spawn(argv: Sequence[str], door: Door, env: Mapping[str, str] | None = None) -> Attached:
    """Start the command. There is no await in here: a cancelled caller cannot lose the process.

    Args:
        argv: starts a sandbox with ``door.shared`` in it, and the daemon with ``--handover``.
        env: of the command; None is our own.
    """
    door.shared.mkdir(mode=0o755)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(door.socket, 0o600))
        waiting = stack.enter_context(_listen(door.handover, 0o666))  # the image decides who the daemon is
        waiting.setblocking(False)
        with door.log.open("ab") as output:
            command = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,  # Ctrl-C in a terminal is for the owner, who stops us in order
            )
        stack.pop_all()
    assert command.stdin is not None
    os.set_blocking(command.stdin.fileno(), False)
    return Attached(command, listener, waiting, door)


def reason(text: str) -> str:
    """The last line that says what went wrong, in what a command wrote.

    >>> reason("pulling\\nError: no such image\\n\\nSee 'docker run --help'.\\n")
    'no such image'
    """
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(ADVICE)] or [
        line for line in lines if line
    ]
    if not said:
        return ""
    last = said[-1]
    for prefix in ("docker: ", "Error: ", "Error response from daemon: "):
        last = last.removeprefix(prefix)
    return last[:REASON_MAX]


def _listen(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _close(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


async def _either_readable(one: int, other: int) -> None:
    waits = [asyncio.ensure_future(readable(fd)) for fd in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
