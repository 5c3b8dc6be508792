"""Tools that misbehave, one sandbox each: what they do ends with them, and no neighbour notices."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from agentfly.resources.errors import Infra
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxError, SandboxLeaseLost, SandboxUnreachable
from tests.local.boxes import TOKEN, Box, box
from tests.local.machine import footprint

LIMITED = pytest.mark.skipif(bool(Cgroups.find().missing), reason="no control group can be written here")
BOMB = "import os\nwhile True:\n  try:\n    os.fork()\n  except OSError: pass"
HOG = "x = [bytearray(10 << 20) for _ in range(100)]"
GONE = (SandboxUnreachable, SandboxLeaseLost, SandboxError)


# What hangs, hides, or kills.


async def test_daemons_do_not_outlive_the_lease(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        await made.sh("setsid setsid sh -c 'trap \"\" TERM HUP; sleep 1234' >/dev/null 2>&1 &")
        await made.sh(
            'python3 -c "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n'
            '    time.sleep(1234)"',
            timeout=5,
        )
        assert len((await made.sh("pgrep -f 1234")).split()) >= 2
        namespace = await made.sh("readlink /proc/self/ns/pid")
        await made.next_lease()
        assert (await made.client.exec("pgrep -f 123[4]")).stdout == ""
        assert await made.sh("readlink /proc/self/ns/pid") == namespace


@pytest.mark.parametrize(
    "line", ["kill -9 1", "kill -STOP 1", "for s in $(seq 1 31); do kill -$s 1; done; true"]
)
async def test_signals_do_not_reach_the_daemon(runner: BubblewrapRunner, line: str) -> None:
    async with box(runner) as made:
        await made.client.exec(line)
        assert await made.sh("echo alive") == "alive\n"


async def test_killing_everything_kills_only_its_own(runner: BubblewrapRunner) -> None:
    async with box(runner) as made, box(runner) as other:
        await made.sh("sleep 300 & kill -9 -1", timeout=10)
        async with asyncio.timeout(20):  # the kernel takes the time it needs to end what was killed
            while (await made.client.exec("pgrep sleep")).stdout:  # noqa: ASYNC110 - of processes
                await asyncio.sleep(0.1)
        assert await made.sh("echo alive") == "alive\n"
        assert await other.sh("echo alive") == "alive\n"


async def test_fork_bomb_is_bounded_and_gone_after_the_reset(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(pids=32)) as made, box(runner) as other:
        bomb = asyncio.create_task(made.client.exec(["python3", "-c", BOMB], timeout=1))
        await asyncio.sleep(0.5)
        group = made.member.handle.group  # type: ignore[attr-defined]
        counts = [len((path / "cgroup.procs").read_text().split()) for path in group.paths]
        assert all(20 <= count <= 52 for count in counts)
        assert await other.sh("echo alive") == "alive\n"
        await asyncio.gather(bomb, return_exceptions=True)
        await made.next_lease()
        assert await made.sh("echo alive") == "alive\n"
        assert int(await made.sh("ls -d /proc/[0-9]* | wc -l")) <= 4


async def test_fork_bomb_that_left_its_group_dies_at_the_reset(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(pids=32)) as made:
        line = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{BOMB}"
        await made.client.exec(["python3", "-c", line], timeout=2)
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await made.next_lease()
        assert time.monotonic() - began < 5
        assert await made.sh("echo alive") == "alive\n"


# Memory, disk, output.


@LIMITED
async def test_memory_hog_is_killed_alone_and_told_as_oom(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(memory_mb=96)) as made, box(runner) as other:
        result = await made.client.exec(["python3", "-c", HOG], timeout=60)
        assert (result.oom, result.exit_code, result.signal) == (True, 137, 9)
        assert not (await made.client.exec("true")).oom
        assert await other.sh("echo alive") == "alive\n"
        await made.next_lease()
        assert await made.sh("echo alive") == "alive\n"


@pytest.mark.skipif(not Cgroups.find().missing, reason="control groups bound memory here")
async def test_memory_hog_without_control_groups_is_refused(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(memory_mb=96)) as made:
        result = await made.client.exec(["python3", "-c", HOG], timeout=60)
        assert "MemoryError" in result.stderr
        assert [note.partition(" ")[0] for note in runner.notes()] == list(Cgroups.find().missing)


@LIMITED
async def test_sandbox_that_died_of_memory_says_so(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(memory_mb=64)) as made:
        # Files in memory are not freed by killing, so the kernel may come to the daemon.
        fill = "for d in /tmp /workspace /dev/shm /root; do head -c 100000000 /dev/zero > $d/f; done; true"
        hold = "import mmap, time\nm = mmap.mmap(-1, 60 << 20)\nm.write(bytes(60 << 20))"
        dead = False
        for _ in range(30):
            try:
                await made.client.exec(fill, timeout=30)
                await made.client.exec(["python3", "-c", hold], timeout=30)
            except SandboxUnreachable:
                dead = True
                break
        if dead:
            assert not (await runner.probe(made.member)).alive
            with pytest.raises(Infra, match="oom, more than its 64 MiB were needed"):
                await runner.lease(made.member, "first", 0, TOKEN, 30)
        await made.next_lease()
        assert await made.sh("ls -A /tmp /workspace; echo alive") == "/tmp:\n\n/workspace:\nalive\n"


async def test_scratch_folders_are_bounded(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        result = await made.client.exec("head -c 100000000 /dev/zero > /tmp/x", timeout=60)
        assert "No space left" in result.stderr
        await made.next_lease()
        assert await made.sh("ls -A /tmp") == ""


# What is written anywhere.

RESIDUE = {
    "/etc": "echo x > /etc/new",
    "/etc changed": "echo x >> /etc/passwd",
    "/etc removed": "rm /etc/hosts",
    "/etc mode": "chmod 700 /etc/ssl",
    "/etc undone": "touch /etc/x; rm /etc/x",
    "workdir": "mkdir -p /workspace/a/b && echo x > /workspace/a/b/c && chmod 000 /workspace/a",
    "/tmp": "touch /tmp/.hidden; mkfifo /tmp/pipe; ln -s /etc /tmp/link; chmod 700 /tmp",
    "/tmp attribute": "python3 -c \"import os; os.setxattr('/tmp', 'user.secret', b'x')\"",
    "/dev/shm": "echo x > /dev/shm/x",
    "/root": "echo x > ~/.bash_history",
    "/run": "echo x > /run/x",
    "message queue": "python3 -c \"open('/dev/mqueue/q', 'w')\"",
    "System V": "ipcmk -M 4096 -S 2 -Q",
    "process": "setsid sleep 500 >/dev/null 2>&1 &",
    "socket": "setsid python3 -c \"import socket, time; s = socket.socket(); s.bind(('', 4000)); s.listen(); "
    'time.sleep(500)" >/dev/null 2>&1 & until grep -q :0FA0 /proc/net/tcp; do sleep 0.02; done',
}
LOOK = """
md5sum /etc/passwd /etc/hosts; ls -lA /etc | md5sum
ls -A /tmp /workspace /dev/shm /root /run /dev/mqueue
stat -c '%n %a %u %g' /tmp /workspace /dev/shm /root /run /etc /etc/ssl
ipcs | grep -c 0x; pgrep -x sleep; cat /proc/net/tcp
python3 -c "import os; print([os.listxattr(path) for path in ('/tmp', '/workspace')])"
"""


@pytest.mark.parametrize("channel", RESIDUE)
async def test_next_tenant_sees_nothing_of(runner: BubblewrapRunner, channel: str) -> None:
    async with box(runner) as made:
        before = (await made.client.exec(LOOK)).stdout
        await made.sh(RESIDUE[channel])
        assert (await made.client.exec(LOOK)).stdout != before or channel == "/etc undone"
        await made.next_lease()
        assert (await made.client.exec(LOOK)).stdout == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write to /usr in a sandbox")
async def test_next_tenant_sees_the_programs_of_the_machine(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        await made.sh("rm /usr/bin/id; echo 'echo evil' > /usr/bin/whoami; touch /usr/bin/new")
        await made.next_lease()
        assert await made.sh("id -u; whoami; ls /usr/bin/new 2>/dev/null || true") == "0\nroot\n"
    assert "new" not in os.listdir("/usr/bin")


# What a tenant may not see or do.


async def test_nothing_of_this_machine_is_visible(runner: BubblewrapRunner, run_dir: Path) -> None:
    here = Path(__file__).parent
    os.environ["AGENTFLY_TEST_SECRET"] = "visible"
    try:
        async with box(runner) as made:
            assert (await made.client.exec("cat /proc/1/environ")).stdout == ""
            assert "visible" not in await made.sh("env")
            assert await made.sh("find /home /root /opt /run /var") == (
                "/home\n/root\n/opt\n/run\n/var\n/var/tmp\n"
            )
            assert (await made.client.exec("cat /etc/shadow /etc/sudoers")).stdout == ""
            assert (await made.client.exec("ls /etc/ssl/private /etc/ssh")).stdout == ""
            assert await made.sh("cut -d: -f1 /etc/passwd") == "root\nnobody\n"
            assert (await made.client.exec(f"ls {run_dir} {here}")).stdout == ""
            assert await made.sh("hostname") == "sandbox\n"
            assert int(await made.sh("ls -d /proc/[0-9]* | wc -l")) <= 4
    finally:
        del os.environ["AGENTFLY_TEST_SECRET"]


async def test_daemon_cannot_be_reached_or_read(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        assert "af-" not in await made.sh("cat /proc/net/unix | cut -d' ' -f8")
        assert await made.sh("ls /proc/self/fd") == "0\n1\n2\n3\n"
        for line in ("cat /proc/1/mem", "ls -l /proc/1/cwd/", "cat /proc/1/fd/0", "cat /proc/1/maps"):
            assert (await made.client.exec(line)).stdout == "", line
        hunt = (
            "import os, socket\n"
            "for root, folders, files in os.walk('/'):\n"
            "  folders[:] = [f for f in folders if f not in ('proc', 'share', 'lib', 'include', 'src')]\n"
            "  for f in files:\n"
            "    try:\n"
            "      s = socket.socket(socket.AF_UNIX); s.connect(os.path.join(root, f)); print('reached', f)\n"
            "    except OSError: pass\n"
            "    finally: s.close()\n"
        )
        assert await made.sh(f'python3 -c "{hunt}"', timeout=60) == ""


FORBIDDEN = [
    "mount -t tmpfs x /mnt",
    "mount -o remount,rw /proc",
    "umount /tmp",
    "unshare -U true",
    "unshare -m true",
    "chroot / true",
    "mknod /tmp/x c 1 3",
    "dmesg",
    "hostname other",
    "chmod 666 /dev/null",
    "chmod 444 /proc/version",
    "echo x > /proc/sys/kernel/hostname",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo 1 > /proc/sysrq-trigger",
    "touch /.agentfly/upper/x",
    "touch /new",
    "touch /dev/x",
    # All that root alone may read there opens for the user outside, if that is root.
    "find /proc -maxdepth 1 -type f ! -perm -o=r -exec head -c 1 {} + 2>/dev/null | grep -a .",
    "grep -a . /proc/keys",
    'python3 -c "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(250, 0, -4, 1) != -1 or '
    'ctypes.get_errno())" && false',
]


@pytest.mark.parametrize("line", FORBIDDEN)
async def test_forbidden(runner: BubblewrapRunner, line: str) -> None:
    async with box(runner) as made:
        assert (await made.client.exec(line)).exit_code != 0


async def test_commands_have_no_capability_and_no_new_ones(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        lines = (await made.sh("cat /proc/self/status")).splitlines()
        status = dict(line.split(":\t") for line in lines if ":\t" in line)
        assert {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_programs_of_a_researcher_work(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(memory_mb=512)) as made:
        await made.sh("git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m x")
        assert (
            await made.sh(
                "python3 -c 'import ssl, sqlite3, multiprocessing as m; "
                "print(sum(m.Pool(2).map(abs, [-1, 2])))'"
            )
            == "3\n"
        )
        await made.sh(
            "echo x > /dev/null; head -c 4 /dev/urandom | wc -c; tty || true; script -qc true /tmp/t"
        )
        await made.sh("echo hi > /dev/stderr")


async def test_misbehaviour_leaves_no_trace_on_the_machine(run_dir: Path, sandboxd: Path) -> None:
    runner = BubblewrapRunner(run_dir.with_name("trace"), sandboxd)
    before = footprint(run_dir)

    async def misbehave(made: Box, line: str) -> None:
        await asyncio.gather(made.client.exec(line, timeout=1), return_exceptions=True)

    async with box(runner) as one, box(runner) as two, box(runner) as three:
        await asyncio.gather(
            misbehave(one, "setsid sleep 100 & yes > /workspace/x"),
            misbehave(two, "touch /etc/a; kill -9 -1"),
            misbehave(three, "mkdir -p /dev/shm/a/b; yes"),
        )
        await one.next_lease()
    await runner.close()
    assert footprint(run_dir) == before
