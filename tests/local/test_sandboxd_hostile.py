"""A tenant against the daemon itself: its descriptors, its signals, what it hands down, its locks."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner, sweep
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient, SandboxError, SandboxLeaseLost, SandboxUnreachable
from tests.local.boxes import TOKEN, Box, box


@pytest.fixture
async def leased(runner: BubblewrapRunner) -> AsyncIterator[Box]:
    async with box(runner) as made:
        yield made


# Its descriptors are files of the machine outside.


async def test_descriptors_of_the_daemon_are_neither_read_nor_written(leased: Box) -> None:
    log = leased.member.handle.home.log  # type: ignore[attr-defined]
    group = leased.member.handle.group  # type: ignore[attr-defined]
    before = (log.read_bytes(), log.stat().st_mode, group.oom_file and group.oom_file.read_text())
    await leased.sh("for n in $(seq 0 15); do ln -s /proc/self/fd/$n /tmp/$n; done")
    for number in range(16):
        for folder in ("/proc/self/fd", "/proc/1/fd", "/dev/fd", "/tmp"):
            path = f"{folder}/{number}"
            with pytest.raises(SandboxError):
                await leased.client.read_file(path)
            with pytest.raises(SandboxError):
                await leased.client.write_file(path, b"1", 0o777)
    assert (log.read_bytes(), log.stat().st_mode, group.oom_file and group.oom_file.read_text()) == before


async def test_files_behind_ordinary_links_are_read_and_written(leased: Box) -> None:
    await leased.sh("mkdir a; ln -s a/x link; ln -s a folder")
    await leased.client.write_file("/workspace/link", b"through")
    await leased.client.write_file("/workspace/folder/y", b"too", 0o600)
    assert await leased.client.read_file("/workspace/a/x") == b"through"
    assert await leased.sh("cat link a/y; stat -c %a a/y") == "throughtoo600\n"


# Its signals.

QUEUE = """
import ctypes, platform, struct
call = {"x86_64": 129, "aarch64": 138}[platform.machine()]
for number in (4, 5, 6, 7, 8, 11, 16, 31):
    info = struct.pack("iiiiii", number, 0, -1, 0, 1, 0) + bytes(104)
    ctypes.CDLL(None).syscall(call, 1, number, info)
