"""What names of members say: the guarantees of names.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.resources.errors import ResourceError
from agentfly.resources.names import member_prefix, pool_of

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


@given(NAMES, st.integers(1, 10**6))
def test_name_says_its_pool_whatever_that_is_called(pool, number):
    assert pool_of(f"{member_prefix(pool)}-{number}") == pool


def test_two_processes_give_different_names():
    assert len({member_prefix("swe") for _ in range(8)}) > 1
    assert pool_of("swe-a0b1-7-a0b1-12") == "swe-a0b1-7", "and of nested ones the outer"


@pytest.mark.parametrize("name", ["", "swe", "swe-1", "swe-a0b1", "swe-a0b1-x", "swe-A0B1-1", "-a0b1-1"])
def test_what_is_no_name_is_an_error(name):
    with pytest.raises(ResourceError, match=f"^member {name}: is no name of a member"):
        pool_of(name)
