"""Sandboxes as pods: one pod for each member, with the daemon as its first process.

Guarantees (beside those of every runner, see ``base``):
1. A member's daemon was seen to know this broker's key, under the member's own name, before it is a member.
   It took a token signed by that key for that name before anybody has it: without, there is no lease.
2. A pod is used in one life of its daemon only: when that is over, so is the lease, whatever runs there.
3. A lease, a renewal and a reset ask nothing of the API server.
4. ``find`` says how a pod is only by the word of its daemon, and of one that knows this broker's key. A pod
   that starts is waited for, and one that is silent for as long as somebody may hold it; what is of no use is
   removed.

Not here: pods and their ends (``lives``), what they look like (``pod``), the daemon (``agentfly.sandbox``).
"""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentfly.errors import AgentflyError
from agentfly.kube import Obj
from agentfly.resources.errors import Infra, LeaseLost, ResourceError, StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.runners.base import Found, Member, Unclean, Vitals
from agentfly.resources.runners.kubernetes.facts import Failed, Ready, look
from agentfly.resources.runners.kubernetes.identity import Recalled, recall
from agentfly.resources.runners.kubernetes.lives import Life, PodCluster, PodLives, url
from agentfly.resources.runners.kubernetes.pod import PORT, sandbox_pod
from agentfly.resources.runners.kubernetes.signer import Signer
from agentfly.resources.runners.sandboxd.kept_admin import KeptAdmin
from agentfly.resources.runners.sandboxd.runner import declares
from agentfly.resources.spec import ContainerSpec, ResourceSpec
from agentfly.sandbox import Met, Owner, SandboxError, SandboxLeaseLost, SandboxUnreachable, meet, meet_all

logger = logging.getLogger(__name__)

READY_S = 60.0
"""From a running container to a daemon that answers, beyond what its method of reset may take."""
_BY_WORTH = ("overlay", "overlay-shared-pid", "scratch", "recreate")
"""Methods of reset that need nothing declared, from the best on; declared ones come before ``scratch``."""
_WHY_LENGTH = 1000
_PAUSES_S = (0.02, 0.05, 0.1, 0.2, 0.5)
_NO_LEASE = ("Busy", "Dirty", "Unauthorized", "Forbidden")
"""The daemon's words for: others have it, nobody has it any more, and: I am not the one that you knew."""


@dataclass(eq=False)
class _Sandbox:
    life: Life
    admin: KeptAdmin
    removed: bool = False


