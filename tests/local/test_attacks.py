"""One tenant against its neighbours and the machine: all that a user of the kernel has only so much of."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd import kernel_quotas
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxError
from tests.local.boxes import Box, box

LIMITED = pytest.mark.skipif(bool(Cgroups.find().missing), reason="no control group can be written here")
SMALL = ContainerSpec(memory_mb=128, disk_mb=16)


@pytest.fixture
async def neighbour(runner: BubblewrapRunner) -> AsyncIterator[Box]:
    async with box(runner) as made:
        yield made


def files(folder: Path) -> list[Path]:
    """All below a folder of this machine."""
    return list(folder.rglob("*"))


def mounts() -> str:
    """The mounts of this machine."""
    return Path("/proc/self/mountinfo").read_text()


# The disk.

FILL = "head -c 200000000 /dev/zero > /etc/full"


async def test_root_takes_what_the_spec_says_and_nothing_of_this_machines_disk(
    runner: BubblewrapRunner, run_dir: Path
) -> None:
    async with box(runner, SMALL) as made:
        filled = await made.client.exec(FILL, timeout=30)
        assert "No space left on device" in filled.stderr
        assert not filled.oom
        assert int(await made.sh("stat -c %s /etc/full")) >> 20 in (15, 16)
        assert sum(path.lstat().st_size for path in files(run_dir)) < 16 << 20
        with pytest.raises(SandboxError, match="no space left"):
            await made.client.write_file("/etc/more", bytes(1 << 20))
        await made.sh("rm /etc/full; echo room > /etc/again")


@LIMITED
async def test_full_root_takes_no_memory_from_processes(runner: BubblewrapRunner) -> None:
    async with box(runner, SMALL) as made:
        await made.client.exec(FILL, timeout=30)
        await made.sh("python3 -c 'bytearray(100 << 20)'", timeout=30)


async def test_next_tenant_has_the_whole_disk_again(runner: BubblewrapRunner) -> None:
    async with box(runner, SMALL) as made:
        await made.client.exec(FILL, timeout=30)
        await made.next_lease()
        await made.sh("head -c 10000000 /dev/zero > /etc/mine")


async def test_disk_is_in_no_file_system_that_outlives_the_sandbox(
    runner: BubblewrapRunner, run_dir: Path
) -> None:
    async with box(runner, SMALL) as made:
        await made.sh("echo x > /etc/mine; mkdir /etc/folder")
        assert not [path for path in files(run_dir) if path.name in ("mine", "folder")]
        assert str(run_dir) not in mounts()


async def test_without_attributes_in_memory_the_root_is_written_to_disk_and_notes_say_so(
    run_dir: Path, sandboxd: Path
) -> None:
    old = BubblewrapRunner(run_dir.with_name("old"), sandboxd)
    assert not [note for note in old.notes() if note.startswith("disk")]
    old._bounded = False
    assert [note for note in old.notes() if note.startswith("disk of a sandbox: not bounded")]
    assert old.check() is None
    async with box(old, SMALL) as made:
        await made.sh("head -c 20000000 /dev/zero > /etc/large; rm -r /etc/ssl; mkdir /etc/ssl")
        await made.next_lease()
        assert (await made.client.exec("cat /etc/large")).exit_code == 1
    await old.close()


@LIMITED
async def test_a_million_files_are_the_tenants_own_trouble(runner: BubblewrapRunner, neighbour: Box) -> None:
    many = "import os\nos.mkdir('/tmp/d')\nfor n in range(1_000_000): os.mknod(f'/tmp/d/{n}')"
    async with box(runner, SMALL) as made:
        try:
            ended = await made.client.exec(["python3", "-c", many], timeout=60)
            assert ended.exit_code != 0
        except SandboxError:
            pass
        assert await neighbour.sh("touch /tmp/x; echo alive") == "alive\n"
        await made.next_lease()
        assert await made.sh("ls -A /tmp; echo alive") == "alive\n"


# The processor.

FOREIGN = [
    "prlimit --pid 1 --nofile=3:3",
    "prlimit --pid 1 --as=1000:1000",
    "renice -n 19 -p 1",
    "renice -n 19 -u 0",
    "chrt -i -p 0 1",
    "ionice -c 3 -p 1",
]
OWN = [
    "ulimit -n 512",
    "nice -n 19 true",
    "chrt -i 0 true",
    "ionice -c 3 true",
    "prlimit --nofile=99:99 true",
]


async def test_daemons_limits_and_scheduling_are_its_own(neighbour: Box) -> None:
    look = "prlimit --pid 1; ps -o ni,cls -p 1; ionice -p 1"
    before = await neighbour.sh(look)
    assert [line for line in FOREIGN if (await neighbour.client.exec(line)).exit_code == 0] == []
    assert await neighbour.sh(look) == before
    for line in OWN:
        await neighbour.sh(line)


async def test_sandbox_ends_though_its_tenant_leaves_the_daemon_no_processor(
    runner: BubblewrapRunner,
) -> None:
    async with box(runner, ContainerSpec(cpu=0.2)) as made:
        busy = "for n in $(seq 60); do setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & done"
        await made.sh(busy, timeout=20)
        starve(await made.member.handle.process.daemon_pid())  # type: ignore[attr-defined]
        await runner.stop(made.member)


def starve(pid: int) -> None:
    """Let a process run only when nobody else wants to."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


# What is the whole machine's.

