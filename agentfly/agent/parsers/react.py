"""Calls as ``Action:`` and ``Action Input:``. See ``base`` for the guarantees of parsers."""

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
    reason,
    text_parameter,
)

_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[ \t]*(.*)$", re.M)
_INPUT = re.compile(r"^[ \t]*Action Input[ \t]*:(.*)", re.M | re.S)
_FINAL = re.compile(r"^[ \t]*Final Answer[ \t]*:", re.M)
_OBSERVATION = re.compile(r"^[ \t]*Observation[ \t]*:", re.M)

_FORM = """\
You can use these tools:

{tools}

To use one, write exactly this, and stop:

Thought: what you think
Action: the name of the tool
Action Input: its arguments as a JSON object

You then read what it gave as an Observation, and go on. When you know the answer, write:

Thought: what you think
Final Answer: the answer"""


class ReActParser:
    """Thought, Action, Action Input, Observation: one call a turn.

    An input that is no JSON object is the text of the tool's one required parameter, where it has one such.
    What a model goes on to write as the Observation is not read: it made that up.
    """

    def __init__(self, tools: Iterable[Schema] = ()) -> None:
        self._tools = {tool["function"]["name"]: tool for tool in tools}

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, a call, or a malformed call."""
        start = end_of_thinking(text)
        action, final = _ACTION.search(text, start), _FINAL.search(text, start)
        if action is None or (final is not None and final.start() < action.start()):
            answer = text[final.end() :] if final else text
            if final is None and _INPUT.search(text, start):
                return Parsed(text.strip(), malformed=["an Action Input without an Action"])
            return Parsed(answer.strip())
        content = text[: action.start()].strip()
        try:
            return Parsed(content, [self._call(action[1].strip(), text[action.end() :])])
        except (ValueError, RecursionError) as error:
            return Parsed(content, malformed=[reason(error)])

    def render(self, call: ToolCall) -> str:
        """The call as the model would write it."""
        return f"Action: {call.name}\nAction Input: {json.dumps(call.arguments, ensure_ascii=False)}"

    def instructions(self) -> str:
        """Which tools there are and how to call them."""
        return _FORM.format(tools="\n\n".join(map(_described, self._tools.values())))

    def observation(self, text: str) -> str:
        """What the user's message says after a call."""
        return f"Observation: {text}"

    def _call(self, name: str, rest: str) -> ToolCall:
        if not name:
            raise ValueError("an Action without the name of a tool")
        if made_up := _OBSERVATION.search(rest):
            rest = rest[: made_up.start()]
        found = _INPUT.search(rest)
        if found is None:
            raise ValueError("an Action without an Action Input")
        return ToolCall(name, self._arguments(name, found[1].strip()))

    def _arguments(self, name: str, text: str) -> dict[str, Any]:
        # Whatever the input is, what is wrong with a call of an unknown tool is its name.
        parameter = text_parameter(self._tools[name]) if name in self._tools else "input"
        try:
            value, end = decode_json(text)
        except (ValueError, RecursionError):
            if parameter is None:
                raise
            return {parameter: text}
        if isinstance(value, dict) and not text[end:].strip():
            return value
        if parameter is None:
            raise ValueError(
                "there is text after the JSON object"
                if isinstance(value, dict)
                else "the Action Input is not a JSON object"
            )
        return {parameter: value if isinstance(value, str) and not text[end:].strip() else text}


def _described(tool: Schema) -> str:
    function = tool["function"]
    return f"{function['name']}: {function['description']}\narguments: {json.dumps(function['parameters'])}"
