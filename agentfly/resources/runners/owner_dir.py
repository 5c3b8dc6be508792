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
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentfly.errors import AgentflyError
from agentfly.resources.runners.cgroups import Group

SOCKET_PATH_MAX = 107
"""Bytes in the path of a unix socket."""
DELETE_S = 60.0
"""A tenant can leave tens of thousands of files; beyond this they are left for the next sweep."""
SWEEP_GROUP_S = 2.0


class OwnerDir:
    """``<run_dir>/<owner>/`` with a folder for each member, and ``<run_dir>/<owner>.lock``.

    Args:
        run_dir: made if missing, readable by this user only.

    Raises:
        AgentflyError: the path is too long for sockets.
    """

    def __init__(self, run_dir: Path) -> None:
        longest = len(os.fsencode(run_dir.absolute())) + len("/01234567/fffff/s")
        if longest > SOCKET_PATH_MAX:
            raise AgentflyError(
                f"run_dir: {run_dir} is {longest - SOCKET_PATH_MAX} bytes too long to hold unix sockets",
                hints=["use a short folder, for example one below /run/user or /tmp"],
            )
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run_dir = run_dir.absolute()
        self._lock, self.name = _claim(self._run_dir)
        self.path = self._run_dir / self.name
        self.path.mkdir(mode=0o700)
        self._trash = self.path / "trash"
        self._trash.mkdir()
        self._numbers = itertools.count(1)
        self._deletion: asyncio.Task[None] | None = None

    def new_home(self, groups: Sequence[Path], name: str) -> Path:
        """A folder for a member, with the record of its control groups in it."""
        home = self.path / name
        home.mkdir()
        (home / "record").write_text(json.dumps([str(path) for path in groups]))
        return home

    def new_name(self) -> str:
        """A short name that no other member of this owner has or had."""
        return f"{next(self._numbers):x}"

    def drop(self, home: Path) -> None:
        """Put a member's files aside and delete them in the background."""
        with contextlib.suppress(FileNotFoundError):
            home.rename(self._trash / home.name)
        if self._deletion is None or self._deletion.done():
            self._deletion = asyncio.get_running_loop().create_task(self._empty_trash())

    async def _empty_trash(self) -> None:
        while entries := [str(entry) for entry in self._trash.iterdir()]:
            if not await asyncio.to_thread(_delete, entries):
                return  # the next drop tries again, and a sweep after it

    async def close(self) -> None:
        """Await the deletions, remove the folder, give up the lock. The owner must have no members."""
        if self._deletion is not None:
            await asyncio.shield(self._deletion)
        await asyncio.to_thread(_delete, [str(self.path)])
        _lock_path(self._run_dir, self.name).unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _delete(paths: Sequence[str]) -> bool:
    """Delete with ``rm``: it stands trees of any depth, and follows no link that a tenant made."""
    for command in (("rm", "-rf", "--"), ("chmod", "-R", "u+rwX", "--"), ("rm", "-rf", "--")):
        try:
            ended = subprocess.run([*command, *paths], capture_output=True, timeout=DELETE_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        if command[0] == "rm" and ended.returncode == 0:
            return True
    return False


def sweep(run_dir: Path) -> list[str]:
    """Remove what dead owners left in ``run_dir``; returns the names of these owners."""
    swept = []
    for lock in sorted(run_dir.glob("*.lock")):
        with _try_lock(lock) as held:
            if not held:
                continue
            home = run_dir / lock.stem
            if all([_remove_group(group) for group in _recorded(home)]) and _delete([str(home)]):
                lock.unlink(missing_ok=True)
                swept.append(lock.stem)
    return swept


def _claim(run_dir: Path) -> tuple[int, str]:
    """A new owner's lock and name. A sweep may take a lock file before we hold it: then take another name."""
    while True:
        name = secrets.token_hex(4)
        path = _lock_path(run_dir, name)
        lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
                return lock, name
        os.close(lock)


def _lock_path(run_dir: Path, name: str) -> Path:
    return run_dir / f"{name}.lock"


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = True
    except OSError:
        held = False
    try:
        yield held
    finally:
        os.close(lock)


def _recorded(home: Path) -> Iterator[Group]:
    for record in (*home.glob("*/record"), *home.glob("trash/*/record")):
        with contextlib.suppress(OSError, ValueError):
            yield Group(tuple(Path(path) for path in json.loads(record.read_text())))


def _remove_group(group: Group) -> bool:
    deadline = time.monotonic() + SWEEP_GROUP_S
    while not group.remove():
        if time.monotonic() > deadline:
            return False
        group.kill()
        time.sleep(0.01)
    return True
