"""What the sandboxes of a pod share, and what nobody can change of it.

1. The skeleton of their roots is what the container's was at the start, whatever a holder does.
2. Their user namespace keeps nothing that a holder could write.
3. A keeper is after many resets what it was after a few.
4. A reset waits for nobody that a holder can stop.
5. What others write to volumes is seen; what they write to what was copied is not.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.local import sandboxd_pod
from tests.local.sandboxd_pod import BASELINE, Pod, Shape, pod
from tests.local.tenant import root
from tests.local.test_sandboxd_pod import LIST, SHAPES, Holder

FEW, MANY = 50, 100  # by then the heap of the daemon has its size
WRITTEN = 4 << 20
"""Bytes that each holder leaves."""


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """A root with folders that are copied, one that is too large for that, and one with much in it."""
    if (reason := sandboxd_pod.missing() or root.missing()) is not None:
        pytest.skip(f"a pod: {reason}")
    home = Path(tempfile.mkdtemp(prefix="af-pods-"))
    home.chmod(0o755)  # the root of a pod with a user namespace is a stranger here
    target = home / "image"
    root.build(target)
    for folder in ("agentfly", "sys", "data", "etc/deep/er", "opt"):
        (target / folder).mkdir(parents=True)
    (target / "etc/deep/er/file").write_text("first")
    (target / "etc/link").symlink_to("deep/er/file")
    for number in range(200):
        (target / f"opt/f{number}").write_text("0123456789abcdef" * 1024)
    yield target
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module", params=SHAPES)
def shared(request: pytest.FixtureRequest, image: Path, sandboxd: Path) -> Iterator[Pod]:
    with pod(image, sandboxd, SHAPES[request.param], {}) as made:
        yield made


@pytest.fixture
async def holder(shared: Pod) -> AsyncIterator[Holder]:
    made = Holder(shared)
    await made.lease()
    yield made
    await made.close()


def first_process(made: Pod) -> int:
    """The keeper's number on this machine."""
    told = subprocess.run(
        ["runc", "--root", str(made.state), "state", made.name], check=True, capture_output=True, text=True
    )
    number: int = json.loads(told.stdout)["pid"]
    return number


# 1, 2. What is shared.

HOSTILE = """
import ctypes, mmap, os, shutil, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call, *args):
    try: call(*args)
    except OSError: pass
def scribble(path):
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0) as view: view[0:1] = b"#"
        file.truncate(1)
for flags in (32, 32 | 4096, 1 << 18, 1 << 20):  # remount, also of a bind; private, shared
    for place in (b"/", b"/etc", b"/opt", b"/usr"):
        if libc.mount(None, place, None, flags, None) == 0: print("mounted", place, flags)
for place in (b"/", b"/opt", b"/proc", b"/dev"):
    if libc.umount2(place, 2) == 0: print("unmounted", place)
for name in ("user", "mnt", "pid", "ipc"):
    for process in ["self", "1", *filter(str.isdigit, os.listdir("/proc"))]:
        with_it = None
        try: with_it = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)
        except OSError: continue
        if libc.setns(with_it, 0) == 0: print("entered", process, name)
for name in ("projid_map", "uid_map", "gid_map", "setgroups", "timens_offsets"):
    try:
        with open(f"/proc/self/{name}", "w") as file: file.write("deny" if name == "setgroups" else "7 0 1")
        print("wrote", name)
    except OSError: pass
for name in os.listdir("/proc/sys/user") if os.path.isdir("/proc/sys/user") else ():
    try:
        with open(f"/proc/sys/user/{name}", "w") as file: file.write("1000")
        print("wrote", name)
    except OSError: pass
for folder, folders, files in os.walk("/etc"):
    for name in files:
        attempt(scribble, os.path.join(folder, name))
        attempt(os.setxattr, os.path.join(folder, name), "user.overlay.opaque", b"y")
    attempt(os.chmod, folder, 0o7777)
    attempt(os.chown, folder, 1000, 1000)
    attempt(os.setxattr, folder, "user.overlay.opaque", b"y")
attempt(os.rename, "/etc/deep/er", "/etc/deep/gone")
for place in ("/etc", "/srv", "/home", "/opt", "/data", "/tmp", "/workspace", "/run"):
    shutil.rmtree(place, ignore_errors=True)
for place in ("/bin", "/lib", "/lib64", "/usr/lib64"):
    attempt(os.unlink, place)
attempt(os.mkdir, "/etc")
attempt(os.mkfifo, "/etc/passwd")
attempt(os.symlink, "/opt", "/srv")
attempt(os.utime, "/", (1, 1))
attempt(os.chmod, "/", 0o777)
"""
NAMESPACES = """
for name in "uid_map", "gid_map", "projid_map", "setgroups":
    print(name, open("/proc/self/" + name).read())
"""
BESIDE = """
import os
open("/etc/x", "w").close()
os.link("/etc/x", "/home/y")
os.mkdir("/srv/new")
os.rename("/srv/new", "/etc/new")
print(len({os.stat(place).st_dev for place in ("/etc", "/home", "/srv", "/")}))
"""


