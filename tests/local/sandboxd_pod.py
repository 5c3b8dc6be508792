"""A stand-in for a pod: a container by runc with what Kubernetes gives it, and sandboxd as first process."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.local import engine_fixture

ADMIN = "admin-token"
READY_S = 30.0
HOST_ID = 200_000
"""Where the users of a pod with a user namespace begin."""
NEEDED = ("SETUID", "SETGID", "SETFCAP", "KILL")
MOUNTING = (*NEEDED, "SYS_ADMIN", "SYS_CHROOT", "DAC_OVERRIDE", "CHOWN", "FOWNER", "SETPCAP", "NET_ADMIN")
MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
NEW_NAMESPACES = 0x7E020000
NO_NAMESPACES = {
    "defaultAction": "SCMP_ACT_ALLOW",
    "syscalls": [
        {"names": ["unshare", "setns", "mount"], "action": "SCMP_ACT_ERRNO", "errnoRet": 1},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        *(
            {
                "names": ["clone"],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": 1,
                "args": [{"index": 0, "value": 1 << bit, "valueTwo": 1 << bit, "op": "SCMP_CMP_MASKED_EQ"}],
            }
            for bit in range(32)
            if NEW_NAMESPACES >> bit & 1
        ),
    ],
}
"""What the default profile of an engine refuses to who may not mount."""


@dataclass(frozen=True)
class Shape:
    """The security context of a pod."""

    capabilities: tuple[str, ...] = NEEDED
    user: int = 0
    own_users: bool = False
    unmasked: bool = False
    namespaces: bool = True
    read_only: bool = True
    writable: tuple[str, ...] = ()
    """Folders of the root that are volumes."""


BASELINE = Shape()
UNMASKED = Shape(own_users=True, unmasked=True)
PRIVILEGED = Shape(capabilities=MOUNTING, own_users=True)
RESTRICTED = Shape(capabilities=(), user=1000, namespaces=False)


@dataclass
class Pod:
    """One that runs. ``address`` is the daemon's; ``root`` the container's own root, on this machine."""

    name: str
    address: str
    root: Path
    state: Path
    log: Path

    def health(self) -> dict[str, Any]:
        """What anybody may know."""
        with urlopen(f"{self.address}/healthz", timeout=10) as answer:
            known: dict[str, Any] = json.load(answer)
            return known

    def exec(self, *argv: str) -> "subprocess.Popen[str]":
        """What ``kubectl exec`` does."""
        command = ["runc", "--root", str(self.state), "exec", self.name, *argv]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def words(self) -> str:
        """What the daemon wrote."""
        return self.log.read_text(errors="replace")


def missing() -> str | None:
    """Why no pod can be made here."""
    if os.geteuid() != 0:
        return "only root can start containers for it"
    problem = engine_fixture.install()
    return problem if shutil.which("runc") is None else None


@contextlib.contextmanager
def pod(
    image: Path,
    sandboxd: Path,
    shape: Shape,
    config: Mapping[str, object],
    env: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Iterator[Pod]:
    """Start one and end it.

    Args:
        image: the root file system, which is copied.
        config: of the daemon; an admin token is added where it has no key.
        env: of the container.
        ready: wait until the daemon answers.
    """
    name = f"af-pod-{secrets.token_hex(4)}"
    home = image.with_name(name)
    for folder in ("agentfly", "state", "etc"):
        (home / folder).mkdir(parents=True)
    root = home / "root"
    try:
        subprocess.run(["cp", "-a", str(image), str(root)], check=True)
        if shape.own_users:
            _shift(root)
        for folder in shape.writable:
            for path in (Path(f"{root}{folder}"), *Path(f"{root}{folder}").rglob("*")):
                os.lchown(path, shape.user, shape.user)
        shutil.copy(sandboxd, home / "agentfly/sandboxd")
        for file in ("hosts", "hostname", "resolv.conf", "termination-log"):
            (home / "etc" / file).write_text(f"# {file}\n" if file != "termination-log" else "")
        port = _free_port()
        given = ({} if "adminKey" in config else {"adminToken": ADMIN}) | dict(config)
        environment = {"PATH": "/usr/bin:/bin", "FROM_IMAGE": "yes", "KUBERNETES_PORT": "tcp://10.0.0.1:443"}
        environment |= {"AGENTFLY_SANDBOXD": json.dumps(given)} | dict(env or {})
        (home / "config.json").write_text(json.dumps(_bundle(home, shape, environment, port)))
        made = Pod(name, f"http://127.0.0.1:{port}", root, home / "state", home / "log")
        with made.log.open("wb") as output:
            run = ["runc", "--root", str(made.state), "run", "--bundle", str(home), name]
            process = subprocess.Popen(run, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            if ready:
                _await(made, process)
            else:
                process.wait(READY_S)
            yield made
        finally:
            delete = ["runc", "--root", str(made.state), "delete", "--force", name]
            subprocess.run(delete, check=False, capture_output=True, timeout=30)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _await(made: Pod, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError):
            made.health()
            return
        assert process.poll() is None, made.words()
        assert time.monotonic() < deadline, made.words()
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _shift(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        os.lchown(path, status.st_uid + HOST_ID, status.st_gid + HOST_ID)
        if not path.is_symlink():
            path.chmod(status.st_mode & 0o7777)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def _bundle(home: Path, shape: Shape, env: Mapping[str, str], port: int) -> dict[str, Any]:
    caps = [f"CAP_{name}" for name in shape.capabilities]
    mapping = [{"containerID": 0, "hostID": HOST_ID, "size": 65536}]
    kinds = ["pid", "ipc", "uts", "mount", *(["user"] if shape.own_users else [])]
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in kinds],
        "maskedPaths": [] if shape.unmasked else list(MASKED),
        "readonlyPaths": [] if shape.unmasked else list(READ_ONLY),
        "rootfsPropagation": "rslave",
    }
    if shape.own_users:
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
    if not shape.namespaces:
        linux |= {"seccomp": NO_NAMESPACES}
    return {
        "ociVersion": "1.0.2",
        "hostname": "pod",
        "root": {"path": "root", "readonly": shape.read_only},
        "process": {
            "args": ["/agentfly/sandboxd", "--pod", "--listen", f"tcp://127.0.0.1:{port}"],
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": "/workspace",
            "user": {"uid": shape.user, "gid": shape.user},
            "noNewPrivileges": True,
            "capabilities": {kind: caps for kind in ("bounding", "effective", "permitted")},
        },
        "linux": linux,
        "mounts": [*_kernels(), *_volumes(home, shape)],
    }


def _kernels() -> Iterator[dict[str, Any]]:
    quiet = ["nosuid", "noexec", "nodev"]
    yield {"destination": "/proc", "type": "proc", "source": "proc", "options": quiet}
    dev = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": dev}
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]
    yield {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": pts}
    shm = [*quiet, "mode=1777", "size=65536k"]
    yield {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shm}
    yield {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": quiet}
    yield {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro", *quiet]}


def _volumes(home: Path, shape: Shape) -> Iterator[dict[str, Any]]:
    for file in ("hosts", "hostname", "resolv.conf"):
        source = str(home / "etc" / file)
        yield {"destination": f"/etc/{file}", "type": "bind", "source": source, "options": ["rbind", "rw"]}
    log = str(home / "etc/termination-log")
    yield {"destination": "/dev/termination-log", "type": "bind", "source": log, "options": ["rbind", "rw"]}
    ours = str(home / "agentfly")
    yield {"destination": "/agentfly", "type": "bind", "source": ours, "options": ["rbind", "ro"]}
    for folder in shape.writable:
        source = f"{home}/root{folder}"
        yield {"destination": folder, "type": "bind", "source": source, "options": ["rbind", "rw"]}
