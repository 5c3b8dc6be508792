"""ResourcePool: a pool of members that are leased, reset, verified and leased again.

Guarantees:
1. Exactly the arm that `type` names is set; blocks of pods are for types whose members are pods.
2. `min` is at most `max` and fits into `quota`; `type` never changes.
3. What is reserved and what is kept for a look leave members for everybody.
4. The network opens only where `container.network` says so.

Not here: what the members of each type are (`pooltypes`), how they run in a cluster (`pods`).
"""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Int, Rule, immutable
from agentfly.api.common import ApiObject
from agentfly.api.pods import ObjectName, Placement, Security
from agentfly.api.poolstatus import ResourcePoolStatus
from agentfly.api.pooltypes import Container, ExternalAPI, InProcess, ModelService
from agentfly.api.quantity import Cpu, Memory, parse

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


class Quota(ApiModel):
    """What all members of a pool may have together."""

    cpu: Cpu | None = Field(default=None, description="CPU cores. Absent: any number.")
    memory: Memory | None = Field(default=None, description="Memory, with its unit. Absent: any amount.")
    rules: ClassVar = (
        Rule(
            cel="has(self.cpu) || has(self.memory)",
            holds=lambda self: self.cpu is not None or self.memory is not None,
            problem="cpu or memory must be set",
            hint='write {cpu: "64", memory: 256Gi}',
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
    per_node: Int | None = Field(
        default=None,
        ge=1,
        description="Members on one node of a cluster. One machine does not read this. Absent: as many as "
        "fit.",
    )
    quota: Quota | None = Field(
        default=None,
        description='What all members may have together, as {cpu: "64", memory: 256Gi}: max is lowered to '
        "what fits. A member counts with container.requests, or where that is absent with its limit. For a "
        "Container. Absent: max alone counts.",
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
    acquire_timeout_seconds: Int | None = Field(
        default=None,
        ge=1,
        description="Longest that an acquire waits, whatever its own deadline. Absent: its own deadline "
        "alone.",
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
    """Which image a member has, and how a node gets it."""

    policy: Literal["Fixed", "PerAcquire"] = Field(
        default="Fixed",
        description="Fixed: that of container. PerAcquire: each acquire names its own. Default Fixed.",
        json_schema_extra=immutable("make a new pool under another name"),
    )
    max_resident: Int | None = Field(
        default=None,
        ge=1,
        description="Images that members have at the same time, for PerAcquire. Idle members of the image "
        "that was not used for longest make room. Absent: as many as there are members.",
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None,
        description="When a node of a cluster pulls. One machine does not read this. Absent: Always for tag "
        "latest, else IfNotPresent.",
    )
    pull_secrets: tuple[ObjectName, ...] = Field(
        default=(),
        strict=False,
        max_length=16,
        description="Secrets with which a node of a cluster pulls. One machine does not read this. Absent: "
        "none.",
    )
    rules: ClassVar = (
        Rule(
            cel="!has(self.maxResident) || self.policy == 'PerAcquire'",
            holds=lambda self: self.max_resident is None or self.policy == "PerAcquire",
            field="maxResident",
            problem="is for the policy PerAcquire",
            hint="set policy: PerAcquire, or remove maxResident",
        ),
    )


def _fits(resource: Literal["cpu", "memory"]) -> Rule:
    """As many members as `min`, at least one, fit into the quota; to the last digits of CEL's floats."""

    def holds(self: "ResourcePoolSpec") -> bool:
        quota = self.capacity.quota and getattr(self.capacity.quota, resource)
        if self.container is None or quota is None:
            return True
        needed = parse(str(self.container.counted(resource))) * max(self.capacity.min, 1)
        return needed <= parse(str(quota))

    text = "string(self.{})" if resource == "cpu" else "self.{}"  # a number or text; to convert text costs
    wanted, limit, all_ = (
        text.format(f"{of}.{resource}") for of in ("container.requests", "container", "capacity.quota")
    )
    asked = f"has(self.container.requests) && has(self.container.requests.{resource})"
    each = f"{asked} ? {wanted} : {limit}"
    return Rule(
        cel=f"!has(self.container) || !has(self.capacity.quota) || !has(self.capacity.quota.{resource}) || "
        f"quantity({each}).asApproximateFloat() * double(self.capacity.min > 1 ? self.capacity.min : 1) "
        f"<= quantity({all_}).asApproximateFloat() * 1.000000001",
        holds=holds,
        field="capacity",
        problem=f"has a quota.{resource} for fewer members than min, or for none",
        hint=f"raise capacity.quota.{resource}, or lower container.{resource} or capacity.min",
    )


def _of_pods(field: str, of: str, unset: str, holds: Callable[["ResourcePoolSpec"], bool]) -> Rule:
    """Members of the other types live in the broker. `of`: what below the field is meant, or nothing."""
    return Rule(
        cel=f"self.type in ['Container', 'ModelService'] || {unset}",
        holds=lambda self: self.type in ("Container", "ModelService") or holds(self),
        field=field,
        problem=f"{of}is for members that are pods, and those of this type are none",
        hint=f"remove {field}" if not of else f"remove {of.strip()} from {field}",
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
    images: Images = Field(default=Images(), description="Images of members. Absent: Fixed.")
    capacity: Capacity = Field(description="How many members there may be, as {min: 0, max: 4}.")
    queue: Queue = Field(default=Queue(), description="Waiting acquires. Absent: its defaults.")
    lease: LeasePolicy = Field(default=LeasePolicy(), description="Holds on members. Absent: its defaults.")
    reuse: Reuse = Field(
        default=Reuse(), description="Retirement of members. Absent: only dirty members are retired."
    )
    security: Security | None = Field(
        default=None,
        description="What members may do in a cluster, as {podSecurity: Baseline}. Absent: its defaults.",
    )
    placement: Placement | None = Field(
        default=None,
        description="Where members run in a cluster, as {nodeSelector: {pool: rollouts}}. Absent: anywhere.",
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
        _of_pods("security", "", "!has(self.security)", lambda self: self.security is None),
        _of_pods("placement", "", "!has(self.placement)", lambda self: self.placement is None),
        _of_pods(
            "capacity", "perNode ", "!has(self.capacity.perNode)", lambda self: self.capacity.per_node is None
        ),
        _of_pods(
            "images",
            "pullPolicy or pullSecrets ",
            "(!has(self.images.pullPolicy) && size(self.images.pullSecrets) == 0)",
            lambda self: self.images.pull_policy is None and not self.images.pull_secrets,
        ),
        Rule(
            cel="self.type == 'Container' || !has(self.capacity.quota)",
            holds=lambda self: self.type == "Container" or self.capacity.quota is None,
            field="capacity",
            problem="quota is for a Container, whose members all have cpu and memory",
            hint="remove capacity.quota; capacity.max bounds the members",
        ),
        _fits("cpu"),
        _fits("memory"),
        Rule(
            cel="!has(self.security) || size(self.security.egress) == 0 || !has(self.container) || "
            "self.container.network",
            holds=lambda self: (
                self.security is None
                or not self.security.egress
                or self.container is None
                or self.container.network
            ),
            field="security",
            problem="egress opens nothing while container.network is false",
            hint="set container.network: true, or remove security.egress",
        ),
        Rule(
            cel="!has(self.security) || self.security.podSecurity != 'Restricted' || !has(self.container) || "
            "!(self.container.reset.method in ['Overlay', 'OverlaySharedPID'])",
            holds=lambda self: (
                self.security is None
                or self.security.pod_security != "Restricted"
                or self.container is None
                or self.container.reset.method not in ("Overlay", "OverlaySharedPID")
            ),
            field="security",
            problem="podSecurity Restricted lets no member mount the overlay that container.reset.method "
            "asks for",
            hint="set security.podSecurity: Baseline, or container.reset.method: Paths",
        ),
    )


class ResourcePool(ApiObject):
    """A pool of leasable members of one type."""

    kind: Literal["ResourcePool"] = Field(default="ResourcePool", description="Kind of the object.")
    spec: ResourcePoolSpec = Field(description="What the pool should be.")
    status: ResourcePoolStatus = Field(default=ResourcePoolStatus(), description="What the pool is.")
