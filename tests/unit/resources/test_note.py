"""What a daemon keeps of a lease: the guarantees of note.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.resources.errors import ResourceError
from agentfly.resources.note import NAMES_LENGTH, NOTE_BYTES, LeaseNote, check_names, read_note

NOTE = LeaseNote(
    lease_id="l",
    pool="swe",
    owner="run/7",
    key="default",
    share="train",
    image="a:1",
    attempt=2,
    token="t",
    ttl_s=30.0,
)


# 1. A lease from its note.


def test_note_gives_the_lease_back():
    assert read_note(NOTE.text()) == NOTE


def test_note_of_a_later_version_is_read():
    assert read_note(NOTE.text().replace("{", '{"colour":"red",', 1)) == NOTE


# 2. Its length.


@given(st.text(min_size=NAMES_LENGTH, max_size=NAMES_LENGTH))
def test_names_that_are_let_through_fit(owner):
    check_names(owner, "", "", "")
    assert (
        len(NOTE.model_copy(update={"owner": owner, "key": "", "share": "", "image": ""}).text().encode())
        < NOTE_BYTES
    )


def test_the_worst_names_fit():
    owner = "\x01" * NAMES_LENGTH
    check_names(owner, "", "", "")
    assert len(NOTE.model_copy(update={"owner": owner}).text().encode()) < NOTE_BYTES


def test_longer_names_are_refused():
    with pytest.raises(ResourceError, match=r"^owner o{40}: is 1030 characters long") as refused:
        check_names("o" * 1000, "k" * 10, "s" * 10, "i" * 10)
    assert refused.value.hints


# 3. What is no note.


@pytest.mark.parametrize(
    "text",
    ["", "{}", "null", "[]", "{", NOTE.text()[:-1], NOTE.text().replace("30.0", "-1"), '"l"'],
)
def test_anything_else_is_none(text):
    assert read_note(text) is None


@given(st.text())
def test_no_text_raises(text):
    assert read_note(text) is None
