"""Calls as JSON between tags. See ``base`` for the guarantees of parsers."""

import json
from typing import Any

from agentfly.agent.parsers.base import Parsed, ToolCall, decode_json, end_of_thinking, reason

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write it.

    The closing tag may be missing at the very end of the text, as other readers of this format allow.
    """

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, calls and malformed calls."""
        parsed = Parsed(content="")
        content: list[str] = []
        at = end_of_thinking(text)
        content.append(text[:at])
        while (found := text.find(_OPEN, at)) >= 0:
            content.append(text[at:found])
            at = self._take(text, found + len(_OPEN), parsed)
        content.append(text[at:])
        return Parsed("".join(content).strip(), parsed.calls, parsed.malformed)

    def render(self, call: ToolCall) -> str:
        """The call as the model would write it."""
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        return f"{_OPEN}\n{body}\n{_CLOSE}"

    def _take(self, text: str, start: int, parsed: Parsed) -> int:
        """Read one call whose opening tag ends at ``start``; return where to go on."""
        try:
            value, end = decode_json(text, start)
            call, end = _as_call(value), _closed(text, end)
        except (ValueError, RecursionError) as error:
            parsed.malformed.append(reason(error))
            close, reopen = text.find(_CLOSE, start), text.find(_OPEN, start)
            if close >= 0 and not 0 <= reopen < close:
                return close + len(_CLOSE)
            return reopen if reopen >= 0 else len(text)
        parsed.calls.append(call)
        return end


def _as_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("the call is not a JSON object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is missing or not a string')
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" is not a JSON object')
    return ToolCall(name, arguments)


def _closed(text: str, end: int) -> int:
    close = text.find(_CLOSE, end)
    between = text[end : close if close >= 0 else len(text)]
    if between.strip():
        raise ValueError("there is text between the JSON object and </tool_call>")
    return len(text) if close < 0 else close + len(_CLOSE)
