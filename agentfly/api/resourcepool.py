"""ResourcePool: a pool of members that are leased, reset, verified and leased again.

Guarantees:
1. Exactly the arm that `type` names is set.
2. `min` is at most `max`; `type` never changes.
3. What is reserved and what is kept for a look leave members for everybody.

Not here: what the members of each type are (`pooltypes`).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Conditions, Int, Rule, immutable
from agentfly.api.common import ApiObject
from agentfly.api.pooltypes import Container, ExternalAPI, InProcess, ModelService
from agentfly.api.quantity import Memory

LONGEST_LEASE_S = 3600  # sandboxd refuses more
SHARES_MAX = 16

PoolType = Literal["Container", "ModelService", "ExternalAPI", "InProcess"]


def _arm(name: str, kind: PoolType, attribute: str, example: str) -> tuple[Rule, Rule]:
    return (
        Rule(
            cel=f"self.type != '{kind}' || has(self.{name})",
            holds=lambda self: self.type != kind or getattr(self, attribute) is not None,
            field=name,
            problem=f"is required when type is {kind}",
            hint=f"add {name}: {example}",
        ),
        Rule(
            cel=f"self.type == '{kind}' || !has(self.{name})",
            holds=lambda self: self.type == kind or getattr(self, attribute) is None,
            field=name,
            problem=f"is allowed only when type is {kind}",
            hint=f"remove {name}",
        ),
    )


class Capacity(ApiModel):
    """How many members there may be."""

    min: Int = Field(default=0, ge=0, description="Members kept even when idle. Default 0.")
    max: Int = Field(ge=1, description="Members at most, counting those that start or are reset.")
    buffer: Int = Field(
        default=0, ge=0, description="Free members kept ready beside those that are held. Default 0."
    )
    max_starting: Int | None = Field(
        default=None, ge=1, description="Starts at the same time. Absent: any number."
    )
    starts_per_second: float | None = Field(
        default=None, gt=0, description="Rate of starts. Absent: not limited."
    )
    rules: ClassVar = (
        Rule(
            cel="self.min <= self.max",
            holds=lambda self: self.min <= self.max,
            field="max",
            problem="is less than min",
            hint="raise max or lower min",
        ),
        Rule(
            cel="self.buffer <= self.max",
            holds=lambda self: self.buffer <= self.max,
            field="max",
            problem="is less than buffer",
            hint="raise max or lower buffer",
        ),
    )


class Queue(ApiModel):
    """Acquires that wait for a member."""

    max_pending: Int = Field(
        default=1024,
        ge=0,
        description="Waiting acquires at most; one more fails at once with Saturated. Default 1024.",
    )
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        max_length=SHARES_MAX,
        description="Weight of each share in what members come free, by name; a share is the name of a job, "
        "or what an acquire calls itself. Others have weight 1. Absent: all are equal.",
    )
    reserved: dict[str, Annotated[Int, Field(ge=1)]] = Field(
        default={},
        max_length=SHARES_MAX,
        description="Members that only this share may take, as {verifier: 2}. Absent: none.",
    )


class LeasePolicy(ApiModel):
    """The hold on a member."""

    ttl_seconds: int = Field(
        default=30,
        ge=3,
        le=LONGEST_LEASE_S,
        description="Seconds without a heartbeat after which a lease is lost. Default 30.",
    )


class Reuse(ApiModel):
    """When a member is retired although it is clean."""

    max_reuses: Int | None = Field(
        default=None, ge=0, description="Leases after the first. Absent: any number."
    )
    max_lifetime_seconds: Int | None = Field(
        default=None,
        ge=1,
        description="Seconds since the start; a leased member is retired at release. Absent: any age.",
    )
    max_memory: Memory | None = Field(
        default=None, description="Memory of a member that nobody holds. Absent: only its own limit."
    )
    quarantine: Int = Field(
        default=0,
        ge=0,
        description="Members that failed their reset and are kept for a look, until a waiter needs their "
        "place. Default 0.",
    )


class Images(ApiModel):
    """Which image a member has."""

    policy: Literal["Fixed", "PerAcquire"] = Field(
        default="Fixed",
        description="Fixed: that of container. PerAcquire: each acquire names its own. Default Fixed.",
    )


class ResourcePoolSpec(ApiModel):
    """What the pool should be."""

    type: PoolType = Field(
        description="What a member is: Container, ModelService, ExternalAPI or InProcess.",
        json_schema_extra=immutable("make a new pool under another name"),
    )
    scope: Literal["Rollout", "Global"] = Field(
        default="Rollout",
        description="Rollout: a member has one holder at a time and is reset before the next. Global: all "
        "holders share the members, of any type but Container. Default Rollout.",
        json_schema_extra=immutable("make a new pool under another name"),
    )
    container: Container | None = Field(
        default=None, description="Members of a Container pool. Absent for other types."
    )
    model_service: ModelService | None = Field(
        default=None, description="Members of a ModelService pool. Absent for other types."
    )
    external_api: ExternalAPI | None = Field(
        default=None,
        alias="externalAPI",
        description="Members of an ExternalAPI pool. Absent for other types.",
    )
    in_process: InProcess | None = Field(
        default=None, description="Members of an InProcess pool. Absent for other types."
    )
    images: Images = Field(default=Images(), description="Images of a Container pool. Absent: Fixed.")
    capacity: Capacity = Field(description="How many members there may be, as {min: 0, max: 4}.")
    queue: Queue = Field(default=Queue(), description="Waiting acquires. Absent: its defaults.")
    lease: LeasePolicy = Field(default=LeasePolicy(), description="Holds on members. Absent: its defaults.")
    reuse: Reuse = Field(
        default=Reuse(), description="Retirement of members. Absent: only dirty members are retired."
    )
    rules: ClassVar = (
        *_arm("container", "Container", "container", "{image: host}"),
        *_arm("modelService", "ModelService", "model_service", "{model: DIR, maxModelLen: 4096}"),
        *_arm("externalAPI", "ExternalAPI", "external_api", "{baseUrl: https://HOST/v1}"),
        *_arm("inProcess", "InProcess", "in_process", "{entrypoint: package.module:make}"),
        Rule(
            cel="self.scope != 'Global' || self.type != 'Container'",
            holds=lambda self: self.scope != "Global" or self.type != "Container",
            field="scope",
            problem="does not suit a Container, which has one holder at a time",
            hint="set scope to Rollout",
        ),
        Rule(
            cel="self.type != 'ExternalAPI' || self.scope == 'Global'",
            holds=lambda self: self.type != "ExternalAPI" or self.scope == "Global",
            field="scope",
            problem="does not suit an ExternalAPI, whose limits are those of all holders together",
            hint="set scope: Global",
        ),
        Rule(
            cel="self.type != 'ExternalAPI' || self.capacity.max == 1",
            holds=lambda self: self.type != "ExternalAPI" or self.capacity.max == 1,
            field="capacity",
            problem="of an ExternalAPI must have max 1: one gateway keeps the limits of all holders",
            hint="set capacity: {max: 1}; externalAPI.concurrency bounds the requests",
        ),
        Rule(
            cel="self.images.policy == 'Fixed' || self.type == 'Container'",
            holds=lambda self: self.images.policy == "Fixed" or self.type == "Container",
            field="images",
            problem="is for a Container, the other types have no image",
            hint="remove images",
        ),
        Rule(
            cel="size(self.queue.reserved) == 0 || "
            "self.queue.reserved.map(share, self.queue.reserved[share]).sum() < self.capacity.max",
            holds=lambda self: sum(self.queue.reserved.values()) < self.capacity.max,
            field="queue",
            problem="reserves all of capacity.max and leaves none for others",
            hint="raise capacity.max or lower queue.reserved",
        ),
        Rule(
            cel="self.scope != 'Global' || size(self.queue.reserved) == 0",
            holds=lambda self: self.scope != "Global" or not self.queue.reserved,
            field="queue",
            problem="reserves members of a Global pool, which nobody has to wait for",
            hint="remove queue.reserved",
        ),
        Rule(
            cel="self.reuse.quarantine < self.capacity.max",
            holds=lambda self: self.reuse.quarantine < self.capacity.max,
            field="reuse",
            problem="quarantine could fill all of capacity.max",
            hint="lower reuse.quarantine",
        ),
    )


class MemberCounts(ApiModel):
    """Counts of members by state."""

    ready: Int = Field(default=0, ge=0, description="Verified members, leased or free.")
    free: Int = Field(default=0, ge=0, description="Verified members that an acquire gets at once.")
    leased: Int = Field(default=0, ge=0, description="Members that are held.")
    starting: Int = Field(default=0, ge=0, description="Members that are being started.")
    resetting: Int = Field(default=0, ge=0, description="Members that are being reset and verified.")
    quarantined: Int = Field(default=0, ge=0, description="Members that are kept for a look.")


class QueueStatus(ApiModel):
    """The queue now."""

    pending: Int = Field(default=0, ge=0, description="Waiting acquires.")


class ResourcePoolStatus(ApiModel):
    """What the pool is. Written by the controller."""

    observed_generation: int = Field(
        default=-1,
        ge=-1,
        description="metadata.generation that this status describes; -1 before the first look.",
    )
    members: MemberCounts | None = Field(
        default=None, description="Members by state. Absent: not looked at yet."
    )
    queue: QueueStatus | None = Field(default=None, description="The queue now. Absent: not looked at yet.")
    conditions: Conditions = Field(default=(), description="Ready, Reconciling, Stalled and others, by type.")


class ResourcePool(ApiObject):
    """A pool of leasable members of one type."""

    kind: Literal["ResourcePool"] = Field(default="ResourcePool", description="Kind of the object.")
    spec: ResourcePoolSpec = Field(description="What the pool should be.")
    status: ResourcePoolStatus = Field(default=ResourcePoolStatus(), description="What the pool is.")
