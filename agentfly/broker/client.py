"""The engine of another process: the same protocol, over the broker's socket.

Guarantees:
1. It is a ``Resources``: what it raises has the types, hints and fields that the engine raised.
2. A broker that cannot be reached is ``Infra``; every request has a deadline.
3. All leases of a client are renewed in one request, every third of their TTL; one without an answer leaves
   time for another.
4. A cancelled acquire hangs up, which cancels it at the broker too. A cancelled release is finished all the
   same.
5. ``close`` releases what is still held, also when its caller is cancelled.
6. What is acquired without a share counts to the client's own.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentfly.broker import wire
from agentfly.resources.demand import counted
from agentfly.resources.errors import Infra
from agentfly.resources.finish import finished
from agentfly.resources.lease import Holdings, Lease, LeaseInfo, LeaseStatus, PoolStatus, Request, Scope
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

CALL_S = 30.0  # an answer that needs no member: more than the engine's own deadlines for a heartbeat
MARGIN_S = 10.0  # beyond the deadline the broker was given: its own Timeout says more than ours
RESET_S = 90.0  # beyond the engine's bound of a reset


class BrokerClient:
    """Resources at a broker.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        share: on whose account this process waits: the name of its job.
    """

    def __init__(self, address: str, share: str = "") -> None:
        self.address = address
        self._share = share
        self._base = "http://broker" if address.startswith("unix://") else address
        self._session: aiohttp.ClientSession | None = None
        self._holdings = Holdings(self)
        self._releases: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Release all leases that are held, and hang up."""
        for lease in self._holdings.held():
            self._begin_release(lease.info.lease_id, dirty=False)
        await finished(self._close())

    async def _close(self) -> None:
        await self._holdings.close()
        if self._releases:
            done, _ = await asyncio.wait(self._releases, timeout=CALL_S)
            for error in [task.exception() for task in done if not task.cancelled()]:
                if error is not None:
                    logger.warning("a lease was not released, its TTL will end it: %s", error)
        if self._session is not None:
            await self._session.close()

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
        """The owner's live lease under this key, or a new one; its heartbeats run until its release."""
        wanted = wire.Wanted.of(Request(pool_or_spec, key, scope, share, image), self._share)
        body = wire.AcquireBody(**dict(wanted), owner=owner, attempt=attempt, deadline_s=deadline)
        answer = await self._post(wire.ACQUIRE, body, within=deadline + MARGIN_S)
        return self._holdings.hold(LeaseInfo.model_validate(answer))

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[Lease]:
        """Leases for all requests, in their order, or none."""
        wanted = [wire.Wanted.of(request, self._share) for request in requests]
        body = wire.AcquireManyBody(requests=wanted, owner=owner, attempt=attempt, deadline_s=deadline)
        answers = await self._post(wire.ACQUIRE_MANY, body, within=deadline + MARGIN_S)
        return [self._holdings.hold(LeaseInfo.model_validate(answer)) for answer in answers]

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        """End the lease; a ``dirty`` member is not used again. Unknown leases are ignored."""
        await asyncio.shield(self._begin_release(lease_id, dirty=dirty))

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        """End all that the owner holds or waits for; with ``attempt``, only up to that attempt."""
        for lease in self._holdings.held():
            if lease.info.owner == owner and attempt is None:
                self._holdings.drop(lease.info.lease_id)
        await self._post(wire.RELEASE_OWNER, wire.ReleaseOwnerBody(owner=owner, attempt=attempt))

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        """Renew leases; False for each that is lost."""
        # The broker takes a third of a TTL at most; if there is no answer, there is time to ask again.
        within = min([CALL_S, *(lease.info.ttl_s / 2 for lease in self._holdings.held())])
        answer = await self._post(
            wire.HEARTBEAT, wire.HeartbeatBody(lease_ids=list(lease_ids)), within=within
        )
        return {str(lease_id): bool(alive) for lease_id, alive in answer.items()}

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        """Say what the owner will need of a pool; see ``Resources.demand``."""
        await self._post(wire.DEMAND, wire.DemandBody(pool=pool, wanted=counted(pool, wanted), owner=owner))

    async def reset(self, lease_id: str) -> LeaseInfo:
        """The lease with a pristine member: its own, reset, or else another."""
        answer = await self._post(wire.RESET, wire.ResetBody(lease_id=lease_id), within=RESET_S)
        return LeaseInfo.model_validate(answer)

    async def status(self) -> dict[str, PoolStatus]:
        """The counts of each pool, by name."""
        answer = await self._request("GET", wire.POOLS, None, CALL_S)
        return {name: PoolStatus.model_validate(status) for name, status in answer.items()}

    async def leases(self) -> list[LeaseStatus]:
        """Every lease that anybody holds at this broker."""
        answer = await self._request("GET", wire.LEASES, None, CALL_S)
        return [LeaseStatus.model_validate(lease) for lease in answer]

    def _begin_release(self, lease_id: str, *, dirty: bool) -> "asyncio.Task[Any]":
        self._holdings.drop(lease_id)
        body = wire.ReleaseBody(lease_id=lease_id, dirty=dirty)
        task = asyncio.get_running_loop().create_task(self._post(wire.RELEASE, body), name="agentfly release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _post(self, path: str, body: wire.Body, *, within: float = CALL_S) -> Any:
        return await self._request("POST", path, body.model_dump_json(), within)

    async def _request(self, method: str, path: str, body: str | None, within: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=within)
        try:
            async with self._connected().request(
                method, self._base + path, data=body, timeout=timeout
            ) as response:
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Infra(
                f"broker {self.address}: {path} got no answer: {str(error) or type(error).__name__}",
                hints=("see whether the broker runs",),
            ) from error
        if response.status != 200:
            raise wire.error_from_wire(answer)
        return answer

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # No limit on connections: every waiting acquire holds one, and heartbeats must not queue behind.
            connector = (
                aiohttp.UnixConnector(self.address.removeprefix("unix://"), limit=0)
                if self.address.startswith("unix://")
                else aiohttp.TCPConnector(limit=0)
            )
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session
