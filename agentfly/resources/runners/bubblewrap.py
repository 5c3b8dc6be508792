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

Not here: the command line (``sandbox_root``), processes (``sandbox_process``), files (``owner_dir``).
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.images.cache import ImageCache
from agentfly.resources.images.holds import ImageHolds, ImageRoot
from agentfly.resources.runners import bubblewrap_check, host_root, kernel_quotas, seccomp
from agentfly.resources.runners.base import Member, Unclean, Vitals
from agentfly.resources.runners.cgroups import DAEMON_TASKS, Cgroups, Group, Limits
from agentfly.resources.runners.kept_admin import KeptAdmin
from agentfly.resources.runners.owner_dir import OwnerDir, delete, sweep
from agentfly.resources.runners.sandbox_process import SandboxProcess, spawn
from agentfly.resources.runners.sandbox_root import DAEMON, UPPER, Home, Root
from agentfly.resources.spec import ContainerSpec, ResourceSpec
from agentfly.sandbox import SandboxAdmin, SandboxError, SandboxLeaseLost, SandboxUnreachable

__all__ = ["BubblewrapRunner", "sweep"]

logger = logging.getLogger(__name__)

START_S = 20.0
"""A start takes 10 ms; a hundred at once on two busy cores take seconds."""
GROUP_S = 5.0
"""A control group is removable once the last process has left it, a moment after it died."""
BACKLOG = 64
DYING_S = 1.0
"""A dying sandbox closes its socket first, and then frees its memory: its end is seen a moment later."""
# Bytecode beside the modules of /usr would be residue: it would turn every reset into a fresh start.
DEFAULT_ENV = {"HOME": "/root", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(eq=False)
class Sandbox:
    """What the runner keeps of one member; ``end`` is the task that removes it, once there is one."""

    home: Home
    group: Group
    process: SandboxProcess | None = None
    image: ImageRoot | None = None
    admin: KeptAdmin | None = None
    end: "asyncio.Task[None] | None" = None


class BubblewrapRunner:
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
        self._sandboxd = sandboxd.absolute()
        self._run_dir = run_dir.absolute()
        self._cgroups = Cgroups.find()
        self._filter = seccomp.program()
        self._bounded = host_root.memory_has_attributes()
        self._images = ImageHolds(images)
        self._owner: OwnerDir | None = None
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
            for name in self._cgroups.missing
        ]
        if not self._bounded:
            notes.append("disk of a sandbox: not bounded; Linux 6.6 or later can keep its writes in memory")
        if self._filter is None:
            notes.append("system calls: no filter is known for this processor, so keyrings are not shut")
        return tuple(notes)

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """Start a sandbox.

        Raises:
            StartFailed: the reason is bubblewrap's, the daemon's or the kernel's; nothing is left.
        """
        return await self._start(_container(spec), member_id, incarnation=1)

    async def probe(self, member: Member) -> Vitals:
        """Whether the sandbox lives and its daemon answers, or is only slow to."""
        process = _sandbox(member).process
        if process is None or not process.alive:
            return Vitals(alive=False)
        try:
            await _admin(member).health()
        except SandboxUnreachable:
            return Vitals(alive=not await process.dies_within(DYING_S))
        return Vitals(alive=True)

    async def lease(self, member: Member, owner: str, attempt: int, token: str, ttl_s: float) -> None:
        """Lease the sandbox, or renew that lease.

        Raises:
            LeaseLost: the daemon has given it to somebody else, or to nobody since it ran out.
            Infra: no answer, or none about the lease; of a dead sandbox the text says why it died.
        """
        try:
            await _admin(member).lease(owner, attempt, token, ttl_s)
        except SandboxUnreachable as error:
            raise Infra(f"member {member.id}: {await self._post_mortem(member) or error}") from error
        except (SandboxError, SandboxLeaseLost) as error:
            if isinstance(error, SandboxError) and error.code not in ("Busy", "Dirty"):
                raise Infra(f"member {member.id}: {error}") from error
            raise LeaseLost(f"member {member.id}: {error}", incarnation=member.incarnation) from error

    async def reset(self, member: Member) -> Member | None:
        """The member under its next incarnation: this sandbox, verified, or a fresh one. None if neither.

        Raises:
            Unclean: see ``Member.keep_unclean``.
        """
        if _sandbox(member).end is not None:
            return None  # it was stopped
        try:
            report = await _admin(member).reset()
            if report.clean:
                return replace(member, incarnation=member.incarnation + 1)
            found = report.reason
            if member.keep_unclean and _container(member.spec).reset.method != "recreate":
                raise Unclean(f"member {member.id}: {found}")
        except (SandboxUnreachable, SandboxError) as error:
            found = await self._post_mortem(member) or error.message
        logger.info("member %s: not clean after its lease (%s), starting it afresh", member.id, found)
        try:
            await self.stop(member)
            return await self._start(_container(member.spec), member.id, member.incarnation + 1)
        except (StartFailed, Infra) as error:
            logger.warning("member %s: cannot be reset: %s", member.id, error)
            return None

    async def stop(self, member: Member) -> None:
        """End the sandbox and remove what it had.

        Raises:
            Infra: the kernel did not end it in time; call again.
        """
        try:
            await self._end(_sandbox(member))
        except (OSError, TimeoutError) as error:
            raise Infra(f"member {member.id}: cannot be removed: {error or type(error).__name__}") from error

    async def close(self) -> None:
        """Await the deletion of files and remove the owner's folder. Stop every member first."""
        await self._images.close()
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()

    async def _start(self, spec: ContainerSpec, member_id: str, incarnation: int) -> Member:
        owner = self._own()
        token = secrets.token_urlsafe(32)
        sandbox = self._reserve(owner)
        try:
            sandbox.image = await self._images.take(spec.image)
            root = Root(_placed(spec, sandbox.image), owner.path, self._sandboxd, self._bounded)
            root.check()
            config = _config(root, token, incarnation, self._cgroups.missing)
            await self._launch(sandbox, root, config, token)
        except BaseException as error:
            reason = (sandbox.process and sandbox.process.last_words()) or str(error) or type(error).__name__
            await _through_cancellation(self._end(sandbox))
            if isinstance(error, (OSError, SandboxUnreachable)):
                raise StartFailed(f"member {member_id}: {reason}", reason=reason) from error
            raise
        address = f"unix://{sandbox.home.socket}"
        return Member(member_id, spec, incarnation, address, admin_token=token, handle=sandbox)

    def _own(self) -> OwnerDir:
        try:
            if self._owner is None:
                self._owner = OwnerDir(self._run_dir)
            host_root.build(self._owner.path)
        except OSError as error:
            raise StartFailed(f"run_dir: {self._run_dir}: {error}") from error
        except AgentflyError as error:
            raise StartFailed(error.message, hints=error.hints) from error
        return self._owner

    def _reserve(self, owner: OwnerDir) -> Sandbox:
        """Name and record the member's folder and group: from here on ``_end`` can remove them."""
        name = owner.new_name()
        group = self._cgroups.plan(f"agentfly-{owner.name}-{name}")
        return Sandbox(Home(owner.new_home(name, group.paths)), group)

    async def _launch(self, sandbox: Sandbox, root: Root, config: bytes, token: str) -> None:
        home = sandbox.home
        root.prepare(home)
        # Files of the root are memory: a full disk leaves as much for processes as an empty one.
        memory_mb = root.spec.memory_mb + (root.disk_mb if root.bounded else 0)
        self._cgroups.create(sandbox.group, Limits(root.spec.cpu, memory_mb, root.spec.pids))
        with contextlib.ExitStack() as stack:
            command, descriptors = self._command(stack, sandbox, root)
            sandbox.process = spawn(command, descriptors, home.log)
        async with asyncio.timeout(START_S):
            daemon = await sandbox.process.daemon_pid()
            sandbox.group.add(daemon)
            kernel_quotas.bound(daemon, root.spec.pids + DAEMON_TASKS)
            sandbox.process.release()
            await sandbox.process.configure(config)
            sandbox.admin = KeptAdmin(f"unix://{home.socket}", token)
            await sandbox.admin.open().health()

    def _command(
        self, stack: contextlib.ExitStack, sandbox: Sandbox, root: Root
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
        arguments = [str(self._bwrap), *root.arguments(sandbox.home, ceilings), *filters]

        def command(status: int, gate: int) -> list[str]:
            return [*arguments, "--json-status-fd", str(status), "--block-fd", str(gate), "--", *daemon]

        return command, descriptors

    async def _end(self, sandbox: Sandbox) -> None:
        """Remove a sandbox once, whoever asks and however often; a failure may be tried again."""
        if sandbox.end is None or (sandbox.end.done() and _failed(sandbox.end)):
            sandbox.end = asyncio.get_running_loop().create_task(self._remove(sandbox))
        await asyncio.shield(sandbox.end)

    async def _remove(self, sandbox: Sandbox) -> None:
        if sandbox.admin is not None:
            await sandbox.admin.close()
        if sandbox.process is not None:
            await sandbox.process.end()
        async with asyncio.timeout(GROUP_S):
            while not sandbox.group.remove():  # noqa: ASYNC110 -- the kernel tells nobody when a group is empty
                await asyncio.sleep(0.002)
        if sandbox.image is not None:
            self._images.give_back(sandbox.image)
            sandbox.image = None
        if self._owner is not None:
            self._owner.drop(sandbox.home.path)

    async def _post_mortem(self, member: Member) -> str | None:
        sandbox = _sandbox(member)
        if sandbox.process is None or not await sandbox.process.dies_within(DYING_S):
            return None
        if sandbox.group.oom_kills() and isinstance(member.spec, ContainerSpec):
            return f"the sandbox died: oom, more than its {member.spec.memory_mb} MiB were needed"
        return f"the sandbox died: {sandbox.process.last_words() or 'its first process was killed'}"


_FALLBACKS = {
    "memory": "each process alone is bounded, by RLIMIT_DATA",
    "pids": "bounded by RLIMIT_NPROC, which does not hold for root",
    "cpu": "not bounded",
}


def _config(root: Root, token: str, incarnation: int, unlimited: tuple[str, ...]) -> bytes:
    spec = root.spec
    limits: dict[str, int] = {}
    if "pids" in unlimited:
        limits["processes"] = spec.pids + DAEMON_TASKS
    if "memory" in unlimited:
        limits["dataBytes"] = spec.memory_mb << 20
    config = {
        "adminToken": token,
        "scratch": [scratch.path for scratch in root.scratch()],
        "upper": UPPER,
        "ownNetwork": not spec.network,
        "workdir": spec.workdir,
        "env": DEFAULT_ENV | spec.env,
        "incarnation": incarnation,
        "limits": limits,
        "reset": {
            "method": spec.reset.method,
            "paths": list(spec.reset.paths),
            "git": spec.reset.git or "",
            "command": list(spec.reset.command),
            "timeoutSeconds": spec.reset.timeout_s,
        },
    }
    return json.dumps(config).encode() + b"\n"


def _container(spec: ResourceSpec) -> ContainerSpec:
    if not isinstance(spec, ContainerSpec):
        raise StartFailed(f"kind: {spec.kind} is not served by bubblewrap, only container")
    return spec


def _admin(member: Member) -> SandboxAdmin:
    kept = _sandbox(member).admin
    assert kept is not None, "only a sandbox that has started is a member's"
    return kept.open()


def _placed(spec: ContainerSpec, image: ImageRoot) -> ContainerSpec:
    """The spec with the image's folder in place of its name, and its environment below the spec's."""
    return spec.model_copy(update={"image": image.path, "env": {**image.env, **spec.env}})


def _sandbox(member: Member) -> Sandbox:
    assert isinstance(member.handle, Sandbox), "a member of another runner"
    return member.handle


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


def _failed(task: "asyncio.Task[None]") -> bool:
    return task.cancelled() or task.exception() is not None


async def _through_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Await clean-up to its end, however often the caller is cancelled meanwhile, then pass the cancel on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except (OSError, TimeoutError):
            break
    if not task.cancelled() and task.exception() is not None:
        logger.error("a sandbox could not be removed: %s", task.exception())
    if cancelled is not None:
        raise cancelled
