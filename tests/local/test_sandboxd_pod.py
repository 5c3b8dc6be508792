"""sandboxd as the first process of a pod's container, for each security context that a pod may have.

1. It finds out which method of reset works, and says why others do not.
2. After a reset nothing of a holder is left.
3. A holder reaches neither the keeper nor what is outside of its sandbox.
4. Whatever ends a sandbox, the next one serves; what cannot be proven clean is never leased again.
5. The owner is known by its key; a note of a lease is the owner's alone.
"""

import asyncio
import base64
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agentfly.sandbox import SandboxAdmin, SandboxClient, SandboxError, SandboxLeaseLost, SandboxUnreachable
from tests.local import sandboxd_pod
from tests.local.sandboxd_pod import ADMIN, BASELINE, PRIVILEGED, RESTRICTED, UNMASKED, Pod, Shape, pod
from tests.local.tenant import root

TOKEN = "token-of-a-lease"
SHAPES = {"baseline": BASELINE, "unmasked": UNMASKED, "privileged": PRIVILEGED}
MANY = 1000


@pytest.fixture(scope="module")
def small() -> Iterator[Path]:
    """A root with a few programs."""
    if (reason := sandboxd_pod.missing()) is not None:
        pytest.skip(f"a pod: {reason}")
    if (part := root.missing()) is not None:
        pytest.skip(f"a small root cannot be made here: no {part}")
    home = Path(tempfile.mkdtemp(prefix="af-pods-"))
    home.chmod(0o755)  # the root of a pod with a user namespace is a stranger here
    target = home / "image"
    root.build(target)
    for folder in ("data", "agentfly", "sys"):
        (target / folder).mkdir()
    shutil.copy(Path(root.__file__).with_name("reach.py"), target / "srv")
    shutil.copy(str(shutil.which("busybox")), target / "usr/bin/busybox")
    for tool in ("env", "grep", "head", "id", "setsid", "sort"):
        (target / "usr/bin" / tool).symlink_to("busybox")
    (target / "home/work").mkdir()
    (target / "home/work/file").write_text("first")
    yield target
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def image(small: Path) -> Path:
    """The same with many files."""
    target = small.with_name("large")
    shutil.copytree(small, target, symlinks=True)
    for number in range(2 * MANY):
        place = target / f"data/d{number // 100}"
        place.mkdir(exist_ok=True)
        (place / f"f{number}").write_text(f"{number}\n" * 50)
    return target


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def shared(image: Path, sandboxd: Path, shape: Shape) -> Iterator[Pod]:
    with pod(image, sandboxd, shape, {"member": "p-1a2b-0"}) as made:
        yield made


class Holder:
    """Who has a lease of a pod's sandbox."""

    def __init__(self, made: Pod) -> None:
        self.pod = made
        self.admin = SandboxAdmin(made.address, ADMIN)
        self.client = SandboxClient(made.address, TOKEN)
        self.condemned = False

    async def lease(self) -> None:
        await self.admin.lease("tenant", 0, TOKEN, 600)

    async def sh(self, line: str, **options: Any) -> str:
        result = await self.client.exec(line, **options)
        assert result.exit_code == 0, result
        return result.stdout

    async def next(self) -> None:
        """Reset, which must be clean, and lease again."""
        report = await self.admin.reset()
        assert report.clean, report
        await self.lease()

    async def close(self) -> None:
        report = await self.admin.reset()
        assert report.clean or self.condemned, report
        await self.client.close()
        await self.admin.close()


@pytest.fixture
async def holder(shared: Pod) -> AsyncIterator[Holder]:
    made = Holder(shared)
    await made.lease()
    yield made
    await made.close()


# 1. The method.


def test_method_is_what_the_security_context_allows(shared: Pod, shape: Shape) -> None:
    health = shared.health()
    if shape is BASELINE:
        assert health["reset"]["method"] == "overlay-shared-pid"
        assert "operation not permitted" in health["reset"]["refused"]["overlay"]
    else:
        assert health["reset"] == {"method": "overlay", "refused": {}}
    assert (health["state"], health["member"], health["incarnation"]) == ("free", "p-1a2b-0", 1)


def test_what_cannot_work_is_said_at_the_start(small: Path, sandboxd: Path) -> None:
    for shape, method, words in (
        (BASELINE, "overlay", "reset.method: overlay does not work here: mount: proc"),
        (
            RESTRICTED,
            "overlay-shared-pid",
            "overlay-shared-pid does not work here: the daemon's user is 1000",
        ),
        (RESTRICTED, "paths", "reset.paths: is empty"),
        (BASELINE, "magic", 'reset.method: "magic" is not one of'),
    ):
        config = {"reset": {"method": method, "timeoutSeconds": 5}}
        with pod(small, sandboxd, shape, config, ready=False) as made:
            assert words in made.words()