class KubernetesRunner:
    """Starts sandboxes in a cluster. Close it at the end: the members live on.

    Args:
        sandboxd_image: the image with the daemon.
    """

    name = "kubernetes"

    def __init__(self, cluster: PodCluster, signer: Signer, *, sandboxd_image: str) -> None:
        self._lives = PodLives(cluster)
        self._signer = signer
        self._sandboxd_image = sandboxd_image
        self._sandboxes: set[_Sandbox] = set()  # with an open connection

    def check(self) -> str | None:
        """See ``Runner.check``."""
        return None

    async def close(self) -> None:
        """Hang up, and follow the pods no more."""
        sandboxes, self._sandboxes = self._sandboxes, set()
        await asyncio.gather(*(sandbox.admin.close() for sandbox in sandboxes))
        await self._lives.close()

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """See ``Runner.start``. It takes as long as the cluster needs to find room, at most 14 minutes."""
        return await self._start(_container(spec), member_id, incarnation=1)

    async def probe(self, member: Member) -> Vitals:
        """See ``Runner.probe``."""
        sandbox = _sandbox(member)
        if sandbox.removed or self._lives.death(sandbox.life) is not None:
            return Vitals(alive=False)
        try:
            await sandbox.admin.open().holding()
        except SandboxUnreachable:
            return Vitals(alive=self._lives.death(sandbox.life) is None)
        except SandboxError:
            return Vitals(alive=False)  # not the daemon that knew us
        return Vitals(alive=True)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """See ``Runner.lease``."""
        sandbox = _sandbox(member)
        if (why := self._death(sandbox)) is not None:
            raise LeaseLost(f"member {member.id}: {why}", incarnation=member.incarnation)
        try:
            await sandbox.admin.open().lease(owner, attempt, token, ttl_s, note)
        except SandboxUnreachable as error:
            raise Infra(f"member {member.id}: {self._death(sandbox) or error}") from error
        except (SandboxError, SandboxLeaseLost) as error:
            if isinstance(error, SandboxError) and error.code not in _NO_LEASE:
                raise Infra(f"member {member.id}: {error}") from error
            raise LeaseLost(f"member {member.id}: {error}", incarnation=member.incarnation) from error

    async def reset(self, member: Member) -> Member | None:
        """See ``Runner.reset``: the same pod where that was verified, else a new one under the same name."""
        sandbox, spec = _sandbox(member), _container(member.spec)
        if sandbox.removed:
            return None
        found = await self._cleaned(member, spec)
        if isinstance(found, int):
            return replace(member, incarnation=found)
        logger.info("member %s: not clean after its lease (%s), starting it afresh", member.id, found)
        try:
            await self.stop(member)
            return await self._start(spec, member.id, incarnation=member.incarnation + 1)
        except (StartFailed, Infra) as error:
            logger.warning("member %s: cannot be reset: %s", member.id, error)
            return None

    async def stop(self, member: Member) -> None:
        """See ``Runner.stop``."""
        sandbox = _sandbox(member)
        sandbox.removed = True
        self._sandboxes.discard(sandbox)
        await sandbox.admin.close()
        try:
            await self._lives.stop(sandbox.life.name, sandbox.life.uid)
        except Infra as error:
            raise Infra(f"member {member.id}: {error.message}") from error

    async def find(self) -> list[Found]:
        """See ``Finder.find``."""
        found, running = [], list[tuple[Life, Recalled]]()
        for pod in await self._lives.strangers():
            if isinstance(each := self._seen(pod), Found):
                found.append(each)
            elif each is not None:
                running.append(each)
        for (life, recalled), met in zip(running, await self._met_all(running), strict=True):
            if (each := self._heard(life, recalled, met)) is not None:
                found.append(each)
        return found

    async def resume(self, found: Found, patience_s: float) -> Found:
        """See ``Finder.resume``."""
        member, spec = found.member, _container(found.member.spec)
        life = await self._lives.ready(_sandbox(member).life)
        seconds = max(READY_S + spec.reset.timeout_s, patience_s)
        try:
            async with asyncio.timeout(seconds):
                met = await self._meet(life)
        except (SandboxError, SandboxUnreachable, TimeoutError) as error:
            reason = self._lives.death(life) or str(error) or f"NotReady: no answer in {seconds:g} s"
            raise StartFailed(f"member {member.id}: {reason}", reason=reason) from error
        return self._recovered(life, Recalled(found.pool, member.id, spec), met)

    def leave(self) -> None:
        """See ``Finder.leave``."""
        self._lives.leave()

    def _seen(self, pod: Obj) -> Found | tuple[Life, Recalled] | None:
        """What a pod is as far as the API server knows: of those that run, the daemon is to be asked."""
        meta = pod["metadata"]
        try:
            recalled = recall(pod)
            if not isinstance(recalled.spec, ContainerSpec):
                return None  # another runner's
            state = look(pod)
            if isinstance(state, Failed):
                raise StartFailed(state.why)
        except ResourceError as error:
            self._lives.discard(meta["name"], meta["uid"], str(error))
            return None
        life = self._lives.adopt(meta["name"], meta["uid"], getattr(state, "address", ""))
        return (life, recalled) if isinstance(state, Ready) else _unknown(life, recalled)

    async def _met_all(self, running: Sequence[tuple[Life, Recalled]]) -> list[Met | AgentflyError]:
        """What the daemons say. In a thread, because an event loop has its own work with each connection."""
        stopped = threading.Event()
        whom = ((url(life.address, PORT), self._owner(life)) for life, _ in running)
        try:
            return await asyncio.to_thread(meet_all, whom, stopped)
        finally:
            stopped.set()

    def _heard(self, life: Life, recalled: Recalled, met: Met | AgentflyError) -> Found | None:
        if isinstance(met, AgentflyError):
            death = self._lives.death(life)
            if isinstance(met, SandboxUnreachable) and death is None:
                return _unknown(life, recalled)
            self._lives.discard(life.name, life.uid, death or str(met))
            return None
        return self._recovered(life, recalled, met)

    def _recovered(self, life: Life, recalled: Recalled, met: Met) -> Found:
        held = met[1]
        return Found(
            recalled.pool, self._member(life, recalled.spec, met), held.state, held.note, held.expires_in_s
        )

    async def _start(self, spec: ContainerSpec, member_id: str, *, incarnation: int) -> Member:
        key, image = self._signer.public_key, self._sandboxd_image
        life = await self._lives.start(
            member_id,
            lambda start: sandbox_pod(start, spec, admin_key=key, sandboxd_image=image),
            incarnation=incarnation,
        )
        seconds = READY_S + spec.reset.timeout_s
        try:
            async with asyncio.timeout(seconds):
                return self._member(life, spec, await self._meet(life))
        except BaseException as error:
            reason = self._lives.death(life) or str(error) or f"NotReady: no answer in {seconds:g} s"
            await finished(self._lives.removed(life))
            if isinstance(error, (SandboxError, SandboxUnreachable, TimeoutError)):
                raise StartFailed(f"member {member_id}: {reason}", reason=reason) from error
            raise

    def _member(self, life: Life, spec: ResourceSpec, met: Met) -> Member:
        """The member of a pod whose daemon answers and knows us."""
        (health, held), address = met, url(life.address, PORT)
        sandbox = _Sandbox(life, KeptAdmin(address, partial(self._owner(life).token, health.boot)))
        self._sandboxes.add(sandbox)
        return Member(
            life.name,
            spec,
            held.incarnation,
            address,
            handle=sandbox,
            reset_method=health.reset_method or "",
            reset_reason=why_not_better(spec, health.reset_method or "", health.reset_refused),
        )

    def _owner(self, life: Life) -> Owner:
        return Owner(life.name, self._signer.public_key, partial(self._signer.token, life.name))

    async def _meet(self, life: Life) -> Met:
        """What the daemon says of itself, once it answers."""
        for pause in (*_PAUSES_S, *([_PAUSES_S[-1]] * 1000)):
            try:
                return await meet(url(life.address, PORT), self._owner(life))
            except SandboxUnreachable as error:
                if (why := self._lives.death(life)) is not None:
                    raise SandboxUnreachable(why) from error
            await asyncio.sleep(pause)
        raise SandboxUnreachable(f"sandbox {life.address}: does not answer")

    async def _cleaned(self, member: Member, spec: ContainerSpec) -> int | str:
        """Clean the sandbox: its incarnation if it was verified, else why it is not to be used."""
        sandbox = _sandbox(member)
        if spec.reset.method == "recreate":
            return "its spec wants a new one"
        try:
            report = await sandbox.admin.open().reset(spec.reset.timeout_s if declares(spec.reset) else 0.0)
        except (SandboxUnreachable, SandboxError) as error:
            return self._death(sandbox) or error.message
        if report.clean:
            return report.incarnation or member.incarnation + 1
        reason = report.reason or "it does not say why"
        if member.keep_unclean:
            raise Unclean(f"member {member.id}: {reason}")
        return reason

    def _death(self, sandbox: _Sandbox) -> str | None:
        return "it was stopped" if sandbox.removed else self._lives.death(sandbox.life)


