"""One tenant against what is not its own: the daemon, its tokens, other leases, files outside, network."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient, SandboxError, SandboxLeaseLost
from tests.local.boxes import TOKEN, Box, box


@pytest.fixture
async def leased(runner: BubblewrapRunner) -> AsyncIterator[Box]:
    async with box(runner) as made:
        yield made


# The daemon's memory, descriptors and namespaces.

TRACE = """
import ctypes, os, platform
libc = ctypes.CDLL(None)
x86 = platform.machine() == "x86_64"
numbers = {"ptrace": (101, 117), "readv": (310, 270), "writev": (311, 271), "kcmp": (312, 272),
           "move_pages": (279, 239), "setns": (308, 268), "robust": (274, 100)}
def call(name, *arguments):
    return libc.syscall(numbers[name][not x86] if name in numbers else name, *arguments)
buffer = ctypes.create_string_buffer(64)
here, there = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 64), (ctypes.c_ulong * 2)(0x400000, 64)
daemon = call(434, 1, 0)
attempts = {
    "attach": lambda: call("ptrace", 16, 1, 0, 0),
    "seize": lambda: call("ptrace", 0x4206, 1, 0, 0),
    "read": lambda: call("readv", 1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    "write": lambda: call("writev", 1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    "compare": lambda: call("kcmp", 1, os.getpid(), 0, 0, 0),
    "pages": lambda: call("move_pages", 1, 0, 0, 0, 0, 0),
    "futexes": lambda: call("robust", 1, ctypes.byref(ctypes.c_long()), ctypes.byref(ctypes.c_long())),
    "advice": lambda: call(440, daemon, ctypes.byref(there), 1, 4, 0),
    **{f"descriptor {n}": lambda n=n: call(438, daemon, n, 0) for n in range(16)},
    **{f"namespace {kind:x}": lambda kind=kind: call("setns", daemon, kind)
       for kind in (0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)},
}
print("\\n".join(name for name, attempt in attempts.items() if attempt() >= 0), end="")
"""


async def test_daemon_is_neither_traced_nor_entered(leased: Box) -> None:
    assert await leased.sh("cat > attack.py; python3 attack.py", stdin=TRACE) == ""
    assert await leased.sh("echo alive") == "alive\n"


# Reads whatever opens, the files of every process included.
SEARCH = """
import os, sys
needles = [word[::-1].encode() for word in sys.argv[1:]]
places = ["/proc", "/dev", "/run", "/tmp", "/etc", "/.agentfly/upper", "/var", "/home", "/root", "/opt"]
for place in places:
    for root, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name not in ("sys", "task", "map_files")]
        for path in (os.path.join(root, name) for name in names):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                content = os.read(fd, 1 << 20)
                os.close(fd)
            except OSError:
                continue
            if any(needle in content for needle in needles):
                print(path)
"""


async def test_tokens_are_nowhere(leased: Box) -> None:
    await leased.client.write_file("/workspace/attack.py", SEARCH.encode())

    async def found(*tokens: str) -> str:
        words = [token[::-1] for token in tokens]
        return (await leased.client.exec(["python3", "attack.py", *words], timeout=60)).text

    assert await found(TOKEN, leased.member.admin_token) == ""
    await leased.sh("echo in-a-file > /tmp/file; A=in-an-environment setsid sleep 60 >/dev/null 2>&1 &")
    assert (await found("in-a-file")).split() == ["/tmp/file"]
    assert "/environ" in await found("in-an-environment")


async def test_nobody_without_the_token_is_heard(leased: Box) -> None:
    async with SandboxClient(leased.member.address, "guessed") as stranger:
        with pytest.raises(SandboxLeaseLost):
            await stranger.exec("true")
        with pytest.raises(SandboxLeaseLost):
            await stranger.read_file("/etc/hosts")


async def test_tenant_writes_nothing_into_the_daemons_log(leased: Box) -> None:
    files = "/dev/stderr /dev/tty /dev/console /proc/1/fd/1 /proc/1/fd/2"
    await leased.client.exec(f"for f in {files}; do yes | head -c 100000 > $f; done", timeout=20)
    await leased.client.exec("yes | head -c 50000000; yes | head -c 50000000 >&2", timeout=20)
    assert leased.member.handle.home.log.read_bytes() == b""  # type: ignore[attr-defined]


async def test_names_that_a_tenant_chose_do_nothing_in_our_logs(
    leased: Box, caplog: pytest.LogCaptureFixture
) -> None:
    await leased.sh("touch \"$(printf '/etc/\\033[2J\\nERROR all is lost\\342\\200\\256')\"")
    with caplog.at_level("INFO"):
        await leased.next_lease()
    (line,) = [record.getMessage() for record in caplog.records if "not clean" in record.getMessage()]
    assert line.isprintable()
    assert "\\x1b[2J\\nERROR all is lost\\u202e" in line


# Other leases.


async def test_neighbours_see_nothing_of_each_other(runner: BubblewrapRunner, leased: Box) -> None:
    mark = "mark-of-the-neighbour"
    await leased.sh(
        f"for d in /tmp /workspace /dev/shm /root /run /etc /dev/mqueue; do touch $d/{mark}; done"
    )
    listen = f"import socket, time; s = socket.socket(1); s.bind('\\0{mark}'); s.listen(); time.sleep(60)"
    await leased.sh(f'setsid python3 -c "{listen}" >/dev/null 2>&1 & ipcmk -M 4096')
    assert mark in await leased.sh("until grep mark /proc/net/unix; do sleep 0.02; done")
    async with box(runner) as other:
        assert await other.sh("find / -path /usr -prune -o -name 'mark-of-*' -print 2>/dev/null; true") == ""
        assert "mark-of-the" not in await other.sh("cat /proc/net/unix /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert await other.sh("ipcs -a | grep -c 0x0 || true") == "0\n"


# Files outside, by name, by link, by archive.


@pytest.fixture
def secret(run_dir: Path) -> Path:
    path = run_dir.parent / "secret"
    path.write_text("of this machine")
    path.chmod(0o666)
    return path


def content(path: Path) -> str:
    """What a file of this machine holds."""
    return path.read_text()


OUTWARD = (
    "",
    "/../../../..",
    "/proc/1/root",
    "/proc/1/cwd/..",
    "/proc/self/root/..",
    "/workspace/root",
    "/dev/fd/..",
)


@pytest.mark.parametrize("prefix", OUTWARD)
async def test_no_name_and_no_link_leads_outside(leased: Box, secret: Path, prefix: str) -> None:
    await leased.sh("ln -s / /workspace/root")
    path = f"{prefix}{secret}"
    with pytest.raises(SandboxError):
        await leased.client.read_file(path)
    assert (await leased.client.exec(["cat", path])).stdout == ""
    await asyncio.gather(leased.client.write_file(path, b"evil"), return_exceptions=True)
    await leased.client.exec(f"ln {secret} hard; ln -s {secret} soft; echo evil > soft; echo evil > {path}")
    assert content(secret) == "of this machine"


ARCHIVE = """
import io, os, sys, tarfile, zipfile
target = sys.argv[1]
with tarfile.open("a.tar", "w") as tar:
    def add(name, content=b"evil", link=None, kind=tarfile.REGTYPE):
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.size = kind, link or "", 0 if link else len(content)
        tar.addfile(entry, None if link else io.BytesIO(content))
    add("../../../../../.." + target)
    add(target)
    add("link", link="/", kind=tarfile.SYMTYPE)
    add("link" + target)
    add("hard", link=target, kind=tarfile.LNKTYPE)
    add("hard")
with zipfile.ZipFile("a.zip", "w") as archive:
    archive.writestr("../../../../../.." + target, "evil")
    archive.writestr(target, "evil")
"""


async def test_no_archive_leads_outside(leased: Box, secret: Path) -> None:
    await leased.client.write_file("/workspace/make.py", ARCHIVE.encode())
    await leased.client.exec(["python3", "make.py", str(secret)])
    for program in (
        "tar -xPf a.tar",
        "tar -xPhf a.tar",
        "python3 -m tarfile -e a.tar",
        "python3 -m zipfile -e a.zip .",
    ):
        await leased.client.exec(program)
    assert content(secret) == "of this machine"


# The network.

RAW = """
import socket
raw = (2, 3, 1), (2, 3, 255), (10, 3, 58), (17, 3, 0x300), (17, 2, 0x300), (40, 1, 0)
# SCTP, DCCP by its number and by its type alone, L2TP, netfilter, crypto, generic netlink
module = (2, 1, 132), (10, 5, 132), (2, 6, 33), (2, 6, 0), (2, 2, 115), (16, 3, 12), (16, 3, 21), (16, 3, 16)
for kind in raw + module:
    try:
        socket.socket(*kind)
        print("socket", kind)
    except OSError:
        pass
for option in ((0, 19), (1, 36), (6, 19), (1, 33)):  # transparent, mark, repair, a buffer beyond the limit
    try:
        socket.socket().setsockopt(*option, 1)
        print("option", option)
    except OSError:
        pass
"""


@pytest.mark.parametrize("network", [False, True])
async def test_raw_sockets_and_those_of_modules_are_refused(runner: BubblewrapRunner, network: bool) -> None:
    async with box(runner, ContainerSpec(network=network)) as made:
        assert await made.sh("cat > attack.py; python3 attack.py", stdin=RAW) == ""


async def test_network_is_off_unless_asked_for() -> None:
    assert not ContainerSpec().network
