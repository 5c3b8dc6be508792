"""The hermes format: any text gives calls, content, and what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.agent import HermesParser, ToolCall

parser = HermesParser()
LS = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


def test_call_is_read() -> None:
    parsed = parser.parse(LS)
    assert parsed.calls == [ToolCall("shell", {"command": "ls"})]
    assert (parsed.content, parsed.malformed) == ("", [])


def test_text_around_calls_is_content() -> None:
    parsed = parser.parse(f"I look.\n{LS}\nAnd then\n{LS} done")
    assert len(parsed.calls) == 2
    assert parsed.content == "I look.\n\nAnd then\n done"


def test_text_without_calls_is_content() -> None:
    assert parser.parse("just text").content == "just text"
    assert parser.parse("").calls == []


def test_unknown_tool_is_still_a_call() -> None:
    assert parser.parse('<tool_call>{"name": "nope"}</tool_call>').calls == [ToolCall("nope", {})]


def test_closing_tag_inside_a_string_is_text() -> None:
    call = ToolCall("write", {"text": "</tool_call> and <tool_call>"})
    assert parser.parse(parser.render(call)).calls == [call]


def test_call_that_ends_with_the_text_needs_no_closing_tag() -> None:
    assert len(parser.parse(LS.removesuffix("</tool_call>")).calls) == 1


# 3. what cannot be read


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "shell", "arguments": {"command": "ls"}', "not valid JSON: Expecting ',' delimiter"),
        ("", "not valid JSON: Expecting value"),
        ("ls -l", "not valid JSON"),
        ("{'name': 'shell'}", "not valid JSON: Expecting property name"),
        ('["shell"]', "the call is not a JSON object"),
        ('{"arguments": {}}', '"name" is missing or not a string'),
        ('{"name": "", "arguments": {}}', '"name" is missing or not a string'),
        ('{"name": 3}', '"name" is missing or not a string'),
        ('{"name": "shell", "arguments": "ls"}', '"arguments" is not a JSON object'),
        ('{"name": "shell", "arguments": [1]}', '"arguments" is not a JSON object'),
        ('{"name": "shell", "arguments": {"n": NaN}}', "NaN is not JSON"),
        ('{"name": "shell"} {"name": "shell"}', "there is text between the JSON object and </tool_call>"),
        ('{"name": "shell", "arguments": {"p": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "shell", "arguments": {"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"name": "shell", "arguments": {"n": ' + "1" * 5_000 + "}}", "limit"),
    ],
)
def test_malformed_call_is_told_and_the_next_one_read(body: str, problem: str) -> None:
    parsed = parser.parse(f"<tool_call>{body}</tool_call>{LS}")
    assert len(parsed.malformed) == 1
    assert problem in parsed.malformed[0]
    assert parsed.calls == [ToolCall("shell", {"command": "ls"})]


def test_unclosed_malformed_call_ends_at_the_next_one() -> None:
    parsed = parser.parse(f'<tool_call>{{"name": {LS}')
    assert (len(parsed.malformed), len(parsed.calls)) == (1, 1)


def test_cut_call_is_malformed() -> None:
    parsed = parser.parse(LS[:30])
    assert (parsed.calls, len(parsed.malformed)) == ([], 1)


# 4. thoughts make no calls


def test_call_in_thoughts_is_not_made() -> None:
    parsed = parser.parse(f"<think>maybe {LS}</think>{LS}")
    assert len(parsed.calls) == 1
    assert parser.parse(f"<think>maybe {LS}").calls == []


def test_mention_of_thinking_in_a_call_is_text() -> None:
    call = ToolCall("write", {"text": "<think>a</think>"})
    assert parser.parse(parser.render(call)).calls == [call]


# 1. no text raises

fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "a"}',
        "{",
        "}",
        '"',
        "\\",
        "[",
        "\n",
        "é",
        LS,
    ]
)
texts = st.text() | st.lists(fragments | st.text(max_size=5), max_size=12).map("".join)


@given(texts)
def test_no_text_raises(text: str) -> None:
    parsed = parser.parse(text)
    for call in parsed.calls:
        json.dumps(call.arguments).encode()
        assert call.name
    assert all("\n" not in line for line in parsed.malformed)


# 2. what is rendered is read back

values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), values, max_size=4))
around = st.text().filter(lambda text: "<" not in text)


@given(st.lists(calls, max_size=4), around)
def test_rendered_calls_are_read_back(made: list[ToolCall], before: str) -> None:
    parsed = parser.parse(before + "\n".join(parser.render(call) for call in made))
    assert parsed.calls == made
    assert parsed.malformed == []
    assert parsed.content == before.strip()
