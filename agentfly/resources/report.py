"""What the engine says about its pools: the errors of those who wait, and the counts of those who watch.

Guarantees:
1. A deadline that passed says whether members are all leased or cannot be started, and with what numbers.
"""

from collections.abc import Sequence

from agentfly.resources.actions import State
from agentfly.resources.claims import Ask, Claim
from agentfly.resources.errors import ResourceError, StartFailed, Timeout
from agentfly.resources.lease import PoolStatus
from agentfly.resources.pool import Pool
from agentfly.resources.spec import ContainerSpec


def check_room(asks: Sequence[Ask]) -> None:
    """Refuse a call that no pool could ever serve whole."""
    for pool in {id(ask.pool): ask.pool for ask in asks}.values():
        wanted = len({(ask.key, ask.image) for ask in asks if ask.pool is pool})
        if wanted > pool.max and not pool.shared:
            raise ResourceError(
                f"pool {pool.spec.name}: {wanted} members were asked for together, max is {pool.max}",
                hints=(f"raise max to {wanted}, or acquire fewer together",),
            )


def image_of(pool: Pool, image: str | None) -> str:
    """The pool's word for an image: "" for its own, by whatever name."""
    resource = pool.spec.resource
    own = resource.image if isinstance(resource, ContainerSpec) else ""
    return "" if image in (None, own) else str(image)


def start_failed(pool: Pool, reason: str) -> StartFailed:
    """What a waiter is told when there will be no member."""
    return StartFailed(f"pool {pool.spec.name}: no member could be started: {reason}", reason=reason)


def late(claim: Claim, deadline: float) -> ResourceError:
    """What a waiter is told at its deadline: why, as far as its pool knows."""
    pool = claim.pool
    if pool.start_failing():
        return start_failed(pool, pool.last_failure)
    leased = pool.count(State.LEASED)
    return Timeout(
        f"pool {pool.spec.name}: gave no member in {deadline:g} s: {leased} of {pool.max} leased, "
        f"{pool.count(State.STARTING)} starting, {pool.ahead(claim.ticket)} waiters ahead",
        hints=(f"raise max ({pool.max}) or the deadline, or lower the concurrency",),
    )


def pool_status(pool: Pool) -> PoolStatus:
    """The counts of a pool."""
    return PoolStatus(
        max=pool.max,
        min=pool.min,
        ready=pool.count(State.FREE),
        leased=pool.count(State.LEASED),
        starting=pool.count(State.STARTING),
        resetting=pool.count(State.RESETTING),
        stopping=pool.count(State.STOPPING),
        queued=pool.queued,
        starts=pool.starts,
        resets=pool.resets,
        failures=pool.failures,
        reason=pool.reason(),
        message=pool.last_failure if pool.start_failing() else "",
    )
