"""A root file system from packages, built by mmdebstrap with this machine's sources of packages.

Guarantees:
1. The build ends, with all it started, as soon as nobody wants it any more.
2. If it fails, the error has its last words; where mmdebstrap is missing, how to get it.

A build is called by what was asked of it, since its content is not known before: it is made once for a suite,
its packages and these sources, and again only after it was evicted.
"""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from agentfly.resources.errors import ResourceError
from agentfly.resources.images.compression import Reader
from agentfly.resources.images.layers import Layer, Source
from agentfly.resources.images.stream import Budget

LAST_WORDS = 600
"""Characters of its log that an error shows."""
END_S = 10.0
"""It removes its folders when it is asked to end."""
PAUSE_MS = 200
APT = Path("/etc/apt")


def packages(path: str, budget: Budget, apt: Path = APT) -> Source:
    """The image of ``SUITE/PACKAGE,PACKAGE``.

    Raises:
        ResourceError: there is no mmdebstrap.
    """
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise ResourceError(
            f"image: packages:{path} needs mmdebstrap, which is not installed",
            hints=["apt install mmdebstrap", "or give a tarball made elsewhere: tar:PATH"],
        )
    suite, _, names = path.partition("/")
    texts = {str(file): file.read_text(errors="replace") for file in _sources(apt)}
    sources = [file for file, text in texts.items() if text.strip()]
    asked = json.dumps([suite, names, os.uname().machine, texts])
    include = [f"--include={names}"] if names else []
    command = [tool, "--variant=minbase", "--format=tar", *include, suite, "-", *sources]
    layer = Layer(f"packages:{path}", lambda: _build(command, f"packages:{path}", budget))
    return Source(f"sha256:{hashlib.sha256(asked.encode()).hexdigest()}", (layer,))


def _sources(apt: Path) -> Iterator[Path]:
    if (single := apt / "sources.list").is_file():
        yield single
    for pattern in ("*.list", "*.sources"):
        yield from sorted((apt / "sources.list.d").glob(pattern))


@contextlib.contextmanager
def _build(command: list[str], name: str, budget: Budget) -> Iterator[Reader]:
    """What a command writes to its output."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            yield _Output(process, log, name, budget)
        finally:
            _end(process)


class _Output:
    """The output of a process that must succeed."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: IO[bytes], name: str, budget: Budget) -> None:
        assert process.stdout is not None  # a pipe
        self._process, self._log, self._name, self._budget = process, log, name, budget
        self._fd = process.stdout.fileno()

    def read(self, size: int, /) -> bytes:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not poll.poll(PAUSE_MS):
            self._budget.check()
        data = os.read(self._fd, size)
        if not data and (code := self._process.wait(END_S)) != 0:
            self._log.seek(0)
            words = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
            raise ResourceError(
                f"image: {self._name}: mmdebstrap ended with {code}: {words}",
                hints=["check the suite, the packages, and that apt update works on this machine"],
            )
        return data


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    if process.stdout is not None:
        process.stdout.close()
