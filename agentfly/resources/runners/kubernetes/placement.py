"""Which nodes a pool's next pod must keep away from, so that no node ever has more than its bound.

Guarantees:
1. Whatever the scheduler does with the pods that are not placed yet, no node gets more than ``limit`` pods.
2. Only a node that is full is excluded: a pod keeps away for as long as it waits, so one that others may fill
   is waited for instead.
3. ``Occupancy`` counts every pod that the API server has, whatever its state: one that ends still runs.

Not here: waiting until something can be promised (``lives``).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any


def excluded_nodes(
    limit: int, placed: Mapping[str, int], waiting: Collection[frozenset[str]]
) -> frozenset[str] | None:
    """The nodes that the next pod may not go to; None: it has to wait until others are placed.

    Args:
        limit: pods of the pool on one node.
        placed: how many each node has.
        waiting: of each pod without a node, the nodes that it may not go to.
    """
    # A node that nobody has named yet may be where all of them go.
    if len(waiting) + 1 > limit:
        return None
    full = frozenset(node for node, count in placed.items() if count >= limit)
    for node in placed.keys() - full:
        if placed[node] + sum(node not in excluded for excluded in waiting) + 1 > limit:
            return None
    return full


def affinity(excluded: Iterable[str]) -> dict[str, Any]:
    """A pod's affinity that keeps it away from these nodes; {} for none."""
    # One name each: the API server takes no more in a requirement on a field.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(excluded)]
    if not fields:
        return {}
    terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


class Occupancy:
    """Which pods of each pool have which node."""

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, str]] = {}
        self._placed: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._waiting: defaultdict[str, set[str]] = defaultdict(set)

    def put(self, name: str, pool: str, node: str) -> None:
        """A pod is on a node, or has none yet ("")."""
        self.drop(name)
        self._pods[name] = (pool, node)
        if node:
            self._placed[pool][node] += 1
        else:
            self._waiting[pool].add(name)

    def drop(self, name: str) -> None:
        """A pod is gone. Unknown ones are ignored."""
        pool, node = self._pods.pop(name, ("", ""))
        if node:
            self._placed[pool][node] -= 1
            if not self._placed[pool][node]:
                del self._placed[pool][node]
        elif pool:
            self._waiting[pool].discard(name)

    def has_node(self, name: str) -> bool:
        """Whether a pod is known to be on a node."""
        return self._pods.get(name, ("", ""))[1] != ""

    def placed(self, pool: str) -> Mapping[str, int]:
        """How many pods of a pool each node has."""
        return self._placed[pool]

    def waiting(self, pool: str) -> Collection[str]:
        """The pods of a pool that have no node, by name."""
        return self._waiting[pool]