def why_not_better(spec: ResourceSpec, method: str, refused: Mapping[str, str]) -> str:
    """Why a daemon that was to take the best method took this one; "" if it is the best, or was asked for."""
    if not isinstance(spec, ContainerSpec) or spec.reset.method != "auto":
        return ""
    better = [each for each in _BY_WORTH[: _worth(method)] if each in refused]
    return "; ".join(f"{each}: {refused[each]}" for each in better)[:_WHY_LENGTH]


def _worth(method: str) -> int:
    return _BY_WORTH.index(method) if method in _BY_WORTH else _BY_WORTH.index("scratch")


def _unknown(life: Life, recalled: Recalled) -> Found:
    logger.info("member %s: does not answer yet, and is waited for", life.name)
    silent = _Sandbox(life, KeptAdmin("", lambda: ""))
    return Found(recalled.pool, Member(life.name, recalled.spec, 1, "", handle=silent), "unknown")


def _container(spec: ResourceSpec) -> ContainerSpec:
    if not isinstance(spec, ContainerSpec):
        raise StartFailed(f"kind: {spec.kind} is not served by kubernetes, only container")
    return spec


def _sandbox(member: Member) -> _Sandbox:
    assert isinstance(member.handle, _Sandbox), "a member of another runner"
    return member.handle