def test_bad_configuration_is_named(small: Path, sandboxd: Path) -> None:
    for config, words in (
        ({"adminKey": "AAAA", "member": "m"}, "adminKey: has 3 bytes"),
        ({"adminKey": "AAAA", "adminToken": "a"}, "adminToken and adminKey are both given"),
        ({"nonsense": 1}, 'unknown field "nonsense"'),
    ):
        with pod(small, sandboxd, BASELINE, config, ready=False) as made:
            assert "AGENTFLY_SANDBOXD: config: " in made.words()
            assert words in made.words()


async def test_probe_says_what_works(shared: Pod, shape: Shape) -> None:
    told, _ = shared.exec("/agentfly/sandboxd", "probe").communicate(timeout=30)
    findings = {(f["method"], f["ownUsers"]): f["works"] for f in json.loads(told)}
    assert findings[("overlay", True)] is (shape is UNMASKED)
    assert findings[("overlay", False)] is (shape is PRIVILEGED)
    assert findings[("overlay-shared-pid", True)]
    assert findings[("recreate", False)]


async def test_restricted_pod_resets_declared_folders(small: Path, sandboxd: Path) -> None:
    shape = Shape(capabilities=(), user=1000, namespaces=False, writable=("/home", "/tmp"))
    config = {"scratch": ["/tmp"], "reset": {"method": "auto", "paths": ["/home/work"], "timeoutSeconds": 20}}
    with pod(small, sandboxd, shape, config) as made:
        reset = made.health()["reset"]
        assert reset["method"] == "paths"
        assert set(reset["refused"]) == {"overlay", "overlay-shared-pid"}
        one = Holder(made)
        await one.lease()
        await one.sh("echo x > /home/work/file; echo x > /tmp/x; setsid sleep 60 & id -u", cwd="/")
        report = await one.admin.reset()
        assert report == type(report)(True, None, "paths", report.wall_s, 1), report
        await one.lease()
        assert await one.sh("cat /home/work/file; ls /tmp", cwd="/") == "first"
        assert (await one.client.exec("cat /proc/1/environ", cwd="/")).exit_code == 1
        await one.close()


LEAVE = """
import os, socket
os.makedirs("/workspace/deep/er")
open("/workspace/deep/er/file", "w").write("left")
os.chmod("/workspace/deep", 0)
os.mkfifo("/tmp/pipe"); os.symlink("/etc", "/tmp/link"); open("/tmp/.hidden", "w").close()
open("/dev/shm/x", "w").write("left")
os.chmod("/tmp", 0o700)
"""


async def test_restricted_pod_of_which_nothing_is_declared_is_emptied(small: Path, sandboxd: Path) -> None:
    shape = Shape(capabilities=(), user=1000, namespaces=False, writable=("/tmp", "/workspace"))
    config = {"scratch": ["/tmp", "/workspace"], "reset": {"method": "auto", "timeoutSeconds": 20}}
    with pod(small, sandboxd, shape, config) as made:
        reset = made.health()["reset"]
        assert reset["method"] == "scratch"
        assert set(reset["refused"]) == {"overlay", "overlay-shared-pid"}
        one = Holder(made)
        for incarnation in (1, 2, 3):
            await one.lease()
            assert await one.sh("ls -A /tmp /workspace /dev/shm; id -u") == (
                "/dev/shm:\n\n/tmp:\n\n/workspace:\n1000\n"
            )
            await one.sh("setsid sleep 60 & python3 -S -B -", stdin=LEAVE)
            report = await one.admin.reset()
            assert report == type(report)(True, None, "scratch", report.wall_s, incarnation), report
        assert (made.root / "tmp").stat().st_mode & 0o7777 == (small / "tmp").stat().st_mode & 0o7777
        await one.lease()
        await one.close()


async def test_pod_whose_root_can_be_written_is_never_emptied_in_place(small: Path, sandboxd: Path) -> None:
    shape = Shape(capabilities=(), user=1000, namespaces=False, read_only=False, writable=("/tmp",))
    with pod(small, sandboxd, shape, {"scratch": ["/tmp"], "reset": {"method": "auto"}}) as made:
        reset = made.health()["reset"]
        assert reset["method"] == "recreate"
        assert reset["refused"]["scratch"] == "the root is not read-only, and nothing is declared"
        one = Holder(made)
        one.condemned = True
        await one.lease()
        assert not (await one.admin.reset()).clean
        await one.close()


