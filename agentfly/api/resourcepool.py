"""ResourcePool: a pool of members that are leased, reset, verified and leased again.

Guarantees:
1. Exactly the arm that `type` names is set.
2. `min` is at most `max`; `type` never changes.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Args, Conditions, Int, Rule, immutable
from agentfly.api.common import ApiObject, DType
from agentfly.api.quantity import Cpu, Memory

LONGEST_LEASE_S = 3600  # sandboxd refuses more
ENV_MAX = 32 * 1024
"""Characters of a sandbox's environment: what its daemon reads at the start is bounded."""

PoolType = Literal["Container", "ModelService"]


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


class Container(ApiModel):
    """A sandbox: one container in which tools run commands."""

    image: str = Field(
        default="host",
        min_length=1,
        max_length=1024,
        description="Root file system: host for this machine's own, read-only under an overlay, or a "
        "directory, relative to the manifest. Default host.",
    )
    cpu: Cpu = Field(
        default=1, description='CPU cores: a whole number, or text such as "0.5" or 500m. Default 1.'
    )
    memory: Memory = Field(
        default="256Mi", description="Memory limit, bytes with a unit such as 256Mi. Default 256Mi."
    )
    pids: Int = Field(default=64, ge=8, description="Processes and threads at the same time. Default 64.")
    env: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default={},
        max_length=64,
        description=f"Environment of commands, at most {ENV_MAX} characters of names and values together. "
        "Absent: none.",
    )
    network: bool = Field(default=False, description="Whether commands reach the network. Default false.")
    workdir: str = Field(
        default="/workspace",
        max_length=1024,
        pattern="^/",
        description="Absolute directory in which commands start. Default /workspace.",
    )
    rules: ClassVar = (
        Rule(
            cel=f"self.env.map(name, size(name) + size(self.env[name])).sum() <= {ENV_MAX}",
            holds=lambda self: sum(len(name) + len(self.env[name]) for name in self.env) <= ENV_MAX,
            field="env",
            problem=f"has more than {ENV_MAX} characters of names and values together",
            hint="let the agent's setup write long values to files",
        ),
    )


class ModelService(ApiModel):
    """A vLLM server."""

    model: str = Field(
        min_length=1,
        max_length=4096,
        description="Directory in Hugging Face layout, relative to the manifest, or name on the hub.",
    )
    max_model_len: Int = Field(ge=2, description="Tokens of prompt and answer together.")
    max_num_seqs: Int = Field(default=64, ge=1, description="Sequences that one member batches. Default 64.")
    dtype: DType = Field(
        default="auto", description="Type of weights and activations. Default auto: as in the model."
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Devices that share one copy. Default 1."
    )
    gpus: int = Field(
        default=0, ge=0, le=64, description="GPUs of each member; 0 runs on the CPU. Default 0."
    )
    args: Args = Field(
        default=(), description="Further arguments of vllm serve; the last wins. Absent: none."
    )
    rules: ClassVar = (
        Rule(
            cel="self.gpus == 0 || self.tensorParallel <= self.gpus",
            holds=lambda self: self.gpus == 0 or self.tensor_parallel <= self.gpus,
            field="tensorParallel",
            problem="is more than gpus",
            hint="set tensorParallel to gpus or less",
        ),
    )


class Capacity(ApiModel):
    """How many members there may be."""

    min: Int = Field(default=0, ge=0, description="Members kept even when idle. Default 0.")
    max: Int = Field(ge=1, description="Members at most, counting those that start or are reset.")
    rules: ClassVar = (
        Rule(
            cel="self.min <= self.max",
            holds=lambda self: self.min <= self.max,
            field="max",
            problem="is less than min",
            hint="raise max or lower min",
        ),
    )


class Queue(ApiModel):
    """Acquires that wait for a member."""

    max_pending: Int = Field(
        default=1024,
        ge=0,
        description="Waiting acquires at most; one more fails at once with Saturated. Default 1024.",
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


class ResourcePoolSpec(ApiModel):
    """What the pool should be."""

    type: PoolType = Field(
        description="What a member is: Container or ModelService.",
        json_schema_extra=immutable("make a new pool under another name"),
    )
    scope: Literal["Rollout", "Global"] = Field(
        default="Rollout",
        description="Rollout: a member has one holder at a time and is reset before the next. Global: all "
        "holders share one member, of type ModelService. Default Rollout.",
        json_schema_extra=immutable("make a new pool under another name"),
    )
    container: Container | None = Field(
        default=None, description="Members of a Container pool. Absent for other types."
    )
    model_service: ModelService | None = Field(
        default=None, description="Members of a ModelService pool. Absent for other types."
    )
    capacity: Capacity = Field(description="How many members there may be, as {min: 0, max: 4}.")
    queue: Queue = Field(default=Queue(), description="Waiting acquires. Absent: its defaults.")
    lease: LeasePolicy = Field(default=LeasePolicy(), description="Holds on members. Absent: its defaults.")
    reuse: Reuse = Field(
        default=Reuse(), description="Retirement of members. Absent: only dirty members are retired."
    )
    rules: ClassVar = (
        *_arm("container", "Container", "container", "{image: host}"),
        *_arm("modelService", "ModelService", "model_service", "{model: DIR, maxModelLen: 4096}"),
        Rule(
            cel="self.scope != 'Global' || self.type == 'ModelService'",
            holds=lambda self: self.scope != "Global" or self.type == "ModelService",
            field="scope",
            problem="does not suit a Container, which has one holder at a time",
            hint="set scope to Rollout",
        ),
    )


class MemberCounts(ApiModel):
    """Counts of members by state."""

    ready: Int = Field(default=0, ge=0, description="Verified members, leased or free.")
    free: Int = Field(default=0, ge=0, description="Verified members that an acquire gets at once.")
    leased: Int = Field(default=0, ge=0, description="Members that are held.")
    starting: Int = Field(default=0, ge=0, description="Members that are being started.")
    resetting: Int = Field(default=0, ge=0, description="Members that are being reset and verified.")


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