async def test_skeleton_is_the_same_after_hostile_writes(holder: Holder) -> None:
    async def seen() -> list[str]:
        lines = []
        for code in (LIST, NAMESPACES):
            argv = ["python3", "-S", "-B", "-c", code]
            result = await holder.client.exec(argv, output_limit=1 << 20, timeout=60)
            assert (result.exit_code, result.stdout_truncated) == (0, False), result.stderr
            lines += result.stdout.splitlines()
        return lines

    before = await seen()
    assert any(line.startswith("/etc/deep/er/file ") for line in before)
    for _ in range(3):
        done = await holder.client.exec(["/usr/bin/python3", "-S", "-B", "-c", HOSTILE], timeout=60)
        assert (done.exit_code, done.stdout) == (0, ""), done
        await holder.next()
        assert sorted(set(before) ^ set(await seen())) == []


async def test_folder_of_the_skeleton_is_one_with_what_is_beside_it(holder: Holder) -> None:
    assert await holder.sh("python3 -S -", stdin=BESIDE) == "1\n"


# 3. Many resets.


async def test_many_resets_leave_a_keeper_as_it_was(holder: Holder) -> None:
    keeper = Path(f"/proc/{first_process(holder.pod)}")

    async def settled() -> tuple[int, int, int]:
        """Descriptors and mounts once nothing is prepared, and kilobytes of memory."""
        await asyncio.sleep(1)
        lines = (keeper / "status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
        mounts = (keeper / "mountinfo").read_text().splitlines()
        return len(os.listdir(keeper / "fd")), len(mounts), resident

    async def resets(number: int) -> None:
        for _ in range(number):
            await holder.sh(f"python3 -S -c \"open('/data/left', 'wb').write(bytes({WRITTEN}))\"")
            await holder.next()

    await resets(FEW)
    before, files = await settled(), in_memory()
    await resets(MANY)
    after = await settled()
    assert after[:2] == before[:2]
    assert after[2] < before[2] + 4096
    assert in_memory() < files + MANY * WRITTEN // 2  # others use this machine too


def in_memory() -> int:
    """Bytes of all file systems in memory of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Shmem:")))


# 4. Makers.


class Catcher(threading.Thread):
    """Stops the next process that makes a root, as a holder may who sees it."""

    def __init__(self, keeper: int, number: signal.Signals) -> None:
        super().__init__(daemon=True)
        self.keeper, self.number = keeper, number
        self.caught = False
        self.end = threading.Event()

    def run(self) -> None:
        while not self.end.is_set() and not self.caught:
            with contextlib.suppress(OSError):
                self.caught = self.catch()
            time.sleep(0.0005)

    def catch(self) -> bool:
        for task in os.listdir(f"/proc/{self.keeper}/task"):
            children = Path(f"/proc/{self.keeper}/task/{task}/children").read_text().split()
            for child in filter(self.makes, children):
                os.kill(int(child), self.number)
                return True
        return False

    @staticmethod
    def makes(child: str) -> bool:
        return Path(f"/proc/{child}/cmdline").read_bytes().endswith(b"--inner\0ground\0")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_maker_that_a_holder_ends_does_not_hold_a_reset(holder: Holder, number: signal.Signals) -> None:
    for _ in range(20):
        await asyncio.sleep(0.5)  # what is made at once, with nobody else there, is not to be caught
        catcher = Catcher(first_process(holder.pod), number)
        catcher.start()
        await holder.next()
        await asyncio.sleep(0.2)
        catcher.end.set()
        await asyncio.to_thread(catcher.join, 5)
        began = time.monotonic()
        await holder.next()
        assert time.monotonic() - began < 10
        if catcher.caught:
            return
    pytest.fail("no maker was caught")


# 5. What others write.


async def test_what_others_write_to_volumes_is_seen_and_to_copies_is_not(image: Path, sandboxd: Path) -> None:
    shape: Shape = replace(BASELINE, writable=("/data",))
    with pod(image, sandboxd, shape, {}) as made:
        one = Holder(made)
        await one.lease()
        (made.root / "data/later").write_text("of another")
        (made.root / "etc/passwd").write_text("changed")
        (made.root / "home/of-another").write_text("x")
        await one.next()
        seen = await one.sh("cat /data/later /etc/passwd; ls /home")
        assert seen == "of anotherroot:x:0:0::/root:/bin/sh\n"
        (made.root / "opt/of-another").write_text("x")
        report = await one.admin.reset()
        assert report.reason == "lower: files of the container, below the sandbox, were changed"
        one.condemned = True
        await one.close()