async def test_commands_have_the_images_environment_and_folder(holder: Holder) -> None:
    assert await holder.sh("env | grep -v '^_=' | sort; pwd") == (
        "FROM_IMAGE=yes\nHOME=/root\nPATH=/usr/bin:/bin\nPWD=/workspace\n/workspace\n"
    )


# 2. Nothing is left.

LIST = """
import hashlib, os
def walk(path):
    for name in sorted(os.listdir(path)):
        full = os.path.join(path, name)
        if full in ("/proc", "/sys"):
            continue
        st = os.lstat(full)
        kind = st.st_mode & 0o170000
        body = hashlib.sha256(open(full, "rb").read()).hexdigest() if kind == 0o100000 else ""
        link = os.readlink(full) if kind == 0o120000 else ""
        names = sorted(set(os.listxattr(full, follow_symlinks=False)) - {"user.overlay.uuid"})
        values = [(n, os.getxattr(full, n, follow_symlinks=False)) for n in names]
        mine = full.startswith("/dev/")
        print(full, oct(st.st_mode), st.st_uid, st.st_gid, 0 if mine else st.st_mtime_ns, body, link, values)
        if kind == 0o040000:
            walk(full)
walk("/")
st = os.lstat("/")
print("/", oct(st.st_mode), st.st_uid, st.st_mtime_ns)
"""
TOUCHED = ("/x", "/etc/passwd", "/etc/hosts", "/etc/x", "/usr/x", "/root-x", "/srv/x", "/tmp/x", "/dev/shm/x")
CHURN = f"""
import os, pathlib
files = sorted(p for p in pathlib.Path("/data").rglob("*") if p.is_file())
for at, path in enumerate(files[:{MANY // 2}]):
    path.unlink() if at % 2 else path.write_text("changed")
for number in range({MANY // 2}):
    pathlib.Path(f"/data/d7/new{{number}}").write_text("new")
for path in {TOUCHED}:
    with open(path, "a") as file:
        file.write("left")
    os.setxattr(path, "user.left", b"left")
    os.chmod(path, 0o4777)
    os.utime(path, (1, 1))
os.chown("/data/d9", 1000, 1000)
os.utime("/", (1, 1))
os.utime("/data", (1, 1))
os.unlink("/usr/bin/git")
os.symlink("/etc", "/home/link")
"""


async def test_tree_is_the_same_after_resets_with_many_changes(holder: Holder) -> None:
    argv = ["python3", "-S", "-B", "-c", LIST]

    async def tree() -> list[str]:
        result = await holder.client.exec([*argv], output_limit=1 << 20, timeout=60)
        assert (result.exit_code, result.stdout_truncated) == (0, False), result.stderr
        return result.stdout.splitlines()

    before = await tree()
    assert len(before) > 2 * MANY
    for _ in range(3):
        await holder.sh("python3 -S -B -", stdin=CHURN, timeout=60)
        changed = await tree()
        assert len(set(before) ^ set(changed)) > MANY
        await holder.next()
        after = await tree()
        assert sorted(set(before) ^ set(after)) == []


async def test_what_runs_ends_with_the_lease(holder: Holder) -> None:
    deaf = "setsid sh -c 'trap \"\" TERM HUP; sleep 1000 & sleep 1000' &"
    await holder.sh(f"for i in 1 2 3; do {deaf} done; sleep 0.2")
    twice = "import os, time\nfor _ in 1, 2:\n  if os.fork(): os._exit(0)\n  os.setsid()\ntime.sleep(1000)"
    await holder.client.exec(["python3", "-S", "-c", twice])
    assert int(await holder.sh("grep -hs . /proc/[0-9]*/comm | grep -c sleep || true")) >= 3
    await holder.next()
    assert await holder.sh("grep -hs . /proc/[0-9]*/comm | grep -cE '^(sleep|python3)$' || true") == "0\n"


async def test_fork_bomb_ends_with_the_lease(holder: Holder) -> None:
    end = time.monotonic() + 20  # whatever happens to the test
    bomb = f"import os\nwhile os.times().elapsed < {end}:\n  try: os.fork()\n  except OSError: pass"
    await holder.client.start(f"ulimit -u 1500; exec python3 -c '{bomb}'", timeout=60, user="1234:1234")
    await asyncio.sleep(0.5)
    await holder.next()
    assert await holder.sh("grep -hs . /proc/[0-9]*/comm | grep -c '^python3$' || true") == "0\n"


