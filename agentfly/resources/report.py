"""What the engine says about its pools: the errors of those who wait, and the counts of those who watch.

Guarantees:
1. A deadline that passed says whether members are all leased or cannot be started, and with what numbers.
   Who waits for an image is told of its starts alone.
2. What a runner said that helps against a failed start reaches whoever waited for it.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from agentfly.resources.actions import State
from agentfly.resources.claims import Ask, Claim, Claims
from agentfly.resources.errors import ResourceError, StartFailed, Timeout
from agentfly.resources.lease import LeaseStatus, PoolStatus, ShareStatus
from agentfly.resources.pool import Pool
from agentfly.resources.rates import Rates
from agentfly.resources.spec import ContainerSpec

T = TypeVar("T")

SHOWN = 16  # shares and images: a status is read by people and kept small for the API server
REASON_LENGTH = 300  # characters


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


def patience(asks: Sequence[Ask], deadline: float) -> float:
    """How many seconds a call may wait: its own deadline, or less where a pool bounds every wait."""
    bounds = [most for ask in asks if (most := ask.pool.spec.acquire_timeout_s) is not None]
    return min([deadline, *bounds])


def late(claim: Claim, waited: float) -> ResourceError:
    """What a waiter is told whose time is over: why it was served by nobody, as far as its pool knows."""
    pool = claim.pool
    if (failures := pool.failing(claim.ask.image)) is not None:
        return start_failed(pool, failures.reason, failures.hints)
    leased = pool.count(State.LEASED)
    bounded = waited == pool.spec.acquire_timeout_s
    bound = "acquire_timeout_s of the pool" if bounded else "the deadline"
    return Timeout(
        f"pool {pool.spec.name}: gave no member in {waited:g} s{f' ({bound})' if bounded else ''}: "
        f"{leased} of {pool.max} leased, {pool.count(State.STARTING)} starting, "
        f"{pool.ahead(claim.ticket)} waiters ahead",
        hints=(f"raise max ({pool.max}) or {bound}, or lower the concurrency",),
    )


def pool_status(pool: Pool, claims: Claims, rates: Rates, now: float) -> PoolStatus:
    """How a pool is doing."""
    name = pool.spec.name
    acquires, warm = rates.acquires(name)
    clean, dirty = rates.resets(name)
    is_open, failing = pool.broken()
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
        outdated=pool.outdated,
        queued=pool.queued,
        starts=pool.starts,
        resets=pool.resets,
        failures=pool.failures,
        reason=pool.reason(),
        message=pool.last_failure if pool.start_failing() else "",
        hit_ratio=rates.hit_ratio(name),
        acquire_p99_s=rates.acquire_p99_s(name),
        acquires=acquires,
        acquires_warm=warm,
        oldest_wait_s=_oldest_wait(pool, claims, now),
        by_share=_shares(pool),
        saturated=pool.queued >= pool.spec.max_pending,
        images=_images(pool, pool.images()) if pool.spec.per_image else {},
        short_s=pool.short_s(now),
        breaker="open" if is_open else "closed",
        retry_in_s=pool.retry_in_s(now),
        failing=_images(pool, {image: reason[:REASON_LENGTH] for image, reason in failing.items()}),
        resets_clean=clean,
        resets_dirty=dirty,
        clean_ratio=rates.clean_ratio(name),
        reset_method=pool.reset_method,
        reset_reason=pool.reset_reason,
    )


def _oldest_wait(pool: Pool, claims: Claims, now: float) -> float:
    for number in pool.waiting():
        claim = claims.of_ticket(pool, number)
        if (
            claim is not None and claim.held_since is None
        ):  # else it has waited only since a reset that failed
            return now - claim.opened
    return 0.0


def _shares(pool: Pool) -> dict[str, ShareStatus]:
    largest = sorted(pool.shares().items(), key=lambda share: (-sum(share[1]), share[0]))
    return {
        name: ShareStatus(pending=pending, leased=leased)
        for name, (pending, leased) in largest[:SHOWN]
        if pending or leased
    }


def _images(pool: Pool, by_image: Mapping[str, T]) -> dict[str, T]:
    """The first or largest, under the names that people know the images by."""
    resource = pool.spec.resource
    own = resource.image if isinstance(resource, ContainerSpec) else ""
    most = sorted(by_image.items(), key=lambda each: -each[1] if isinstance(each[1], int) else 0)
    return {image or own: value for image, value in most[:SHOWN]}


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
