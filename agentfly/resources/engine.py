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
8. Who waits for a pool whose decision raises is told so; its members are stopped by ``close`` all the same.
9. A pool can be added, changed and removed at any time. A change ends no lease, a removal all of its pool.
10. What an earlier process left is taken over by ``adopt``: a lease that lives goes on as it was.
11. ``detach`` ends an engine and not what outlives its process: holders notice another engine, if anything.

Not here: who is served and when (``pool``, ``turns``), what is done about it (``members``, ``leasing``), what
is taken over (``adoption``), handles (``lease``).
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from agentfly.resources.actions import (
    Action,
    Grant,
    Lost,
    Probe,
    Quarantine,
    Reject,
    Reset,
    Start,
    Stop,
)
from agentfly.resources.adoption import Adoption
from agentfly.resources.claims import DEFAULT_KEY, Ask, Entry
from agentfly.resources.demand import Demands, counted
from agentfly.resources.errors import Infra, LeaseLost, ResourceError
from agentfly.resources.events import Events, Observer
from agentfly.resources.finish import finished
from agentfly.resources.lease import (
    BEATS_PER_TTL,
    Holdings,
    Lease,
    LeaseInfo,
    LeaseStatus,
    PoolStatus,
    Request,
    Scope,
)
from agentfly.resources.leasing import Leasing
from agentfly.resources.members import RESET_S, Members, describe
from agentfly.resources.note import LeaseNote
from agentfly.resources.pool import Pool
from agentfly.resources.rates import Rates
from agentfly.resources.registry import Pools, deleted
from agentfly.resources.report import check_room, image_of, late, lease_status, patience, pool_status
from agentfly.resources.runners.base import Found, Runner
from agentfly.resources.spec import PoolSpec, ResourceSpec
from agentfly.resources.turns import Turns

logger = logging.getLogger(__name__)

CLOSE_S = 60.0  # all members stop side by side: this bounds one stop and one retry
DETACH_S = 3.0  # for processes of this machine to end


