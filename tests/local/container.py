"""A stand-in for an ordinary container: a root without an overlay, and sandboxd as its first process."""

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.runners.bubblewrap import check as bubblewrap_check

ADMIN = "admin-token"
END_S = 30.0
SCRATCH = ("/tmp", "/run", "/dev/shm")


@dataclass
class Container:
    """Where its daemon listens; a caller waits there until it has started."""

    address: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def last_words(self) -> str:
        """What a daemon says that ends by itself."""
        self.process.wait(END_S)
        return self.log.read_text()


@contextlib.contextmanager
def container(
    root: Path,
    sandboxd: Path,
    reset: Mapping[str, object],
    volumes: Sequence[str] | None = None,
    files: Sequence[str] = (),
    privileged: bool = False,
    overlay: bool = False,
) -> Iterator[Container]:
    """Start one over a folder that it may write to, and end it.

    Args:
        root: its root file system, used as it is; a folder beside it has the socket.
        reset: the ``reset`` of the daemon's configuration.
        volumes: folders of the root; all else is read-only then.
        privileged: commands have every capability in its namespaces.
        overlay: the root is below an overlay, as the image of an engine is, and the daemon does not know it.
        files: those of the root that are mounted by themselves, as engines do with /etc/hosts.
    """
    home = root.with_name(f"{root.name}.run")
    home.mkdir()
    for name in files:
        shutil.copy(f"{root}{name}", home)
    config = {"adminToken": ADMIN, "scratch": SCRATCH, "ownNetwork": True, "workdir": "/", "incarnation": 1}
    log, socket_path = home / "log", home / "s"
    with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
        listener.bind(str(socket_path))
        listener.listen(16)
        fd = listener.fileno()
        process = subprocess.Popen(
            [
                str(bubblewrap_check.find_bubblewrap()),
                *(
                    _overlay(root, home)
                    if overlay
                    else ("--bind" if volumes is None else "--ro-bind", str(root), "/")
                ),
                *_arguments(root, sandboxd, volumes, privileged),
                *_mounted(home, files),
                "--",
                "/dev/sandboxd",
                "--listen-fd",
                str(fd),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            pass_fds=[fd],
            cwd="/",
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(config | {"reset": reset}).encode() + b"\n")
        process.stdin.flush()
        yield Container(f"unix://{socket_path}", process, log)
    finally:
        process.stdin.close()  # the daemon ends with its owner, and everything in it with the daemon
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()


def _mounted(home: Path, files: Sequence[str]) -> Iterator[str]:
    for name in files:
        yield from ("--bind", str(home / Path(name).name), name)


def _overlay(root: Path, home: Path) -> list[str]:
    (home / "upper").mkdir()
    (home / "work").mkdir()
    return ["--overlay-src", str(root), "--overlay", str(home / "upper"), str(home / "work"), "/"]


def _arguments(root: Path, sandboxd: Path, volumes: Sequence[str] | None, privileged: bool) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--as-pid-1", "--clearenv")
    yield from ("--cap-add" if privileged else "--cap-drop", "ALL", "--hostname", "box")
    yield from ("--new-session", "--die-with-parent")
    for folder in volumes or ():
        yield from ("--bind", f"{root}{folder}", folder)
    yield from ("--proc", "/proc", "--dev", "/dev", "--mqueue", "/dev/mqueue")
    yield from ("--ro-bind", str(sandboxd), "/dev/sandboxd")
    for folder in SCRATCH:
        yield from ("--perms", "1777", "--tmpfs", folder)
    yield from ("--remount-ro", "/proc")
