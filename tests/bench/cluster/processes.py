"""The processes that are measured, and what they used: broker, operator, and the daemons they speak to.

Guarantees:
1. Each ends with its block, however that is left; the text of its failure has its last words.
2. The broker is `agentfly broker` as it is shipped.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.resources.lease import PoolStatus
from tests.integration.operator.world import free_port

SEED = b"k" * 32
TOKEN = "client-token-of-this-bench"
START_S, END_S, READY_S = 60.0, 15.0, 180.0
POLL_S = 0.02
LAST_WORDS = 2000


@dataclass(frozen=True)
class Usage:
    """What a process used since it began: CPU, the most memory in MB, and seconds until it was ready."""

    cpu_s: float
    peak_mb: float
    ready_s: float

    def __str__(self) -> str:
        return f"{self.cpu_s:.1f} CPU s, {self.peak_mb:.0f} MB, ready in {self.ready_s:.1f} s"


@dataclass
class Broker:
    """A broker that runs. ``began`` is when it was started, in seconds of the monotonic clock."""

    process: asyncio.subprocess.Process
    address: str
    log: Path
    began: float = field(default_factory=time.monotonic)

    def client(self, share: str = "") -> BrokerClient:
        """A holder at the broker."""
        return BrokerClient(self.address, share, token=TOKEN)

    async def pool(self, name: str) -> PoolStatus | None:
        """What it says of a pool."""
        async with self.client() as client:
            return (await client.status()).get(name)

    async def holds(self, name: str, ready: int, within_s: float = READY_S) -> None:
        """Wait until so many members of a pool are free."""

        last: PoolStatus | None = None

        async def free() -> bool:
            nonlocal last
            last = await self.pool(name)
            return last is not None and last.ready == ready

        await until(
            f"{ready} free members", free, within_s, lambda: f"{last}\n{self.last_words()}", every_s=0.1
        )

    def cpu_s(self) -> float:
        """Seconds of CPU that it used until now."""
        return cpu_s(self.process.pid)

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-LAST_WORDS:]

    async def ready(self) -> bool:
        """Whether it answers acquires."""
        if self.process.returncode is not None:
            raise RuntimeError(f"broker: ended: {self.last_words()}")
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"{self.address}{wire.HEALTH}?ready") as answer,
            ):
                return answer.status == 200
        return False


@contextlib.asynccontextmanager
async def broker(kubeconfig: Path, namespace: str, folder: Path) -> AsyncIterator[Broker]:
    """The broker of a namespace, ready."""
    (folder / "key").write_bytes(SEED)
    (folder / "token").write_text(TOKEN)
    listen, gateway = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    variables = {
        "PATH": os.environ["PATH"],
        "AGENTFLY_LISTEN": listen,
        "AGENTFLY_GATEWAY_LISTEN": gateway,
        "AGENTFLY_GATEWAY_URL": f"http://{gateway}",
        "AGENTFLY_SIGNING_KEY_FILE": str(folder / "key"),
        "AGENTFLY_CLIENT_TOKEN_FILE": str(folder / "token"),
    }
    words = ("-m", "agentfly.cli", "broker", "--kubeconfig", str(kubeconfig), "-n", namespace)
    log = folder / f"broker-{time.monotonic_ns()}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    found = Broker(process, f"http://{listen}", log)
    try:
        await until("the broker is ready", found.ready, READY_S, found.last_words)
        yield found
    finally:
        await _end(process)


@contextlib.asynccontextmanager
async def daemons(kubeconfig: Path, namespace: str, folder: Path) -> AsyncIterator[None]:
    """What answers at the addresses of the pods of a namespace; see ``daemons``."""
    log = folder / "daemons.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.cluster.daemons", str(kubeconfig), namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            if not await process.stdout.readline():
                raise RuntimeError(f"daemons: ended: {log.read_text()[-LAST_WORDS:]}")
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await _end(process, asked=True)


async def until(
    what: str,
    holds: Callable[[], Awaitable[Any]],
    within_s: float,
    says: Callable[[], str] = lambda: "",
    every_s: float = POLL_S,
) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it is not, in ``within_s`` seconds.
    """
    end = time.monotonic() + within_s
    while not await holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not so within {within_s:g} s: {says()}")
        await asyncio.sleep(every_s)


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    """The most memory that a process had, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(words["VmHWM"].split()[0]) * 1024 / 1e6


async def _end(process: asyncio.subprocess.Process, *, asked: bool = False) -> None:
    if process.returncode is not None:
        return
    if not asked:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