async def test_channels_beside_files_are_closed(holder: Holder) -> None:
    leave = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
made = libc.shmget(0x5ec, 4096, 0o1666), libc.msgget(0x5ec, 0o1666), libc.semget(0x5ec, 1, 0o1666)
print(*(number >= 0 for number in made))
libc.mq_open.restype = ctypes.c_int
print(libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None) >= 0)
print(libc.syscall(248, b"user", b"left", b"x", 1, -4) >= 0)
sys.stdout.flush()
if os.fork() == 0:
    abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0left"); abstract.listen()
    tcp = socket.socket(); tcp.bind(("127.0.0.1", %d)); tcp.listen()
    print("listening", flush=True)
    os.close(1); os.close(2)
    import time; time.sleep(1000)
"""
    look = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0x5ec, 4096, 0) >= 0, libc.msgget(0x5ec, 0) >= 0, libc.semget(0x5ec, 1, 0) >= 0)
print(libc.mq_open(b"/left", os.O_RDWR) >= 0, os.listdir("/dev/mqueue"), os.listdir("/dev/shm"))
for family, address in ((socket.AF_UNIX, "\\0left"), (socket.AF_INET, ("127.0.0.1", %d))):
    try: socket.socket(family).connect(address); print("reached", address)
    except OSError as error: print(error.errno)
socket.socket().bind(("127.0.0.1", %d))
"""
    port = sandboxd_pod._free_port()
    assert await holder.sh("python3 -", stdin=leave % port) == "True True True\nTrue\nFalse\nlistening\n"
    assert (await holder.sh("python3 -", stdin=look % (port, 0))).count("reached") == 2
    await holder.next()
    nothing = "False False False\nFalse [] []\n111\n111\n"
    assert await holder.sh("python3 -", stdin=look % (port, port)) == nothing


# 3. The keeper.

REACH = ["python3", "-S", "-B", "/srv/reach.py"]


async def test_keeper_is_out_of_reach(holder: Holder, shape: Shape) -> None:
    """Where it can be seen at all: elsewhere process 1 is the sandbox's own."""
    first = await holder.sh("cat /proc/1/cmdline")
    assert ("--inner" in first) is (shape is not BASELINE), first
    if shape is BASELINE:
        port = holder.pod.address.rsplit(":", 1)[1]
        done = await holder.client.exec([*REACH, "process", "1", port])
        assert (done.exit_code, done.stdout) == (0, ""), done
    assert await holder.sh("grep -ls -- '[-]-configured' /proc/[0-9]*/cmdline || true") == (
        "/proc/1/cmdline\n" if shape is BASELINE else ""
    )


async def test_own_daemon_is_neither_read_nor_entered_and_its_port_is_not_taken(holder: Holder) -> None:
    find = "for p in /proc/[0-9]*; do grep -q inner $p/cmdline && echo ${p#/proc/} && break; done"
    pid, port = (await holder.sh(find)).strip(), holder.pod.address.rsplit(":", 1)[1]
    done = await holder.client.exec([*REACH, "process", pid, port], env={"SIGNALS": "no"})
    assert done.exit_code == 0, done
    # What is its user's own it can do: to slow its own daemon, whom the next holder does not get.
    assert {line.split()[0] for line in done.stdout.splitlines()} <= {"write", "slow:"}, done
    assert "write mem" not in done.stdout


async def test_nothing_outside_is_reached(holder: Holder, shape: Shape) -> None:
    done = await holder.client.exec([*REACH, "outside"])
    assert done.exit_code == 0, done
    assert done.stdout.splitlines() == (["the keeper's user"] if shape is PRIVILEGED else [])


async def test_commands_cannot_gain_a_capability(holder: Holder) -> None:
    lines = (await holder.sh("cat /proc/self/status")).splitlines()
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    assert int(status["CapEff"], 16) & ~0xA00405FB == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


# 4. The next one serves.


async def test_sandbox_that_its_holder_ends_is_replaced(holder: Holder, shape: Shape) -> None:
    before = (await holder.admin.health()).incarnation
    await holder.sh("echo left > /data/left")
    if shape is BASELINE:
        with pytest.raises((SandboxUnreachable, SandboxLeaseLost)):
            await holder.client.exec("kill -9 -1; sleep 5")
    else:  # nobody inside can end its first process
        await holder.client.exec("kill -9 -1; kill -9 1")
        assert await holder.sh("echo alive") == "alive\n"
        return
    for _ in range(100):
        if (await holder.admin.health()).incarnation == before + 1:
            break
        await asyncio.sleep(0.05)
    health = await holder.admin.health()
    assert (health.state, health.incarnation) == ("free", before + 1)
    with pytest.raises(SandboxLeaseLost):
        await holder.client.exec("true")
    await holder.lease()
    assert (await holder.client.exec("ls /data/left")).exit_code == 2


