"""Forms of calls other than JSON between tags: read, rendered, and what is wrong with them."""

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentfly.agent import BlockParser, HermesParser, Parser, ReActParser, ToolCall, XMLParser, tool


class Unit(Enum):
    METRE = "m"


class Point(BaseModel):
    x: int


@tool
def edit(path: str, line: int, note: str | None = None, at: Point | None = None, dry: bool = False) -> str:
    """Edit a file."""
    return ""


@tool
def shell(command: str, seconds: int = 5) -> str:
    """Run a command.

    Args:
        command: one line.
    """
    return ""


@tool
def pick(unit: Unit, anything: Any = None, points: list[Point] = []) -> str:  # noqa: B006
    """Pick a unit."""
    return ""


TOOLS = [edit.schema, shell.schema, pick.schema]
XML, REACT, PYTHON = XMLParser(TOOLS), ReActParser(TOOLS), BlockParser("python", [shell.schema])
PARSERS: list[Parser] = [HermesParser(), XML, REACT, PYTHON, XMLParser(), ReActParser()]

LS = "<tool_call>\n<function=shell>\n<parameter=command>\nls -l\n</parameter>\n</function>\n</tool_call>"
CALL = ToolCall("shell", {"command": "ls -l"})

# 1. no text raises

TAGS = [
    "<tool_call>", "</tool_call>", "<function=", "shell>", "</function>", "<parameter=command>",
    "</parameter>", "Action: shell", "Action:", "Action Input:", "Observation:", "Final Answer:", "```python",
    "```", "\n", "{", "}", '"', "<think>", "</think>", "[" * 2000, "\\ud800", "1" * 5000,
]  # fmt: skip


@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_raises(text: str) -> None:
    for parser in PARSERS:
        parsed = parser.parse(text)
        assert all(isinstance(one, str) and one for one in parsed.malformed)


# 2. what is rendered is parsed back

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
LINES = st.text(st.characters(exclude_characters="<`\r", exclude_categories=["Cs"]))


@given(LINES)
def test_text_comes_back(text: str) -> None:
    call = ToolCall("shell", {"command": text})
    for parser in (XML, REACT, PYTHON):
        assert parser.parse(f"I look.\n{parser.render(call)}").calls == [call], parser


@given(st.integers(), VALUES, st.lists(st.fixed_dictionaries({"x": st.integers()})))
def test_values_come_back(number: int, anything: Any, points: list[dict[str, int]]) -> None:
    calls = [
        ToolCall("shell", {"command": "</function> <tool_call> <function=x>", "seconds": number}),
        ToolCall("pick", {"unit": "m", "anything": anything, "points": points}),
    ]
    assert XML.parse("\n".join(XML.render(call) for call in calls)).calls == calls
    for call in calls:
        assert REACT.parse(REACT.render(call)).calls == [call]


# 3. XML: calls, values, what cannot be read


def test_xml_calls_are_read_with_what_stands_around_them() -> None:
    parsed = XML.parse(f"I look.\n{LS}\nand\n{LS}")
    assert (parsed.calls, parsed.malformed) == ([CALL, CALL], [])
    assert parsed.content == "I look.\n\nand"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (LS.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), [CALL]),
        (LS.removesuffix("\n</function>\n</tool_call>"), [CALL]),
        (LS.removesuffix("\n</function>\n</tool_call>") + LS, [CALL, CALL]),
        ("<function=shell><parameter=command>ls -l</parameter></function>", [CALL]),
        ("<function=look></function>", [ToolCall("look", {})]),
        ("<think>\n" + LS + "</think>done", []),
    ],
)
def test_xml_call_may_be_written_in_several_ways(text: str, calls: list[ToolCall]) -> None:
    parsed = XML.parse(text)
    assert (parsed.calls, parsed.malformed) == (calls, [])


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("path", "5", "5"),
        ("path", "null", "null"),
        ("path", "\n\n  x\n\n", "\n  x\n"),
        ("line", "5", 5),
        ("line", "five", "five"),
        ("line", "5 or 6", "5 or 6"),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "5", "5"),
        ("at", '{"x": 1}', {"x": 1}),
        ("at", "null", None),
        ("dry", "true", True),
        ("dry", "True", True),
        ("unknown", "[1]", [1]),
        ("unknown", "text", "text"),
    ],
)
def test_xml_value_is_what_the_schema_takes(parameter: str, text: str, value: Any) -> None:
    written = f"<function=edit><parameter={parameter}>{text}</parameter></function>"
    assert XML.parse(written).calls == [ToolCall("edit", {parameter: value})]


