"""The forms in which chat templates take answers and observations.

Guarantees:
1. ``plain``: an answer as the text that was sampled, observations as tool messages.
2. ``with_calls``: an answer as its parser reads it, with its calls as ``tool_calls``, and each observation
   names the id of its call. An answer with a call that cannot be read stays text, and what it was answered
   with is a user message.
3. ``as_user``: observations, and what a user says right behind them, as one user message.
4. A form is pure, and changes nothing but the messages that it must: equal conversations look equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly.agent import Parsed
from agentfly.agent.content import joined

Messages = Sequence[Mapping[str, Any]]
Parse = Callable[[str], Parsed]
Form = Callable[[Messages, Parse], list[dict[str, Any]]]


def plain(messages: Messages, parse: Parse) -> list[dict[str, Any]]:
    """For templates that know tool messages by themselves: Qwen, Llama 3, DeepSeek."""
    return [dict(message) for message in messages]


def with_calls(messages: Messages, parse: Parse) -> list[dict[str, Any]]:
    """For templates that want the call of every observation: Mistral, GPT-OSS."""
    told: list[dict[str, Any]] = []
    waiting: list[str] = []
    number = 0
    for message in messages:
        if message["role"] == "tool":
            if waiting:
                told.append({**message, "tool_call_id": waiting.pop(0)})
            else:
                told.append({"role": "user", "content": message["content"]})
            continue
        waiting, calls = [], []
        if message["role"] != "assistant":
            told.append(dict(message))
            continue
        parsed = parse(message["content"])
        for call in parsed.calls:
            # Nine letters and digits: Mistral's templates count them.
            waiting.append(f"call{number:05d}")
            number += 1
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": waiting[-1], "type": "function", "function": function})
        text = message["content"] if parsed.malformed and not calls else parsed.content
        told.append({**message, "content": text} | ({"tool_calls": calls} if calls else {}))
    return told


def as_user(messages: Messages, parse: Parse) -> list[dict[str, Any]]:
    """For templates that know users and assistants alone: Gemma."""
    told: list[dict[str, Any]] = []
    observed = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if observed and (is_tool or message["role"] == "user"):
            told[-1] = {"role": "user", "content": joined(told[-1]["content"], message["content"])}
        else:
            told.append({"role": "user", "content": message["content"]} if is_tool else dict(message))
            observed = is_tool
    return told


FORMS: tuple[Form, ...] = (plain, with_calls, as_user)
