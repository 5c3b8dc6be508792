"""A sandbox behind an attached command: its daemon, and what of its root file system was written.

Guarantees:
1. The daemon's configuration, and so its life, begins only after the kernel said which process it is.
2. ``residue`` is None only if the writable layer, the volumes and the devices are as they were at the start;
   where these cannot be seen, it says so every time.
3. Ending it asks the daemon first, then whoever else can; a removal leaves its files to the owner's folder.

Not here: the command (``cli``, ``enroot``), the socket (``attached``), the layer
(``layer``).
"""

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentfly.resources.runners.container import layer
from agentfly.resources.runners.container.attached import Attached, Door, spawn
from agentfly.resources.runners.sandboxd import kernel_files, kernel_quotas
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir
from agentfly.resources.runners.sandboxd.runner import Sandbox
from agentfly.resources.spec import ContainerSpec

logger = logging.getLogger(__name__)

START_S = 60.0
"""A start takes 0.2 s; with a hundred at once, twenty."""
SHM = "/dev/shm"


class AttachedSandbox(Sandbox):
    """One sandbox and its folder on this machine.

    Args:
        owner: whose member it is.
        groups: control groups that are its own, recorded for a sweep.
    """

    spec: ContainerSpec

    def __init__(self, owner: OwnerDir, number: str, groups: Sequence[Path] = ()) -> None:
        self._owner = owner
        self.door = Door(owner.new_home(number, groups))
        self.address = f"unix://{self.door.socket}"
        self.process: Attached | None = None
        self._trees: list[layer.Tree] = []
        self._before: layer.Stamps | None = None
        self._kernel: kernel_files.Modes = {}

    @abstractmethod
    def command(self) -> tuple[list[str], Mapping[str, str] | None]:
        """The command line, and its environment if that is not ours."""

    @abstractmethod
    def scratch(self) -> list[str]:
        """The folders that the daemon empties at a reset."""

    @abstractmethod
    async def force(self) -> None:
        """End what did not end by itself, if there is a way."""

    def joined(self, pid: int) -> None:
        """Bound the daemon, which does nothing yet but wait.

        Raises:
            OSError: it is gone.
        """
        with contextlib.suppress(PermissionError):  # another user's: an engine that runs as root, for a user
            kernel_quotas.bound(pid, self.spec.pids + DAEMON_TASKS)

    async def tidy(self) -> None:
        """Remove what it had outside its folder, once nothing of it runs.

        Raises:
            OSError, TimeoutError: something is left.
        """

    async def connect(self) -> int:
        """Start it; returns the pid of its daemon, which waits for its configuration.

        Raises:
            OSError, TimeoutError: ``last_words`` says why.
        """
        argv, env = self.command()
        self.process = spawn(argv, self.door, env)
        async with asyncio.timeout(START_S):
            await self.process.connected(self.joined)
        return self.process.pid

    async def launch(self, config: bytes) -> None:
        """See ``Sandbox.launch``."""
        pid = await self.connect()
        assert self.process is not None
        async with asyncio.timeout(START_S):
            await self.process.configure(config)
        await asyncio.to_thread(self._record, pid)

    def _record(self, pid: int) -> None:
        try:
            table = Path(f"/proc/{pid}/mountinfo").read_text()
            self._trees = layer.watched(table, self.scratch(), f"/proc/{pid}/root")
            self._before = layer.stamps(self._trees)
            self._kernel = kernel_files.read(Path(f"/proc/{pid}/root/proc"))
        except OSError as error:
            if self.process is None or not self.process.alive:
                raise
            logger.info("%s: every reset will be a new sandbox: %s", self.address, error)

    async def dies_within(self, seconds: float) -> bool:
        """See ``Sandbox.dies_within``."""
        return self.process is None or await self.process.dies_within(seconds)

    def last_words(self) -> str:
        """See ``Sandbox.last_words``."""
        return self.process.last_words() if self.process else ""

    def residue(self, declared: bool) -> str | None:
        """See ``Sandbox.residue``."""
        assert self.process is not None
        machine = kernel_files.changed(self._kernel, Path(f"/proc/{self.process.pid}/root/proc"))
        if machine is not None or declared:
            return machine
        if self._before is None:
            return "what was written to its root cannot be seen from here"
        return layer.difference(self._before, self._trees)

    async def remove(self) -> None:
        """See ``Sandbox.remove``."""
        if self.process is not None:
            try:
                await self.process.end()
            except TimeoutError:
                await self.force()
                self.process.kill()
                await self.process.end()
        kernel_files.put_back(self._kernel)  # it may have died with a reset or without
        await self.tidy()
        self._owner.drop(self.door.path)
