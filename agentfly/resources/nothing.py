"""Resources of rollouts that need none.

Guarantees:
1. An acquire fails at once and says how to have pools; everything else is as of an engine without any.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from agentfly.resources.errors import PoolNotFound
from agentfly.resources.lease import Lease, LeaseInfo, PoolStatus, Request, Scope
from agentfly.resources.spec import ResourceSpec


class NoPools:
    """A ``Resources`` that has nothing."""

    async def acquire(
        self,
        pool_or_spec: str | ResourceSpec,
        owner: str,
        *,
        key: str = "default",
        scope: Scope = "rollout",
        share: str = "",
        image: str | None = None,
        attempt: int = 0,
        deadline: float = 600.0,
    ) -> Lease:
        """Raise ``PoolNotFound``."""
        _fail(pool_or_spec)

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[Lease]:
        """Raise ``PoolNotFound``, unless nothing is asked for."""
        for request in requests:
            _fail(request.pool_or_spec)
        return []

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        """Ignore it: there is no lease."""

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        """Ignore it: nobody holds anything."""

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        """All of them are lost."""
        return dict.fromkeys(lease_ids, False)

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        """Raise ``PoolNotFound``."""
        _fail(pool)

    async def reset(self, lease_id: str) -> LeaseInfo:
        """Raise ``PoolNotFound``."""
        _fail(lease_id)

    async def status(self) -> dict[str, PoolStatus]:
        """No pools."""
        return {}


def _fail(wanted: str | ResourceSpec) -> NoReturn:
    name = wanted if isinstance(wanted, str) else wanted.kind
    raise PoolNotFound(
        f"pool {name}: is not here; this rollout was given no resources",
        hints=['pass resources=..., as `async with local_pools("pools.yaml") as resources` gives them'],
    )
