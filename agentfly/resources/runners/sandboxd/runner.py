"""What runners of sandboxes do alike: they differ in how one is started and removed, not in its life.

Guarantees:
1. A failed or cancelled start has removed what there was of its sandbox before it ends.
2. ``reset`` gives the same sandbox if it was found pristine; else a fresh one under the same member id, begun
   only after the old one is gone. The daemon answers for all that can be written where the spec declares what
   a task may change, else for all but the root file system, which the runner sees from outside.
3. A sandbox is removed once, whoever asks and however often; a removal that failed may be tried again.

Not here: the daemon's side (``agentfly.sandbox``), and everything about one kind of sandbox (its runner).
"""

import asyncio
import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.runners.base import Member, Unclean, Vitals
from agentfly.resources.runners.sandboxd.cgroups import Group
from agentfly.resources.runners.sandboxd.kept_admin import KeptAdmin
from agentfly.resources.runners.sandboxd.owner_dir import OwnerDir
from agentfly.resources.spec import ContainerSpec, ResetSpec, ResourceSpec
from agentfly.sandbox import SandboxAdmin, SandboxError, SandboxLeaseLost, SandboxUnreachable

logger = logging.getLogger(__name__)

READY_S = 60.0
"""Beyond what a spec allows its method of reset: the daemon copies declared folders before it answers."""
DYING_S = 1.0
"""A dying sandbox closes its socket first, and then frees its memory: its end is seen a moment later."""
# Bytecode beside the modules of an image would be residue: it would turn every reset into a fresh start.
DEFAULT_ENV = {"HOME": "/root", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


class Sandbox(ABC):
    """What a runner keeps of one member.

    ``admin`` is there once it has started, ``removal`` is the task that removes it.
    """

    address: str
    admin: KeptAdmin | None = None
    removal: "asyncio.Task[None] | None" = None

    @abstractmethod
    async def launch(self, config: bytes) -> None:
        """Start it and give its daemon the configuration.

        Raises:
            OSError: with the reason; it is still to be removed.
        """

    @abstractmethod
    async def dies_within(self, seconds: float) -> bool:
        """Whether the daemon is dead, now or in a moment."""

    @abstractmethod
    def last_words(self) -> str:
        """The reason in what was written while it lived, empty if there is none."""

    def cause(self, memory_mb: int) -> str:
        """Why it died.

        Args:
            memory_mb: what it was allowed.
        """
        killed = f"its first process was killed, or it needed more than its {memory_mb} MiB"
        return self.last_words() or killed

    @abstractmethod
    def residue(self, declared: bool) -> str | None:
        """What outside the daemon's view is not as at the start, once nothing but the daemon runs.

        Args:
            declared: the daemon answers for everything that can be written in the sandbox.
        """

    @abstractmethod
    async def remove(self) -> None:
        """End it, however far it came, and remove what it had.

        Raises:
            OSError, TimeoutError: something of it is left.
        """


class SandboxdRunner(ABC):
    """A runner of containers with sandboxd as their first process.

    Args:
        run_dir: a folder for this runner alone, with a short path. Made at the first start.
        sandboxd: the daemon's binary, statically linked.
    """

    name: str

    def __init__(self, run_dir: Path, sandboxd: Path) -> None:
        self._sandboxd = sandboxd.absolute()
        self._run_dir = run_dir.absolute()
        self._owner: OwnerDir | None = None
        self._prepared = False

    @abstractmethod
    async def _plan(self, spec: ContainerSpec, member_id: str) -> Sandbox:
        """A sandbox that is recorded but not started.

        Raises:
            StartFailed: the spec cannot be had here; nothing was made.
        """

    @abstractmethod
    def _config(self, sandbox: Any) -> dict[str, object]:
        """What the daemon is told beside its token and incarnation."""

    @abstractmethod
    def _prepare(self, owner: OwnerDir) -> None:
        """Make in the owner's folder what all its members share; called again if it failed."""

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """Start a sandbox.

        Raises:
            StartFailed: with the reason; nothing is left.
        """
        return await self._start(self._container(spec), member_id, incarnation=1)

    async def probe(self, member: Member) -> Vitals:
        """Whether the sandbox lives and its daemon answers, or is only slow to."""
        sandbox = _sandbox(member)
        if sandbox.removal is not None or await sandbox.dies_within(0):
            return Vitals(alive=False)
        try:
            await _admin(sandbox).health()
        except SandboxUnreachable:
            return Vitals(alive=not await sandbox.dies_within(DYING_S))
        return Vitals(alive=True)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """Lease the sandbox, or renew that lease.

        Raises:
            LeaseLost: the daemon has given it to somebody else, or to nobody since it ran out.
            Infra: no answer, or none about the lease; of a dead sandbox the text says why it died.
        """
        try:
            await _admin(_sandbox(member)).lease(owner, attempt, token, ttl_s)
        except SandboxUnreachable as error:
            raise Infra(f"member {member.id}: {await _post_mortem(member) or error}") from error
        except (SandboxError, SandboxLeaseLost) as error:
            if isinstance(error, SandboxError) and error.code not in ("Busy", "Dirty"):
                raise Infra(f"member {member.id}: {error}") from error
            raise LeaseLost(f"member {member.id}: {error}", incarnation=member.incarnation) from error

    async def reset(self, member: Member) -> Member | None:
        """The member under its next incarnation: this sandbox, verified, or a fresh one. None if neither.

        Raises:
            Unclean: see ``Member.keep_unclean``.
        """
        if _sandbox(member).removal is not None:
            return None  # it was stopped
        found = await self._cleaned(member)
        if found is None:
            return replace(member, incarnation=member.incarnation + 1)
        logger.info("member %s: not clean after its lease (%s), starting it afresh", member.id, found)
        try:
            await self.stop(member)
            return await self._start(self._container(member.spec), member.id, member.incarnation + 1)
        except (StartFailed, Infra) as error:
            logger.warning("member %s: cannot be reset: %s", member.id, error)
            return None

    async def _cleaned(self, member: Member) -> str | None:
        """Clean the sandbox; None if it was verified, else why it is not to be used again."""
        reset = self._container(member.spec).reset
        if reset.method == "recreate":
            return "its spec wants a new one"
        declared = declares(reset)
        try:
            report = await _admin(_sandbox(member)).reset(reset.timeout_s if declared else 0.0)
        except (SandboxUnreachable, SandboxError) as error:
            return await _post_mortem(member) or error.message
        left = _sandbox(member).residue(declared)  # whatever the daemon says: it may put something back
        found = left if report.clean else report.reason or "it does not say why"
        if found is not None and member.keep_unclean:
            raise Unclean(f"member {member.id}: {found}")
        return found

    async def stop(self, member: Member) -> None:
        """End the sandbox and remove what it had.

        Raises:
            Infra: something of it is left; call again.
        """
        try:
            await _remove(_sandbox(member))
        except (OSError, TimeoutError) as error:
            raise Infra(
                f"member {member.id}: cannot be removed: {str(error) or type(error).__name__}"
            ) from error

    async def close(self) -> None:
        """Await the deletion of files and remove the owner's folder. Stop every member first."""
        owner, self._owner = self._owner, None
        if owner is not None:
            await owner.close()

    async def _start(self, spec: ContainerSpec, member_id: str, incarnation: int) -> Member:
        sandbox = await self._plan(spec, member_id)
        token = secrets.token_urlsafe(32)
        config = {"adminToken": token, "incarnation": incarnation} | self._config(sandbox)
        if declares(spec.reset):
            config["reset"] = reset_config(spec.reset)
        try:
            await sandbox.launch(json.dumps(config).encode() + b"\n")
            sandbox.admin = KeptAdmin(sandbox.address, lambda: token)
            await self._ready(sandbox, READY_S + spec.reset.timeout_s)
        except BaseException as error:
            reason = sandbox.last_words() or str(error) or type(error).__name__
            await finished(removed(_remove(sandbox)))
            if isinstance(error, (OSError, SandboxUnreachable)):
                raise StartFailed(f"member {member_id}: {reason}", reason=reason) from error
            raise
        return Member(member_id, spec, incarnation, sandbox.address, admin_token=token, handle=sandbox)

    async def _ready(self, sandbox: Sandbox, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await _admin(sandbox).health()
                    return
                except SandboxUnreachable:
                    if await sandbox.dies_within(0):
                        raise

    def _own(self) -> OwnerDir:
        try:
            if self._owner is None:
                self._owner, self._prepared = OwnerDir(self._run_dir), False
            if not self._prepared:
                self._prepare(self._owner)
                self._prepared = True
        except OSError as error:
            raise StartFailed(f"run_dir: {self._run_dir}: {error}") from error
        except AgentflyError as error:
            raise StartFailed(error.message, hints=error.hints) from error
        return self._owner

    def _container(self, spec: ResourceSpec) -> ContainerSpec:
        if not isinstance(spec, ContainerSpec):
            raise StartFailed(f"kind: {spec.kind} is not served by {self.name}, only container")
        return spec


def declares(reset: ResetSpec) -> bool:
    """Whether the daemon resets by what a spec declares, and then answers for everything that can be written.

    Without, ``auto`` is ``overlay``: a new sandbox costs most here, and to drop what was written is one.
    """
    return reset.method in ("paths", "git", "command") or (
        reset.method == "auto" and bool(reset.paths or reset.git or reset.command)
    )


def reset_config(reset: ResetSpec) -> dict[str, object]:
    """A spec's reset in the daemon's words."""
    return {
        "method": reset.method,
        "paths": list(reset.paths),
        "git": reset.git or "",
        "command": list(reset.command),
        "timeoutSeconds": reset.timeout_s,
    }


async def _post_mortem(member: Member) -> str | None:
    sandbox = _sandbox(member)
    if not await sandbox.dies_within(DYING_S):
        return None
    assert isinstance(member.spec, ContainerSpec)
    return f"the sandbox died: {sandbox.cause(member.spec.memory_mb)}"


def cause_in(group: Group, last_words: str, memory_mb: int) -> str:
    """Why a sandbox with a control group of its own died."""
    if group.oom_kills():
        return f"oom, more than its {memory_mb} MiB were needed"
    return last_words or "its first process was killed"


def _sandbox(member: Member) -> Sandbox:
    assert isinstance(member.handle, Sandbox), "a member of another runner"
    return member.handle


def _admin(sandbox: Sandbox) -> SandboxAdmin:
    assert sandbox.admin is not None, "only a sandbox that has started is a member's"
    return sandbox.admin.open()


async def _remove(sandbox: Sandbox) -> None:
    if sandbox.removal is None or (sandbox.removal.done() and _failed(sandbox.removal)):
        sandbox.removal = asyncio.get_running_loop().create_task(_hang_up_and_remove(sandbox))
    await asyncio.shield(sandbox.removal)


async def _hang_up_and_remove(sandbox: Sandbox) -> None:
    if sandbox.admin is not None:
        await sandbox.admin.close()
    await sandbox.remove()


def _failed(task: "asyncio.Task[None]") -> bool:
    return task.cancelled() or task.exception() is not None


async def removed(removal: Coroutine[Any, Any, None]) -> None:
    """Remove a sandbox that something else went wrong with: what fails now is told, and hides no reason."""
    try:
        await removal
    except (OSError, TimeoutError) as error:
        logger.error("a sandbox could not be removed: %s", error)
