"""What a ResourcePool asks for, as planners need it; or why it asks for what cannot be.

Guarantees:
1. What the broker would refuse is a problem here, in the same words.
2. Reading never raises: an object that the API server accepted gets an answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentfly.api import ResourcePool
from agentfly.api.problems import NOTHING, explain, path_text, shown
from agentfly.broker.pools import pool_spec
from agentfly.errors import AgentflyError
from agentfly_operator.names import COMPONENT, POOL

_QUOTED = 5  # complaints; a person mends these first


@dataclass(frozen=True, slots=True)
class Wanted:
    """One pool.

    Attributes:
        pool: None if it cannot be read.
        problem: why no member can be made of it; "" if one can.
        max: members at most, after ``capacity.quota``; ``max_written`` before it.
        revision: identity of what a member should be.
    """

    name: str
    generation: int
    pool: ResourcePool | None = None
    problem: str = ""
    min: int = 0
    max: int = 0
    max_written: int = 0
    buffer: int = 0
    max_pending: int = 0
    per_image: bool = False
    revision: str | None = None

    @property
    def selector(self) -> str | None:
        """Of its pods; None if its members are none."""
        if self.pool is None or self.pool.spec.type not in ("Container", "ModelService"):
            return None
        return f"{COMPONENT}=member,{POOL}={self.name}"


def read_pool(obj: Mapping[str, Any]) -> Wanted:
    """Read a ResourcePool as the API server returned it."""
    meta = obj["metadata"]
    name, generation = str(meta["name"]), int(meta.get("generation") or 1)
    try:
        pool = ResourcePool.model_validate({key: value for key, value in obj.items() if key != "status"})
    except ValidationError as error:
        return Wanted(name, generation, problem=_complaints(error))
    try:
        spec = pool_spec(pool, platform="kubernetes")
    except AgentflyError as error:
        problem = "; ".join((error.message, *error.hints))
        return Wanted(name, generation, pool, problem, max_written=pool.spec.capacity.max)
    return Wanted(
        name,
        generation,
        pool,
        min=spec.min,
        max=spec.max,
        max_written=pool.spec.capacity.max,
        buffer=spec.buffer,
        max_pending=spec.max_pending,
        per_image=spec.per_image,
        revision=spec.resource.identity(),
    )


def _complaints(error: ValidationError) -> str:
    found: list[str] = []
    for each in error.errors(include_url=False):
        for complaint in explain(each, ResourcePool):
            path = path_text(complaint.where)
            hidden = complaint.value is NOTHING or ".credentials" in path
            what = complaint.problem if hidden else f"{shown(complaint.value)} {complaint.problem}"
            found.append("; ".join((f"{path}: {what}" if path else what, *complaint.hints)))
    more = f" (and {len(found) - _QUOTED} more)" if len(found) > _QUOTED else ""
    return " · ".join(found[:_QUOTED]) + more
