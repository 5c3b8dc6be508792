"""Amounts; the sections have the numbers of the guarantees in agentfly.api.quantity."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentfly.api.quantity import CPU_PATTERN, MEMORY_PATTERN, Cpu, Memory, cores, mebibytes, parse

# 1. What a pattern accepts is parsed to a value above zero.


@given(st.from_regex(re.compile(CPU_PATTERN, re.ASCII), fullmatch=True))
def test_every_accepted_cpu_is_above_zero(text: str) -> None:
    assert cores(text) > 0


@given(st.from_regex(re.compile(MEMORY_PATTERN, re.ASCII), fullmatch=True))
def test_every_accepted_memory_is_a_mebibyte_or_more(text: str) -> None:
    assert mebibytes(text) >= 1


# 2. Amounts are exact.


@pytest.mark.parametrize(
    ("value", "amount"), [(1, 1.0), ("2", 2.0), ("0.5", 0.5), ("500m", 0.5), ("1.25", 1.25)]
)
def test_cpu_is_in_cores(value: int | str, amount: float) -> None:
    assert TypeAdapter(Cpu).validate_python(value, strict=True) == value
    assert cores(value) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("256Mi", 256 * 2**20),
        ("1Gi", 2**30),
        ("1.5Gi", 1610612736),
        ("2Ti", 2**41),
        ("1M", 10**6),
        ("1.001G", 1001000000),
        ("1T", 10**12),
    ],
)
def test_memory_is_in_bytes(text: str, amount: int) -> None:
    assert TypeAdapter(Memory).validate_python(text, strict=True) == text
    assert parse(text) == Fraction(amount)


@pytest.mark.parametrize(
    ("text", "amount"), [("256Mi", 256), ("1Gi", 1024), ("1M", 1), ("300M", 287), ("1.5Gi", 1536)]
)
def test_mebibytes_are_rounded_up(text: str, amount: int) -> None:
    assert mebibytes(text) == amount


@pytest.mark.parametrize("text", ["", "Mi", "x", "1Xi", "1 Gi"])
def test_other_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount"):
        parse(text)


@pytest.mark.parametrize(
    "value", [0, -1, 10000, 0.5, True, "0", "0.0", "0m", "1.5m", "2 cores", "1e3", "", None, "\u0661"]
)
def test_what_is_no_cpu_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Cpu).validate_python(value, strict=True)


@pytest.mark.parametrize(
    "value", [256, 1.5, True, "256", "0Mi", "1Ki", "1gb", "1GB", "-1Gi", "1.Gi", "", None]
)
def test_what_is_no_memory_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Memory).validate_python(value, strict=True)
