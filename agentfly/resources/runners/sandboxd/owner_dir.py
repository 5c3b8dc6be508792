"""The folder of one owner of sandboxes: its members' files while it lives, the means to remove them after.

Guarantees:
1. A living owner holds a lock on its folder; whoever gets the lock knows that the owner is dead.
2. What must be removed outside the folder (control groups) is recorded in it before it is made.
3. Dropping a member's files costs the caller a rename; the deletion runs beside, and ``close`` awaits it.
4. ``sweep`` removes everything of dead owners and touches nothing of living ones.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agentfly.errors import AgentflyError
from agentfly.resources.runners.sandboxd.cgroups import Group

LOCK = "sandboxes.lock"
RECORD = "cgroups.json"
SOCKET_PATH_MAX = 107
"""Bytes in the path of a unix socket."""
DELETE_S = 60.0
"""A tenant can leave tens of thousands of files; beyond this they are left for the next sweep."""
SWEEP_GROUP_S = 2.0


class OwnerDir:
    """A folder that one living process owns, with a folder in it for each member.

    Args:
        path: made if missing, readable by this user only; not shared with another owner.

    Raises:
        AgentflyError: the path is too long for sockets, or has a living owner.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        excess = len(os.fsencode(self.path)) + len("/fffff/s") - SOCKET_PATH_MAX
        if excess > 0:
            raise AgentflyError(
                f"run_dir: {path} is {excess} bytes too long to hold unix sockets",
                hints=["use a short folder, for example one below /run/user or /tmp"],
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = _claim(self.path, self.name)
        self._trash = self.path / "trash"
        self._trash.mkdir(exist_ok=True)
        self._numbers = itertools.count(1)
        self._deletion: asyncio.Task[None] | None = None

    def new_name(self) -> str:
        """A short name that no other member of this owner has or had, and no dead owner's has here."""
        names = (f"{number:x}" for number in self._numbers)
        return next(name for name in names if not (self.path / name).exists())

    def new_home(self, name: str, groups: Sequence[Path]) -> Path:
        """A folder for a member, with the record of its control groups in it."""
        home = self.path / name
        home.mkdir()
        (home / RECORD).write_text(json.dumps([str(path) for path in groups]))
        return home

    def drop(self, home: Path) -> None:
        """Put a member's files aside and delete them in the background."""
        with contextlib.suppress(FileNotFoundError):
            home.rename(self._trash / home.name)
        if self._deletion is None or self._deletion.done():
            self._deletion = asyncio.get_running_loop().create_task(self._empty_trash())

    async def _empty_trash(self) -> None:
        while entries := [str(entry) for entry in self._trash.iterdir()]:
            if not await asyncio.to_thread(delete, entries):
                return  # the next drop tries again, and a sweep after it

    async def close(self) -> None:
        """Await the deletions, remove what this owner made, give up the lock. It must have no members."""
        if self._deletion is not None and not self._deletion.done():
            await asyncio.wait([self._deletion])
        ours = [str(self.path / name) for name in ("trash", "etc", "dev", "disk")]
        await asyncio.to_thread(delete, ours)
        if not any(self.path.glob(f"*/{RECORD}")):  # a dead owner's are for a sweep, which looks for locks
            (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            self.path.rmdir()


def sweep(parent: Path, remove: Callable[[Path], bool] = lambda _: True) -> list[str]:
    """Remove the folders of dead owners, and their control groups; returns the names of the folders.

    Args:
        parent: the folder that holds the owners' folders (the ``run_dir`` of each).
        remove: given the folder of a dead owner, removes what that left elsewhere, and says whether it could.
    """
    swept = []
    for lock in sorted(parent.glob(f"*/{LOCK}")):
        with _try_lock(lock) as held:
            home = lock.parent
            if held:
                _kill_left(home)
            gone = held and remove(home) and all([_remove_group(group) for group in _recorded(home)])
            if gone and delete([str(home)]):
                swept.append(home.name)
    return swept


def _claim(folder: Path, name: str) -> int:
    """Take the lock under another name and move it into place: nobody ever sees it free."""
    final, fresh = folder / LOCK, folder / f"{LOCK}.{name}"
    with _try_lock(final) as free:
        if not free and final.exists():
            raise AgentflyError(
                f"run_dir: {folder} is in use by another process",
                hints=["give every owner a folder of its own"],
            )
        lock = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(final)
    return lock


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Whether the file exists and nobody holds it; we hold it meanwhile."""
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except BlockingIOError:
        held = False
    try:
        yield held
    finally:
        os.close(lock)


def _recorded(home: Path) -> Iterator[Group]:
    for record in (*home.glob(f"*/{RECORD}"), *home.glob(f"trash/*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError):
            yield Group(tuple(Path(path) for path in json.loads(record.read_text())))


def _kill_left(home: Path) -> None:
    """Kill what waits for ever for a bubblewrap that died with its owner before it could say a word.

    The child of such a bubblewrap does not know yet that it must die with it. It is known by its arguments,
    which name the folder of the dead owner.
    """
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, or is nobody's we may look at
            handle = os.pidfd_open(int(process.name))
            try:
                program, _, arguments = (process / "cmdline").read_bytes().partition(b"\0")
                if program.endswith(b"bwrap") and os.fsencode(f"{home}/") in arguments:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _remove_group(group: Group) -> bool:
    deadline = time.monotonic() + SWEEP_GROUP_S
    while not group.remove():
        if time.monotonic() > deadline:
            return False
        group.kill()
        time.sleep(0.01)
    return True


def delete(paths: Sequence[str]) -> bool:
    """Delete with ``rm``: it stands trees of any depth, and follows no link that a tenant made."""
    for command in (("rm", "-rf", "--"), ("chmod", "-R", "u+rwX", "--"), ("rm", "-rf", "--")):
        try:
            ended = subprocess.run([*command, *paths], capture_output=True, timeout=DELETE_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        if command[0] == "rm" and ended.returncode == 0:
            return True
    return False
