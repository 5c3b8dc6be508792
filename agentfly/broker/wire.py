"""What broker and client say to each other: paths, bodies, and errors that keep their type.

Guarantees:
1. An error of layer IV arrives as the type it was raised as, with its message, its hints and its fields.
2. A body with a field that is not known, or without one that is needed, is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentfly.resources.errors import (
    Infra,
    LeaseLost,
    PoolNotFound,
    ResourceError,
    Saturated,
    SpecMismatch,
    StartFailed,
    Timeout,
)
from agentfly.resources.lease import PoolStatus, Request, Scope
from agentfly.resources.spec import AnySpec, ResourceSpec, parse_spec

ACQUIRE = "/v1/acquire"
ACQUIRE_MANY = "/v1/acquire_many"
RELEASE = "/v1/release"
RELEASE_OWNER = "/v1/release_owner"
HEARTBEAT = "/v1/heartbeat"
RESTORE = "/v1/restore"
DEMAND = "/v1/demand"
RESET = "/v1/reset"
# For people and monitors: the same for every version.
POOLS = "/pools"
LEASES = "/leases"
METRICS = "/metrics"
HEALTH = "/healthz"


class NotReady(Infra):
    """The broker starts or ends: what was asked for was not begun, and may be asked for again."""


class Unauthorized(ResourceError):
    """The broker does not know the token that came with the request."""


STATUS_OF: dict[type[ResourceError], int] = {
    Timeout: 504,
    Saturated: 429,
    LeaseLost: 410,
    StartFailed: 503,
    NotReady: 503,
    Infra: 502,
    Unauthorized: 401,
    SpecMismatch: 409,
    PoolNotFound: 404,
    ResourceError: 400,
}
_COUNTS = ("max", "min", "ready", "leased", "starting", "resetting", "stopping")
NO_POOL = PoolStatus.model_validate(
    {"kind": "", "reason": "InvalidSpec", "quarantined": {}}
    | dict.fromkeys((*_COUNTS, "queued", "starts", "resets", "failures"), 0)
)
"""Of a pool that is not served, so that there are no counts."""
FIELDS = ("retry_after", "incarnation", "reason")  # of errors, beside message and hints
_TYPES = {kind.__name__: kind for kind in STATUS_OF}


class Body(BaseModel):
    """A request of a client."""

    model_config = ConfigDict(extra="forbid")


class Wanted(Body):
    """One resource: a pool by name, or a spec."""

    pool: str | None = None
    spec: AnySpec | None = None
    key: str = "default"
    scope: Scope = "rollout"
    share: str = ""
    image: str | None = None

    @classmethod
    def of(cls, request: Request, share: str = "") -> "Wanted":
        """The wire form of a request; ``share`` is that of a request which names none."""
        wanted = request.pool_or_spec
        return cls(
            pool=wanted if isinstance(wanted, str) else None,
            spec=parse_spec(wanted.model_dump()) if isinstance(wanted, ResourceSpec) else None,
            key=request.key,
            scope=request.scope,
            share=request.share or share,
            image=request.image,
        )

    def request(self) -> Request:
        """The request that this is the wire form of.

        Raises:
            ResourceError: neither a pool nor a spec is named, or both are.
        """
        wanted = self.spec if self.pool is None else self.pool
        if wanted is None or (self.pool is not None and self.spec is not None):
            raise ResourceError("acquire: needs a pool or a spec, and not both")
        return Request(wanted, self.key, self.scope, self.share, self.image)


class AcquireManyBody(Body):
    """``deadline_s`` is how long the broker may wait, in seconds.

    ``records`` are those of leases that the owner holds under these keys, see ``records``.
    """

    requests: list[Wanted]
    owner: str
    attempt: int = 0
    deadline_s: float = Field(default=600.0, ge=0)
    records: list[str] = []


class AcquireBody(Wanted):
    """One resource for one owner."""

    owner: str
    attempt: int = 0
    deadline_s: float = Field(default=600.0, ge=0)
    records: list[str] = []


class ReleaseBody(Body):
    """A lease to end."""

    lease_id: str
    dirty: bool = False


class ReleaseOwnerBody(Body):
    """An owner that is through."""

    owner: str
    attempt: int | None = None


class HeartbeatBody(Body):
    """All leases of one client."""

    lease_ids: list[str]


class RestoreBody(Body):
    """Records of leases that this broker does not know."""

    records: list[str]


class DemandBody(Body):
    """How many members of each image of a pool an owner will need, soonest first."""

    pool: str
    wanted: dict[str, int]
    owner: str


class ResetBody(Body):
    """A lease whose member is to be pristine."""

    lease_id: str


def pools_to_wire(
    pools: Mapping[str, PoolStatus], problems: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """What the broker says of its pools, and of those that it cannot serve as they are written."""
    told = {name: {**status.model_dump(), "problems": []} for name, status in pools.items()}
    for name, texts in problems.items():
        told.setdefault(name, {**NO_POOL.model_dump(), "message": texts[0] if texts else ""})
        told[name]["problems"] = list(texts)
    return told


def error_to_wire(error: ResourceError) -> tuple[int, dict[str, Any]]:
    """The HTTP status and body of an error."""
    kind = next(kind for kind in type(error).__mro__ if kind in STATUS_OF)
    fields = {name: getattr(error, name) for name in FIELDS if hasattr(error, name)}
    content = {"code": kind.__name__, "message": error.message, "hints": list(error.hints), **fields}
    return STATUS_OF[kind], {"error": content}


def error_from_wire(body: Any) -> ResourceError:
    """The error in an answer; one that is not ours (a proxy's, say) is ``Infra``."""
    content = body.get("error") if isinstance(body, dict) else None
    if not isinstance(content, dict) or content.get("code") not in _TYPES:
        return Infra(f"broker: answered what is not an answer: {str(body)[:200]}")
    fields = {name: content[name] for name in FIELDS if name in content}
    return _TYPES[content["code"]](
        str(content.get("message")), hints=tuple(content.get("hints", ())), **fields
    )
