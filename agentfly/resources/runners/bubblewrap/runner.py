"""Sandboxes on this machine: one bubblewrap with sandboxd inside for each member.

Guarantees:
1. ``start`` gives a member whose daemon answers, or raises ``StartFailed`` and leaves no process, folder,
   control group or descriptor; also when it is cancelled.
2. ``reset`` gives the same sandbox if the daemon verified it, else a fresh one under the same member id,
   begun only after the old one is gone; either has the next incarnation.
3. ``stop`` may be called at any time and twice; afterwards nothing of the member is left.
4. A sandbox lives no longer than this process; what a killed process leaves on disk, ``sweep`` removes.
5. Processor, memory and number of processes are bounded by control groups where these can be written, what is
   written to the root file system by its size; ``notes`` says what is bounded less well elsewhere.
6. It works for root and for an ordinary user.

Not here: the life of a sandbox (``sandboxd.runner``), the command line (``root``), processes
(``process``), files (``sandboxd.owner_dir``).
"""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from agentfly.resources.images.cache import ImageCache
from agentfly.resources.images.holds import ImageHolds, ImageRoot
from agentfly.resources.runners.bubblewrap import check as bubblewrap_check
from agentfly.resources.runners.bubblewrap import host_root, seccomp
from agentfly.resources.runners.bubblewrap.process import SandboxProcess, spawn
from agentfly.resources.runners.bubblewrap.root import DAEMON, UPPER, Home, Root
from agentfly.resources.runners.sandboxd import kernel_quotas
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS, Cgroups, Limits
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir, delete, sweep
from agentfly.resources.runners.sandboxd.runner import (
    DEFAULT_ENV,
    Sandbox,
    SandboxdRunner,
    cause_in,
    reset_config,
)
from agentfly.resources.spec import ContainerSpec

__all__ = ["BubblewrapRunner", "sweep"]

START_S = 20.0
"""A start takes 10 ms; a hundred at once on two busy cores take seconds."""
GROUP_S = 5.0
"""A control group is removable once the last process has left it, a moment after it died."""
BACKLOG = 64


class BubblewrapSandbox(Sandbox):
    """What the runner keeps of one member: from here on ``remove`` can remove what it has."""

    def __init__(self, runner: "BubblewrapRunner", owner: OwnerDir, root: Root, image: ImageRoot) -> None:
        name = owner.new_name()
        self.group = runner.cgroups.plan(f"agentfly-{owner.name}-{name}")
        self.home = Home(owner.new_home(name, self.group.paths))
        self.address = f"unix://{self.home.socket}"
        self.root = root
        self.image: ImageRoot | None = image
        self.process: SandboxProcess | None = None
        self._runner, self._owner = runner, owner

    async def launch(self, config: bytes) -> None:
        """See ``Sandbox.launch``."""
        self.process = self._runner.spawn(self)
        async with asyncio.timeout(START_S):
            daemon = await self.process.daemon_pid()
            self.group.add(daemon)
            kernel_quotas.bound(daemon, self.root.spec.pids + DAEMON_TASKS)
            self.process.release()
            await self.process.configure(config)

    async def dies_within(self, seconds: float) -> bool:
        """See ``Sandbox.dies_within``."""
        return self.process is None or await self.process.dies_within(seconds)

    def last_words(self) -> str:
        """See ``Sandbox.last_words``."""
        return self.process.last_words() if self.process else ""

    def cause(self, memory_mb: int) -> str:
        """See ``Sandbox.cause``."""
        return cause_in(self.group, self.last_words(), memory_mb)

    def residue(self, declared: bool) -> None:
        """See ``Sandbox.residue``: the daemon sees everything, the upper folder of its root too."""

    async def remove(self) -> None:
        """See ``Sandbox.remove``."""
        if self.process is not None:
            await self.process.end()
        async with asyncio.timeout(GROUP_S):
            while not self.group.remove():  # noqa: ASYNC110 -- the kernel tells nobody when a group is empty
                await asyncio.sleep(0.002)
        if self.image is not None:
            self._runner.images.give_back(self.image)
            self.image = None
        self._owner.drop(self.home.path)


