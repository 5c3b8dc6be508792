"""Who waits for what and who holds what: the owners behind the tickets of the pools.

Guarantees:
1. One claim for each (owner, key) of a pool. A key that was named is one claim over all pools and images; the
   default key is one in each.
2. All who enter a claim get the same answer. The claim outlives those who leave it while somebody else waits
   or the lease was delivered, and no longer.
3. A claim that is lost keeps its name for ``LOST_MEMORY_S``, so that its owner is told.
4. What it costs to lose or end a claim does not grow with the others.

Not here: tickets and members (``pool``), and when a claim ends (``leasing``).
"""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentfly.resources.errors import LeaseLost, SpecMismatch
from agentfly.resources.lease import LeaseInfo
from agentfly.resources.note import LeaseNote, check_names
from agentfly.resources.pool import Pool

DEFAULT_KEY = "default"
LOST_MEMORY_S = 3600.0  # longer than a rollout: after this, nobody comes back for a lost lease


_Name = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for: a member of a pool, under a key, on the account of a share.

    ``image`` is "" for the pool's own.
    """

    pool: Pool
    key: str = DEFAULT_KEY
    share: str = ""
    image: str = ""

    def __str__(self) -> str:
        image = f", image {self.image}" if self.image else ""
        return f"pool {self.pool.spec.name} (spec {self.pool.spec.resource.identity()}{image})"


@dataclass(eq=False, slots=True)
class Claim:
    """What one owner waits for or holds under one key. Times are those of the loop."""

    ask: Ask
    ticket: int
    owner: str
    attempt: int
    lease_id: str
    token: str
    opened: float
    asked_in: int  # the number of the turn in which it was
    held_since: float | None = None
    renewed: float = 0.0
    note: str = ""  # what the member's daemon keeps of it
    resumed: bool = False  # an earlier process gave it
    warm: bool = False  # its pool had a member for it when it was asked
    waiters: "list[asyncio.Future[LeaseInfo]]" = field(default_factory=list)
    member_id: str = ""
    info: LeaseInfo | None = None  # None while it waits, and while its member is being reset
    incarnation: int = 0
    delivered: bool = False  # somebody returned with it: it is theirs to release
    lost: str | None = None
    lost_at: float = 0.0

    @property
    def pool(self) -> Pool:
        """The pool that it is a claim on."""
        return self.ask.pool

    @property
    def live(self) -> bool:
        """True while the lease is held or on its way."""
        return self.lost is None

    def enter(self) -> "Entry":
        """One more who waits for the answer."""
        future: asyncio.Future[LeaseInfo] = asyncio.get_running_loop().create_future()
        self.waiters.append(future)
        return Entry(self, future)

    def check(self, ask: Ask, attempt: int) -> None:
        """Refuse what this claim cannot be: another pool or image, an earlier attempt, or a lost lease.

        Raises:
            SpecMismatch, LeaseLost.
        """
        if self.pool.spec.name != ask.pool.spec.name or self.ask.image != ask.image:
            raise SpecMismatch(
                f"owner {self.owner}: key {ask.key} stands for {self.ask}, not for {ask}",
                hints=("use another key for the other resource, or leave the key out",),
            )
        if attempt < self.attempt:
            raise LeaseLost(
                f"owner {self.owner}: attempt {attempt} is over, attempt {self.attempt} has begun"
            )
        if self.lost is not None:
            raise self.lost_error()

    def serve(self) -> None:
        """Give everybody who waits the lease."""
        for future in self.waiters:
            if self.info is not None and not future.done():
                future.set_result(self.info)

    def fail(self, error: Exception) -> None:
        """Give everybody who waits the error."""
        for future in self.waiters:
            if not future.done():
                future.set_exception(error)

    def lost_error(self) -> LeaseLost:
        """What the owner of a lost claim is told."""
        return LeaseLost(
            f"lease of pool {self.pool.spec.name}, owner {self.owner}, key {self.ask.key}: lost: {self.lost}",
            incarnation=self.incarnation,
            hints=(
                "release it and acquire again, or begin the next attempt: what was in the member is gone",
            ),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One call's part in a claim."""

    claim: Claim
    future: "asyncio.Future[LeaseInfo]"

    @property
    def served(self) -> bool:
        """True if the lease has come."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    def leave(self) -> bool:
        """Take part no longer. True: nobody is left who could release the claim, so it must end."""
        self.claim.waiters.remove(self.future)
        if self.future.done() and not self.future.cancelled():
            self.future.exception()  # seen, so that it is not reported as lost
        return not self.claim.waiters and not self.claim.delivered


class Claims:
    """The claims of one engine, by name, by lease and by ticket."""

    def __init__(self) -> None:
        self._names: dict[_Name, Claim] = {}
        self._leases: dict[str, Claim] = {}
        self._tickets: dict[tuple[Pool, int], Claim] = {}
        self._lost: dict[str, Claim] = {}  # by lease, the one that was lost first in front

    def __iter__(self) -> Iterator[Claim]:
        return iter(list(self._leases.values()))

    def find(self, owner: str, ask: Ask) -> Claim | None:
        """The claim that the owner has under this key."""
        return self._names.get(_name(owner, ask))

    def of_lease(self, lease_id: str) -> Claim | None:
        """The claim with this lease, if it has not ended."""
        return self._leases.get(lease_id)

    def of_ticket(self, pool: Pool, ticket: int) -> Claim | None:
        """The claim that the pool knows by this ticket."""
        return self._tickets.get((pool, ticket))

    def open(self, ask: Ask, owner: str, attempt: int, now: float, turn: int) -> Claim:
        """A new claim, in the pool's queue.

        Raises:
            Saturated: the pool admits no more waiters.
            ResourceError: it has no such image, or a name is longer than a member could note.
        """
        check_names(owner, ask.key, ask.share, ask.image)
        ticket = ask.pool.ask(ask.share, ask.image)
        lease_id, token = secrets.token_hex(8), secrets.token_hex(16)
        return self._enter(Claim(ask, ticket, owner, attempt, lease_id, token, now, turn))

    def resume(self, ask: Ask, note: LeaseNote, ticket: int, now: float) -> Claim:
        """The claim that a lease of an earlier process was, under a name that nobody has."""
        claim = Claim(ask, ticket, note.owner, note.attempt, note.lease_id, note.token, now, asked_in=0)
        claim.resumed = claim.delivered = True
        return self._enter(claim)

    def reopen(self, ask: Ask, note: LeaseNote, now: float, turn: int) -> Claim:
        """The claim that a lease of an earlier process was, in the queue for another member.

        Raises:
            Saturated: the pool admits no more waiters.
        """
        ticket = ask.pool.ask(ask.share, ask.image)
        claim = Claim(ask, ticket, note.owner, note.attempt, note.lease_id, note.token, now, asked_in=turn)
        claim.resumed = claim.delivered = True
        return self._enter(claim)

    def end(self, claim: Claim) -> bool:
        """Forget a claim. False: it was forgotten before."""
        if self._leases.pop(claim.lease_id, None) is None:
            return False
        del self._names[_name(claim.owner, claim.ask)]
        del self._tickets[claim.pool, claim.ticket]
        self._lost.pop(claim.lease_id, None)
        return True

    def _enter(self, claim: Claim) -> Claim:
        self._names[_name(claim.owner, claim.ask)] = claim
        self._leases[claim.lease_id] = claim
        self._tickets[claim.pool, claim.ticket] = claim
        return claim

    def lose(self, claim: Claim, reason: str, now: float) -> None:
        """Mark a claim as lost, and forget those that were lost long ago."""
        claim.lost, claim.lost_at = reason, now
        self._lost.pop(claim.lease_id, None)
        self._lost[claim.lease_id] = claim
        while now >= (first := next(iter(self._lost.values()))).lost_at + LOST_MEMORY_S:
            self.end(first)


def noted(claim: Claim) -> str:
    """The claim as its member's daemon keeps it."""
    ask, spec = claim.ask, claim.ask.pool.spec
    note = LeaseNote(
        lease_id=claim.lease_id,
        pool=spec.name,
        owner=claim.owner,
        key=ask.key,
        share=ask.share,
        image=ask.image,
        attempt=claim.attempt,
        token=claim.token,
        ttl_s=spec.lease_ttl_s,
    )
    return note.text()


def _name(owner: str, ask: Ask) -> _Name:
    if ask.key == DEFAULT_KEY:
        return owner, ask.key, ask.pool.spec.name, ask.image
    return owner, ask.key, "", ""
