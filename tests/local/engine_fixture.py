"""Container engines for tests: installed where that is possible, started here, with nothing left after.

podman needs no daemon, docker's is started here with folders of its own and without a network: neither
touches an engine that this machine may have. What is missing, the skip says.
"""

import contextlib
import fcntl
import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.resources.runners.container.engine import docker_archive

PACKAGES = {"podman": "podman", "runc": "runc", "dockerd": "docker.io", "busybox": "busybox-static"}
INSTALL_S = 300
READY_S = 30
ENGINES = ("podman", "docker")
SHELL = "localhost/agentfly-test:shell"
USER = "localhost/agentfly-test:user"
BARE = "localhost/agentfly-test:bare"
FULL = "localhost/agentfly-test:full"


def install() -> str | None:
    """What is still missing of the engines once Debian's packages were tried; None if nothing is."""
    missing = [program for program in PACKAGES if not _which(program)]
    if not missing:
        return None
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or apt is None:
        return f"{', '.join(missing)} not installed, and only root with apt-get can install them here"
    with Path(tempfile.gettempdir(), "agentfly-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = [PACKAGES[program] for program in missing]
        install = [apt, "install", "-y", "-q", "--no-install-recommends", *wanted]
        for command in ([apt, "update", "-q"], install):
            try:
                ended = subprocess.run(
                    command,
                    env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"},
                    capture_output=True,
                    text=True,
                    timeout=INSTALL_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"{', '.join(missing)}: {' '.join(command)} took more than {INSTALL_S} s"
            if ended.returncode != 0:
                last = ended.stderr.strip().splitlines()[-1:] or ["no reason given"]
                return f"{', '.join(missing)}: {' '.join(command)}: {last[0]}"
    return None


@contextlib.contextmanager
def engine(name: str) -> Iterator[list[str]]:
    """The command of an engine with an empty store of its own, and the test images in it."""
    if (problem := install()) is not None:
        pytest.skip(f"container-cli with {name}: {problem}")
    home = Path(tempfile.mkdtemp(prefix="af-engine-"))
    try:
        with _podman(home) if name == "podman" else _docker(home) as command:
            for image in images():
                subprocess.run([*command, "load"], input=image, check=True, capture_output=True, timeout=60)
            yield command
    finally:
        _unmount(home)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _podman(home: Path) -> Iterator[list[str]]:
    podman = shutil.which("podman")
    assert podman is not None
    command = [podman, "--root", str(home / "root"), "--runroot", str(home / "run")]
    yield command
    listed = subprocess.check_output([*command, "ps", "-aq"], text=True, timeout=30).split()
    if listed:
        subprocess.run([*command, "rm", "-f", *listed], check=False, capture_output=True, timeout=60)


@contextlib.contextmanager
def _docker(home: Path) -> Iterator[list[str]]:
    socket, log = home / "s", home / "log"
    dockerd = _which("dockerd")
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "TERM", "--", str(dockerd), "-H", f"unix://{socket}"),
                *("--data-root", str(home / "data"), "--exec-root", str(home / "exec")),
                *("--pidfile", str(home / "pid"), "--exec-opt", "native.cgroupdriver=cgroupfs"),
                *("--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        command = [shutil.which("docker") or "docker", "-H", f"unix://{socket}"]
        deadline = time.monotonic() + READY_S
        while subprocess.run([*command, "version"], capture_output=True, timeout=30, check=False).returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                pytest.skip(f"container-cli with docker: dockerd does not run here: {last}")
            time.sleep(0.1)
        yield command
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def images() -> Iterator[bytes]:
    """The test images: a shell and few tools; the same for a user; one program and no shell; with content."""
    shell = _layer(_busybox())
    yield docker_archive(SHELL, shell, {"Env": ["PATH=/bin", "FROM_IMAGE=yes"]})
    yield docker_archive(USER, shell, {"User": "1000:1000", "Env": ["PATH=/bin"]})
    yield docker_archive(BARE, _layer({"busybox": Path(str(_which("busybox"))).read_bytes()}), {})
    work = {"work/file": b"of the image", "tmp/of-the-image": b"x", "data/v": b"volume"}
    yield docker_archive(FULL, _layer(_busybox() | work), {"Env": ["PATH=/bin"], "Volumes": {"/data": {}}})


def _busybox() -> dict[str, bytes | str]:
    busybox = Path(str(_which("busybox")))
    tools = "sh ls cat echo id sleep mkdir touch rm mv ln mkfifo chmod chown find grep stat dd seq env tee"
    files: dict[str, bytes | str] = {"bin/busybox": busybox.read_bytes()}
    files |= {f"bin/{tool}": "busybox" for tool in tools.split()}
    files["etc/passwd"] = b"root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    files["etc/group"] = b"root:x:0:\nuser:x:1000:\n"
    return files


def _layer(files: dict[str, bytes | str]) -> bytes:
    """A tar of executable files, and links where the content is text."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _which(program: str) -> str | None:
    """Debian has daemons in /usr/sbin, which an ordinary PATH leaves out."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _unmount(home: Path) -> None:
    """Whatever an engine left mounted below its folder, deepest first."""
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in table if line.split()[4].startswith(f"{home}/")]
    for point in sorted(points, reverse=True):
        subprocess.run(["umount", "-l", point], check=False, capture_output=True, timeout=10)