HUGE = """
import ctypes, mmap, os
for attempt in (lambda: mmap.mmap(-1, 2 << 20, 0x40022), lambda: os.memfd_create("x", os.MFD_HUGETLB)):
    try:
        attempt()
        print("got them")
    except OSError as error:
        print(error.strerror)
os.sync()
print(ctypes.CDLL(None).syncfs(os.open("/.agentfly/sandboxd", os.O_RDONLY)))
"""


async def test_huge_pages_are_not_to_be_had_and_syncs_do_nothing(neighbour: Box) -> None:
    told = await neighbour.sh("cat > huge.py; python3 huge.py; sync", stdin=HUGE)
    assert told == "Cannot allocate memory\nCannot allocate memory\n0\n"


# What the kernel counts for a user of the machine.

HOLD = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
held = 0
def instances(most):
    return len([fd for fd in (libc.inotify_init() for _ in range(most)) if fd >= 0])
def watches(most):
    fds, files = [libc.inotify_init() for _ in range(4)], []
    for folder, _, names in os.walk("/usr/lib"):
        files += [os.path.join(folder, name).encode() for name in names]
    added = set()  # many names are of one file
    for fd in fds:
        for file in files:
            if len(added) == most or (watch := libc.inotify_add_watch(fd, file, 2)) < 0: return len(added)
            added.add((fd, watch))
    return len(added)
def signals(most):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    queued = 0
    while queued < most and libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0: queued += 1
    return queued
def queues(most):
    made = 0
    for number in range(most):
        try: os.close(os.open(f"/dev/mqueue/{os.getpid()}-{number}", os.O_CREAT | os.O_RDWR)); made += 1
        except OSError: break
    return made
def files(most):
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = []
    try:
        for _ in range(most): made.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: pass
    return len(made)
print(globals()[sys.argv[1]](int(sys.argv[2])), flush=True)
time.sleep(float(sys.argv[3]))
"""
WHOLE = {"instances": 100_000, "watches": 1_000_000, "signals": 1_000_000, "queues": 100, "files": 1_000_000}
"""More than there is of each."""


def share(kind: str) -> int:
    """What one sandbox may have of it."""
    ceilings, limits = dict(kernel_quotas.ceilings()), list(kernel_quotas.limits(64 + 20).values())
    return {
        "instances": ceilings["user/max_inotify_instances"],
        "watches": ceilings["user/max_inotify_watches"],
        "signals": limits[0],
        "queues": limits[1] // 80_000,  # a queue of ten messages of 8 KiB
        "files": limits[2],
    }[kind]


@pytest.mark.parametrize("kind", WHOLE)
async def test_tenant_that_takes_all_leaves_its_neighbours_theirs(
    runner: BubblewrapRunner, neighbour: Box, kind: str
) -> None:
    async with box(runner) as made:
        await made.client.write_file("/workspace/hold.py", HOLD.encode())
        await neighbour.client.write_file("/workspace/hold.py", HOLD.encode())
        await made.sh(
            f"setsid python3 hold.py {kind} {WHOLE[kind]} 600 > taken 2>&1 & "
            "until test -s taken; do sleep 0.05; done",
            timeout=60,
        )
        taken = int(await made.sh("cat taken"))
        assert 1 <= taken <= share(kind)
        again = await made.sh(f"python3 hold.py {kind} 100 0")
        if kind in ("instances", "queues"):
            assert int(again) + taken <= share(kind)  # of the sandbox, not of each process
        assert await neighbour.sh(f"python3 hold.py {kind} 1 0") == "1\n"


RAISED = [
    "echo 1000000 > /proc/sys/user/max_inotify_instances",
    "prlimit --nofile=1000000:1000000 true",
    "prlimit --sigpending=unlimited:unlimited true",
    "prlimit --msgqueue=unlimited:unlimited true",
]


async def test_nobody_inside_raises_what_it_may_take(neighbour: Box) -> None:
    assert [line for line in RAISED if (await neighbour.client.exec(line)).exit_code == 0] == []


PIPES = """
import os, resource, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
try:
    while True: held.append(os.pipe()[1])
except OSError: pass
print(len(held), flush=True)
time.sleep(600)
"""


async def test_small_pipes_hinder_no_start_and_lose_nothing(runner: BubblewrapRunner, neighbour: Box) -> None:
    await neighbour.client.write_file("/workspace/pipes.py", PIPES.encode())
    await neighbour.sh(
        "setsid python3 pipes.py > taken 2>&1 & until test -s taken; do sleep 0.05; done", timeout=60
    )
    assert int(await neighbour.sh("cat taken")) > 500
    async with box(runner, ContainerSpec(env={"A": "x" * 30_000})) as made:
        assert await made.sh("echo $A | wc -c; head -c 5000000 /dev/zero | wc -c") == "30001\n5000000\n"


def test_shares_are_an_eighth_of_what_the_machine_gives(tmp_path: Path) -> None:
    settings = {"fs/inotify/max_user_instances": 128, "user/max_inotify_instances": 9, "fs/file-max": 80_000}
    for file, value in settings.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{value}\n")
    assert dict(kernel_quotas.ceilings(tmp_path)) == {"user/max_inotify_instances": 16}
    assert list(kernel_quotas.limits(5, tmp_path).values())[2] == 2000
    assert list(kernel_quotas.limits(50, tmp_path).values())[2] == 1024


async def test_machine_out_of_memory_ends_sandboxes_first(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        assert (await made.sh("cat /proc/1/oom_score_adj /proc/self/oom_score_adj")).split() == ["1000"] * 2
        for process in ("1", "self"):
            assert (await made.client.exec(f"echo 0 > /proc/{process}/oom_score_adj")).exit_code != 0
