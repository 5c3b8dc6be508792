"""The resource engine: carries out what its pools decide and tells holders; it decides nothing itself.

Guarantees:
1. The same (owner, key) of the same pool is the same live lease. Under a key that was named, another pool is
   ``SpecMismatch``; under the default key, each pool has its own.
2. A lease that was lost stays lost for its owner until it is released or a later attempt asks, for at least
   an hour (``LOST_MEMORY_S``): no blank member in its place. An older attempt can neither acquire nor disturb
   what a newer one holds.
3. However an acquire ends, it ends with its leases or without a trace.
4. ``acquire_many`` enters all its queues at one moment: of two such calls one is wholly before the other in
   every queue, whatever the order of their requests, so they cannot wait for each other. All or nothing.
5. A lease whose TTL passes without a heartbeat is lost, and its member is reset before anybody else has it.
6. ``close`` stops every member in bounded time, and raises ``Infra`` with those that did not stop.
7. An engine belongs to no event loop: while nothing is in progress, it may be used from another one.

Not here: who is served and when (``pool``), the tasks of members (``members``), handles (``lease``).
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from agentfly.resources.actions import Action, Grant, Lost, Probe, Reject, Reset, Start, Stop
from agentfly.resources.claims import DEFAULT_KEY, Claim, Claims, Entry
from agentfly.resources.errors import Infra, LeaseLost, PoolNotFound, ResourceError
from agentfly.resources.lease import BEATS_PER_TTL, Holdings, Lease, LeaseInfo, PoolStatus, Request, Scope
from agentfly.resources.members import RESET_S, Members, describe
from agentfly.resources.pool import Pool
from agentfly.resources.report import check_room, late, pool_status, start_failed
from agentfly.resources.runners.base import Runner
from agentfly.resources.spec import PoolSpec, ResourceSpec, parse_spec

logger = logging.getLogger(__name__)

CLOSE_S = 60.0  # all members stop side by side: this bounds one stop and one retry
SPEC_POOL_MAX = 8  # members of a pool that exists only because somebody acquired by spec


class ResourceEngine:
    """Layer IV in this process. Use it as ``async with``, or call ``close``."""

    def __init__(self, runners: Sequence[Runner], pools: Sequence[PoolSpec] = ()) -> None:
        self._runners = {runner.name: runner for runner in runners}
        self._pools: dict[str, Pool] = {}
        self._claims = Claims()
        self._members = Members(self._turn)
        self._holdings = Holdings(self)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        for pool in pools:
            self.add_pool(pool)

    # Life.

    async def __aenter__(self) -> Self:
        self._turn()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def add_pool(self, pool: PoolSpec) -> None:
        """Serve a pool from now on. Adding an equal one again changes nothing.

        Raises:
            ResourceError: another pool has this name, or its kind cannot run here.
        """
        if self._closed:
            raise ResourceError(f"pool {pool.name}: the engine is closed")
        if pool.name in self._pools:
            if self._pools[pool.name].spec != pool:
                raise ResourceError(f"pool {pool.name}: exists already with another specification")
            return
        wanted = pool.resource.runner
        runner = self._runners.get(wanted)
        reason = "there is no such runner" if runner is None else runner.check()
        if reason is not None:
            raise ResourceError(f"pool {pool.name}: runner {wanted} cannot work here: {reason}")
        prefix = f"{pool.name}-{secrets.token_hex(2)}"  # names of members that an earlier process left behind
        self._pools[pool.name] = Pool(pool, shared=pool.shared, prefix=prefix)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # its first members are started when the engine is entered
        self._turn()

    async def close(self) -> None:
        """Stop every member and fail every waiter. May be called again.

        Raises:
            Infra: some members could not be stopped; the message names them.
        """
        self._closed = True
        for pool in self._pools.values():
            pool.close()
        for claim in self._claims:
            self._end(claim, ResourceError(f"pool {claim.pool.spec.name}: the engine was closed"))
        self._turn()
        closing = asyncio.ensure_future(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                cancelled = error  # members are stopped however often the caller is cancelled
        if cancelled is not None:
            raise cancelled
        closing.result()

    async def _close(self) -> None:
        await self._holdings.close()
        left = await self._members.close(CLOSE_S)
        if self._timer is not None:
            self._timer.cancel()
        if left:
            raise Infra(f"members {', '.join(left)}: not stopped in {CLOSE_S:g} s")

    # What holders ask for.

    async def acquire(
        self,
        pool_or_spec: str | ResourceSpec,
        owner: str,
        *,
        key: str = DEFAULT_KEY,
        scope: Scope = "rollout",
        attempt: int = 0,
        deadline: float = 600.0,
    ) -> Lease:
        """The owner's live lease under this key, or a new one; its heartbeats run until its release."""
        requests = [Request(pool_or_spec, key, scope)]
        return (await self.acquire_many(requests, owner, attempt=attempt, deadline=deadline))[0]

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[Lease]:
        """Leases for all requests, in their order, or none."""
        infos = await self.claim_many(requests, owner, attempt=attempt, deadline=deadline)
        return [self._holdings.hold(info) for info in infos]

    async def claim_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[LeaseInfo]:
        """As ``acquire_many``, without handles: the caller sends the heartbeats."""
        asked = [(self._pool(request), request.key) for request in requests]
        check_room(asked)
        entries: list[Entry] = []
        try:
            for pool, key in asked:
                entries.append(self._enter(pool, key, owner, attempt))
            self._turn()
            await self._settle(entries, deadline)
            for entry in entries:
                entry.claim.delivered = True
            return [entry.future.result() for entry in entries]
        finally:
            self._leave(entries)

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        """End the lease; a ``dirty`` member is not used again. Unknown leases are ignored."""
        claim = self._claims.of_lease(lease_id)
        if claim is not None:
            self._end(claim, LeaseLost(f"lease {lease_id}: was released"), dirty=dirty)
            self._turn()

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        """End all that the owner holds or waits for; with ``attempt``, only up to that attempt."""
        for claim in self._claims:
            if claim.owner == owner and (attempt is None or claim.attempt <= attempt):
                self._end(claim, LeaseLost(f"owner {owner}: released all that it waited for"))
        self._turn()

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        """Renew leases; False for each that is lost. A member that does not answer has until its TTL.

        Answers within a third of the shortest TTL asked for, so that no slow member delays the others' next.
        """
        claims = {lease_id: self._claims.of_lease(lease_id) for lease_id in lease_ids}
        renewals = {task for claim in claims.values() if claim and (task := self._renewal(claim))}
        if renewals:
            shortest = min(claim.pool.spec.lease_ttl_s for claim in claims.values() if claim)
            await asyncio.wait(renewals, timeout=shortest / BEATS_PER_TTL)  # the rest goes on by itself
        return {lease_id: claim is not None and claim.live for lease_id, claim in claims.items()}

    async def reset(self, lease_id: str) -> LeaseInfo:
        """The lease with a pristine member: its own, reset, or else another."""
        claim = self._claims.of_lease(lease_id)
        if claim is None:
            raise LeaseLost(f"lease {lease_id}: is over")
        if claim.lost is not None:
            raise claim.lost_error()
        if claim.pool.shared:
            raise ResourceError(f"pool {claim.pool.spec.name}: a shared member is not reset for one holder")
        if claim.pool.clean(claim.ticket):
            claim.info, claim.token = None, secrets.token_hex(16)
        entry = claim.enter()
        self._turn()
        try:
            await self._settle([entry], RESET_S)
            return entry.future.result()
        finally:
            self._leave([entry])

    async def status(self) -> dict[str, PoolStatus]:
        """The counts of each pool, by name."""
        return self.pool_status()

    def pool_status(self) -> dict[str, PoolStatus]:
        """As ``status``, for callers that cannot wait."""
        return {name: pool_status(pool) for name, pool in self._pools.items()}

    # Claims.

    def _pool(self, request: Request) -> Pool:
        if self._closed:
            raise ResourceError("resource engine: is closed")
        wanted = request.pool_or_spec
        shared = request.scope == "global"
        pool = self._pools.get(wanted) if isinstance(wanted, str) else self._pool_of(wanted, shared)
        if pool is None:
            known = ", ".join(sorted(self._pools)) or "none"
            raise PoolNotFound(f"pool {wanted}: does not exist", hints=(f"pools that do: {known}",))
        if shared and not pool.shared:
            raise ResourceError(
                f"pool {pool.spec.name}: is not shared, as scope global needs: a member has one holder",
                hints=('use scope="rollout"', "or set spec.scope of the pool to Global"),
            )
        return pool

    def _pool_of(self, spec: ResourceSpec, shared: bool) -> Pool:
        identity = spec.identity()
        for pool in self._pools.values():
            if pool.spec.resource.identity() == identity and pool.shared == shared:
                return pool
        name = f"{'shared' if shared else 'spec'}-{identity}"
        resource = parse_spec(spec.model_dump())
        self.add_pool(PoolSpec(name=name, resource=resource, max=SPEC_POOL_MAX, shared=shared))
        return self._pools[name]

    def _enter(self, pool: Pool, key: str, owner: str, attempt: int) -> Entry:
        claim = self._claims.find(owner, key, pool)
        if claim is not None and claim.attempt < attempt:
            self._end(claim, LeaseLost(f"owner {owner}: attempt {attempt} has begun"))
            self._turn()  # its member goes to its reset even if there is no room for the new attempt
            claim = None
        if claim is None:
            claim = self._claims.open(pool, key, owner, attempt)
        claim.check(pool, attempt)
        entry = claim.enter()
        self._renewal(claim)  # what is held already is asked whether it lives before it is given out again
        return entry

    async def _settle(self, entries: Sequence[Entry], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        pending = {entry.future for entry in entries}
        beat = min((entry.claim.pool.spec.lease_ttl_s for entry in entries), default=0.0) / BEATS_PER_TTL
        due = loop.time() + beat
        while pending:
            timeout = max(min(end, due) - loop.time(), 0)
            _, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            for entry in entries:
                if entry.future.done():
                    entry.future.result()
                    if entry.claim.lost is not None:
                        raise entry.claim.lost_error()
                elif loop.time() >= end:
                    raise late(entry.claim, deadline)
            if loop.time() >= due:
                due = loop.time() + beat
                for entry in entries:
                    if entry.future.done():
                        self._renewal(
                            entry.claim
                        )  # what came early must not expire while the rest is waited for

    def _leave(self, entries: Iterable[Entry]) -> None:
        # Synchronous, on purpose: nothing can interrupt the way out.
        for entry in entries:
            if entry.leave():
                self._end(entry.claim, LeaseLost(f"lease {entry.claim.lease_id}: nobody waits for it"))
                self._turn()

    def _end(self, claim: Claim, error: ResourceError, *, dirty: bool = False) -> None:
        self._claims.end(claim)
        self._holdings.drop(claim.lease_id)
        claim.pool.withdraw(claim.ticket, _now(), dirty=dirty)
        claim.fail(error)

    def _lose(self, claim: Claim | None, reason: str) -> None:
        if claim is None:
            return
        logger.warning("lease %s of %s: lost: %s", claim.lease_id, claim.owner, reason)
        self._claims.lose(claim, reason, _now())
        claim.fail(claim.lost_error())

    # Actions.

    def _turn(self) -> None:
        now = _now()
        for pool in list(self._pools.values()):
            for action in pool.decide(now):
                self._carry_out(pool, action)
        if self._timer is not None:
            self._timer.cancel()
        wakes = [wake for pool in self._pools.values() if (wake := pool.wake_at(now)) is not None]
        self._timer = asyncio.get_running_loop().call_at(min(wakes), self._turn) if wakes else None

    def _carry_out(self, pool: Pool, action: Action) -> None:
        match action:
            case Start(member):
                self._members.start(pool, self._runners[pool.spec.resource.runner], member)
            case Reset(member):
                self._members.reset(member)
            case Stop(member, reason):
                self._members.stop(member, reason)
            case Probe(member):
                self._members.probe(member)
            case Grant(ticket, member):
                claim = self._claims.of_ticket(pool, ticket)
                if claim is not None:
                    claim.member_id = member
                    self._members.call(member, self._hand_over(claim, member))
            case Lost(ticket, reason):
                self._lose(self._claims.of_ticket(pool, ticket), reason)
            case Reject(ticket, reason):
                claim = self._claims.of_ticket(pool, ticket)
                if claim is not None:
                    self._end(claim, start_failed(pool, reason))

    async def _hand_over(self, claim: Claim, member_id: str) -> None:
        began, ttl = _now(), claim.pool.spec.lease_ttl_s
        token = claim.token
        try:
            await self._members.lease(member_id, claim.owner, claim.attempt, token)
        except Exception as error:
            logger.warning("member %s: took no lease: %s", member_id, describe(error))
            claim.pool.lost(member_id, f"it took no lease: {describe(error)}", _now())
        else:
            if claim.pool.leased(claim.ticket, began):
                member = self._members.member(member_id)
                claim.incarnation = member.incarnation
                claim.info = LeaseInfo(
                    lease_id=claim.lease_id,
                    pool=claim.pool.spec.name,
                    owner=claim.owner,
                    key=claim.key,
                    member_id=member.id,
                    incarnation=member.incarnation,
                    kind=member.spec.kind,
                    address=member.address,
                    token=token,
                    ttl_s=ttl,
                )
                claim.serve()
        self._turn()

    def _renewal(self, claim: Claim) -> "asyncio.Task[None] | None":
        if claim.info is not None and claim.live:
            return self._members.call(claim.member_id, self._renew(claim, claim.member_id, claim.token))
        claim.pool.renewed(claim.ticket, _now())  # its member is on its way, or on its way back from a reset
        return None

    async def _renew(self, claim: Claim, member_id: str, token: str) -> None:
        began = _now()
        try:
            await self._members.lease(member_id, claim.owner, claim.attempt, token)
        except LeaseLost as error:
            if token == claim.token:  # else its reset has begun, which finds out what the member is
                claim.pool.lost(member_id, describe(error), _now())
        except Exception as error:
            logger.warning("member %s: heartbeat failed: %s", member_id, describe(error))
            if not (await self._members.vitals(member_id)).alive:
                claim.pool.lost(member_id, f"it is gone: {describe(error)}", _now())
        else:
            claim.pool.renewed(claim.ticket, began)
        self._turn()  # where the lease is lost, this tells those who wait; the others are served
        claim.serve()


def _now() -> float:
    return asyncio.get_running_loop().time()
