"""From the text of a turn to the tool calls in it.

Guarantees:
1. Any text gives a ``Parsed``; no text raises.
2. What a parser renders, it parses back to the same calls.
3. A call that cannot be read is kept as malformed, with what is wrong with it, so that the policy can be
   told.
4. Text that a model thinks (a leading ``<think>`` block) makes no calls.

The policy's text is parsed here and nowhere else: a server-side parser must never decide what is trained.
"""

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it: the name may be unknown, the arguments may be wrong."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """``content`` is the text around the calls; ``malformed`` has one line for each bad call."""

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


class Parser(Protocol):
    """How a model family writes tool calls."""

    def parse(self, text: str) -> Parsed:
        """Split a turn's text (without the end-of-turn token) into content and calls."""
        ...


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes, Qwen2.5 and Qwen3 write it.

    The closing tag may be missing at the very end of the text, as other readers of this format allow.
    """

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, calls and malformed calls."""
        parsed = Parsed(content="")
        content: list[str] = []
        at = _end_of_thinking(text)
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
            value, end = _decode(text, start)
            call, end = _as_call(value), _closed(text, end)
        except (ValueError, RecursionError) as error:
            parsed.malformed.append(_reason(error))
            close, reopen = text.find(_CLOSE, start), text.find(_OPEN, start)
            if close >= 0 and not 0 <= reopen < close:
                return close + len(_CLOSE)
            return reopen if reopen >= 0 else len(text)
        parsed.calls.append(call)
        return end


PARSERS: dict[str, type[HermesParser]] = {"hermes": HermesParser}


def _end_of_thinking(text: str) -> int:
    if not text.lstrip().startswith(_THINK):
        return 0
    end = text.find(_THINK_END)
    return len(text) if end < 0 else end + len(_THINK_END)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _decode(text: str, start: int) -> tuple[Any, int]:
    while start < len(text) and text[start].isspace():
        start += 1
    return _DECODER.raw_decode(text, start)


def _as_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError("the call is not a JSON object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" is missing or not a string')
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" is not a JSON object')
    # JSON can spell half of a surrogate pair; such a string can be sent nowhere.
    json.dumps(value, ensure_ascii=False).encode()
    return ToolCall(name, arguments)


def _closed(text: str, end: int) -> int:
    close = text.find(_CLOSE, end)
    between = text[end : close if close >= 0 else len(text)]
    if between.strip():
        raise ValueError("there is text between the JSON object and </tool_call>")
    return len(text) if close < 0 else close + len(_CLOSE)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    if isinstance(error, UnicodeEncodeError):
        return "not valid JSON: a string holds half of a surrogate pair"
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    return str(error)
