"""Google-style docstrings."""

from hypothesis import given
from hypothesis import strategies as st

from agentfly.agent.docstring import parse_docstring

# 1. the description


def test_description_ends_at_the_first_section() -> None:
    parsed = parse_docstring(
        "Do it.\n\n    Slowly, and\n    with care.\n\n    Raises:\n        ValueError: no.\n"
    )
    assert parsed.description == "Do it.\n\nSlowly, and with care."
    assert parsed.arguments == {}


def test_absent_docstring_is_empty() -> None:
    assert parse_docstring(None).description == ""
    assert parse_docstring("   \n ").description == ""


def test_colon_in_the_text_is_no_section() -> None:
    assert parse_docstring("Note: this is text.\n\nExamples follow:").description == (
        "Note: this is text.\n\nExamples follow:"
    )


# 2. arguments


def test_arguments_are_unwrapped() -> None:
    text = """Do it.

    Args:
        path: where,
            relative to the root.

            Second paragraph: still path.
        mode (str, optional): how.
        *rest: others
        empty:

    Returns:
        path: not an argument.
    """
    assert parse_docstring(text).arguments == {
        "path": "where, relative to the root. Second paragraph: still path.",
        "mode": "how.",
        "rest": "others",
        "empty": "",
    }


# 3. any text


@given(st.text())
def test_any_text_is_accepted(text: str) -> None:
    parse_docstring(text)


@given(st.lists(st.sampled_from(["Args:", "    a: b", "  c", "Returns:", "", "x: y", "\tz: w"]), max_size=8))
def test_any_arrangement_of_sections_is_accepted(lines: list[str]) -> None:
    parse_docstring("\n".join(lines))
