"""The member pods of all pools, as facts by pool.

Guarantees:
1. Of a pod only a few words are kept, so that ten thousand of them fit into little memory.
2. A pool is told of a change that matters to its status, and when its last pod is gone, and of no other.
3. Pods that are gone are gone here too, however their deletion became known.

Not here: what facts there are (`plan.facts`), and the counts of members, which are the broker's.
"""

from collections.abc import Callable
from typing import Any

from agentfly_operator.names import POOL
from agentfly_operator.plan.facts import NO_PODS, PodFact, PodFacts, fact_of, gather

Key = tuple[str, str]  # namespace and name of a pool
_FACT = "fact"


def project(pod: dict[str, Any]) -> dict[str, Any]:
    """What the informer keeps of a pod: who it is, and the one fact that is made of it."""
    meta = pod["metadata"]
    kept = {name: meta[name] for name in ("uid", "namespace", "name", "resourceVersion")}
    going = "deletionTimestamp" in meta
    pool = (meta.get("labels") or {}).get(POOL, "")
    return {"metadata": kept, POOL: pool, _FACT: None if going else _one(fact_of(pod))}


class Members:
    """Subscribe ``heard`` to an informer that has ``project``.

    Args:
        changed: called with the pool whose facts changed.
    """

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._pools: dict[Key, dict[str, PodFact]] = {}
        self._there: dict[Key, set[str]] = {}

    def heard(self, kind: str, pod: dict[str, Any]) -> None:
        """One change."""
        meta = pod["metadata"]
        key = (meta["namespace"], pod[POOL])
        self._count(key, meta["uid"], kind)
        facts = self._pools.setdefault(key, {})
        before = facts.get(meta["uid"])
        now = None if kind == "DELETED" else pod[_FACT]
        if now is None:
            facts.pop(meta["uid"], None)
            if not facts:
                del self._pools[key]
        else:
            facts[meta["uid"]] = now
        if now != before or key not in self._there:
            self._changed(key)

    def facts(self, key: Key) -> PodFacts:
        """Those of a pool."""
        facts = self._pools.get(key)
        return gather(facts.values()) if facts else NO_PODS

    def held(self, key: Key) -> int:
        """How many pods of a pool are there, whatever their state: one that ends still has its node."""
        return len(self._there.get(key, ()))

    def _count(self, key: Key, uid: str, kind: str) -> None:
        there = self._there.setdefault(key, set())
        if kind == "DELETED":
            there.discard(uid)
        else:
            there.add(uid)
        if not there:
            del self._there[key]

    def __len__(self) -> int:
        return sum(len(facts) for facts in self._pools.values())


_known: dict[PodFact, PodFact] = {}


def _one(fact: PodFact) -> PodFact:
    """The first of all equal facts: most pods have one of a few."""
    if len(_known) > 1000:
        _known.clear()
    return _known.setdefault(fact, fact)
