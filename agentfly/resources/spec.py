"""What a resource is and how many of it a pool may hold: frozen, validated, hashable by content.

Guarantees:
1. The identity of a spec is a hash of every field it has: two specs that differ in anything never share one.
2. The identity depends neither on the order in which a mapping was written nor on defaults being spelled out.
3. A spec or pool with a field it does not know, or a value out of range, is refused with the field's name.

Not here: how members are started (``runners``), when (``pool``).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, model_validator

IDENTITY_LENGTH = 16  # hex digits: 64 bits, far beyond what the specs of one cluster can collide in


class ResourceSpec(BaseModel):
    """What one member is. Subclasses add the fields of their kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str

    @property
    def runner(self) -> str:
        """The name of the runner that starts members of this spec."""
        return self.kind

    def identity(self) -> str:
        """Hash of the whole spec as 16 hex digits."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:IDENTITY_LENGTH]


class ResetSpec(BaseModel):
    """How a container is made pristine between two holders.

    ``auto`` takes the first that works: ``overlay`` (what was written is dropped), ``overlay-shared-pid``
    (the same, where a sandbox gets no process namespace of its own), ``paths`` (declared folders are swapped
    for a prepared copy), ``git`` (a declared repository goes back to where it was), ``command`` (the image's
    own), emptying the scratch folders of a pod whose root is read-only, ``recreate`` (a new container).
    ``timeout_s`` bounds one, in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["auto", "overlay", "overlay-shared-pid", "paths", "git", "command", "recreate"] = "auto"
    paths: tuple[str, ...] = ()
    git: str | None = Field(default=None, pattern="^/")
    command: tuple[str, ...] = ()
    timeout_s: float = Field(default=30.0, gt=0)


class PodOptions(BaseModel):
    """How a member that is a pod runs. Runners of one machine do not read it.

    ``security`` is the Pod Security Standard that the pod keeps to; ``user_namespace`` maps its root to
    nobody on the node. ``tolerations`` have the form of core/v1. The rest are names of objects of the
    cluster, or what the pod's metadata gets beside the broker's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    security: Literal["restricted", "baseline", "privileged"] = "baseline"
    user_namespace: bool = False
    runtime_class: str | None = Field(default=None, min_length=1)
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    pull_secrets: tuple[str, ...] = ()
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str | int], ...] = ()
    priority_class: str | None = Field(default=None, min_length=1)
    scheduler: str | None = Field(default=None, min_length=1)
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class ContainerSpec(ResourceSpec):
    """A sandbox in which commands of one holder at a time run.

    ``runtime`` names the runner. For ``bubblewrap``, ``image`` is ``host`` (this machine's system
    directories, read-only under an overlay) or a local image; for the others it is what these take.
    ``cpu`` is in cores, ``memory_mb`` and ``disk_mb`` (what may be written to the root file
    system) in MiB, ``pids`` counts processes and threads. ``kubernetes`` alone reads ``pod``, and what a node
    sets aside for it: ``cpu_request`` and ``memory_request_mb``, None for as much as the limit.
    """

    kind: Literal["container"] = "container"
    runtime: Literal["bubblewrap", "container-cli", "enroot", "kubernetes"] = "bubblewrap"
    image: str = Field(default="host", min_length=1)
    cpu: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=256, gt=0)
    cpu_request: float | None = Field(default=None, gt=0)
    memory_request_mb: int | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)
    pids: int = Field(default=64, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    network: bool = False
    workdir: str = Field(default="/workspace", pattern="^/")
    reset: ResetSpec = ResetSpec()
    pod: PodOptions = PodOptions()

    @property
    def runner(self) -> str:
        """See ``ResourceSpec.runner``."""
        return self.runtime


class ModelServiceSpec(ResourceSpec):
    """A model behind HTTP that many holders use at once.

    ``model`` is a directory or a hub id; ``max_model_len`` is in tokens, prompt and answer together;
    ``gpus`` 0 means that it runs on the CPU.

    With ``runtime`` ``process`` it is a process of this machine; with ``kubernetes`` a pod of ``image``,
    which alone reads what follows: ``cpu`` in cores, ``memory_mb`` and ``shm_mb`` (``/dev/shm``) in MiB,
    ``disk_mb`` of the node to ask for, ``env`` in the form of core/v1,
    ``gpu_resource`` as nodes name their GPUs, ``cache_claim`` the PersistentVolumeClaim that keeps downloads,
    ``hub_token`` where the key for the hub is: ``secret/NAME/KEY``.
    """

    kind: Literal["model-service"] = "model-service"
    model: str = Field(min_length=1)
    served_model_name: str = Field(default="policy", min_length=1)
    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=64, gt=0)
    dtype: str = "auto"
    tensor_parallel: int = Field(default=1, gt=0)
    pipeline_parallel: int = Field(default=1, gt=0)
    gpus: int = Field(default=0, ge=0)
    args: tuple[str, ...] = ()
    runtime: Literal["process", "kubernetes"] = "process"
    image: str | None = Field(default=None, min_length=1)
    cpu: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    shm_mb: int | None = Field(default=None, gt=0)
    disk_mb: int | None = Field(default=None, gt=0)
    env: tuple[dict[str, Any], ...] = ()
    gpu_resource: str = Field(default="nvidia.com/gpu", min_length=1)
    cache_claim: str | None = Field(default=None, min_length=1)
    hub_token: str | None = Field(default=None, pattern="^secret/[^/]+/[^/]+$")
    pod: PodOptions = PodOptions()

    @property
    def runner(self) -> str:
        """See ``ResourceSpec.runner``."""
        return self.kind if self.runtime == "process" else "model-service-pod"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.runtime == "kubernetes" and self.image is None:
            raise ValueError("image: is missing, and a pod needs one")
        return self


class Budget(BaseModel):
    """What an external API may cost, over the life of its pool. None is no bound.

    ``calls`` counts requests; ``usd`` is money, at the prices of a million input and output tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: int | None = Field(default=None, gt=0)
    usd: float | None = Field(default=None, gt=0)
    usd_per_million_input: float = Field(default=0.0, ge=0)
    usd_per_million_output: float = Field(default=0.0, ge=0)


