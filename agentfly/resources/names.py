"""The names of members: which pool one is of can be read from its name, also by whoever comes later.

Guarantees:
1. A member is ``<pool>-<4 hex digits>-<number>``; the digits are drawn anew for each process, so that no name
   of an earlier one is given again.
2. ``pool_of`` is the inverse, for pools of any name; what is no name of a member is an error.
"""

import re
import secrets

from agentfly.resources.errors import ResourceError

_MEMBER = re.compile(r"(?P<pool>.+)-[0-9a-f]{4}-[0-9]+")


def member_prefix(pool: str) -> str:
    """What the names of this process's members of a pool begin with."""
    return f"{pool}-{secrets.token_hex(2)}"


def pool_of(member_id: str) -> str:
    """The name of the pool that a member is of.

    Raises:
        ResourceError: it is no name of a member.
    """
    match = _MEMBER.fullmatch(member_id)
    if match is None:
        raise ResourceError(
            f"member {member_id}: is no name of a member", hints=("such names are POOL-xxxx-NUMBER",)
        )
    return match["pool"]
