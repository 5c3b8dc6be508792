"""Which rollouts of a step are trained on.

Guarantees:
1. A group that shrank below as many rollouts as its algorithm compares is left out whole.
2. All rows of a rollout stay together, and so do all rollouts of a group that stays.
3. A group teaches nothing if fewer than two of its rollouts have a reward, or if all rewards are equal.

A key is ``{group}_{rollout}_{row}``: how verl names the rows of its queue.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping


def split_groups(keys: Iterable[str], minimum: int) -> tuple[list[str], list[str]]:
    """The keys to train on and the keys to drop, in the given order."""
    keys = list(keys)
    rollouts: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        group, rollout, _ = key.rsplit("_", 2)
        rollouts[group].add(rollout)
    kept = {group for group, members in rollouts.items() if len(members) >= minimum}
    return (
        [key for key in keys if key.rsplit("_", 2)[0] in kept],
        [key for key in keys if key.rsplit("_", 2)[0] not in kept],
    )


def silent_groups(groups: Iterable[str], rewards: Mapping[str, float]) -> list[str]:
    """Those that teach nothing, in their order; ``rewards`` is by key, the same in all rows of a rollout."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for key, reward in rewards.items():
        group, rollout, _ = key.rsplit("_", 2)
        found[group][rollout] = reward
    return [group for group in groups if len(set(found[group].values())) < 2]
