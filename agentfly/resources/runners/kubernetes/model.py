"""vLLM servers as pods: one pod for each member, which many hold at once.

Guarantees (beside those of every runner, see ``base``):
1. A member was seen to answer a real request before it is handed out.
2. A lease is lost with the pod, and never by time.
3. ``find`` gives a server that answers, or may yet; who holds it, only its holders know.

``reset`` aborts what runs and drops cached prefixes, verified by the server; the weights stay as they are.

Not here: pods and their ends (``lives``), what they look like (``model_pod``).
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace

import aiohttp

from agentfly.kube import Obj
from agentfly.resources.errors import Infra, LeaseLost, ResourceError, StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.runners import vllm
from agentfly.resources.runners.base import Found, Member, Vitals
from agentfly.resources.runners.kubernetes.facts import Failed, Ready, look
from agentfly.resources.runners.kubernetes.identity import recall
from agentfly.resources.runners.kubernetes.lives import Life, PodCluster, PodLives, url
from agentfly.resources.runners.kubernetes.model_pod import PORT, STOP_GRACE_S, model_pod
from agentfly.resources.spec import ModelServiceSpec, ResourceSpec

logger = logging.getLogger(__name__)

READY_S = 60.0
"""From a pod that is ready to a server that answers."""
_PAUSE_S = 0.5
_SILENT = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(eq=False)
class _Server:
    life: Life
    removed: bool = False


class ModelServicePodRunner:
    """Starts vLLM in a cluster. Close it at the end: the members live on."""

    name = "model-service-pod"

    def __init__(self, cluster: PodCluster) -> None:
        self._lives = PodLives(cluster)

    def check(self) -> str | None:
        """See ``Runner.check``."""
        return None

    async def close(self) -> None:
        """Follow the pods no more."""
        await self._lives.close()

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """See ``Runner.start``. Takes as long as the cluster needs for room, the image and the model."""
        if not isinstance(spec, ModelServiceSpec):
            raise StartFailed(f"kind: {spec.kind} is not served by {self.name}, only model-service")
        life = await self._lives.start(member_id, lambda start: model_pod(start, spec))
        address = url(life.address, PORT)
        try:
            await vllm.first_request(address)
        except BaseException as error:
            reason = (
                self._lives.death(life)
                or f"NotReady: its first request: {str(error) or type(error).__name__}"
            )
            await finished(self._lives.removed(life))
            if isinstance(error, (vllm.Refused, *_SILENT)):
                raise StartFailed(f"member {member_id}: {reason}", reason=reason) from error
            raise
        return self._member(life, spec)

    async def probe(self, member: Member) -> Vitals:
        """See ``Runner.probe``."""
        if self._death(member) is not None:
            return Vitals(alive=False)
        try:
            return Vitals(alive=await vllm.healthy(member.address))
        except _SILENT:
            return Vitals(alive=self._death(member) is None)  # its own probe ends one that is silent for long

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """See ``Runner.lease``. Many hold a server at once."""
        if (why := self._death(member)) is not None:
            raise LeaseLost(f"member {member.id}: {why}", incarnation=member.incarnation)

    async def reset(self, member: Member) -> Member | None:
        """See ``Runner.reset``."""
        if _server(member).removed:
            return None
        try:
            await vllm.clear(member.address)
        except (vllm.Refused, ValueError, *_SILENT) as error:
            why = self._death(member) or str(error) or type(error).__name__
            logger.warning("member %s: cannot be reset: %s", member.id, why)
            return None
        return replace(member, incarnation=member.incarnation + 1)

    async def stop(self, member: Member) -> None:
        """See ``Runner.stop``."""
        server = _server(member)
        server.removed = True
        try:
            await self._lives.stop(server.life.name, server.life.uid, STOP_GRACE_S)
        except Infra as error:
            raise Infra(f"member {member.id}: {error.message}") from error

    async def find(self) -> list[Found]:
        """See ``Finder.find``."""
        pods = await self._lives.strangers()
        found = await asyncio.gather(*(self._found(pod) for pod in pods))
        return [each for each in found if each is not None]

    async def resume(self, found: Found, patience_s: float) -> Found:
        """See ``Finder.resume``."""
        life = await self._lives.ready(_server(found.member).life)
        address = url(life.address, PORT)
        try:
            async with asyncio.timeout(max(READY_S, patience_s)):
                await self._answers(life, address)
            await vllm.first_request(address)
        except (vllm.Refused, *_SILENT) as error:
            reason = self._lives.death(life) or f"NotReady: {str(error) or type(error).__name__}"
            raise StartFailed(f"member {life.name}: {reason}", reason=reason) from error
        return replace(found, member=self._member(life, found.member.spec), state="free")

    async def _answers(self, life: Life, address: str) -> None:
        """Wait until a server says that it works, or its pod ends."""
        while True:
            try:
                if await vllm.healthy(address) or self._lives.death(life) is not None:
                    return
            except _SILENT:
                if self._lives.death(life) is not None:
                    raise
            await asyncio.sleep(_PAUSE_S)

    def leave(self) -> None:
        """See ``Finder.leave``."""
        self._lives.leave()

    def _member(self, life: Life, spec: ResourceSpec) -> Member:
        address = url(life.address, PORT) if life.address else ""
        return Member(life.name, spec, 1, address, handle=_Server(life))

    async def _found(self, pod: Obj) -> Found | None:
        meta = pod["metadata"]
        try:
            recalled = recall(pod)
        except ResourceError:
            return None  # nobody's, and removed by who finds sandboxes
        if not isinstance(recalled.spec, ModelServiceSpec):
            return None
        state = look(pod)
        if isinstance(state, Failed):
            self._lives.discard(meta["name"], meta["uid"], state.why)
            return None
        life = self._lives.adopt(meta["name"], meta["uid"], getattr(state, "address", ""))
        if isinstance(state, Ready):
            with contextlib.suppress(*_SILENT):
                if not await vllm.healthy(url(life.address, PORT)):
                    self._lives.discard(life.name, life.uid, "it does not say that it works")
                    return None
                return Found(recalled.pool, self._member(life, recalled.spec), "free")
        logger.info("member %s: does not answer yet, and is waited for", life.name)
        return Found(recalled.pool, self._member(life, recalled.spec), "unknown")

    def _death(self, member: Member) -> str | None:
        server = _server(member)
        return "it was stopped" if server.removed else self._lives.death(server.life)


def _server(member: Member) -> _Server:
    assert isinstance(member.handle, _Server), "a member of another runner"
    return member.handle