"""
FROM_A_SOCKET = """
import fcntl, os, socket
one, other = socket.socketpair()
fcntl.fcntl(one, 10, 11)  # F_SETSIG, SIGSEGV
fcntl.fcntl(one, fcntl.F_SETOWN, 1)
fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
other.send(b"x")
"""


@pytest.mark.parametrize("program", [QUEUE, FROM_A_SOCKET])
async def test_signal_that_looks_like_a_fault_does_not_end_the_daemon(leased: Box, program: str) -> None:
    assert (await leased.client.exec(["python3", "-c", program])).exit_code == 0
    assert await leased.sh("echo alive") == "alive\n"


# What it hands down, and what stays where no file is.

CONNECT = """
import socket
server = socket.create_server(("127.0.0.1", 4242))
client = socket.create_connection(("127.0.0.1", 4242))
server.accept()[0].close()
client.close()
"""
RESIDUE = {
    "file size": "prlimit --pid 1 --fsize=1000000",
    "soft limit": "prlimit --pid 1 --cpu=3600:",
    "priority": "renice -n 5 -p 1",
    "processors": "taskset -a -p $(( 1 << $(nproc) - 1 )) 1",
    "processors of one thread": "taskset -p 1 $(ls /proc/1/task | tail -1)",
    "idle": "chrt -i -p 0 1",
    "disk priority": "ionice -c 3 -p 1",
    "times": "touch -d @12345 /tmp /workspace /dev/shm /run /root",
    "time of the queues": "touch -d @12345 /dev/mqueue",
    "terminals": "chmod 600 /dev/pts/ptmx; chmod 711 /dev/pts; touch -d @777 /dev/pts /dev/pts/ptmx; true",
    "file flags": "chattr +d /tmp; chattr +A /workspace; true",
    "closed connection": f"python3 -c '{CONNECT}'",
}
LOOK = """
prlimit --pid $$ | sort; nice; ionice -p $$; chrt -p 1
grep Cpus_allowed: /proc/1/task/*/status | sort -u -k2
find /tmp /workspace /dev/shm /run /root /dev/mqueue /dev/pts /dev/pts/ptmx -maxdepth 0 ! -newermt 2020-01-01
stat -c '%n %a' /dev/pts /dev/pts/ptmx; lsattr -d /tmp /workspace; cat /proc/net/tcp /proc/net/dev
"""


@pytest.mark.parametrize("channel", RESIDUE)
async def test_next_tenant_sees_nothing_of(runner: BubblewrapRunner, channel: str) -> None:
    async with box(runner) as made:
        before = _seen(await made.sh(LOOK))
        await made.client.exec(RESIDUE[channel])
        await made.next_lease()
        assert _seen(await made.sh(LOOK)) == before
        assert await made.sh("script -qc 'echo terminal' /dev/null") == "terminal\r\n"


def _seen(text: str) -> list[str]:
    """Threads come and go; what they may use must not."""
    return [line.partition(":Cpus_allowed:")[2] or line for line in text.splitlines()]


async def test_lease_that_changed_nothing_keeps_its_sandbox(leased: Box) -> None:
    await leased.sh("echo x > x; (sleep 0.01 &); python3 -c 'import socket; socket.socketpair()'")
    assert (await leased.admin.reset()).clean


async def test_stalled_download_ends_with_its_lease(leased: Box) -> None:
    await leased.sh("head -c 20000000 /dev/zero > big")
    reader, writer = await asyncio.open_unix_connection(
        leased.member.address.removeprefix("unix://"), limit=1024
    )
    head = f"GET /files?path=/workspace/big HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    writer.write(head.encode())
    assert b"200" in await reader.readline()
    async with asyncio.timeout(3):
        assert (await leased.admin.reset()).clean
        received = 0
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                received += len(piece)
    assert received < 20_000_000
    writer.close()


async def test_command_of_a_lost_lease_does_not_start_in_the_next(leased: Box) -> None:
    # The search for the command takes longer than the change of the lease.
    slow = {"PATH": ":".join(["/usr/share/none"] * 400_000) + ":/usr/bin"}
    token = TOKEN
    for number in range(5):
        async with SandboxClient(leased.member.address, token) as old:
            late = asyncio.create_task(old.exec(["touch", "/tmp/late"], env=slow))
            await asyncio.sleep(0.3)
            assert not late.done()
            assert (await leased.admin.reset()).clean
            token = f"token-{number}"
            await leased.admin.lease("next", number, token, 60)
            with pytest.raises(SandboxLeaseLost):
                await late
        async with SandboxClient(leased.member.address, token) as new:
            assert (await new.exec("ls /tmp")).stdout == ""


# Its locks.

# Whoever opens the file, and be it to run it, waits for the holder of the lease, up to 45 seconds.
LEASED_FILE = """
import fcntl, os, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.write(os.open("trap", os.O_CREAT | os.O_WRONLY, 0o755), b"#!/bin/sh\\n")
os.closerange(3, 9)
held = os.open("trap", os.O_RDONLY)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
open("ready", "w")
time.sleep(600)
"""


async def _hold_up(made: Box) -> asyncio.Task[object]:
    """Start a command that the tenant keeps from ever reaching its exec."""
    await made.client.write_file("/workspace/hold.py", LEASED_FILE.encode())
    await made.sh("setsid python3 hold.py >/dev/null 2>&1 & until test -e ready; do sleep 0.02; done")
    stuck: asyncio.Task[object] = asyncio.create_task(made.client.exec(["/workspace/trap"]))
    await asyncio.sleep(0.3)
    assert not stuck.done()
    return stuck


async def test_command_that_cannot_start_does_not_hold_up_a_reset(leased: Box) -> None:
    stuck = await _hold_up(leased)
    async with asyncio.timeout(3):
        assert (await leased.admin.reset()).clean
    with pytest.raises((SandboxLeaseLost, SandboxUnreachable)):
        await stuck


async def test_command_that_cannot_start_ends_at_its_timeout_and_holds_up_no_other(leased: Box) -> None:
    stuck = await _hold_up(leased)
    for _ in range(20):  # enough garbage for a collection, which waits for every thread of the daemon
        assert (await leased.client.exec("true", stdin="x" * 1_000_000, timeout=5)).exit_code == 0
    result = await leased.client.exec(["/workspace/trap"], timeout=0.3)
    assert (result.timed_out, result.signal, result.wall_s < 3) == (True, 9, True)
    assert not stuck.done()
    assert (await leased.admin.reset()).clean
    with pytest.raises(SandboxLeaseLost):
        await stuck


STOP_ALL = """
import os, signal
open("/tmp/ready", "w")
while True:
    try: os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError: pass
"""


async def test_children_stopped_before_their_exec_hold_up_neither_others_nor_a_reset(leased: Box) -> None:
    await leased.client.write_file("/workspace/stop.py", STOP_ALL.encode())
    await leased.sh("setsid python3 stop.py >/dev/null 2>&1 &")
    async with asyncio.timeout(5):
        while not await _exists(leased, "/tmp/ready"):  # noqa: ASYNC110 -- no command would tell
            await asyncio.sleep(0.02)
    calls = [leased.client.exec(["true"], timeout=0.5) for _ in range(12)]
    for result in await asyncio.gather(*calls):
        assert result.exit_code == 0 or (result.timed_out and result.signal == 9)
    async with asyncio.timeout(3):
        assert (await leased.admin.health()).state == "leased"
        assert (await leased.admin.reset()).clean


async def _exists(made: Box, path: str) -> bool:
    try:
        await made.client.read_file(path)
    except SandboxError:
        return False
    return True


async def test_many_commands_that_cannot_start_hold_up_no_other(leased: Box) -> None:
    stuck = [await _hold_up(leased)]
    stuck += [asyncio.create_task(leased.client.exec(["/workspace/trap"])) for _ in range(9)]
    await asyncio.sleep(0.3)
    for _ in range(5):
        assert (await leased.client.exec("true", stdin="x" * 1_000_000, timeout=5)).exit_code == 0
    async with asyncio.timeout(3):
        assert (await leased.admin.reset()).clean
    for call in stuck:
        with pytest.raises((SandboxLeaseLost, SandboxUnreachable)):
            await call


OWNER = """
import asyncio, sys
from pathlib import Path
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec

async def main():
    runner = BubblewrapRunner(Path(sys.argv[1]), Path(sys.argv[2]))
    member = await runner.start(ContainerSpec(), "m")
    member.handle.process._stdin = -1 if len(sys.argv) > 3 else member.handle.process._stdin
    print(await member.handle.process.daemon_pid(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_sandbox_whose_daemon_cannot_run_ends_with_its_owner(run_dir: Path, sandboxd: Path) -> None:
    home = run_dir.with_name("stopped")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(home), str(sandboxd)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        os.kill(daemon, signal.SIGSTOP)  # from outside: inside, commands have ways to the same
        process.kill()
        process.wait()
    deadline = time.monotonic() + 3
    while Path(f"/proc/{daemon}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    survived = Path(f"/proc/{daemon}").exists()
    if survived:
        os.kill(daemon, signal.SIGKILL)
    sweep(home.parent)
    assert not survived


# More than its share.


async def test_sockets_are_of_the_sandboxs_network_alone(leased: Box) -> None:
    program = (
        "import socket\n"
        "for family in range(1, 47):\n"
        "  for kind in (1, 2, 3, 5):\n"
        "    try: socket.socket(family, kind).close(); print(family); break\n"
        "    except OSError: pass"
    )
    assert (await leased.sh(f'python3 -c "{program}"')).split() == ["1", "2", "10", "16"]
    await leased.sh('python3 -c "import socket; socket.socketpair()"')


FILL_SOCKETS = """
import socket
server, held, total = socket.create_server(("127.0.0.1", 0), backlog=200), [], 0
while len(held) < 100 and total < 200 << 20:
    held.append(socket.create_connection(server.getsockname()))
    held.append(server.accept()[0])
    for end in held[-2:]:
        end.setblocking(False)
        try:
            while True: total += end.send(bytes(65536))
        except BlockingIOError: pass
print(total >> 20)
"""


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/memory.kmem.tcp.limit_in_bytes").exists(),
    reason="control groups of version 1 alone count the memory of sockets apart",
)
async def test_memory_in_sockets_is_bounded(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(memory_mb=128)) as made:
        assert int(await made.sh(f"python3 -c '{FILL_SOCKETS}'", timeout=60)) < 64
