"""The supervisor: starts keeper and workers, kills them at random, and counts what is left.

Guarantees:
1. Every kind of death happens: of workers, of sandboxes and of the engine, besides cancelled acquires and
   commands.
2. The last line says ok only if every pool was whole at the end, nothing was left on the machine (processes,
   mounts, control groups, sockets, files) and no holder saw anything of another.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.local.paths import run_dir
from agentfly.resources.lease import PoolStatus
from tests.local.machine import descendants, groups
from tests.soak import worker
from tests.soak.keeper import POOL

PR_SET_CHILD_SUBREAPER = 36
WHOLE_S = 60.0  # resets, fresh starts and expiring leases of a pool in use, on busy cores
ENGINE_EVERY_S = 60.0


class Soak:
    """One run. ``root`` is its folder, on a real disk."""

    def __init__(self, root: Path, workers: int, members: int, seed: int) -> None:
        self.root, self.members, self.rng = root, members, random.Random(seed)
        self.killed: Counter[str] = Counter()
        self.owners: list[int] = []
        self._names = [f"w{number}" for number in range(workers)]
        self._workers: dict[str, int] = {}
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pristine = ""
        (root / "accounts").mkdir()

    async def run(self, seconds: float) -> list[str]:
        """Everything; returns what is wrong at the end."""
        self._start_keeper()
        if (status := await self._whole()) is not None:
            return [f"the pool did not start: {status}"]
        self._pristine = await self._look()
        for name in self._names:
            self._fork(name)
        end, engine = time.monotonic() + seconds, time.monotonic() + ENGINE_EVERY_S / 2
        while time.monotonic() < end:
            await asyncio.sleep(self.rng.random())
            self._kill_worker()
            self._kill_sandbox()
            if time.monotonic() >= engine:
                engine += ENGINE_EVERY_S
                await self._kill_keeper()
        await self._stop_workers()
        wrong = [] if (status := await self._whole()) is None else [f"the pool is not whole: {status}"]
        await self._stop_keeper()
        return [*wrong, *await self._left()]

    def kill(self) -> None:
        """End what still runs; after a good end that is nothing."""
        for pid in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.kill()

    def account(self) -> tuple[Counter[str], list[str]]:
        """What the workers wrote: counts, and every sight of another holder."""
        counts: Counter[str] = Counter()
        dirty = []
        for file in (self.root / "accounts").iterdir():
            for line in file.read_text().splitlines():
                what, _, detail = line.partition("\t")
                counts[what] += 1
                if what in ("dirty", "broke"):
                    dirty.append(f"{file.name}: {what}: {detail[:400]}")
        return counts, dirty

    def _start_keeper(self) -> None:
        environment = os.environ | {"XDG_CACHE_HOME": str(self.root / "c")}
        with (self.root / "keeper.log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.keeper", str(self.root), str(self.members)],
                env=environment,
                stdout=log,
                stderr=log,
            )
        self.owners.append(self._keeper.pid)

    async def _kill_keeper(self) -> None:
        assert self._keeper is not None
        self._keeper.kill()
        self._keeper.wait()
        self.killed["engine"] += 1
        self._start_keeper()

    async def _stop_keeper(self) -> None:
        assert self._keeper is not None
        self._keeper.terminate()
        try:
            await asyncio.to_thread(self._keeper.wait, WHOLE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()

    def _fork(self, name: str) -> None:
        seed = self.rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                asyncio.events._set_running_loop(None)  # this one is the parent's
                signal.set_wakeup_fd(-1)
                worker.main(self.root, name, seed, self._pristine)
            os._exit(1)
        self._workers[name] = pid

    def _kill_worker(self) -> None:
        name = self.rng.choice(self._names)
        os.kill(self._workers[name], signal.SIGKILL)
        os.waitpid(self._workers[name], 0)
        self.killed["worker"] += 1
        self._fork(name)

    def _kill_sandbox(self) -> None:
        assert self._keeper is not None
        if self.rng.random() < 0.5:
            boxes = [pid for pid in _children(self._keeper.pid) if _name(pid) == "bwrap"]
            inner = [child for pid in boxes for child in _children(pid)]
            if boxes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(self.rng.choice([boxes, inner or boxes])), signal.SIGKILL)
                    self.killed["sandbox"] += 1

    async def _stop_workers(self) -> None:
        for pid in self._workers.values():
            os.kill(pid, signal.SIGTERM)
        for pid in self._workers.values():
            await asyncio.to_thread(os.waitpid, pid, 0)
        self._workers.clear()

    async def _whole(self) -> PoolStatus | str | None:
        """None as soon as every member is free again; else the last status."""
        status: PoolStatus | str = "the engine does not answer"
        end = time.monotonic() + WHOLE_S
        while time.monotonic() < end:
            with contextlib.suppress(AgentflyError, OSError):
                async with BrokerClient((self.root / "address").read_text()) as broker:
                    status = (await broker.status())[POOL]
                    if status.ready == self.members and not status.queued:
                        return None
            await asyncio.sleep(0.2)
        return status

    async def _look(self) -> str:
        async with (
            BrokerClient((self.root / "address").read_text()) as broker,
            await broker.acquire(POOL, "baseline") as lease,
        ):
            return (await lease.sandbox.exec(worker.LOOK, timeout=20)).stdout

    async def _left(self) -> list[str]:
        for _ in range(50):  # what dies of its owner's death dies a moment later
            left = self._leaks()
            if not left:
                return []
            await asyncio.sleep(0.2)
        return left

    def _leaks(self) -> list[str]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # orphans that became ours and have ended
        mark = str(self.root)
        found = {
            "processes": dict(descendants()),
            "mounts": [line for line in _lines("/proc/self/mountinfo") if mark in line],
            "control groups": sorted(path for owner in self.owners for path in groups(owner)),
            "sockets": [line for line in _lines("/proc/net/unix") if mark in line],
            "files": [str(path) for path in (self.root / "c").glob("agentfly/run/*")],
        }
        return [f"{what} are left: {things}" for what, things in found.items() if things]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def main() -> int:
    """Run, and say in one line how it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--sandboxes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        parser.error("prctl: orphans cannot be counted here")
    root = Path(tempfile.mkdtemp(prefix="soak-", dir=run_dir().parent))
    soak = Soak(root, args.workers, args.sandboxes, args.seed)
    began = time.monotonic()
    try:
        wrong = asyncio.run(soak.run(args.seconds))
    finally:
        soak.kill()
    counts, dirty = soak.account()
    wrong += dirty[:10]
    if not counts["served"]:
        wrong.append("nobody was served")
    sys.stderr.write("".join(f"soak: {line}\n" for line in wrong))
    kills = " ".join(f"{what}={soak.killed[what]}" for what in ("worker", "sandbox", "engine"))
    sys.stdout.write(
        f"soak: {'FAILED' if wrong else 'ok'} seconds={time.monotonic() - began:.0f} "
        f"served={counts['served']} cancelled={counts['cancelled']} errors={counts['error']} "
        f"killed: {kills} dirty={counts['dirty']} leaks={sum('are left' in line for line in wrong)}\n"
    )
    if wrong:
        sys.stderr.write(f"soak: kept for a look: {root}\n")
    else:
        shutil.rmtree(root)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
