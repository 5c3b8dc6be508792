"""APIs of somebody else as members: for each, a gateway that holders use like the API.

A holder is an ordinary client of the API, with ``lease.base_url`` as its base URL and ``lease.info.token`` as
its key. Each pool has one member, which all holders share, and with it the limits.

Guarantees (beside those of every runner, see ``base``):
1. Only tokens of live leases are admitted. A request whose lease ends is cut off. Nobody tells a runner of a
   release: a token that was released while others hold the member works until its TTL is over.
2. What was counted and what was spent, and which keys are set aside, belong to the API: they outlast a member
   that is stopped because nobody holds it, and end with this runner. Pools of equal specs share them.
3. Keys are read where the credentials point. None is handed out, logged or passed on to another process.
   Requests with a key that works read no Secret.
4. An API that does not answer is the breaker's matter. The member is alive while its gateway listens.
5. Where addresses outlive the process, a gateway that just began tells whoever it does not know to come again
   for ``GRACE_S``, and not that their lease is over: they may hold one that the engine is yet to hear of.

Not here: what becomes of a request (``proxy``), where it comes in (``door``).
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from aiohttp import web

from agentfly.resources.errors import Infra
from agentfly.resources.names import pool_of
from agentfly.resources.runners.base import Member, Vitals
from agentfly.resources.runners.door import Door, LoopbackDoor
from agentfly.resources.runners.external.account import Refused, Usage
from agentfly.resources.runners.external.gate import Gate, ReadSecret
from agentfly.resources.runners.external.proxy import Answering, Proxy, TornError, client
from agentfly.resources.runners.external.wire import bearer, check_base_url, refusal
from agentfly.resources.spec import ExternalAPISpec, ResourceSpec

logger = logging.getLogger(__name__)

GRACE_S = 30.0  # a holder's next heartbeat comes in a third of its TTL, which is seldom above 90 s


@dataclass(slots=True)
class _Hold:
    expires: float
    bounds: set[asyncio.Timeout] = field(default_factory=set)  # of its requests

    def until(self, expires: float) -> None:
        """The lease ends then, and so do its requests."""
        self.expires = expires
        for bound in self.bounds:
            if not bound.expired():  # else it is being cut off already
                bound.reschedule(expires)


class Gateway:
    """The server of one member, and who may use it."""

    def __init__(self, spec: ExternalAPISpec, gate: Gate, door: Door) -> None:
        self._spec = spec
        self._gate = gate
        self._door = door
        self._holds: dict[str, _Hold] = {}
        self._life = AsyncExitStack()
        self._proxy: Proxy | None = None
        self._prefix = ""
        self._known_from = 0.0  # when all who have a lease must have been heard of

    @property
    def alive(self) -> bool:
        """True from ``open`` to ``close``."""
        return self._proxy is not None

    def usage(self) -> Usage:
        """What all holders together used so far."""
        return self._gate.usage()

    async def open(self, name: str) -> str:
        """Listen under this name; the address."""
        async with AsyncExitStack() as life:
            session = await life.enter_async_context(client())
            opened = await self._door.open(name, self._serve)
            life.push_async_callback(opened.close)
            self._life = life.pop_all()
        self._prefix = opened.prefix
        self._known_from = asyncio.get_running_loop().time() + (GRACE_S if self._door.lasts else 0.0)
        self._proxy = Proxy(self._spec, self._gate, session)
        return opened.address

    async def close(self) -> None:
        """Cut everybody off and listen no more."""
        self._proxy = None
        self.drop()
        await self._life.aclose()

    def hold(self, token: str, expires: float) -> None:
        """Admit a token until then. Expired ones are forgotten."""
        now = asyncio.get_running_loop().time()
        self._holds = {each: hold for each, hold in self._holds.items() if hold.expires > now or hold.bounds}
        self._holds.setdefault(token, _Hold(expires)).until(expires)

    def drop(self) -> None:
        """Admit nobody any more."""
        for hold in self._holds.values():
            hold.until(asyncio.get_running_loop().time())
        self._holds.clear()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answering = Answering(request, self._prefix)
        try:
            return await self._leased(answering)
        except Refused as error:
            if answering.begun is None:
                return refusal(error)
            why = error.message
        except TornError as error:
            why = str(error)
        logger.info("%s %s: the answer breaks off: %s", request.method, request.path, why)
        answering.tear()
        return answering.begun or web.Response()

    async def _leased(self, answering: Answering) -> web.StreamResponse:
        hold = self._holds.get(bearer(answering.request.headers))
        if self._proxy is None or (hold is None and asyncio.get_running_loop().time() < self._known_from):
            raise Refused("busy", "the gateway just began, and hears who has a lease", retry_after=1.0)
        if hold is None:
            raise _not_leased()
        try:
            async with asyncio.timeout_at(hold.expires) as bound:  # of an expired one: at its first wait
                hold.bounds.add(bound)
                try:
                    return await self._proxy.forward(answering)
                finally:
                    hold.bounds.discard(bound)
        except TimeoutError:
            raise _not_leased() from None


def _not_leased() -> Refused:
    return Refused(
        "lease",
        "the token is of no live lease",
        hints=("use lease.info.token as the key, and acquire again if the lease was released or lost",),
    )


class ExternalAPIRunner:
    """Keeps gateways, and for each API what was spent and which limits are in force.

    Args:
        door: where holders come in; None is the loopback.
        read_secret: the value of ``NAME/KEY``, for credentials that are Secrets; None where there are none.
    """

    name = "external-api"

    def __init__(self, door: Door | None = None, read_secret: ReadSecret | None = None) -> None:
        self._door = door or LoopbackDoor()
        self._read_secret = read_secret
        self._gates: dict[str, Gate] = {}

    def check(self) -> str | None:
        """See ``Runner.check``."""
        return None

    async def start(self, spec: ResourceSpec, member_id: str) -> Member:
        """See ``Runner.start``. Asks the API nothing."""
        assert isinstance(spec, ExternalAPISpec)
        check_base_url(spec.base_url)
        gate = self._gates.setdefault(spec.identity(), Gate(spec, self._read_secret))
        await gate.open()
        gateway = Gateway(spec, gate, self._door)
        name = pool_of(member_id) if self._door.lasts else member_id  # a pool has one gateway at a time
        return Member(member_id, spec, 1, await gateway.open(name), handle=gateway)

    async def probe(self, member: Member) -> Vitals:
        """See ``Runner.probe``."""
        return Vitals(alive=_gateway(member).alive)

    async def lease(
        self, member: Member, owner: str, attempt: int, token: str, ttl_s: float, note: str = ""
    ) -> None:
        """See ``Runner.lease``. A lease that ran out may be had again: nothing of it was lost."""
        gateway = _gateway(member)
        if not gateway.alive:
            raise Infra(f"member {member.id}: was stopped")
        gateway.hold(token, asyncio.get_running_loop().time() + ttl_s)

    async def reset(self, member: Member) -> Member | None:
        """See ``Runner.reset``. A gateway keeps nothing of its holders but their leases, which end."""
        gateway = _gateway(member)
        if not gateway.alive:
            return None
        gateway.drop()
        return replace(member, incarnation=member.incarnation + 1)

    async def stop(self, member: Member) -> None:
        """See ``Runner.stop``."""
        await _gateway(member).close()


def _gateway(member: Member) -> Gateway:
    assert isinstance(member.handle, Gateway), "a member of another runner"
    return member.handle
