"""What every model of the API has in common: strictness, naming, cross-field rules, object metadata.

Guarantees:
1. A model refuses unknown fields, wrong types (no "8" for 8) and non-finite numbers, and is frozen.
2. `null` means absence: it is dropped before validation, as the API server drops it. A field that has a
   default then takes the default.
3. A `Rule` is stated in one place, as CEL for the API server and as a predicate for Python, with one text.
4. All broken rules of a block are reported together.

Not here: the schema made from the models (`agentfly.api.crd`), reading files (`agentfly.api.load`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

GROUP = "agentfly.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

INT32_MAX = 2**31 - 1
NAME_MAX = 40
"""Longest object name: 63 (a DNS label) less what the suffixes of children need (`-inference-0-xxxxx`)."""
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Of an object: as of a Service, which some have one of, and which begins with a letter."""

RULES_BROKEN = "agentfly_rules"
"""Error type under which pydantic reports broken rules; `ctx["broken"]` is the list of rules."""


@dataclass(frozen=True)
class Rule:
    """One statement about several fields of a block.

    Args:
        cel: the statement for `x-kubernetes-validations`; `self` is the block with its defaults filled in.
        holds: the same statement about the pydantic model.
        problem: what is wrong when it does not hold: a predicate of `field` ("is less than min"), or a
            sentence of its own when `field` is empty.
        field: JSON name of the field that is at fault, directly below the block; empty for the block itself.
        hint: one remedy; empty when the problem says it already.
    """

    cel: str
    holds: Callable[[Any], bool]
    problem: str
    field: str = ""
    hint: str = ""

    @property
    def message(self) -> str:
        """What the API server prints after the path of the field."""
        text = f"{self.field} {self.problem}" if self.field else self.problem
        return f"{text}; {self.hint}" if self.hint else text


class ApiModel(BaseModel):
    """Base of all blocks: frozen, closed, strict; camelCase in YAML and JSON, snake_case in Python."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for rule in self.rules if not rule.holds(self)]
        if broken:
            text = "; ".join(rule.message for rule in broken)
            raise PydanticCustomError(RULES_BROKEN, "{text}", {"text": text, "broken": broken})
        return self

    def to_json(self) -> dict[str, Any]:
        """The object as the API server stores it: camelCase, JSON types, absent fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def untouched(where: str, model: type[ApiModel]) -> str:
    """CEL that the block of a model has its defaults: the block itself is at ``where``."""
    parts: list[str] = []
    for name, info in model.model_fields.items():
        path = f"{where}.{info.alias or name}"
        if info.default is None:
            parts.append(f"!has({path})")
        elif isinstance(info.default, ApiModel):
            parts.append(untouched(path, type(info.default)))
        elif isinstance(info.default, str | int | float):
            parts.append(f"{path} == {json.dumps(info.default)}")
        else:
            parts.append(f"size({path}) == 0")
    return " && ".join(parts)


def _unique(values: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise PydanticCustomError("duplicate_items", "has {items} twice", {"items": ", ".join(twice)})
    return values


Int = Annotated[int, Field(le=INT32_MAX)]
Time = Annotated[AwareDatetime, Field(strict=False)]
Name = Annotated[str, Field(max_length=NAME_MAX, pattern=NAME_PATTERN)]
Args = Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(strict=False, max_length=64)]
"""Command-line arguments, in order."""
NameSet = Annotated[
    tuple[Name, ...],
    Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
    AfterValidator(_unique),
]
"""Names of objects in the same namespace, each once."""
Decimal = Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?$")]
"""A number as text: the API conventions keep floats out of status, because clients round them differently."""


def decimal(value: float) -> str:
    """A finite number as `Decimal` text with six significant digits."""
    return f"{value:.6g}"


class Metadata(ApiModel):
    """metav1.ObjectMeta. People write the first four fields, the API server the others."""

    name: Name = Field(
        description="Name of the object, unique for its kind in the namespace: a lower case letter, then "
        f"lower case letters, digits and '-', at most {NAME_MAX} characters."
    )
    namespace: str | None = Field(default=None, description="Namespace. Absent: the one of the caller.")
    labels: dict[str, str] = Field(default={}, description="Labels. Absent: none.")
    annotations: dict[str, str] = Field(default={}, description="Annotations. Absent: none.")
    generate_name: str | None = Field(
        default=None, description="Prefix of a name that the API server completed."
    )
    uid: str | None = Field(default=None, description="Identity of this incarnation of the object.")
    resource_version: str | None = Field(default=None, description="Version of the stored object, opaque.")
    generation: int | None = Field(default=None, description="Counts changes of spec.")
    creation_timestamp: Time | None = Field(default=None, description="When the object was stored first.")
    deletion_timestamp: Time | None = Field(default=None, description="When deletion was asked for.")
    deletion_grace_period_seconds: int | None = Field(
        default=None, description="Seconds that deletion may take."
    )
    finalizers: tuple[str, ...] = Field(default=(), strict=False, description="Who must act before deletion.")
    owner_references: tuple[dict[str, Any], ...] = Field(
        default=(), strict=False, description="Owning objects."
    )
    managed_fields: tuple[dict[str, Any], ...] = Field(
        default=(), strict=False, description="Who set which field."
    )
    self_link: str | None = Field(default=None, description="Not used by current API servers.")


class Condition(ApiModel):
    """metav1.Condition: one observation of the object's state."""

    type: str = Field(
        max_length=316,
        pattern=r"^[A-Za-z]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        description="What is observed; one of agentfly.api.reasons.ConditionType.",
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="metadata.generation that was looked at. Absent: not recorded."
    )
    last_transition_time: Time = Field(description="When status last changed to another value.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, for programs; one of agentfly.api.reasons.Reason.",
    )
    message: str = Field(max_length=32768, description="Why, for people. May be empty.")


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        strict=False,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]

IMMUTABLE = "agentfly-immutable"
"""Key in a field's schema that `agentfly.api.crd` turns into a transition rule."""


def immutable(because: str) -> dict[str, Any]:
    """`json_schema_extra` of a field that keeps its first value; `because` says what to do instead."""
    return {IMMUTABLE: because}
