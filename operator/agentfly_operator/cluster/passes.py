"""One pass over one TrainingRun or RolloutJob: look, plan, write its status if that says something new, act.

Guarantees:
1. One that is being deleted gets nothing any more. One that is gone ends its loop.
2. What the API server refuses to make is told in the status, and made when it would be accepted.
3. A pass over one of which all is known asks for its object alone: its children are seen by watches.
4. A status that cannot be read is never written over; a spec that cannot be is told in the status.
5. A status is written over the object that it was planned from, before anything is done for it.

Not here: what is looked at and done for each kind (`cluster.runs`, `cluster.jobs`), what follows from what
(`plan`), when a status is written (`cluster.works`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar

from agentfly.api.common import WorkStatus
from agentfly.kube import Conflict, Kube, NotFound, Resource
from agentfly_operator.cluster.absent import MISSING_S, Absent
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.figures import Figures
from agentfly_operator.cluster.hand import Hand, Refused
from agentfly_operator.cluster.queues import Queues
from agentfly_operator.cluster.read import S, W, read, read_status
from agentfly_operator.cluster.works import (
    AGAIN_S,
    QUIET_S,
    RESYNC_S,
    Refusals,
    Statuses,
    Unwatched,
    Written,
    look_again,
)
from agentfly_operator.config import Config
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.invalid import invalid_status, invalid_turns
from agentfly_operator.plan.turns import Event

Key = tuple[str, str]
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Means:
    """What a pass looks and acts with."""

    kube: Kube
    hand: Hand
    children: Children
    absent: Absent
    queues: Queues
    events: Events
    config: Config


@dataclass
class Memory:
    """What one process remembers of one run or job; losing it costs a request, a write, or a wait."""

    uid: str
    written: Written = field(default_factory=Written)
    others: Unwatched = field(default_factory=Unwatched)
    refused: Refusals = field(default_factory=Refusals)


class Seen(Protocol):
    """Of what a pass saw: what nothing but another look will tell of."""

    @property
    def missing(self) -> Collection[object]: ...
    @property
    def conflicts(self) -> Collection[str]: ...
    @property
    def refused(self) -> str: ...


StatusT_co = TypeVar("StatusT_co", covariant=True)


class Planned(Protocol[StatusT_co]):
    """Of a plan: what does not depend on the kind."""

    @property
    def status(self) -> StatusT_co | None: ...
    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def wake_at(self) -> datetime | None: ...


M = TypeVar("M", bound=Memory)
O = TypeVar("O", bound=Seen)  # noqa: E741
P = TypeVar("P", bound=Planned[Any])


@dataclass(frozen=True, slots=True)
class Kind(Generic[W, S]):
    """One of the two kinds.

    Attributes:
        progress: fields of the status that move all the time.
    """

    resource: Resource
    model: type[W]
    status: type[S]
    progress: Collection[str]


class Passes(ABC, Generic[W, S, M, O, P]):
    """Passes over the objects of one kind."""

    def __init__(
        self,
        kind: Kind[W, S],
        remember: Callable[[str], M],
        plan: Callable[[W, O, datetime], P],
        means: Means,
        figures: Figures[S],
    ) -> None:
        self._kind = kind
        self._new = remember
        self._plan = plan
        self._means = means
        self._figures = figures
        self._statuses = Statuses(means.hand, means.events, kind.resource, kind.progress)
        self._memories: dict[Key, M] = {}

    async def run(self, key: Key) -> float | None:
        """One pass; seconds until the next, None if the object is gone."""
        namespace, name = key
        try:
            obj = await self._means.kube.get(self._kind.resource, name, namespace)
        except NotFound:
            self._forget(key)
            return None
        if "deletionTimestamp" in obj["metadata"]:
            self._forget(key)
            return RESYNC_S
        memory = self._remember(key, obj["metadata"]["uid"])
        try:
            return await self._pass(key, obj, memory)
        except Conflict:
            return AGAIN_S  # it was changed since it was read
        except Refused as error:
            # News is told at once; what is tried in every pass, until its name is free, not in a circle.
            return AGAIN_S if memory.refused.put(error, obj["metadata"]["generation"]) else MISSING_S

    async def _pass(self, key: Key, obj: Object, memory: M) -> float:
        now = datetime.now(UTC).replace(microsecond=0)
        before = read_status(self._kind.status, obj)
        work = read(self._kind.model, obj, before)
        if isinstance(work, str):
            status = invalid_status(obj["metadata"]["generation"], work, before, now)
            told = invalid_turns(before, status)
            return await self._statuses.show(obj, status.to_json(), told, memory.written)
        await self._means.children.confirm(self._work(key))
        if is_over(before):
            memory.refused.forget()
        seen = await self._observe(key, work, memory, now)
        plan = self._plan(work, seen, now)
        self._figures.put(key, plan.status or before)
        pause = QUIET_S
        if plan.status is not None:
            pause = await self._statuses.show(obj, plan.status.to_json(), plan.events, memory.written)
        await self._act(work, plan, seen, memory)
        until = look_again(
            over=is_over(before),
            left=self._left(seen),
            waits=bool(seen.missing or seen.conflicts or seen.refused),
            wake_at=plan.wake_at,
        )
        return min(pause, until)

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._means.children.forget(self._work(key))
        self._figures.drop(key)

    def _remember(self, key: Key, uid: str) -> M:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            self._forget(key)
            memory = self._memories[key] = self._new(uid)
        return memory

    @staticmethod
    @abstractmethod
    def _work(key: Key) -> WorkKey:
        """As its children know it."""

    @abstractmethod
    async def _observe(self, key: Key, work: W, memory: M, now: datetime) -> O:
        """Everything that its plan depends on."""

    @abstractmethod
    async def _act(self, work: W, plan: P, seen: O, memory: M) -> None:
        """The steps of its plan."""

    @staticmethod
    @abstractmethod
    def _left(seen: O) -> bool:
        """Whether something that was made for it is still there."""


def is_over(status: WorkStatus) -> bool:
    """Whether it is finished for good."""
    return status.completion_time is not None