async def test_what_may_be_written_is_bounded(small: Path, sandboxd: Path, shape: Shape) -> None:
    with pod(small, sandboxd, shape, {"upperBytes": 32 << 20}) as made:
        one = Holder(made)
        await one.lease()
        full = await one.client.exec("cat /dev/zero > /data/full")
        assert "No space left" in full.stderr
        await one.next()
        await one.sh("head -c 20000000 /dev/zero > /data/x")
        await one.close()


async def test_network_of_its_own(small: Path, sandboxd: Path, shape: Shape) -> None:
    with pod(small, sandboxd, shape, {"ownNetwork": True}) as made:
        one = Holder(made)
        await one.lease()
        port = 8080 if shape is PRIVILEGED else 80  # whose network is a user namespace's above it
        line = (
            f"import socket as s; l = s.socket(); l.bind(('127.0.0.1', {port})); l.listen(); "
            "s.create_connection(l.getsockname()); print(open('/proc/net/dev').read().count(':'))"
        )
        fresh = await one.sh("cat /proc/net/dev /proc/net/tcp")
        assert await one.sh(f'python3 -c "{line}"') == "1\n"
        assert await one.sh("cat /proc/net/dev /proc/net/tcp") != fresh
        await one.next()
        assert await one.sh("cat /proc/net/dev /proc/net/tcp") == fresh
        await one.close()


async def test_session_beside_the_sandbox_ends_at_a_reset(holder: Holder) -> None:
    session = holder.pod.exec("/usr/bin/sleep", "1000")
    await asyncio.sleep(0.5)
    assert session.poll() is None
    await holder.next()
    await asyncio.to_thread(session.communicate, timeout=10)
    assert session.returncode == 137


async def test_changed_files_below_condemn_for_ever(small: Path, sandboxd: Path, shape: Shape) -> None:
    with pod(small, sandboxd, shape, {}) as made:
        one = Holder(made)
        (made.root / "usr/of-another").write_text("x")
        report = await one.admin.reset()
        assert not report.clean
        assert report.reason == "lower: files of the container, below the sandbox, were changed"
        report = await one.admin.reset()
        assert not report.clean
        with pytest.raises(SandboxError, match="Dirty"):
            await one.lease()
        assert (await one.admin.health()).state == "dirty"
        one.condemned = True
        await one.close()


# 5. The owner.


async def test_owner_is_known_by_its_key(small: Path, sandboxd: Path) -> None:
    key = Ed25519PrivateKey.generate()
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    with pod(small, sandboxd, BASELINE, {"adminKey": public, "member": "p-1a2b-0"}) as made:
        boot = made.health()["boot"]
        assert len(boot) == 32

        def token(member: str, of: str) -> str:
            signature = key.sign(f"agentfly-admin:{member}:{of}".encode())
            return base64.urlsafe_b64encode(signature).decode().rstrip("=")

        for wrong in (token("p-1a2b-1", boot), token("p-1a2b-0", "0" * 32), public):
            async with SandboxAdmin(made.address, wrong) as stranger:
                with pytest.raises(SandboxError, match="Unauthorized"):
                    await stranger.lease("x", 0, TOKEN, 60)
        async with SandboxAdmin(made.address, token("p-1a2b-0", boot)) as owner:
            for incarnation in (1, 2):
                await owner.lease("tenant", 3, TOKEN, 60, note='{"key": "ü"}')
                held = await owner.call("GET", "/lease", deadline=5)
                assert held.pop("expiresInSeconds") > 50
                assert held == {
                    **{"state": "leased", "owner": "tenant", "attempt": 3},
                    **{"incarnation": incarnation, "note": '{"key": "ü"}'},
                }
                assert (await owner.reset()).clean
                assert made.health()["boot"] == boot
            with pytest.raises(SandboxError, match="note: has 8193 bytes"):
                await owner.lease("tenant", 3, TOKEN, 60, note="x" * 8193)
        async with SandboxClient(made.address, TOKEN) as holder:
            with pytest.raises(SandboxError, match="Unauthorized"):
                await holder.call("GET", "/lease", deadline=5)
