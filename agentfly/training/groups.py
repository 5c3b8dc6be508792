"""Which rollouts of a step are trained on.

Guarantees:
1. A group that shrank below two rollouts is left out whole: with one rollout the baseline is that rollout,
   and GRPO would take its raw reward for an advantage.
2. All rows of a rollout stay together, and so do all rollouts of a group that stays.

A key is ``{group}_{rollout}_{row}``: how verl names the rows of its queue.
"""

from collections import defaultdict
from collections.abc import Iterable

MINIMUM = 2


def split_groups(keys: Iterable[str], minimum: int = MINIMUM) -> tuple[list[str], list[str]]:
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
