"""What a holder has of a member: the lease, its handle, and the heartbeats that keep it.

Guarantees:
1. While a handle is held, its lease is renewed every third of its TTL; all leases of one holder in one call.
   A call that fails, however it does, is followed by the next.
2. The renewals end with the release; when nothing is held, no task is left.
3. A lease that could not be renewed for its TTL, that the engine calls lost, or that was released, is marked
   lost; using its handle after that raises ``LeaseLost``.
4. Releasing twice, or releasing a lost lease, is harmless.

Not here: who gets which member (``pool``), and the engine's own view of leases (``claims``).
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict

from agentfly.resources.errors import LeaseLost, ResourceError
from agentfly.resources.instance import InstanceClient
from agentfly.resources.spec import ResourceSpec
from agentfly.sandbox import SandboxClient

logger = logging.getLogger(__name__)

BEATS_PER_TTL = 3  # two heartbeats may be lost or late before the lease is
CLOSE_S = 5.0  # a cancelled heartbeat ends at once; this bounds one that does not

Scope = Literal["rollout", "global"]


class LeaseInfo(BaseModel):
    """A lease as data, fit for the wire. ``token`` opens the member for this holder alone.

    ``image`` is "" for the pool's own.
    """

    model_config = ConfigDict(frozen=True)

    lease_id: str
    pool: str
    owner: str
    key: str
    share: str = ""
    image: str = ""
    member_id: str
    incarnation: int
    kind: str
    address: str
    token: str
    ttl_s: float


class ShareStatus(BaseModel):
    """How many of one share wait, and how many members it holds."""

    model_config = ConfigDict(frozen=True)

    pending: int
    leased: int


class PoolStatus(BaseModel):
    """Counts of one pool at one moment. ``kind`` is that of the pool's resource.

    Members: ``ready`` counts free ones, of whatever spec, ``outdated`` those of an older spec in any state.
    ``images`` says how many there are of each image, where acquires name theirs; ``quarantined`` what the
    check of each member found that is kept for a look. ``short_s`` is for how long fewer than ``buffer`` have
    been free; None while they are not.

    Waiters: ``oldest_wait_s`` is the age of the oldest, 0 if there is none. ``by_share`` has the largest
    shares, ``saturated`` says that the next asker is refused.

    Starts: ``breaker`` is ``open`` while an image failed so often in a row that it is left alone for longer
    and longer; the next start that was put off comes in ``retry_in_s``, None if none is. ``failing`` says of
    each image what its last start failed of.

    Rates are of the last acquires and resets, None before the first: ``hit_ratio`` is the fraction of grants
    for which a member was free at once, ``acquire_p99_s`` their 99th percentile in seconds, ``clean_ratio``
    the fraction of resets that were verified. ``starts``, ``resets``, ``failures``, ``acquires``,
    ``acquires_warm``, ``resets_clean`` and ``resets_dirty`` only grow. ``reset_method`` is that of the member
    that started last, "" where nobody chose one, ``reset_reason`` why it is not a better one.

    ``reason`` is a constant of ``actions.Reason``, ``message`` is for people.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    max: int
    min: int
    ready: int
    leased: int
    starting: int
    resetting: int
    stopping: int
    quarantined: dict[str, str]
    outdated: int = 0
    queued: int
    starts: int
    resets: int
    failures: int
    reason: str
    message: str = ""
    hit_ratio: float | None = None
    acquire_p99_s: float | None = None
    acquires: int = 0
    acquires_warm: int = 0
    oldest_wait_s: float = 0.0
    by_share: dict[str, ShareStatus] = {}
    saturated: bool = False
    images: dict[str, int] = {}
    short_s: float | None = None
    breaker: Literal["closed", "open"] = "closed"
    retry_in_s: float | None = None
    failing: dict[str, str] = {}
    resets_clean: int = 0
    resets_dirty: int = 0
    clean_ratio: float | None = None
    reset_method: str = ""
    reset_reason: str = ""


class LeaseStatus(BaseModel):
    """A lease that is held, for people: it opens nothing. Seconds are as of the moment of asking."""

    model_config = ConfigDict(frozen=True)

    lease_id: str
    pool: str
    member_id: str
    owner: str
    key: str
    share: str
    image: str
    held_s: float
    expires_in_s: float


@dataclass(frozen=True)
class Request:
    """One of several resources that are acquired together.

    ``share`` is on whose account it waits in the queue, "" that of the holder's job. ``image`` may be named
    where the pool has ``per_image``; None is the pool's own.
    """

    pool_or_spec: str | ResourceSpec
    key: str = "default"
    scope: Scope = "rollout"
    share: str = ""
    image: str | None = None


class Resources(Protocol):
    """Layer IV as the layers above see it: an engine in this process or a broker's client."""

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
    ) -> "Lease":
        """The owner's live lease under this key, or a new one within ``deadline`` seconds; see ``Request``.

        Raises:
            Timeout, Saturated, StartFailed, LeaseLost, SpecMismatch, PoolNotFound, Infra.
        """
        ...

    async def acquire_many(
        self, requests: Sequence[Request], owner: str, *, attempt: int = 0, deadline: float = 600.0
    ) -> list["Lease"]:
        """All of them, in the order of the requests, or none."""
        ...

    async def release(self, lease_id: str, *, dirty: bool = False) -> None:
        """End the lease; a ``dirty`` member is not used again. Unknown leases are ignored."""
        ...

    async def release_owner(self, owner: str, *, attempt: int | None = None) -> None:
        """End all that the owner holds or waits for; with ``attempt``, only up to that attempt."""
        ...

    async def heartbeat(self, lease_ids: Sequence[str]) -> dict[str, bool]:
        """Renew leases; False for each that is lost."""
        ...

    async def demand(self, pool: str, wanted: Mapping[str, int] | Sequence[str], owner: str) -> None:
        """Say what the owner will need of a pool, soonest first, so that it is warm by then.

        Args:
            wanted: how many members of each image ("" is the pool's own), or the image of each acquire to
                come. It replaces what the owner said before, and ends with ``release_owner`` or after
                ``DEMAND_S`` without being said again.

        Raises:
            PoolNotFound, ResourceError.
        """
        ...

    async def reset(self, lease_id: str) -> LeaseInfo:
        """Make the holder's member pristine again, or replace it by one that is."""
        ...

    async def status(self) -> dict[str, PoolStatus]:
        """The counts of each pool, by name."""
        ...


