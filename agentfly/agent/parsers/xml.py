"""Calls as ``<function=...>`` with ``<parameter=...>``. See ``base`` for the guarantees of parsers.

A value is text in this form, whatever its type: the tool's schema says what it is. Where the schema takes
text it is that text, else it is read as JSON; what cannot be read stays text, and the tool says that it is
wrong. A value cannot hold its own closing tag.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from agentfly.agent.parsers.base import (
    Parsed,
    Schema,
    ToolCall,
    decode_json,
    end_of_thinking,
    parameters_of,
)

_FUNCTION = re.compile(r"(<tool_call>\s*)?<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>", re.S)
# Of a call. What ends it may be missing at the end of the text, or before another call.
_END = re.compile(r"\s*(</function>(\s*</tool_call>)?|(?=<function=|<tool_call>)|\Z)")
# Where to go on behind a call that cannot be read.
_NEXT = re.compile(r"</function>(\s*</tool_call>)?|(?=<function=|<tool_call>)|\Z")
# As Python writes them: models that were trained on code do.
_PYTHON = {"True": True, "False": False, "None": None}


class XMLParser:
    """``<function=name><parameter=key>value</parameter></function>``, as Qwen3-Coder writes it.

    ``<tool_call>`` around a call may be there or not; ``</function>`` may be missing at the end of the text
    or before another call.
    """

    def __init__(self, tools: Iterable[Schema] = ()) -> None:
        self._tools = {tool["function"]["name"]: tool for tool in tools}

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, calls and malformed calls."""
        start = end_of_thinking(text)
        parsed = Parsed(content="")
        content, at = [text[:start]], start
        while found := _FUNCTION.search(text, at):
            content.append(text[at : found.start()])
            at = self._take(found[2].strip(), text, found.end(), parsed)
        content.append(text[at:])
        return Parsed("".join(content).strip(), parsed.calls, parsed.malformed)

    def render(self, call: ToolCall) -> str:
        """The call as the model would write it."""
        lines = [f"<tool_call>\n<function={call.name}>"]
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"<parameter={name}>\n{text}\n</parameter>")
        return "\n".join([*lines, "</function>\n</tool_call>"])

    def _take(self, name: str, text: str, at: int, parsed: Parsed) -> int:
        """Read one call whose opening tag ends at ``at``; return where to go on."""
        tool = self._tools.get(name)
        known = parameters_of(tool) if tool else {}
        defined = tool["function"]["parameters"].get("$defs", {}) if tool else {}
        arguments: dict[str, Any] = {}
        problem = "" if name else "a function without a name"
        while found := _PARAMETER.match(text, at):
            parameter, value = found[1].strip(), _without_lines(found[2])
            if not parameter or parameter in arguments:
                wrong = f"parameter {parameter} is there twice" if parameter else "a parameter without a name"
                problem = problem or f"{name}: {wrong}"
            arguments[parameter] = _value(value, _types(known.get(parameter, {}), defined))
            at = found.end()
        if end := _END.match(text, at):
            at = end.end()
        else:
            unclosed = text[at:].lstrip().startswith("<parameter=")
            problem = problem or (
                f"{name}: a parameter has no </parameter>"
                if unclosed
                else f"{name}: there is text between its parameters"
            )
            following = _NEXT.search(text, at)
            at = following.end() if following else len(text)
        if problem:
            parsed.malformed.append(problem)
        else:
            parsed.calls.append(ToolCall(name, arguments))
        return at


def _without_lines(text: str) -> str:
    """Without the line breaks that the form puts around a value."""
    text = text[1:] if text.startswith("\n") else text
    return text[:-1] if text.endswith("\n") else text


def _types(schema: Schema, defined: Schema) -> set[str]:
    """The JSON types that a schema takes; empty if it takes any."""
    if reference := schema.get("$ref"):
        return _types(defined.get(str(reference).rpartition("/")[2], {}), defined)
    if several := schema.get("anyOf") or schema.get("oneOf"):
        each = [_types(one, defined) for one in several]
        return set().union(*each) if all(each) else set()
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if "type" not in schema and values:
        return {"string" if isinstance(value, str) else "other" for value in values}
    named = schema.get("type", [])
    return {named} if isinstance(named, str) else set(named)


def _value(text: str, types: set[str]) -> Any:
    if "string" in types:
        return None if "null" in types and text.strip() in ("null", "None") else text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        value, end = decode_json(text)
    except (ValueError, RecursionError):
        return text
    return text if text[end:].strip() else value
