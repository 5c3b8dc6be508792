"""Members and leases of an earlier process, taken over as they are.

Guarantees:
1. A free member is free again, and counts from then on. One that is dirty is reset before anybody has it.
2. A leased member's lease goes on under the same id, token, owner, key, attempt, share and image, for the
   rest of its TTL: its holder notices nothing.
3. A lease that ended while nobody watched is lost for its owner, as if it had been watched.
4. Of two leases under one name, what this process gave itself stays; else that of the later attempt, else the
   one that ends later. The other's member is stopped.
5. A member of a pool that there is not, or with a lease that cannot be read, is stopped. One that is known
   already is left as it is.
6. No member is refused for lack of room: ``pool`` lets those go that are above ``max``, never a held one.
7. A member that starts, or is silent for now, counts as one that starts until it says how it is. As long as
   there is one, no lease is said to be over that is not known here: it may be that member's.
8. A lease that no member keeps goes on when its holder brings its note: at the same member, or, of a kind
   whose members keep nothing, at any. One whose name has been given to another since is over.

Not here: where members are found (``runners``).
"""

import asyncio
import logging

from agentfly.resources.claims import Ask, Claim
from agentfly.resources.errors import LeaseLost, Saturated
from agentfly.resources.leasing import Leasing
from agentfly.resources.members import Members
from agentfly.resources.note import LeaseNote, read_note
from agentfly.resources.pool import Pool
from agentfly.resources.registry import Pools
from agentfly.resources.report import image_of
from agentfly.resources.runners.base import Found, Member
from agentfly.resources.spec import ContainerSpec, ResourceSpec
from agentfly.resources.turns import Turns

logger = logging.getLogger(__name__)

ALIKE = {"external-api"}
"""Kinds of which every member is as good as another to a holder."""


class Adoption:
    """What one engine takes over."""

    def __init__(self, pools: Pools, members: Members, leasing: Leasing, turns: Turns) -> None:
        self._pools, self._members, self._leasing, self._turns = pools, members, leasing, turns
        self._before: dict[str, tuple[ResourceSpec, ResourceSpec, tuple[str, str]]] = {}  # by pool

    def adopt(self, found: Found, now: float) -> bool:
        """Take a member over; False if it is of no use, and is being stopped."""
        member = found.member
        if self._members.knows(member.id):
            return True
        runner = self._pools.runner(member.spec)
        if runner is None:
            logger.error("member %s: was found, and no runner %s to stop it", member.id, member.spec.runner)
            return False
        pool = self._pools.get(found.pool)
        note = read_note(found.note)
        if pool is None:
            why = f"pool {found.pool} does not exist"
        elif found.state == "unknown":
            image, revision = self._image_and_revision(pool, member.spec)
            pool.expect(member.id, image, now, revision=revision)
            self._members.resume(pool, runner, found, self._adopt_later)
            self._turns.due(pool)
            return True
        elif found.state == "leased" and (note is None or note.pool != found.pool):
            why = "its lease cannot be read"
        elif found.state == "leased" and note is not None and not self._wins(pool, member, note, found, now):
            why = f"owner {note.owner} holds another member under key {note.key}"
        else:
            self._members.adopt(pool, runner, member)
            self._count(pool, found, note, now)
            self._turns.due(pool)
            return True
        self._members.discard(found.pool, runner, member, why)
        return False

    def _adopt_later(self, found: Found) -> None:
        self.adopt(found, asyncio.get_running_loop().time())

    def restore(self, note: LeaseNote, member_id: str, incarnation: int, now: float) -> bool:
        """Go on with a lease whose note its holder has; False if it is over."""
        claims, pool = self._leasing.claims, self._pools.get(note.pool)
        if (known := claims.of_lease(note.lease_id)) is not None:
            return known.live
        if pool is None:
            return False
        ask = Ask(pool, note.key, note.share, image_of(pool, note.image))
        if claims.find(note.owner, ask) is not None:
            return False
        restored = (
            self._reopened(ask, note, now)
            if pool.spec.resource.kind in ALIKE
            else self._resumed(ask, note, member_id, incarnation, now)
        )
        self._turns.due(pool)
        return restored

    def _reopened(self, ask: Ask, note: LeaseNote, now: float) -> bool:
        try:
            self._leasing.claims.reopen(ask, note, now, self._turns.number)
        except Saturated:
            return False
        return True

    def _resumed(self, ask: Ask, note: LeaseNote, member_id: str, incarnation: int, now: float) -> bool:
        pool = ask.pool
        if not pool.takes_back(member_id):
            return False
        member, ttl_s = self._members.member(member_id), pool.spec.lease_ttl_s
        if member.incarnation != incarnation:
            return False
        ticket = pool.resumed(member_id, note.share, now, ttl_s)
        self._leasing.resume(ask, note, note.text(), ticket, member, now, ttl_s)
        return True

    def _count(self, pool: Pool, found: Found, note: LeaseNote | None, now: float) -> None:
        member = found.member
        image, revision = self._image_and_revision(pool, member.spec)
        # Each incarnation but the first came from a reset, and each reset from a lease.
        leases = member.incarnation - (found.state == "free")
        pool.adopt(member.id, image, now, clean=found.state == "free", leases=leases, revision=revision)
        if found.state == "free" or note is None or note.pool != found.pool:
            return
        ask = Ask(pool, note.key, note.share, image_of(pool, note.image))
        if found.state == "leased" or self._leasing.claims.find(note.owner, ask) is None:
            left = (
                found.ttl_left_s if found.state == "leased" else 0.0
            )  # its end comes with the next decision
            ticket = pool.resumed(member.id, note.share, now, left)
            self._leasing.resume(ask, note, found.note, ticket, member, now, left)

    def _wins(self, pool: Pool, member: Member, note: LeaseNote, found: Found, now: float) -> bool:
        """Whether the lease of a member that was found is the one that its owner has."""
        claims = self._leasing.claims
        ask = Ask(pool, note.key, note.share, image_of(pool, note.image))
        known: Claim | None = claims.find(note.owner, ask) or claims.of_lease(note.lease_id)
        if known is None:
            return True
        ends = known.renewed + known.pool.spec.lease_ttl_s
        if not known.resumed or (note.attempt, now + found.ttl_left_s) <= (known.attempt, ends):
            return False
        error = LeaseLost(f"lease {known.lease_id}: its owner holds member {member.id} since then")
        self._leasing.end(known, error, dirty=True)
        return True

    def _image_and_revision(self, pool: Pool, spec: ResourceSpec) -> tuple[str, str]:
        """The pool's word for a member's image, and the identity of its spec with the pool's own image.

        Thousands of members have one spec, and a hash of each would be a third of their adoption.
        """
        own = pool.spec.resource
        before = self._before.get(pool.spec.name)
        if before is not None and before[0] is spec and before[1] is own:
            return before[2]
        if pool.spec.per_image and isinstance(spec, ContainerSpec) and isinstance(own, ContainerSpec):
            found = image_of(pool, spec.image), spec.model_copy(update={"image": own.image}).identity()
        else:
            found = "", spec.identity()
        self._before[pool.spec.name] = spec, own, found
        return found
