"""What the engine says about its pools: the errors of those who wait, and the counts of those who watch.

Guarantees:
1. A deadline that passed says whether members are all leased or cannot be started, and with what numbers.
   Who waits for an image is told of its starts alone.
2. What a runner said that helps against a failed start reaches whoever waited for it.
"""

import sys
from collections.abc import Sequence

from agentfly.resources.actions import State
from agentfly.resources.claims import Ask, Claim
from agentfly.resources.errors import ResourceError, StartFailed, Timeout
from agentfly.resources.lease import LeaseStatus, PoolStatus
from agentfly.resources.pool import Pool
from agentfly.resources.rates import Rates
from agentfly.resources.spec import ContainerSpec


def check_room(asks: Sequence[Ask]) -> None:
    """Refuse a call that no pool could ever serve whole."""
    if len(asks) < 2:
        return
    together: dict[tuple[str, str | None], set[tuple[str, str]]] = {}
    pools = {ask.pool.spec.name: ask.pool for ask in asks}
    for ask in asks:
        for share in (ask.share, None):
            together.setdefault((ask.pool.spec.name, share), set()).add((ask.key, ask.image))
    for (name, share), wanted in together.items():
        most, bound = _most(pools[name], share)
        if len(wanted) > most:
            raise ResourceError(
                f"pool {name}: {len(wanted)} members were asked for together, {bound}",
                hints=(f"raise max to {pools[name].max + len(wanted) - most}, or acquire fewer together",),
            )


def _most(pool: Pool, share: str | None) -> tuple[int, str]:
    """How many one share (None: all together) can ever have, and what bounds it."""
    spec = pool.spec
    if spec.shared:
        return sys.maxsize, ""  # one member may have any number of holders
    others = 0 if share is None else sum(count for name, count in spec.reserved.items() if name != share)
    kept = f", of which {others} are reserved for others" if others else ""
    return pool.max - others, f"max is {pool.max}{kept}"


def image_of(pool: Pool, image: str | None) -> str:
    """The pool's word for an image: "" for its own, by whatever name."""
    resource = pool.spec.resource
    own = resource.image if isinstance(resource, ContainerSpec) else ""
    return "" if image in (None, own) else str(image)


def start_failed(pool: Pool, reason: str, hints: Sequence[str]) -> StartFailed:
    """What a waiter is told when there will be no member."""
    message = f"pool {pool.spec.name}: no member could be started: {reason}"
    return StartFailed(message, reason=reason, hints=hints)


def late(claim: Claim, deadline: float) -> ResourceError:
    """What a waiter is told at its deadline: why, as far as its pool knows."""
    pool = claim.pool
    if (failures := pool.failing(claim.ask.image)) is not None:
        return start_failed(pool, failures.reason, failures.hints)
    leased = pool.count(State.LEASED)
    return Timeout(
        f"pool {pool.spec.name}: gave no member in {deadline:g} s: {leased} of {pool.max} leased, "
        f"{pool.count(State.STARTING)} starting, {pool.ahead(claim.ticket)} waiters ahead",
        hints=(f"raise max ({pool.max}) or the deadline, or lower the concurrency",),
    )


def pool_status(pool: Pool, rates: Rates) -> PoolStatus:
    """How a pool is doing."""
    name = pool.spec.name
    return PoolStatus(
        kind=pool.spec.resource.kind,
        max=pool.max,
        min=pool.min,
        ready=pool.count(State.FREE),
        leased=pool.count(State.LEASED),
        starting=pool.count(State.STARTING),
        resetting=pool.count(State.RESETTING),
        stopping=pool.count(State.STOPPING),
        quarantined=pool.quarantined(),
        queued=pool.queued,
        starts=pool.starts,
        resets=pool.resets,
        failures=pool.failures,
        reason=pool.reason(),
        message=pool.last_failure if pool.start_failing() else "",
        hit_ratio=rates.hit_ratio(name),
        acquire_p99_s=rates.acquire_p99_s(name),
    )


def lease_status(claim: Claim, now: float) -> LeaseStatus | None:
    """What people may know of a claim; None if nothing is held."""
    if claim.held_since is None or not claim.live:
        return None
    return LeaseStatus(
        lease_id=claim.lease_id,
        pool=claim.pool.spec.name,
        member_id=claim.member_id,
        owner=claim.owner,
        key=claim.ask.key,
        share=claim.ask.share,
        image=claim.ask.image,
        held_s=now - claim.held_since,
        expires_in_s=claim.renewed + claim.pool.spec.lease_ttl_s - now,
    )