def test_xml_value_of_an_enum_is_text() -> None:
    written = "<function=pick><parameter=unit>m</parameter></function>"
    assert XML.parse(written).calls == [ToolCall("pick", {"unit": "m"})]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<function=><parameter=a>1</parameter></function>", "a function without a name"),
        ("<function=f><parameter=>1</parameter></function>", "f: a parameter without a name"),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "f: parameter a is there twice",
        ),
        ("<function=f>ls -l</function>", "f: there is text between its parameters"),
    ],
)
def test_xml_malformed_call_is_told_and_the_next_one_read(body: str, problem: str) -> None:
    parsed = XML.parse(f"<tool_call>{body}</tool_call>{LS}")
    assert (parsed.malformed, parsed.calls) == ([problem], [CALL])


def test_xml_parameter_that_was_cut_is_told() -> None:
    parsed = XML.parse("<tool_call><function=shell>\n<parameter=command>\nls")
    assert (parsed.malformed, parsed.calls) == (["shell: a parameter has no </parameter>"], [])


# 4. ReAct


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('Thought: I look.\nAction: shell\nAction Input: {"command": "ls -l"}', [CALL], "Thought: I look."),
        ("Action: shell\nAction Input: ls -l\n", [CALL], ""),
        ('Action: shell\nAction Input: "ls -l"', [CALL], ""),
        ("Action: shell\nAction Input: ls -l\nObservation: total 0\nFinal Answer: none", [CALL], ""),
        ('Action: shell\nAction Input:\n{\n"command": "ls -l"\n}', [CALL], ""),
        ("Action: shell\nAction Input: 5", [ToolCall("shell", {"command": "5"})], ""),
        ('Action: shell\nAction Input: {"command"', [ToolCall("shell", {"command": '{"command"'})], ""),
        ("Action: nothing\nAction Input: x", [ToolCall("nothing", {"input": "x"})], ""),
        ("Thought: I know.\nFinal Answer: 42", [], "42"),
        ("Final Answer: 42\nAction: shell\nAction Input: ls", [], "42\nAction: shell\nAction Input: ls"),
        ("just text", [], "just text"),
        ("<think>\nAction: shell\nAction Input: ls\n</think>\nhello", [], None),
    ],
)
def test_react_turn_has_a_call_or_an_answer(text: str, calls: list[ToolCall], content: str | None) -> None:
    parsed = REACT.parse(text)
    assert (parsed.calls, parsed.malformed) == (calls, [])
    assert content is None or parsed.content == content


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Action: shell", "an Action without an Action Input"),
        ("Action:\nAction Input: ls", "an Action without the name of a tool"),
        ("Action Input: ls", "an Action Input without an Action"),
        ("Action: edit\nAction Input: a.txt", "not valid JSON: Expecting value at character 0"),
        ("Action: edit\nAction Input: [1]", "the Action Input is not a JSON object"),
        ('Action: edit\nAction Input: {"line": 1} and so on', "there is text after the JSON object"),
        ('Action: edit\nAction Input: {"p": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_react_malformed_call_is_told(text: str, problem: str) -> None:
    parsed = REACT.parse(text)
    assert parsed.calls == []
    assert problem in parsed.malformed[0]


def test_react_instructions_have_every_tool_with_its_schema() -> None:
    told = ReActParser([shell.schema]).instructions()
    assert "shell: Run a command.\narguments: {" in told
    assert '"properties": {"command": {"description": "one line.", "type": "string"}' in told
    assert "Action Input: its arguments as a JSON object" in told


# 5. blocks


@pytest.mark.parametrize(
    ("text", "code", "content"),
    [
        ("I look.\n```python\nprint(1)\nprint(2)\n```", "print(1)\nprint(2)", "I look."),
        ("```python\nprint(1)\n```\nI wait.", "print(1)", ""),
        ("```python\n\n```", "", ""),
        ("```python\n```", "", ""),
        ("```python \nx = '```'\n```", "x = '```'", ""),
    ],
)
def test_block_is_the_call_of_the_tool(text: str, code: str, content: str) -> None:
    parsed = PYTHON.parse(text)
    assert (parsed.calls, parsed.content) == ([ToolCall("shell", {"command": code})], content)


@pytest.mark.parametrize(
    "text", ["no code", "```bash\nls\n```", "say ```python", "<think>\n```python\nx\n```\n</think>\ndone"]
)
def test_text_without_such_a_block_is_an_answer(text: str) -> None:
    parsed = PYTHON.parse(text)
    assert (parsed.calls, parsed.malformed, parsed.content) == ([], [], text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nx\n```\n```python\ny\n```", "2 blocks of python: write one"),
        ("```python\nx", "the block of python has no end"),
    ],
)
def test_block_that_is_not_clear_is_malformed(text: str, problem: str) -> None:
    assert (PYTHON.parse(text).calls, PYTHON.parse(text).malformed) == ([], [problem])


def test_instructions_of_a_block_say_what_the_tool_is_for() -> None:
    told = PYTHON.instructions()
    assert told.startswith("Run a command.")
    assert "```python\n...\n```" in told
