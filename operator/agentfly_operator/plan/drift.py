"""Whether an object in the API server says all that we want it to say.

Guarantees:
1. What others added (defaults, annotations, fields of other managers) is no difference.
2. What is wanted and is absent or another value is one; so is a list that lacks an element or has one more.
3. Items of lists that have names or uids are compared by these, in any order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = ("uid", "name")  # ownerReferences first: two owners may have one name at different times


def covers(live: Any, wanted: Any) -> bool:
    """Whether applying ``wanted`` over ``live`` would change nothing."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            key in live and covers(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return isinstance(live, list | tuple) and _list_covers(live, wanted)
    return bool(live == wanted) and isinstance(live, bool) == isinstance(wanted, bool)


def _list_covers(live: Sequence[Any], wanted: Sequence[Any]) -> bool:
    if len(live) != len(wanted):
        return False
    for key in _KEYS:
        if wanted and all(isinstance(item, Mapping) and key in item for item in wanted):
            by_key = {item.get(key): item for item in live if isinstance(item, Mapping)}
            return all(covers(by_key.get(item[key]), item) for item in wanted)
    return all(covers(mine, theirs) for mine, theirs in zip(live, wanted, strict=True))
