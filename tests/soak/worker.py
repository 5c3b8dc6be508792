"""One worker process: holds sandboxes, leaves a canary in each, and looks for the canaries of others.

Its account is a file of one line a turn, written at once: it may be killed at any moment.
"""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

from agentfly.broker.client import BrokerClient
from agentfly.errors import AgentflyError
from agentfly.resources.lease import Lease, Request
from tests.soak.keeper import POOL

DEADLINE_S = 60.0
# What a holder can see of the one before: files, modes, processes, memory shared or queued, names.
LOOK = """
cd /; find /workspace /tmp /dev/shm /dev/mqueue /root /run /home /opt -xdev | sort
ls -A / /etc | grep canary; stat -c '%n %a %u' / /tmp /workspace /etc /usr; ipcs | grep -c 0x
for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; done | grep -o 'sleep 424[2]'
hostname; umask
"""
CANARY = """
echo {name} > /workspace/canary; echo {name} > /tmp/canary; echo {name} > /dev/shm/canary
chmod 777 /workspace; mkdir -p /run/canary; (setsid sleep 4242 > /dev/null 2>&1 &)
"""
IN_ROOT = "echo {name} > /etc/canary; chmod 700 /usr/bin/env; rm -f /etc/hostname"


class Account:
    """Lines that outlive this process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def note(self, what: str, detail: str = "") -> None:
        """One thing that happened."""
        self._file.write(f"{what}\t{detail!r}\n".encode())


async def use(lease: Lease, rng: random.Random, name: str, pristine: str, account: Account) -> None:
    """Look for canaries, leave one, and sometimes be cancelled in the middle of a command."""
    seen = (await lease.sandbox.exec(LOOK, timeout=20)).stdout
    if seen != pristine:
        account.note("dirty", seen)
    await lease.sandbox.exec(CANARY.format(name=name), timeout=20)
    if rng.random() < 0.15:
        await lease.sandbox.exec(IN_ROOT.format(name=name), timeout=20)
    if rng.random() < 0.15:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() * 0.2):
                await lease.sandbox.exec("sleep 5", timeout=10)
        account.note("cancelled", "exec")


async def turn(broker: BrokerClient, rng: random.Random, name: str, pristine: str, account: Account) -> None:
    """One acquire and what follows from it."""
    patience = rng.random() * 0.1 if rng.random() < 0.15 else DEADLINE_S
    requests = [Request(POOL)] if rng.random() < 0.9 else [Request(POOL, "one"), Request(POOL, "two")]
    try:
        async with asyncio.timeout(patience):
            leases = await broker.acquire_many(requests, name, deadline=DEADLINE_S)
    except TimeoutError:
        account.note("cancelled", "acquire")
        return
    try:
        for lease in leases:
            await use(lease, rng, name, pristine, account)
            if rng.random() < 0.1:
                await lease.reset()
                await use(lease, rng, name, pristine, account)
            await asyncio.sleep(rng.random() * 0.05)
    finally:
        for lease in leases:
            await lease.release(dirty=rng.random() < 0.05)
    account.note("served", str(len(leases)))


async def work(root: Path, name: str, seed: int, pristine: str) -> None:
    """Turns until SIGTERM; a broker that goes away is looked for again."""
    rng, account, stop = random.Random(seed), Account(root / "accounts" / name), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    number = 0
    while not stop.is_set():
        try:
            async with BrokerClient((root / "address").read_text()) as broker:
                while not stop.is_set():
                    number += 1
                    await turn(broker, rng, f"{name}.{os.getpid()}.{number}", pristine, account)
        except AgentflyError as error:
            account.note("error", f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


def main(root: Path, name: str, seed: int, pristine: str) -> None:
    """What a forked child does; it never returns."""
    try:
        asyncio.run(work(root, name, seed, pristine))
    except BaseException as error:
        Account(root / "accounts" / name).note("broke", repr(error))
        os._exit(1)
    os._exit(0)
