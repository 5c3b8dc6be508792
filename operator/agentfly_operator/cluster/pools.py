"""One pass over one ResourcePool: look, plan, apply, write its status if that says something new.

Guarantees:
1. A status is written only if it differs from the one before, and at most once in `STATUS_S` seconds.
2. What other managers wrote into the object, its status too, stays, and leads to no write of ours.
3. A pool that is being deleted gets nothing any more. One that is gone ends its loop.
4. Nothing is written by a process that does not lead.
5. Events come after the status that they tell of, so that a failed write does not tell twice.

Not here: what the status says (`plan.pool`), what the namespace needs (`cluster.namespaces`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from agentfly.api import Condition
from agentfly.api.base import API_VERSION
from agentfly.errors import AgentflyError
from agentfly.kube import NETWORK_POLICIES, RESOURCE_POOLS, Kube, NotFound
from agentfly_operator.cluster.brokers import Brokers
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.members import Members
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.config import Config
from agentfly_operator.names import owner_of
from agentfly_operator.plan.drift import covers
from agentfly_operator.plan.namespace import owned_by
from agentfly_operator.plan.pool import Plan, low_since, plan_pool
from agentfly_operator.plan.seen import PoolSeen
from agentfly_operator.plan.wanted import Wanted, read_pool
from agentfly_operator.render.policy import pool_members_policy

STATUS_S = 1.0
RESYNC_S = 20.0
POLICY_S = 60.0  # after so long a policy that somebody changed or deleted is put right
TAKE_UP = timedelta(seconds=1)  # a broker hears of a change of its pools within that time

Key = tuple[str, str]
Object = dict[str, Any]


class NotLeading(AgentflyError):
    """Another operator acts now."""


@dataclass
class _Memory:
    """What one process remembers of one incarnation of a pool; losing it costs a request or a write."""

    uid: str
    generation: int = -1
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    low_since: datetime | None = None
    written: Object | None = None
    written_at: float = float("-inf")
    policy: tuple[int, float] = (-1, float("-inf"))


class Pools:
    """Passes over ResourcePools.

    Args:
        leads: whether this process may write.
        changed: called with the namespace of a pool that came, went, or changed its spec.
    """

    def __init__(
        self,
        kube: Kube,
        members: Members,
        brokers: Brokers,
        events: Events,
        metrics: Metrics,
        leads: Callable[[], bool],
        changed: Callable[[str], None],
        config: Config,
    ) -> None:
        self._kube = kube
        self._members = members
        self._brokers = brokers
        self._events = events
        self._metrics = metrics
        self._leads = leads
        self._changed = changed
        self._config = config
        self._memories: dict[Key, _Memory] = {}

    async def run(self, key: Key) -> float | None:
        """One pass; seconds until the next, None if the pool is gone."""
        namespace, name = key
        try:
            obj = await self._kube.get(RESOURCE_POOLS, name, namespace)
        except NotFound:
            self._memories.pop(key, None)
            self._changed(namespace)
            return None
        if "deletionTimestamp" in obj["metadata"]:
            if self._memories.pop(key, None) is not None:
                self._changed(namespace)
            return RESYNC_S
        memory = self._remember(key, obj)
        wanted = read_pool(obj)
        await self._keep_policy(obj, wanted, memory)
        plan = self._plan(key, obj, wanted, memory)
        pause = await self._show(obj, plan, memory)
        if plan.wake_at is not None:
            pause = min(pause, max(0.0, (plan.wake_at - datetime.now(UTC)).total_seconds()))
        return pause

    def _remember(self, key: Key, obj: Object) -> _Memory:
        meta = obj["metadata"]
        memory = self._memories.get(key)
        if memory is None or memory.uid != meta["uid"]:
            memory = self._memories[key] = _Memory(meta["uid"])
        if memory.generation != meta["generation"]:
            memory.generation, memory.since = meta["generation"], datetime.now(UTC)
            self._changed(key[0])
            self._brokers.poke(key[0])
        return memory

    async def _keep_policy(self, obj: Object, pool: Wanted, memory: _Memory) -> None:
        now = asyncio.get_running_loop().time()
        generation, checked = memory.policy
        if generation == memory.generation and now - checked < POLICY_S:
            return
        wanted = self._policy(obj, pool)
        if wanted is not None:
            meta = wanted["metadata"]
            try:
                live: Object = await self._kube.get(NETWORK_POLICIES, meta["name"], meta["namespace"])
            except NotFound:
                live = {}
            if not covers(live, wanted):
                self._must_lead()
                await self._kube.apply(NETWORK_POLICIES, wanted)
                self._metrics.writes.labels("apply").inc()
        memory.policy = memory.generation, now

    def _plan(self, key: Key, obj: Object, wanted: Wanted, memory: _Memory) -> Plan:
        now = datetime.now(UTC).replace(microsecond=0)
        broker = self._brokers.seen(key[0])
        taken_up = broker.answered is not None and broker.answered >= memory.since + TAKE_UP
        memory.low_since = low_since(wanted, broker.pools.get(key[1]), memory.low_since, now)
        seen = PoolSeen(
            broker=broker,
            pods=self._members.facts(key),
            conditions=conditions_of(obj),
            fresh=taken_up or (obj.get("status") or {}).get("observedGeneration") == memory.generation,
            low_since=memory.low_since,
        )
        return plan_pool(wanted, seen, now)

    async def _show(self, obj: Object, plan: Plan, memory: _Memory) -> float:
        """Write the status if it says something new; seconds until the next look."""
        if plan.status is None:
            return RESYNC_S
        wanted = plan.status.to_json()
        live = obj.get("status") or {}
        if not differs(live, wanted, memory.written):
            memory.written = wanted
            return RESYNC_S
        now = asyncio.get_running_loop().time()
        if (wait := memory.written_at + STATUS_S - now) > 0:
            return wait
        self._must_lead()
        meta = obj["metadata"]
        body: Object = {"apiVersion": API_VERSION, "kind": "ResourcePool", "status": wanted}
        body["metadata"] = {name: meta[name] for name in ("name", "namespace", "uid")}
        await self._kube.apply(RESOURCE_POOLS, body, subresource="status")
        self._metrics.writes.labels("status").inc()
        memory.written, memory.written_at = wanted, now
        for event in plan.events:
            await self._events.post(obj, event)
        return RESYNC_S

    def _policy(self, obj: Object, wanted: Wanted) -> Object | None:
        if wanted.pool is None:
            return None
        policy = pool_members_policy(obj["metadata"]["namespace"], wanted.pool, self._config)
        return None if policy is None else owned_by(policy, [owner_of(obj, controller=True)])

    def _must_lead(self) -> None:
        if not self._leads():
            raise NotLeading("lease: was lost, nothing is written any more")


def differs(live: Mapping[str, Any], wanted: Mapping[str, Any], written: Mapping[str, Any] | None) -> bool:
    """Whether a status has to be written.

    Args:
        live: what the API server has, with whatever others wrote into it.
        written: what this process wrote last; None: nothing yet.
    """
    types = {condition["type"] for condition in wanted["conditions"]}
    others = [each for each in live.get("conditions", ()) if each["type"] not in types]
    ours = {**live, "conditions": [each for each in live.get("conditions", ()) if each not in others]}
    if written is None:
        return ours != wanted
    return written != wanted or not covers(ours, wanted)


def conditions_of(obj: Mapping[str, Any]) -> Sequence[Condition]:
    """The conditions that a status has now; what is none of ours is left out."""
    found: list[Condition] = []
    for each in (obj.get("status") or {}).get("conditions") or ():
        try:
            found.append(Condition.model_validate(each))
        except ValidationError:
            continue
    return tuple(found)
