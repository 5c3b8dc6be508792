"""What a tool or a reward may know and acquire during one rollout.

Guarantees:
1. Within one rollout the same pool or spec and key give the same lease object; acquires of one key at the
   same time become one request.
2. Two pools, specs or images under the default key are two resources.
3. ``close`` releases everything: also when one release fails, while an acquire is pending, or when the caller
   is cancelled over and over. It never raises for a dead resource; what could not be released is logged, and
   the lease's TTL ends it.
4. Waiting for a resource does not count against the limits of a call or a turn, only the rollout's.
5. Every lease is recorded with the seconds that were waited for it.
6. No two contexts share an owner, so a restarted rollout never gets what its predecessor left behind.
7. ``acquire_many`` gives everything it is asked for or acquires nothing: no two rollouts wait for each other,
   each with half of what it needs.
8. The objects of tool classes are the attempt's own.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TypeVar

from agentfly.context.deadlines import Deadlines
from agentfly.errors import AgentflyError
from agentfly.resources.finish import finished
from agentfly.resources.lease import Lease, Request, Resources, Scope
from agentfly.resources.spec import ResourceSpec

logger = logging.getLogger(__name__)

# A broker that does not answer must not hold a finished rollout; its leases end by their TTL anyway.
RELEASE_SECONDS = 30.0

# The rollout's own limit is to end a wait, so that one thing decides what it was; this is for a context that
# is used without it.
GRACE_SECONDS = 5.0

_Key = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Use:
    """One lease that the rollout held."""

    pool: str
    member_id: str
    incarnation: int
    wait_seconds: float


class ContextClosed(AgentflyError):
    """The rollout is over: nothing can be acquired any more."""


class Context:
    """One attempt at one rollout, as its tools and rewards see it.

    Args:
        rollout_id: the rollout's identifier, equal for all attempts.
        task: the task's row, read-only.
        resources: where leases come from.
        attempt: 0 for the first try.
        deadlines: the limits of this rollout, in seconds.

    Attributes:
        messages: what was said so far.
        images: the images in it as data URLs; messages name them by their places here.
    """

    def __init__(
        self,
        rollout_id: str,
        task: Mapping[str, Any],
        resources: Resources,
        attempt: int = 0,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self.task: Mapping[str, Any] = MappingProxyType(dict(task))
        self.attempt = attempt
        self.deadlines = deadlines or Deadlines()
        self.owner = f"{rollout_id}.{attempt}.{secrets.token_hex(4)}"
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.images: Sequence[str] = ()
        self.uses: list[Use] = []
        self.instances: dict[type, Any] = {}
        self.acquire_error: Exception | None = None
        self._resources = resources
        self._leases: dict[_Key, asyncio.Task[Lease]] = {}
        self._limits: list[asyncio.Timeout] = []
        self._paused: list[tuple[asyncio.Timeout, float]] = []
        self._waiters = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def final_response(self) -> str:
        """The text of the policy's last turn, empty before the first."""
        turns = (m["content"] for m in reversed(self.messages) if m["role"] == "assistant")
        return str(next(turns, ""))

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """Names of the pools (or kinds of spec) that were asked for and are not there yet."""
        return tuple(sorted({name for (name, _), task in self._leases.items() if not task.done()}))

    def instance(self, kind: type[T]) -> T:
        """The rollout's object of a class of tools, for other tools, ``setup`` and rewards."""
        if kind not in self.instances:
            known = ", ".join(made.__name__ for made in self.instances) or "none"
            raise AgentflyError(
                f"{kind.__name__}: is no tool class of this rollout's agent (known: {known})",
                hints=[f"put @tool on {kind.__name__} and pass it in Agent(tools=[...])"],
            )
        found: T = self.instances[kind]
        return found

    async def acquire(
        self,
        pool_or_spec: str | ResourceSpec,
        key: str = "default",
        scope: Scope = "rollout",
        share: str = "",
        image: str | None = None,
    ) -> Lease:
        """The rollout's lease of this pool or spec under this key; acquired at the first call, then the same.

        Args:
            key: tells apart several of the same pool.
            share: on whose account it waits, such as ``verifier`` where a pool has reserved members for
                rewards; "" is the job's own.
            image: of the container, from a pool that lets each acquire name it; None is the pool's own.

        Raises:
            ResourceError: no member could be had; ``acquire_error`` is then that exception.
            ContextClosed: the rollout is over.
        """
        self._check_open()
        request = Request(pool_or_spec, key, scope, share, image)
        slot = _slot(request)
        if slot not in self._leases:
            self._begin(slot, self._acquire(request, slot))
        return await self._wait(self._leases[slot])

    async def acquire_many(self, wanted: Sequence[str | ResourceSpec | Request]) -> list[Lease]:
        """The rollout's leases of all of these, in their order; those it does not have are acquired together.

        Args:
            wanted: pools or specs, or a ``Request`` for what ``acquire`` takes beside them.

        Raises:
            ResourceError: they could not be had, so none was acquired; what the rollout had before stays.
            ContextClosed: the rollout is over.
        """
        self._check_open()
        requests = [item if isinstance(item, Request) else Request(item) for item in wanted]
        slots = [_slot(request) for request in requests]
        missing = {
            slot: request for slot, request in zip(slots, requests, strict=True) if slot not in self._leases
        }
        if missing:
            together = asyncio.create_task(self._acquire_many(missing), name=f"acquire {self.owner}")
            for slot in missing:
                self._begin(slot, _one_of(together, slot))
        return [await self._wait(task) for task in [self._leases[slot] for slot in slots]]

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout`` whose clock stands still while something inside waits for a resource."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.append(limit)
            try:
                yield limit
            finally:
                self._limits.remove(limit)
                self._paused = [(paused, left) for paused, left in self._paused if paused is not limit]

    async def close(self) -> None:
        """Release every lease. May be called again; cancelling the caller does not stop the releases."""
        self._closed = True
        leases, self._leases = self._leases, {}
        if not leases:
            return
        await finished(self._release_all(leases))

    def _check_open(self) -> None:
        if self._closed:
            raise ContextClosed(f"rollout {self.rollout_id}: is over, so nothing can be acquired")

    def _begin(self, slot: _Key, acquire: Coroutine[Any, Any, Lease]) -> None:
        task = asyncio.create_task(acquire, name=f"acquire {slot[0]}")
        # A failure that nobody waits for any more is in acquire_error; asyncio need not report it again.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._leases[slot] = task

    async def _wait(self, task: asyncio.Task[Lease]) -> Lease:
        if task.done():
            return task.result()
        with self._pause():
            # Shielded: the request is the rollout's, and outlives a caller that is cut off by its own limit.
            return await asyncio.shield(task)

    async def _acquire(self, request: Request, slot: _Key) -> Lease:
        with self._noted([slot]) as leases:
            leases[slot] = await self._resources.acquire(
                request.pool_or_spec,
                self.owner,
                key=request.key,
                scope=request.scope,
                share=request.share,
                image=request.image,
                attempt=self.attempt,
                deadline=self.deadlines.rollout + GRACE_SECONDS,
            )
        return leases[slot]

    async def _acquire_many(self, requests: Mapping[_Key, Request]) -> dict[_Key, Lease]:
        with self._noted(requests) as leases:
            found = await self._resources.acquire_many(
                list(requests.values()),
                self.owner,
                attempt=self.attempt,
                deadline=self.deadlines.rollout + GRACE_SECONDS,
            )
            leases.update(zip(requests, found, strict=True))
        return leases

    @contextlib.contextmanager
    def _noted(self, slots: Iterable[_Key]) -> Iterator[dict[_Key, Lease]]:
        """Note what is acquired inside and how long it took, or the error; then the slots are free again."""
        began = time.monotonic()
        leases: dict[_Key, Lease] = {}
        try:
            yield leases
        except Exception as error:
            self.acquire_error = error
            for slot in slots:
                self._leases.pop(slot, None)
            raise
        for info in (lease.info for lease in leases.values()):
            self.uses.append(Use(info.pool, info.member_id, info.incarnation, time.monotonic() - began))

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        clock = asyncio.get_running_loop().time
        # Also those that began while something else waited already.
        running = [limit for limit in self._limits if not limit.expired() and limit.when() is not None]
        self._paused += [(limit, (limit.when() or 0.0) - clock()) for limit in running]
        for limit in running:
            limit.reschedule(None)
        self._waiters += 1
        try:
            yield
        finally:
            self._waiters -= 1
            if not self._waiters:
                for limit, left in self._paused:
                    limit.reschedule(clock() + left)
                self._paused = []

    async def _release_all(self, leases: Mapping[_Key, asyncio.Task[Lease]]) -> None:
        for task in leases.values():
            task.cancel()
        await asyncio.wait(leases.values(), timeout=RELEASE_SECONDS)
        held = [task.result() for task in leases.values() if task.done() and not _failed(task)]
        released = await asyncio.gather(*(_guarded(lease.release(), lease.info.lease_id) for lease in held))
        if not all(released) or len(held) < len(leases):
            # The net below: whatever the owner still holds or waits for, by one request.
            await _guarded(self._resources.release_owner(self.owner), self.owner)


def _slot(request: Request) -> _Key:
    wanted = request.pool_or_spec
    name = wanted if isinstance(wanted, str) else f"{wanted.kind}:{wanted.identity()}"
    return name if request.image is None else f"{name} {request.image}", request.key


async def _one_of(together: asyncio.Task[dict[_Key, Lease]], slot: _Key) -> Lease:
    return (await together)[slot]


def _failed(task: asyncio.Task[Lease]) -> bool:
    return task.cancelled() or task.exception() is not None


async def _guarded(release: Awaitable[None], what: str) -> bool:
    """True if it was released in time; a failure is logged, because a rollout that is over must end."""
    try:
        async with asyncio.timeout(RELEASE_SECONDS):
            await release
    except Exception as error:
        logger.warning("%s: not released, its TTL will: %s", what, error or type(error).__name__)
        return False
    return True
