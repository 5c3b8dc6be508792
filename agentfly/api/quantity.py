"""Amounts of CPU and memory as Kubernetes writes them.

Guarantees:
1. What a pattern accepts, its function parses, to a value above zero.
2. Amounts are exact: "1.5Gi" is 1610612736 bytes, "500m" is 0.5 cores.

A subset of resource.Quantity: no exponents, no "Ki" and below, and memory without a unit is refused, because
`memory: 256` means 256 bytes to Kubernetes and never to the person who wrote it.
"""

import re
from fractions import Fraction
from typing import Annotated

from pydantic import Field, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

CPU_PATTERN = r"^([1-9][0-9]{0,5}m|[1-9][0-9]{0,3}(\.[0-9]{1,3})?|0\.(00[1-9]|0[1-9][0-9]?|[1-9][0-9]{0,2}))$"
MEMORY_PATTERN = r"^[1-9][0-9]{0,6}(\.[0-9]{1,3})?(Mi|Gi|Ti|M|G|T)$"
CORES_MAX = 9999

_UNITS = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
}


def parse(text: str) -> Fraction:
    """The number in front times its unit. ValueError for what is not a number with a known unit."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text, re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not an amount")
    return Fraction(found[1]) * _UNITS[found[2]]


def cores(value: int | str) -> float:
    """CPU cores of a `Cpu` field: 1, "1.5" or "500m"."""
    return float(parse(str(value)))


def mebibytes(value: str) -> int:
    """Whole MiB of a `Memory` field, rounded up so that a limit never gets smaller than what was asked."""
    return -int(-parse(value) // 2**20)


def _cpu(value: object, handler: ValidatorFunctionWrapHandler) -> int | str:
    if isinstance(value, float):
        raise PydanticCustomError(
            "quantity",
            "is a fraction without quotes, which the API server refuses",
            {"hint": f'write "{value:g}" in quotes, or {round(value * 1000)}m'},
        )
    try:
        return handler(value)  # type: ignore[no-any-return]
    except ValueError:
        raise PydanticCustomError(
            "quantity", "is not an amount of CPU", {"hint": 'write cores, as in 2, "0.5" or 500m'}
        ) from None


def _memory(value: object, handler: ValidatorFunctionWrapHandler) -> str:
    try:
        return handler(value)  # type: ignore[no-any-return]
    except ValueError:
        bare = isinstance(value, int) and not isinstance(value, bool)
        hint = f"write {value}Mi or {value}Gi" if bare else "write a number with Mi, Gi, Ti, M, G or T: 256Mi"
        raise PydanticCustomError("quantity", "is not an amount of memory", {"hint": hint}) from None


Cpu = Annotated[
    Annotated[int, Field(ge=1, le=CORES_MAX)] | Annotated[str, Field(pattern=CPU_PATTERN)],
    WrapValidator(_cpu),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 1,
            "maximum": CORES_MAX,
            "maxLength": 8,
            "pattern": CPU_PATTERN,
        }
    ),
]
"""Cores: a whole number, or text such as "0.5" or "500m"."""

Memory = Annotated[
    Annotated[str, Field(pattern=MEMORY_PATTERN)],
    WrapValidator(_memory),
    WithJsonSchema({"type": "string", "maxLength": 16, "pattern": MEMORY_PATTERN}),
]
"""Bytes with a unit, such as "256Mi" or "1Gi"."""
