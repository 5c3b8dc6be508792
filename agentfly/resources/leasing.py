"""What becomes of a claim: its hand-over, renewals, loss and end, and what its owner is told of each.

Guarantees:
1. A lease is given to those who wait for it only when its member's daemon knows it.
2. A member that takes no lease, or that a renewal finds gone, is reported to its pool and never given out.
3. Each grant, release, loss and failed acquire is one event, with its seconds.

Not here: when any of this happens (``engine``, ``pool``).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentfly.resources.actions import Reason
from agentfly.resources.claims import Ask, Claim, Claims, noted
from agentfly.resources.demand import Demands
from agentfly.resources.errors import LeaseLost, ResourceError
from agentfly.resources.events import Event, EventKind, LeaseEnd
from agentfly.resources.lease import LeaseInfo
from agentfly.resources.members import Members, describe
from agentfly.resources.note import LeaseNote
from agentfly.resources.pool import Pool
from agentfly.resources.report import start_failed
from agentfly.resources.runners.base import Member
from agentfly.resources.turns import Turns

logger = logging.getLogger(__name__)


class Leasing:
    """The claims of one engine and their leases. ``drop`` ends the handle of a lease."""

    def __init__(
        self,
        members: Members,
        turns: Turns,
        demands: Demands,
        emit: Callable[[Event], None],
        drop: Callable[[str], None],
    ) -> None:
        self.claims = Claims()
        self._members, self._turns, self._demands = members, turns, demands
        self._emit, self._drop = emit, drop

    def grant(self, pool: Pool, ticket: int, member_id: str) -> None:
        """Hand the member over to the owner of the ticket."""
        claim = self.claims.of_ticket(pool, ticket)
        if claim is not None:
            if not claim.member_id:  # else it is a second try, or its member was reset
                self._demands.granted(pool.spec.name, claim.ask.image)
            claim.member_id = member_id
            claim.warm = self._turns.number - claim.asked_in <= 1  # served in the first turn after it asked
            self._members.call(member_id, self._hand_over(claim, member_id))

    def reject(self, pool: Pool, ticket: int, why: str, hints: Sequence[str]) -> None:
        """There will be no member for the owner of the ticket."""
        claim = self.claims.of_ticket(pool, ticket)
        if claim is not None:
            self.end(claim, start_failed(pool, why, hints))

    def end(self, claim: Claim, error: ResourceError, *, dirty: bool = False) -> None:
        """The claim is over; whoever waits for it is told the error. A ``dirty`` member is not used again."""
        if not self.claims.end(claim):
            return
        now = _now()
        self._drop(claim.lease_id)
        claim.pool.withdraw(claim.ticket, now, dirty=dirty)
        claim.fail(error)
        if claim.held_since is not None and claim.live:
            reason = Reason.DIRTY if dirty else ""
            self._tell(EventKind.LEASE_RELEASED, claim, seconds=now - claim.held_since, reason=reason)
        self._turns.due(claim.pool)

    def lost(self, pool: Pool, ticket: int, why: str) -> None:
        """The lease of the ticket is over without its owner's doing."""
        claim = self.claims.of_ticket(pool, ticket)
        if claim is None:
            return
        gone = self._members.is_lost(claim.member_id)
        self._lose(claim, why, LeaseEnd.MEMBER_LOST if gone else LeaseEnd.NO_HEARTBEAT)

    def _lose(self, claim: Claim, why: str, reason: LeaseEnd) -> None:
        now = _now()
        self.claims.lose(claim, why, now)
        claim.fail(claim.lost_error())
        self._tell(
            EventKind.LEASE_LOST,
            claim,
            reason=reason,
            detail=why,
            seconds=None if claim.held_since is None else now - claim.held_since,
        )

    def revoke(self, claim: Claim, why: str) -> None:
        """The pool of a held claim takes it back."""
        claim.pool.withdraw(claim.ticket, _now())
        self._drop(claim.lease_id)
        self._lose(claim, why, LeaseEnd.POOL_DELETED)

    def resume(
        self, ask: Ask, note: LeaseNote, text: str, ticket: int, member: Member, now: float, left: float
    ) -> None:
        """A lease of an earlier process goes on for ``left`` seconds, unless it is renewed."""
        claim = self.claims.resume(ask, note, ticket, now)
        claim.member_id, claim.note, claim.held_since = member.id, text, now
        claim.renewed = now + left - ask.pool.spec.lease_ttl_s
        claim.info = self._info(claim, member, claim.token)

    def failed(self, asks: Iterable[Ask], owner: str, error: BaseException, seconds: float) -> None:
        """An acquire ended without these; told once for each pool."""
        for ask in {id(ask.pool): ask for ask in asks}.values():
            event = Event(
                EventKind.ACQUIRE_FAILED,
                ask.pool.spec.name,
                owner=owner,
                share=ask.share,
                reason=type(error).__name__,
                detail=str(error),
                seconds=seconds,
            )
            self._emit(event)

    def renewal(self, claim: Claim) -> "asyncio.Task[None] | None":
        """Begin to renew a lease; None if its member is with nobody now, and is asked nothing."""
        if claim.info is not None and claim.live:
            renewal = self._renew(claim, claim.member_id, claim.token, claim.note)
            return self._members.call(claim.member_id, renewal)
        # Its member is on its way, or on its way back from a reset.
        claim.renewed = _now()
        claim.pool.renewed(claim.ticket, claim.renewed)
        return None

    async def _hand_over(self, claim: Claim, member_id: str) -> None:
        began = _now()
        token, note = claim.token, noted(claim)
        try:
            await self._members.lease(member_id, claim.owner, claim.attempt, token, note)
        except Exception as error:
            self._members.lost(member_id, f"it took no lease: {describe(error)}")
        else:
            if claim.pool.leased(claim.ticket, began):
                claim.renewed, claim.note = began, note
                self._granted(claim, self._members.member(member_id), token)
        self._turns.due(claim.pool)

    def _granted(self, claim: Claim, member: Member, token: str) -> None:
        claim.info = self._info(claim, member, token)
        claim.serve()
        if claim.held_since is None:  # else its member was reset for the same holder
            claim.held_since = _now()
            waited = claim.held_since - claim.opened
            self._tell(EventKind.LEASE_GRANTED, claim, seconds=waited, warm=claim.warm)

    def _info(self, claim: Claim, member: Member, token: str) -> LeaseInfo:
        claim.incarnation = member.incarnation
        return LeaseInfo(
            lease_id=claim.lease_id,
            pool=claim.pool.spec.name,
            owner=claim.owner,
            key=claim.ask.key,
            share=claim.ask.share,
            image=claim.ask.image,
            member_id=member.id,
            incarnation=member.incarnation,
            kind=member.spec.kind,
            address=member.address,
            token=token,
            ttl_s=claim.pool.spec.lease_ttl_s,
        )

    async def _renew(self, claim: Claim, member_id: str, token: str, note: str) -> None:
        began = _now()
        try:
            await self._members.lease(member_id, claim.owner, claim.attempt, token, note)
        except LeaseLost as error:
            if token == claim.token:  # else its reset has begun, which finds out what the member is
                self._gone(claim, member_id, describe(error))
        except Exception as error:
            logger.warning("member %s: heartbeat failed: %s", member_id, describe(error))
            if not (await self._members.vitals(member_id)).alive:
                self._gone(claim, member_id, f"it is gone: {describe(error)}")
        else:
            if claim.pool.renewed(claim.ticket, began):
                claim.renewed = began
        claim.serve()  # nobody is left to be served where the lease is lost

    def _gone(self, claim: Claim, member_id: str, why: str) -> None:
        self._members.lost(member_id, why)
        self._turns.now(claim.pool)  # those who wait are told of the loss

    def _tell(self, kind: EventKind, claim: Claim, **fields: Any) -> None:
        event = Event(
            kind,
            claim.pool.spec.name,
            member=claim.member_id,
            lease=claim.lease_id,
            owner=claim.owner,
            share=claim.ask.share,
            **fields,
        )
        self._emit(event)


def _now() -> float:
    return asyncio.get_running_loop().time()
