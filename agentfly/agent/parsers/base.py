"""What a parser is: from the text of a turn to the tool calls in it.

Guarantees of every parser here:
1. Any text gives a ``Parsed``; no text raises.
2. What a parser renders, it parses back to the same calls.
3. A call that cannot be read is kept as malformed, with what is wrong with it, so that the policy can be
   told.
4. Text that a model thinks (a leading ``<think>`` block) makes no calls.

The policy's text is parsed here and nowhere else: a server-side parser must never decide what is trained.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, runtime_checkable

Schema = Mapping[str, Any]
"""A tool as chat templates take it."""

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


@runtime_checkable
class TextFormat(Protocol):
    """A parser of a form that no chat template knows: the prompt has to say how calls are written.

    The template is told of no tools then, and observations are messages of the user.
    """

    def parse(self, text: str) -> Parsed:
        """See ``Parser``."""
        ...

    def instructions(self) -> str:
        """Which tools there are and how to call them, for the end of the system message."""
        ...

    def observation(self, text: str) -> str:
        """What the user's message says after a call."""
        ...


def end_of_thinking(text: str) -> int:
    """Where the text goes on behind a leading ``<think>`` block; its end if the block never ends."""
    if not text.lstrip().startswith(_THINK):
        return 0
    end = text.find(_THINK_END)
    return len(text) if end < 0 else end + len(_THINK_END)


def parameters_of(schema: Schema) -> dict[str, Any]:
    """The JSON schemas of a tool's parameters, by name."""
    found: dict[str, Any] = schema["function"]["parameters"].get("properties", {})
    return found


def text_parameter(schema: Schema) -> str | None:
    """The one parameter that a tool needs, if it takes text and every other one is optional."""
    required: Sequence[str] = schema["function"]["parameters"].get("required", [])
    if len(required) != 1 or parameters_of(schema)[required[0]].get("type") != "string":
        return None
    return required[0]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at ``start``, and where it ends.

    Raises:
        ValueError, RecursionError: there is none that can be read; see ``reason``.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    value, end = _DECODER.raw_decode(text, start)
    # JSON can spell half of a surrogate pair; such a string can be sent nowhere.
    json.dumps(value, ensure_ascii=False).encode()
    return value, end


def reason(error: Exception) -> str:
    """What the policy is told of an error of ``decode_json``."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    if isinstance(error, UnicodeEncodeError):
        return "not valid JSON: a string holds half of a surrogate pair"
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    return str(error)
