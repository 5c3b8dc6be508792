"""A child of a pod's main process.

Guarantees:
1. What it prints is at once in the pod's own output and in its log, in bounded memory: whoever reads slowly
   slows the child down. A log that cannot be written any more does not stop the output.
2. When the block is left, nothing is left of its session: neither the child nor what it started.
3. Its exit code is that of a shell: 128 and the number of the signal that ended it.
4. As the first process of a container, `reap_orphans` collects what nobody else does, and no child of ours.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, NamedTuple

from agentfly.resources.runners.guard import end_guard, start_guarded

logger = logging.getLogger(__name__)

CHUNK = 65536
SWEEP_S = 5.0  # for killed processes to be gone; they have no way to refuse
OUTPUT_S = 5.0  # for the last words of a session that is gone
SIGNALLED = 128


class Child:
    """A started process; see `running`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self._process.returncode
        return SIGNALLED - code if code is not None and code < 0 else code

    async def wait(self, deadline_s: float) -> int:
        """The exit code, once it ended.

        Raises:
            TimeoutError: it did not end in time; it runs on.
        """
        async with asyncio.timeout(deadline_s):
            await self._process.wait()
        code = self.exit_code
        assert code is not None
        return code

    async def ends_within(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        try:
            await self.wait(seconds)
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def running(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path
) -> AsyncIterator[Child]:
    """A process in a session of its own, killed with all of it when the block is left.

    Args:
        env: added to the environment of this process.
        log: its output is appended to it.
    """
    source, sink = os.pipe()
    output = threading.Thread(target=_pump, args=(source, log), name=f"output {log.stem}", daemon=True)
    output.start()
    try:
        process = await start_guarded(
            argv,
            contained=True,
            env={**os.environ, **env},
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=asyncio.subprocess.STDOUT,
        )
    finally:
        os.close(sink)
    try:
        yield Child(process)
    finally:
        await asyncio.shield(_end(process, output))


async def _end(process: asyncio.subprocess.Process, output: threading.Thread) -> None:
    await end_guard(process)
    await asyncio.to_thread(_sweep, process.pid)
    await asyncio.to_thread(output.join, OUTPUT_S)


def _sweep(session: int) -> None:
    """Kill what is left of a session whose leader is gone."""
    end = time.monotonic() + SWEEP_S
    while time.monotonic() < end:
        left = [each.pid for each in _processes() if each.session == session and each.state != "Z"]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    logger.error("processes %s do not end after SIGKILL", left)


def _pump(source: int, log: Path) -> None:
    """Copy what the child prints, until nobody holds the other end."""
    with os.fdopen(source, "rb", buffering=0) as pipe, ExitStack() as stack:
        targets: list[IO[bytes]] = [stack.enter_context(os.fdopen(os.dup(1), "wb", buffering=0))]
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            targets.append(stack.enter_context(log.open("ab", buffering=0)))
        except OSError as error:
            logger.warning("%s: cannot be written: %s", log, error)
        while chunk := pipe.read(CHUNK):
            for target in list(targets):
                try:
                    _write(target, chunk)
                except OSError as error:
                    targets.remove(target)  # the child must not wait for a full disk
                    logger.warning("%s: takes nothing more: %s", target.name, error)


def _write(target: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[target.write(rest) :]


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


def _processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield _Process(int(name), fields[0], int(fields[1]), int(fields[3]))


def reap_orphans() -> None:
    """Collect ended processes that came to this one because their parents had ended.

    A child of ours leads a session, and is collected by whoever waits for it.
    """
    for each in _processes():
        if each.state == "Z" and each.parent == os.getpid() and each.session != each.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)