class Lease:
    """The handle of a lease. Leaving its ``async with`` releases it."""

    def __init__(self, info: LeaseInfo, resources: Resources, holdings: "Holdings") -> None:
        self.info = info
        self.lost = False
        self._resources = resources
        self._holdings = holdings
        self._sandbox: SandboxClient | None = None
        self._instance: InstanceClient | None = None

    @property
    def sandbox(self) -> "SandboxClient":
        """The client of the container's daemon; its connection is kept until the release.

        What it raises is the daemon's own: ``SandboxLeaseLost`` and ``SandboxUnreachable`` mean here what
        ``LeaseLost`` and ``Infra`` mean at the engine.
        """
        self._require("container")
        if self._sandbox is None:
            self._sandbox = SandboxClient(self.info.address, self.info.token)
        return self._sandbox

    @property
    def instance(self) -> "InstanceClient":
        """The client of an in-process member's object; its connection is kept until the release."""
        self._require("in-process")
        if self._instance is None:
            self._instance = InstanceClient(self.info.address, self.info.token)
        return self._instance

    @property
    def base_url(self) -> str:
        """The address of the model service, or of the external API, whose key is ``info.token``."""
        self._require("model-service", "external-api")
        return self.info.address

    async def reset(self) -> None:
        """Make the member pristine; ``info`` and ``sandbox`` are new ones afterwards.

        After an error the lease is of no more use but to be released.
        """
        info = await self._resources.reset(self.info.lease_id)
        await self._close_clients()
        self.info = info

    async def release(self, *, dirty: bool = False) -> None:
        """Give the member back. Does not raise if the other side is gone: there the TTL ends the lease."""
        self._holdings.drop(self.info.lease_id)
        try:
            await self._close_clients()
        finally:
            try:
                await self._resources.release(self.info.lease_id, dirty=dirty)
            except ResourceError as error:
                logger.warning("lease %s: not released, its TTL will: %s", self.info.lease_id, error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    def _require(self, *kinds: str) -> None:
        if self.info.kind not in kinds:
            wanted = " or ".join(kinds)
            raise ResourceError(f"lease of pool {self.info.pool}: is of type {self.info.kind}, not {wanted}")
        if self.lost:
            raise LeaseLost(
                f"lease of pool {self.info.pool}: is over, member {self.info.member_id} is no longer held",
                incarnation=self.info.incarnation,
            )

    async def _close_clients(self) -> None:
        clients = (self._sandbox, self._instance)
        self._sandbox = self._instance = None
        for client in clients:
            if client is not None:
                await client.close()


class Holdings:
    """The handles that one holder has, and the one task that renews their leases."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._leases: dict[str, Lease] = {}
        self._renewed: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def hold(self, info: LeaseInfo) -> Lease:
        """The handle of this lease: the same object for as long as it is held."""
        loop = asyncio.get_running_loop()
        lease = self._leases.get(info.lease_id)
        if lease is None:
            lease = self._leases[info.lease_id] = Lease(info, self._resources, self)
            self._renewed[info.lease_id] = loop.time()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._changed = asyncio.Event()  # belongs to the loop of the task that waits for it
            self._task = loop.create_task(self._beat(), name="agentfly-heartbeat")
        self._changed.set()
        return lease

    def drop(self, lease_id: str) -> None:
        """Stop renewing a lease; its handle is of no more use. Unknown leases are ignored."""
        self._renewed.pop(lease_id, None)
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            lease.lost = True
            self._changed.set()

    def held(self) -> list[Lease]:
        """Every handle that is held now."""
        return list(self._leases.values())

    async def close(self) -> None:
        """Stop renewing everything."""
        for lease_id in list(self._leases):
            self.drop(lease_id)
        if self._task is not None and self._task.get_loop() is asyncio.get_running_loop():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._leases:
            due = began + min(lease.info.ttl_s for lease in self._leases.values()) / BEATS_PER_TTL
            if loop.time() >= due:
                began = loop.time()
                await self._renew(loop)
                continue
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()

    async def _renew(self, loop: asyncio.AbstractEventLoop) -> None:
        began = loop.time()
        asked = list(self._leases)
        try:
            alive = await self._resources.heartbeat(asked)
        except Exception as error:  # whatever it is: without this task every lease would end
            logger.warning(
                "heartbeat of %d leases failed: %s", len(asked), str(error) or type(error).__name__
            )
            alive = {}
        for lease_id in asked:
            lease = self._leases.get(lease_id)
            if lease is None:
                continue  # released while the renewal was on its way
            if alive.get(lease_id):
                self._renewed[lease_id] = began  # and however long the answer took, it is alive
            elif lease_id in alive or loop.time() - self._renewed[lease_id] >= lease.info.ttl_s:
                self.drop(lease_id)
