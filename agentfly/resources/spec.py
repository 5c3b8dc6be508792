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
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

IDENTITY_LENGTH = 16  # hex digits: 64 bits, far beyond what the specs of one cluster can collide in


class ResourceSpec(BaseModel):
    """What one member is. Subclasses add the fields of their kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str

    def identity(self) -> str:
        """Hash of the whole spec as 16 hex digits."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:IDENTITY_LENGTH]


class ContainerSpec(ResourceSpec):
    """A sandbox in which commands of one holder at a time run.

    ``image`` is ``host`` (this machine's system directories, read-only under an overlay) or a directory with
    a root file system. ``cpu`` is in cores, ``memory_mb`` in MiB, ``pids`` counts processes and threads.
    """

    kind: Literal["container"] = "container"
    image: str = Field(default="host", min_length=1)
    cpu: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=256, gt=0)
    pids: int = Field(default=64, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    network: bool = False
    workdir: str = Field(default="/workspace", pattern="^/")


class ModelServiceSpec(ResourceSpec):
    """A model behind HTTP that many holders use at once.

    ``model`` is a directory or a hub id; ``max_model_len`` is in tokens, prompt and answer together;
    ``gpus`` 0 means that it runs on the CPU.
    """

    kind: Literal["model-service"] = "model-service"
    model: str = Field(min_length=1)
    served_model_name: str = Field(default="policy", min_length=1)
    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=64, gt=0)
    dtype: str = "auto"
    tensor_parallel: int = Field(default=1, gt=0)
    gpus: int = Field(default=0, ge=0)
    args: tuple[str, ...] = ()


AnySpec = Annotated[ContainerSpec | ModelServiceSpec, Field(discriminator="kind")]

_SPECS: TypeAdapter[ContainerSpec | ModelServiceSpec] = TypeAdapter(AnySpec)


def parse_spec(data: Mapping[str, object]) -> ContainerSpec | ModelServiceSpec:
    """The spec that a mapping with a ``kind`` describes.

    Raises:
        pydantic.ValidationError: for an unknown kind, an unknown field, or a value out of range.
    """
    return _SPECS.validate_python(data)


class PoolSpec(BaseModel):
    """A named, bounded set of members of one spec.

    ``max`` counts every member that exists in any state, ``min`` of them are kept without anybody asking.
    A member of a ``shared`` pool has any number of holders, and there is one of it.
    ``max_pending`` bounds the waiters, ``max_reuses`` the leases of one member after its first,
    ``max_lifetime_s`` its age in seconds (checked whenever nobody holds it).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    resource: AnySpec
    min: int = Field(default=0, ge=0)
    max: int = Field(default=1, ge=1)
    shared: bool = False
    lease_ttl_s: float = Field(default=30.0, gt=0)
    max_pending: int = Field(default=1024, ge=0)
    max_reuses: int | None = Field(default=None, ge=0)
    max_lifetime_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _min_within_max(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is above max: {self.max}")
        return self