class ResourceEngine:
    """Layer IV in this process. Use it as ``async with``, or call ``close``."""

    def __init__(
        self, runners: Sequence[Runner], pools: Sequence[PoolSpec] = (), observer: Observer | None = None
    ) -> None:
        self._runners = {runner.name: runner for runner in runners}
        self._pools = Pools(self._runners)
        self._rates = Rates()
        self._events = Events()
        self._events.observe(self._rates.note)
        self._turns = Turns(self._carry_out, self._not_decided)
        self._members = Members(self._turns.due, self._events.emit)
        self._holdings = Holdings(self)
        self._demands = Demands()
        self._leasing = Leasing(
            self._members, self._turns, self._demands, self._events.emit, self._holdings.drop
        )
        self._claims = self._leasing.claims
        self._adoption = Adoption(self._pools, self._members, self._leasing, self._turns)
        self._demands_end: asyncio.TimerHandle | None = None
        self._closed = False
        if observer is not None:
            self.observe(observer)
        for pool in pools:
            self.add_pool(pool)

    # Life.

    async def __aenter__(self) -> Self:
        for pool in self._pools:
            self._turns.due(pool)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def observe(self, observer: Observer) -> None:
        """Tell this observer of every event from now on."""
        self._events.observe(observer)

    def add_pool(self, pool: PoolSpec) -> None:
        """Serve a pool from now on. Adding an equal one again changes nothing.

        Raises:
            ResourceError: another pool has this name, or its kind cannot run here.
        """
        self._open(f"pool {pool.name}")
        self._begin(self._pools.add(pool))

    def set_pool(self, pool: PoolSpec) -> None:
        """Serve a pool from now on, or go on with it under another specification.

        Under other bounds its members stay, down to its new ``max``. If its resource is another, those that
        nobody holds are replaced, and those that are held stop when they come back.

        Raises:
            ResourceError: its type or scope is another, it is being deleted, or its kind cannot run here.
        """
        self._open(f"pool {pool.name}")
        self._begin(self._pools.set(pool))

    async def remove_pool(self, name: str) -> None:
        """Delete a pool: whoever waits for it is told, its leases are lost, and its members are stopped.

        Returns when they have. The name is free again then.

        Raises:
            PoolNotFound: there is no pool of this name.
            Infra: some members could not be stopped; the message names them. They are tried again.
        """
        pool = self._pools.remove(name)
        for claim in self._claims:
            if claim.pool is pool and claim.live:
                if claim.held_since is None:
                    self._leasing.end(claim, deleted(name))
                else:
                    self._leasing.revoke(claim, f"pool {name} was deleted")
        self._demands.drop(name)
        self._turns.now(pool)
        self._turns.forget(pool)
        self._rates.forget(name)
        if left := await self._members.gone(pool, CLOSE_S):
            raise Infra(f"pool {name}: members {', '.join(left)}: not stopped in {CLOSE_S:g} s")

    def adopt(self, found: Found) -> bool:
        """Take over a member that an earlier process started; False if it is of no use, and is being stopped.

        To be called for all that there are before anything is awaited after ``set_pool``: else others are
        started in their places.
        """
        self._open(f"member {found.member.id}")
        return self._adoption.adopt(found, _now())

    def restore(self, note: LeaseNote, member_id: str, incarnation: int) -> bool:
        """Go on with a lease of an earlier engine that no member kept; False if it is over.

        Whoever calls this has made sure that a lease of this note was given on the member.
        """
        self._open(f"lease {note.lease_id}")
        return self._adoption.restore(note, member_id, incarnation, _now())

    def _open(self, wanted: str) -> None:
        if self._closed:
            raise ResourceError(f"{wanted}: the engine is closed")

    def _begin(self, pool: Pool) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # its first members are started when the engine is entered
        self._turns.due(pool)

    def unquarantine(self, pool: str, member_id: str) -> None:
        """Nobody needs to look at this member any more: stop it.

        Raises:
            PoolNotFound: there is no pool of this name.
            ResourceError: the member is not in quarantine.
        """
        known = self._pools.named(pool)
        if not known.unquarantine(member_id):
            kept = ", ".join(known.quarantined()) or "none"
            raise ResourceError(
                f"pool {pool}: member {member_id} is not in quarantine", hints=(f"members that are: {kept}",)
            )
        self._turns.due(known)

    async def close(self) -> None:
        """Stop every member and fail every waiter. May be called again.

        Raises:
            Infra: some members could not be stopped; the message names them.
        """
        self._closed = True
        for pool in self._pools:
            pool.close()
        for claim in self._claims:
            self._leasing.end(claim, ResourceError(f"pool {claim.pool.spec.name}: the engine was closed"))
        for pool in self._pools:
            self._turns.now(pool)
        await finished(self._close())

    async def _close(self) -> None:
        await self._holdings.close()
        left = await self._members.close(CLOSE_S)
        self._turns.cancel()
        if self._demands_end is not None:
            self._demands_end.cancel()
        if left:
            raise Infra(f"members {', '.join(left)}: not stopped in {CLOSE_S:g} s")

    async def detach(self) -> None:
        """End, and leave members that outlive this process to the next one, with their leases.

        Whoever waits gets ``Infra``. Starts and resets are cut off, and members that no runner could find
        again are stopped, all within ``DETACH_S``. May be called again, and after ``close``.
        """
        if self._closed:
            return
        self._closed = True
        self._turns.stop()
        for claim in self._claims:
            claim.fail(Infra(f"pool {claim.pool.spec.name}: its engine ends, and another one may follow"))
        if self._demands_end is not None:
            self._demands_end.cancel()
        await finished(self._detach())

    async def _detach(self) -> None:
        await self._holdings.close()
        await self._members.detach(DETACH_S)

    # What holders ask for.

    async def acquire(
        self,
        pool_or_spec: str | ResourceSpec,
        owner: str,
        *,
        key: str = DEFAULT_KEY,
        scope: Scope = "rollout",
        share: str = "",
        image: str | None = None,
        attempt: int = 0,
        deadline: float = 600.0,
    ) -> Lease:
        """The owner's live lease under this key, or a new one; its heartbeats run until its release."""
        requests = [Request(pool_or_spec, key, scope, share, image)]
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
        asks = [self._ask(request) for request in requests]
        check_room(asks)
        began = _now()
        entries: list[Entry] = []
        try:
            for ask in asks:
                entries.append(self._enter(ask, owner, attempt))
            await self._settle(entries, patience(asks, deadline))
            for entry in entries:
                entry.claim.delivered = True
            return [entry.future.result() for entry in entries]
        except (ResourceError, asyncio.CancelledError) as error:
            missing = [entry.claim.ask for entry in entries if not entry.served]
            self._leasing.failed(asks[len(entries) :][:1] or missing, owner, error, _now() - began)
            raise
        finally:
            self._leave(entries)

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        """End the lease; a ``dirty`` member is not used again. Unknown leases are ignored."""
        claim = self._claims.of_lease(lease_id)
        if claim is not None:
            self._leasing.end(claim, LeaseLost(f"lease {lease_id}: was released"), dirty=dirty)

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        """Say what the owner will need of a pool; see ``Resources.demand``."""
        known = self._pools.named(pool)
        counts: dict[str, int] = {}
        for name, count in counted(pool, wanted).items():
            image = image_of(known, name)
            counts[image] = counts.get(image, 0) + count
        self._demands.say(pool, owner, counts, _now())
        try:
            self._demanded([pool])
        except ResourceError:
            self._demands.say(pool, owner, {}, _now())
            raise

    def _demanded(self, pools: Iterable[str]) -> None:
        for pool in [self._pools.named(name) for name in pools]:
            pool.demand(self._demands.total(pool.spec.name))
            self._turns.due(pool)
        if self._demands_end is not None:
            self._demands_end.cancel()
        end = self._demands.next_end()
        loop = asyncio.get_running_loop()
        self._demands_end = None if end is None else loop.call_at(end, self._end_demands)

    def _end_demands(self) -> None:
        self._demanded(self._demands.expire(_now()))

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        """End all that the owner holds or waits for; with ``attempt``, only up to that attempt."""
        for claim in self._claims:
            if claim.owner == owner and (attempt is None or claim.attempt <= attempt):
                self._leasing.end(claim, LeaseLost(f"owner {owner}: released all that it waited for"))
        if attempt is None:
            self._demanded(self._demands.forget(owner))

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        """Renew leases; False for each that is lost. A member that does not answer has until its TTL.

        Of a lease that is not known nothing is said while members of an earlier process are not heard of yet.
        Answers within a third of the shortest TTL asked for, so that no slow member delays the others' next.
        """
        claims = {lease_id: self._claims.of_lease(lease_id) for lease_id in lease_ids}
        renewals = {task for claim in claims.values() if claim and (task := self._leasing.renewal(claim))}
        if renewals:
            shortest = min(claim.pool.spec.lease_ttl_s for claim in claims.values() if claim)
            await asyncio.wait(renewals, timeout=shortest / BEATS_PER_TTL)  # the rest goes on by itself
        unsure = self._members.unknown
        return {
            lease_id: claim is not None and claim.live
            for lease_id, claim in claims.items()
            if claim is not None or not unsure
        }

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
        self._turns.due(claim.pool)
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
        now = _now()
        return {pool.spec.name: pool_status(pool, self._claims, self._rates, now) for pool in self._pools}

    def leases(self) -> list[LeaseStatus]:
        """What is held now."""
        now = _now()
        return [status for claim in self._claims if (status := lease_status(claim, now)) is not None]

    # Claims.

    def _ask(self, request: Request) -> Ask:
        if self._closed:
            raise ResourceError("resource engine: is closed")
        wanted = request.pool_or_spec
        shared = request.scope == "global"
        pool = self._pools.named(wanted) if isinstance(wanted, str) else self._pools.of_spec(wanted, shared)
        if shared and not pool.shared:
            raise ResourceError(
                f"pool {pool.spec.name}: is not shared, as scope global needs: a member has one holder",
                hints=('use scope="rollout"', "or set spec.scope of the pool to Global"),
            )
        return Ask(pool, request.key, request.share, image_of(pool, request.image))

    def _enter(self, ask: Ask, owner: str, attempt: int) -> Entry:
        claim = self._claims.find(owner, ask)
        if claim is not None and claim.attempt < attempt:
            self._leasing.end(claim, LeaseLost(f"owner {owner}: attempt {attempt} has begun"))
            claim = None
        if claim is None:
            claim = self._claims.open(ask, owner, attempt, _now(), self._turns.number)
            self._turns.due(ask.pool)
        claim.check(ask, attempt)
        entry = claim.enter()
        self._leasing.renewal(claim)  # what is held already: does it live, before it is given out again
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
                # What came early must not expire while the rest is waited for.
                for entry in entries:
                    if entry.future.done():
                        self._leasing.renewal(entry.claim)

    def _leave(self, entries: Iterable[Entry]) -> None:
        # Synchronous, on purpose: nothing can interrupt the way out.
        for entry in entries:
            if entry.leave():
                self._leasing.end(
                    entry.claim, LeaseLost(f"lease {entry.claim.lease_id}: nobody waits for it")
                )

    # Actions.

    def _carry_out(self, pool: Pool, action: Action) -> None:
        match action:
            case Start(member, image):
                self._members.start(pool, self._runners[pool.spec.resource.runner], member, image)
            case Reset(member):
                self._members.reset(member)
            case Stop(member, reason):
                self._members.stop(member, reason)
            case Quarantine(member, reason):
                self._members.quarantine(member, reason)
            case Probe(member):
                self._members.probe(member)
            case Grant(ticket, member):
                self._leasing.grant(pool, ticket, member)
            case Lost(ticket, reason):
                self._leasing.lost(pool, ticket, reason)
            case Reject(ticket, reason, hints):
                self._leasing.reject(pool, ticket, reason, hints)

    def _not_decided(self, pool: Pool, error: Exception) -> None:
        """A decision was a defect of ours: nobody waits for what may never come."""
        name = pool.spec.name
        logger.error("pool %s: could not decide", name, exc_info=error)
        failure = Infra(
            f"pool {name}: could not decide: {type(error).__name__}: {describe(error)}",
            hints=("report it with the trace in the log of the engine",),
        )
        for claim in self._claims:
            if claim.pool is pool and claim.live and claim.info is None:
                self._leasing.end(claim, failure)


def _now() -> float:
    return asyncio.get_running_loop().time()
