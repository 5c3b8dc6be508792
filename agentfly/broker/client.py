"""The engine of another process: the same protocol, over the broker's socket.

Guarantees:
1. It is a ``Resources``: what it raises has the types, hints and fields that the engine raised.
2. Every request has a deadline. What a holder asks of a broker over TCP that cannot be reached, or starts or
   ends, is asked again until then: everything may be, an acquire because it is known by its owner and key.
   Then, and at once over a unix socket, whose broker never comes back, it is ``Infra``.
3. All leases of a client are renewed in one request, every third of their TTL; one without an answer leaves
   time for another.
4. A cancelled acquire hangs up, which cancels it at the broker too. A cancelled release is finished all the
   same.
5. ``close`` releases what is still held, also when its caller is cancelled.
6. What is acquired without a share counts to the client's own.
7. A token that is refused is read again from its file, and the request repeated if there is another one.
8. A lease that the broker does not know any more is restored, if it gave a record of it, before it counts as
   lost, and before its owner asks for it again.
9. A broker whose machine is gone, which nothing says on the connection, is noticed within a minute.
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentfly.broker import wire
from agentfly.broker.access import HEADER, TOKEN_FILE, TokenFile
from agentfly.kube.connections import connector
from agentfly.resources.demand import counted
from agentfly.resources.errors import Infra
from agentfly.resources.finish import finished
from agentfly.resources.lease import Holdings, Lease, LeaseInfo, LeaseStatus, PoolStatus, Request, Scope
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

CALL_S = 30.0  # an answer that needs no member: more than the engine's own deadlines for a heartbeat
MARGIN_S = 10.0  # beyond the deadline the broker was given: its own Timeout says more than ours
RESET_S = 90.0  # beyond the engine's bound of a reset
CONNECT_S = 5.0  # for a connection inside a cluster; an address of a pod that is gone may never answer
PAUSES_S = (0.1, 2.0)  # first and longest pause before a request is repeated, each at random up to that
DNS_S = 1  # a name is looked up again: a broker that was replaced has another address
PROXIED = {502, 503, 504}  # of something between that does not reach the broker


class _NoAnswerError(Exception):
    """A try that came to nothing, and may be repeated."""


class BrokerClient:
    """Resources at a broker.

    Args:
        address: ``unix:///path`` or ``http://host:port``.
        share: on whose account this process waits: the name of its job.
        token: what opens a broker over TCP; None reads the file that ``AGENTFLY_BROKER_TOKEN_FILE`` names.

    Raises:
        ResourceError: that file has no token.
    """

    def __init__(self, address: str, share: str = "", *, token: str | None = None) -> None:
        self.address = address
        self._share = share
        self._remote = not address.startswith("unix://")
        file = os.environ.get(TOKEN_FILE) if self._remote and token is None else None
        self._token: str | TokenFile | None = TokenFile(Path(file)) if file else token
        self._base = address.rstrip("/") if self._remote else "http://broker"
        self._session: aiohttp.ClientSession | None = None
        self._holdings = Holdings(self)
        self._releases: set[asyncio.Task[Any]] = set()
        self._records: dict[str, str] = {}  # of leases that are held

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
        records = self._records_of(owner, {key})
        body = wire.AcquireBody(
            **dict(wanted), owner=owner, attempt=attempt, deadline_s=deadline, records=records
        )
        return self._hold(await self._post(wire.ACQUIRE, body, within=deadline))

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list[Lease]:
        """Leases for all requests, in their order, or none."""
        wanted = [wire.Wanted.of(request, self._share) for request in requests]
        records = self._records_of(owner, {each.key for each in wanted})
        body = wire.AcquireManyBody(
            requests=wanted, owner=owner, attempt=attempt, deadline_s=deadline, records=records
        )
        answers = await self._post(wire.ACQUIRE_MANY, body, within=deadline)
        return [self._hold(answer) for answer in answers]

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
        alive = {str(lease_id): bool(lives) for lease_id, lives in answer.items()}
        unknown = {
            each: self._records[each] for each, lives in alive.items() if not lives and each in self._records
        }
        if unknown:
            body = wire.RestoreBody(records=list(unknown.values()))
            alive |= dict(zip(unknown, await self._post(wire.RESTORE, body, within=within), strict=True))
        return alive

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        """Say what the owner will need of a pool; see ``Resources.demand``."""
        await self._post(wire.DEMAND, wire.DemandBody(pool=pool, wanted=counted(pool, wanted), owner=owner))

    async def reset(self, lease_id: str) -> LeaseInfo:
        """The lease with a pristine member: its own, reset, or else another."""
        answer = await self._post(wire.RESET, wire.ResetBody(lease_id=lease_id), within=RESET_S)
        return LeaseInfo.model_validate(answer)

    async def status(self) -> dict[str, PoolStatus]:
        """The counts of each pool, by name."""
        answer = await self._get(wire.POOLS)
        return {name: PoolStatus.model_validate(status) for name, status in answer.items()}

    async def leases(self) -> list[LeaseStatus]:
        """Every lease that anybody holds at this broker."""
        answer = await self._get(wire.LEASES)
        return [LeaseStatus.model_validate(lease) for lease in answer]

    def _hold(self, answer: dict[str, Any]) -> Lease:
        held = {lease.info.lease_id for lease in self._holdings.held()}
        self._records = {each: record for each, record in self._records.items() if each in held}
        info = LeaseInfo.model_validate(answer)
        if (record := answer.get("record")) is not None:
            self._records[info.lease_id] = record
        return self._holdings.hold(info)

    def _records_of(self, owner: str, keys: Set[str]) -> list[str]:
        held = [lease.info for lease in self._holdings.held()] if self._records else []
        ids = [info.lease_id for info in held if info.owner == owner and info.key in keys]
        return [self._records[each] for each in ids if each in self._records]

    def _begin_release(self, lease_id: str, *, dirty: bool) -> "asyncio.Task[Any]":
        self._holdings.drop(lease_id)
        self._records.pop(lease_id, None)
        body = wire.ReleaseBody(lease_id=lease_id, dirty=dirty)
        task = asyncio.get_running_loop().create_task(self._post(wire.RELEASE, body), name="agentfly release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _post(self, path: str, body: wire.Body, *, within: float = CALL_S) -> Any:
        """The answer to what a holder asks, within so many seconds, in as many tries as it takes."""
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        pauses = _pauses()
        while True:
            left = max(0.0, end - loop.time())
            if isinstance(body, wire.AcquireBody | wire.AcquireManyBody):
                body = body.model_copy(update={"deadline_s": left})
                left += MARGIN_S
            try:
                return await self._try("POST", path, body.model_dump_json(), left)
            except _NoAnswerError as error:
                pause = next(pauses)
                if not self._remote or loop.time() + pause >= end:
                    raise self._unreachable(path, error) from error
                logger.warning("broker %s: %s got no answer, comes again: %s", self.address, path, error)
            await asyncio.sleep(pause)

    async def _get(self, path: str) -> Any:
        """The answer to what somebody wants to see now."""
        try:
            return await self._try("GET", path, None, CALL_S)
        except _NoAnswerError as error:
            raise self._unreachable(path, error) from error

    async def _try(self, method: str, path: str, body: str | None, within: float) -> Any:
        """One request; a second one if its token was refused and is another by now."""
        try:
            return await self._once(method, path, body, within)
        except wire.NotReady as error:
            raise _NoAnswerError(error.message) from error
        except wire.Unauthorized:
            if not isinstance(self._token, TokenFile) or not self._token.renewed():
                raise
        return await self._once(method, path, body, within)

    async def _once(self, method: str, path: str, body: str | None, within: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=within, sock_connect=CONNECT_S)
        token = self._token.token if isinstance(self._token, TokenFile) else self._token
        headers = {HEADER: token} if token else None
        try:
            async with self._connected().request(
                method, self._base + path, data=body, timeout=timeout, headers=headers
            ) as response:
                status, received = response.status, await response.read()
        except aiohttp.InvalidURL as error:
            raise Infra(f"broker {self.address}: is no address", hints=("use http://host:port",)) from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            raise _NoAnswerError(str(error) or type(error).__name__) from error
        try:
            answer = json.loads(received)
        except ValueError:
            answer = received.decode(errors="replace")
        if status == 200 and not isinstance(answer, str):
            return answer
        failure = wire.error_from_wire(answer)
        if status in PROXIED and not isinstance(answer, dict):
            raise _NoAnswerError(failure.message)
        raise failure

    def _unreachable(self, path: str, error: _NoAnswerError) -> Infra:
        return Infra(
            f"broker {self.address}: {path} got no answer: {error}", hints=("see whether the broker runs",)
        )

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # No limit on connections: every waiting acquire holds one, and heartbeats must not queue behind.
            pooled: aiohttp.BaseConnector = (
                connector(0, dns_s=DNS_S)
                if self._remote
                else aiohttp.UnixConnector(self.address.removeprefix("unix://"), limit=0)
            )
            self._session = aiohttp.ClientSession(connector=pooled)
        return self._session


def _pauses() -> Iterator[float]:
    """Pauses before the next tries, at random so that many clients do not come at once."""
    pause, longest = PAUSES_S
    while True:
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, longest)