class BubblewrapRunner(SandboxdRunner):
    """Runner of containers whose ``runtime`` is ``bubblewrap``.

    Args:
        run_dir: a folder for this runner alone, with a short path, on a local disk: sockets, and what
            sandboxes write to their root. Made at the first start; ``sweep`` its parent.
        sandboxd: the daemon's binary, statically linked.
        bwrap: bubblewrap 0.11 or later; None finds it.
        images: where images are unpacked; without it sandboxes have this machine's own root or a folder's.

    Raises:
        AgentflyError: there is no bubblewrap.
    """

    name = "bubblewrap"

    def __init__(
        self, run_dir: Path, sandboxd: Path, bwrap: Path | None = None, images: ImageCache | None = None
    ) -> None:
        self._bwrap = (bwrap or bubblewrap_check.find_bubblewrap()).absolute()
        super().__init__(run_dir, sandboxd)
        self.cgroups = Cgroups.find()
        self._filter = seccomp.program()
        self._bounded = host_root.memory_has_attributes()
        self.images = ImageHolds(images)
        self._works = False

    def check(self) -> str | None:
        """None if a real sandbox ran here, else why not and what to change. A success is remembered."""
        if self._works:
            return None
        if not os.access(self._sandboxd, os.X_OK):
            return f"sandboxd: {self._sandboxd} is not an executable file; make sandboxd builds it"
        if problem := bubblewrap_check.version_problem(self._bwrap):
            return problem
        self._run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = Path(tempfile.mkdtemp(prefix="probe-", dir=self._run_dir.parent))
        try:
            (probe / "etc").mkdir()  # the daemon needs nothing of it, and the real one takes 0.1 s
            host_root.build_devices(probe / "dev")
            root = Root(ContainerSpec(), probe, self._sandboxd, self._bounded)
            root.prepare(Home(probe))
            with contextlib.ExitStack() as stack:
                ceilings = _ceilings(stack)
                argv = [str(self._bwrap), *root.arguments(Home(probe), ceilings), "--", DAEMON, "--version"]
                inherited = list(ceilings.values())
                problem = bubblewrap_check.probe(argv, inherited, self._bwrap, self._run_dir)
        finally:
            delete([str(probe)])  # an overlay leaves a folder that its owner cannot read
        self._works = problem is None
        return problem

    def notes(self) -> tuple[str, ...]:
        """What works less well here than it could, for ``agentfly doctor``."""
        notes = [
            f"{name} of a sandbox: no control group can be written; {_FALLBACKS[name]}"
            for name in self.cgroups.missing
        ]
        if not self._bounded:
            notes.append("disk of a sandbox: not bounded; Linux 6.6 or later can keep its writes in memory")
        if self._filter is None:
            notes.append("system calls: no filter is known for this processor, so keyrings are not shut")
        return tuple(notes)

    async def close(self) -> None:
        """See ``SandboxdRunner.close``."""
        await self.images.close()
        await super().close()

    async def _plan(self, spec: ContainerSpec, member_id: str) -> BubblewrapSandbox:
        owner = self._own()
        image = await self.images.take(spec.image)
        try:
            root = Root(_placed(spec, image), owner.path, self._sandboxd, self._bounded)
            root.check()
            return BubblewrapSandbox(self, owner, root, image)
        except BaseException:
            self.images.give_back(image)
            raise

    def _prepare(self, owner: OwnerDir) -> None:
        host_root.build(owner.path)

    def _config(self, sandbox: BubblewrapSandbox) -> dict[str, object]:
        return config(sandbox.root, self.cgroups.missing)

    def spawn(self, sandbox: BubblewrapSandbox) -> SandboxProcess:
        """Start bubblewrap, which holds the daemon back.

        Raises:
            OSError: something of the sandbox cannot be made.
        """
        root = sandbox.root
        root.prepare(sandbox.home)
        # Files of the root are memory: a full disk leaves as much for processes as an empty one.
        memory_mb = root.spec.memory_mb + (root.disk_mb if root.bounded else 0)
        self.cgroups.create(sandbox.group, Limits(root.spec.cpu, memory_mb, root.spec.pids))
        with contextlib.ExitStack() as stack:
            command, descriptors = self._command(stack, sandbox)
            return spawn(command, descriptors, sandbox.home.log)

    def _command(
        self, stack: contextlib.ExitStack, sandbox: BubblewrapSandbox
    ) -> tuple[Callable[[int, int], list[str]], list[int]]:
        """The command line, as a function of the two descriptors that ``spawn`` makes, and all others."""
        listener = stack.enter_context(_listen(sandbox.home.socket))
        descriptors = [listener.fileno()]
        daemon = [DAEMON, "--listen-fd", str(listener.fileno())]
        if (oom_file := sandbox.group.oom_file) is not None:
            descriptors.append(stack.enter_context(oom_file.open("rb")).fileno())
            daemon += ["--oom-fd", str(descriptors[-1])]
        filters: list[str] = []
        if self._filter is not None:
            descriptors.append(stack.enter_context(_memory_file(self._filter)))
            filters = ["--seccomp", str(descriptors[-1])]
        ceilings = _ceilings(stack)
        descriptors += ceilings.values()
        arguments = [str(self._bwrap), *sandbox.root.arguments(sandbox.home, ceilings), *filters]

        def command(status: int, gate: int) -> list[str]:
            return [*arguments, "--json-status-fd", str(status), "--block-fd", str(gate), "--", *daemon]

        return command, descriptors


_FALLBACKS = {
    "memory": "each process alone is bounded, by RLIMIT_DATA",
    "pids": "bounded by RLIMIT_NPROC, which does not hold for root",
    "cpu": "not bounded",
}


def config(root: Root, unlimited: tuple[str, ...]) -> dict[str, object]:
    """What the daemon is told of a root, where these limits are not the kernel's."""
    spec = root.spec
    limits: dict[str, int] = {}
    if "pids" in unlimited:
        limits["processes"] = spec.pids + DAEMON_TASKS
    if "memory" in unlimited:
        limits["dataBytes"] = spec.memory_mb << 20
    return {
        "scratch": [scratch.path for scratch in root.scratch()],
        "upper": UPPER,
        "ownNetwork": not spec.network,
        "workdir": spec.workdir,
        "env": DEFAULT_ENV | spec.env,
        "limits": limits,
        "reset": reset_config(spec.reset),
    }


def _placed(spec: ContainerSpec, image: ImageRoot) -> ContainerSpec:
    """The spec with the image's folder in place of its name, and its environment below the spec's."""
    return spec.model_copy(update={"image": image.path, "env": {**image.env, **spec.env}})


@contextlib.contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        yield listener


def _ceilings(stack: contextlib.ExitStack) -> dict[str, int]:
    """Descriptors from which bubblewrap reads what a sandbox's user namespace may have at most."""
    return {
        file: stack.enter_context(_memory_file(str(value).encode()))
        for file, value in kernel_quotas.ceilings()
    }


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("agentfly")
    try:
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