class CircuitBreaker(BaseModel):
    """``failures`` in a row within ``window_s`` seconds stop requests for ``open_s``; then one is tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failures: int = Field(default=5, gt=0)
    window_s: float = Field(default=60.0, gt=0)
    open_s: float = Field(default=30.0, gt=0)


class ExternalAPISpec(ResourceSpec):
    """An HTTP API of somebody else, behind limits that all holders share.

    ``credentials`` are references, never values: ``env:NAME``, ``file:PATH`` or, in a cluster,
    ``secret:NAME/KEY``; with several, a key that the API refuses or limits is set aside for the next.
    ``concurrency`` counts requests at a time.
    """

    kind: Literal["external-api"] = "external-api"
    base_url: str = Field(pattern="^https?://")
    model: str = ""
    credentials: tuple[Annotated[str, Field(pattern="^((env|file):.|secret:[^/]+/[^/]+$)")], ...] = ()
    concurrency: int = Field(default=32, gt=0)
    requests_per_second: float | None = Field(default=None, gt=0)
    tokens_per_second: float | None = Field(default=None, gt=0)
    timeout_s: float = Field(default=120.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    budget: Budget = Budget()
    circuit_breaker: CircuitBreaker = CircuitBreaker()


class InProcessSpec(ResourceSpec):
    """A Python object: what ``entrypoint`` returns for ``kwargs``.

    ``entrypoint`` is ``package.module:factory`` or ``/absolute/file.py:factory``.
    ``isolated`` gives each its own process; without it, all live in the process of the engine.
    ``call_timeout_s`` bounds one call, ``start_timeout_s`` the factory, in seconds.
    """

    kind: Literal["in-process"] = "in-process"
    entrypoint: str = Field(pattern="^.+:.+$")
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    isolated: bool = False
    call_timeout_s: float = Field(default=60.0, gt=0)
    start_timeout_s: float = Field(default=60.0, gt=0)


OneSpec = ContainerSpec | ModelServiceSpec | ExternalAPISpec | InProcessSpec
AnySpec = Annotated[OneSpec, Field(discriminator="kind")]

_SPECS: TypeAdapter[OneSpec] = TypeAdapter(AnySpec)


def parse_spec(data: Mapping[str, object]) -> OneSpec:
    """The spec that a mapping with a ``kind`` describes.

    Raises:
        pydantic.ValidationError: for an unknown kind, an unknown field, or a value out of range.
    """
    return _SPECS.validate_python(data)


class PoolSpec(BaseModel):
    """A named, bounded set of members of one spec.

    Capacity: ``max`` counts every member that exists in any state, ``min`` of them are kept without anybody
    asking, ``buffer`` free ones are kept beside those that are held. ``per_node`` bounds the members of one
    node of a cluster. ``max_starting`` bounds the starts at one time, ``starts_per_s`` their rate.

    Holders: a member has one, or, if the pool is ``shared``, any number; a shared pool gives each holder the
    member with the fewest, and starts another when all have ``slots`` holders.

    Waiters: ``max_pending`` bounds them, and ``acquire_timeout_s`` how long one waits, whatever its own
    deadline, in seconds. ``weights`` are those of shares in what members come free (1 for a share that is
    not named); ``reserved`` members are for waiters of their share alone.

    Members: ``per_image`` lets each acquire name its image, and ``max_resident_images`` bounds the images
    that members have at one time. A member is retired after ``max_reuses`` leases beyond its first, at the
    age of ``max_lifetime_s`` seconds, or above ``max_memory_mb`` MiB, checked whenever nobody holds it.
    ``quarantine`` is how many that failed their reset are kept for a look.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    resource: AnySpec
    min: int = Field(default=0, ge=0)
    max: int = Field(default=1, ge=1)
    buffer: int = Field(default=0, ge=0)
    max_starting: int | None = Field(default=None, ge=1)
    starts_per_s: float | None = Field(default=None, gt=0)
    per_node: int | None = Field(default=None, ge=1)
    shared: bool = False
    slots: int | None = Field(default=None, ge=1)
    lease_ttl_s: float = Field(default=30.0, gt=0)
    max_pending: int = Field(default=1024, ge=0)
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    reserved: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    acquire_timeout_s: float | None = Field(default=None, gt=0)
    per_image: bool = False
    max_resident_images: int | None = Field(default=None, ge=1)
    max_reuses: int | None = Field(default=None, ge=0)
    max_lifetime_s: float | None = Field(default=None, gt=0)
    max_memory_mb: int | None = Field(default=None, gt=0)
    quarantine: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        if sum(self.reserved.values()) >= self.max and self.reserved:
            raise ValueError(f"reserved: {sum(self.reserved.values())} members leave none of max: {self.max}")
        if self.quarantine >= self.max:
            raise ValueError(f"quarantine: {self.quarantine} members could fill all of max: {self.max}")
        if self.shared and self.reserved:
            raise ValueError("reserved: every holder of a shared pool has a member at once")
        if self.shared and self.per_image:
            raise ValueError("per_image: the members of a shared pool are alike")
        if self.per_image and not isinstance(self.resource, ContainerSpec):
            raise ValueError(f"per_image: a {self.resource.kind} has no image")
        if self.max_resident_images is not None and not self.per_image:
            raise ValueError("max_resident_images: all members of the pool have one image")
        return self
