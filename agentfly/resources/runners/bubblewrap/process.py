"""One sandbox's processes as its owner sees them: bubblewrap, and the daemon, the first process inside.

Guarantees:
1. The daemon runs only once it is in its control group: until then bubblewrap holds it back.
2. It ends with its owner: it reads from a pipe whose other end only the owner holds.
3. Signals go to the daemon's pid by a handle of the kernel (pidfd), never by a number that may be another's.
4. ``end`` returns when every process of the sandbox is gone, however far the start had come, or raises. What
   a tenant runs cannot delay it: a dead daemon that gets no processor to die with gets theirs.
"""

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

LOG_TAIL = 2000
"""Bytes of bubblewrap's and the daemon's last words that an error quotes."""
KNOWN_S = 2.0
"""bubblewrap tells the daemon's pid within a millisecond, or it hangs."""
DYING_S = 0.2
"""A killed process dies at once, if it gets a moment of the processor."""
KILL_S = 5.0
"""A killed process may be in an uninterruptible call; the kernel ends the rest of its namespace first."""


class SandboxProcess:
    """Started by ``spawn``; the owner must ``end`` it."""

    def __init__(
        self, bwrap: "subprocess.Popen[bytes]", stdin: int, status: int, gate: int, log: Path
    ) -> None:
        self._bwrap = bwrap
        self._stdin, self._status, self._gate = stdin, status, gate
        self._log = log
        self._received = b""
        self._daemon = -1  # pidfd
        self._namespace = ""

    async def daemon_pid(self) -> int:
        """The daemon's pid on this machine, once bubblewrap tells it.

        Raises:
            ProcessLookupError: bubblewrap or the daemon ended first.
        """
        while (found := re.search(rb'"child-pid"\s*:\s*(\d+)', self._received)) is None:
            await readable(self._status)
            if not (more := os.read(self._status, 4096)):
                raise ProcessLookupError("bubblewrap ended before it had a child")
            self._received += more
        pid = int(found[1])
        if self._daemon < 0:
            self._daemon = os.pidfd_open(pid)
            self._namespace = os.readlink(f"/proc/{pid}/ns/pid")
        return pid

    async def configure(self, line: bytes) -> None:
        """Write the daemon's configuration, once it runs; the pipe stays open as the sign of our life.

        It may hold as little as two pages, where tenants took all that the kernel gives a user for pipes.
        """
        await write_all(self._stdin, line)

    def release(self) -> None:
        """Let the daemon run."""
        os.write(self._gate, b"x")
        self._gate = _close(self._gate)

    @property
    def alive(self) -> bool:
        """Whether the daemon, and so the sandbox, lives."""
        return self._daemon >= 0 and not is_readable(self._daemon)

    async def died(self) -> None:
        """Wait for the daemon's end."""
        await readable(self._daemon)

    async def dies_within(self, seconds: float) -> bool:
        """Whether the daemon is dead, now or in a moment."""
        if self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.died()
        return not self.alive

    def last_words(self) -> str:
        """The end of what bubblewrap and the daemon wrote."""
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
        return ""

    async def end(self) -> None:
        """Kill the daemon and wait until it, everything in its namespace, and bubblewrap are gone.

        Raises:
            TimeoutError: something of it is still there; may be called again.
        """
        self._stdin = _close(self._stdin)
        if self._daemon < 0 and not self._bwrap_has_ended():
            # Killing bubblewrap now could leave its child waiting for it for ever: learn the pid first.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(KNOWN_S):
                    await self.daemon_pid()
        self._gate = _close(self._gate)
        async with asyncio.timeout(KILL_S):
            if self._daemon >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._daemon, signal.SIGKILL)
                while not await self.dies_within(DYING_S):
                    _kill_all(self._namespace)
            else:
                # Who kills bubblewrap while it starts leaves a child in its group that waits for it for ever.
                _kill_group(self._bwrap)
            await self._bwrap_ended()
            while _has_group(self._bwrap.pid):  # noqa: ASYNC110 -- the kernel tells nobody when a group is empty
                await asyncio.sleep(0.002)
        self._daemon, self._status = _close(self._daemon), _close(self._status)

    def _bwrap_has_ended(self) -> bool:
        """Without collecting it: until then its number is not given to another process or group."""
        if self._bwrap.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._bwrap.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def _bwrap_ended(self) -> None:
        if self._bwrap.poll() is None:
            handle = os.pidfd_open(self._bwrap.pid)  # not reaped yet: the pid is still its own
            try:
                await readable(handle)
            finally:
                os.close(handle)
            self._bwrap.wait()


def spawn(argv: Callable[[int, int], Sequence[str]], inherited: Sequence[int], log: Path) -> SandboxProcess:
    """Start bubblewrap. There is no await in here: a cancelled caller cannot lose the process.

    Args:
        argv: the command line, given the descriptors for ``--json-status-fd`` and ``--block-fd``.
        inherited: further descriptors that it names; the caller closes them.
        log: file for what bubblewrap and the daemon write.
    """
    ours: list[int] = []
    theirs: list[int] = []
    try:
        for reading_is_theirs in (True, False, True):  # stdin, status, gate
            ends = os.pipe()
            theirs.append(ends[0 if reading_is_theirs else 1])
            ours.append(ends[1 if reading_is_theirs else 0])
        with log.open("ab") as output:
            bwrap = subprocess.Popen(
                argv(theirs[1], theirs[2]),
                stdin=theirs[0],
                stdout=output,
                stderr=output,
                env={},  # the daemon's /proc/1/environ shows what bubblewrap was started with
                pass_fds=(*theirs[1:], *inherited),
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for the owner, who stops us in order
            )
    except BaseException:
        for fd in ours:
            os.close(fd)
        raise
    finally:
        for fd in theirs:
            os.close(fd)
    os.set_blocking(ours[0], False)
    return SandboxProcess(bwrap, ours[0], ours[1], ours[2], log)


def _kill_group(leader: "subprocess.Popen[bytes]") -> None:
    if leader.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def _has_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_all(namespace: str) -> None:
    """Kill every process of a pid namespace, from outside."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is nobody's we may look at
            handle = os.pidfd_open(int(name))
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _close(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def is_readable(fd: int) -> bool:
    """Whether a descriptor is readable now; a pidfd is when its process has ended."""
    poll = select.poll()  # unlike select, good for descriptors above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


async def readable(fd: int) -> None:
    """Wait until ``is_readable``."""
    if not is_readable(fd):
        loop = asyncio.get_running_loop()
        await _told(fd, loop.add_reader, loop.remove_reader)


async def write_all(fd: int, data: bytes) -> None:
    """Write everything to a descriptor that does not block, as its reader takes it."""
    loop = asyncio.get_running_loop()
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            await _told(fd, loop.add_writer, loop.remove_writer)


async def _told(
    fd: int, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool]
) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    add(fd, ready)
    try:
        await future
    finally:
        remove(fd)
