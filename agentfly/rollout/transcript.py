"""The conversation with a model that answers in text: what a ``TokenLedger`` is for one that gives tokens.

Guarantees:
1. The model is told of the tools by its API and calls them there, unless the agent's parser has a form of its
   own: then the API is told of nothing, and the prompt says how calls are written.
2. A call of the API becomes text in the parser's form, so that all that follows is the same as with tokens.
   One whose arguments are no JSON object is a malformed call, with what is wrong with them.
3. There are no token ids, so there are no rows: nothing of it can be trained on.
4. Images that a tool shows are shown by the user, since APIs take none from a tool.
5. Its length is what the server counted at its last answer; what was added since is counted at the next one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentfly.agent import Parsed, Parser, TextFormat, ToolCall
from agentfly.agent.content import is_image, text_of
from agentfly.agent.parsers.base import decode_json, reason
from agentfly.models import ChatCall, ChatModel, Sampling
from agentfly.rollout.dialect import Messages, with_calls
from agentfly.rollout.errors import InvalidSample
from agentfly.rollout.ledger import Credit
from agentfly.rollout.media import AnyImage, Media
from agentfly.rollout.trajectory import Drift, Row


@runtime_checkable
class _Renders(Protocol):
    def render(self, call: ToolCall) -> str: ...


class Transcript:
    """Messages of one rollout with a ``ChatModel``.

    Args:
        model: who answers.
        messages: the chat before the first turn.
        tools: schemas, which the API is told.
        parser: how calls are written.
        media: the images of the messages.
    """

    stop_token_ids: tuple[int, ...] = ()

    def __init__(
        self,
        model: ChatModel,
        messages: Messages,
        tools: Sequence[dict[str, Any]],
        parser: Parser,
        media: Media | None = None,
    ) -> None:
        self._media = media or Media(AnyImage())
        self._model = model
        self._messages = [dict(message) for message in messages]
        self._parser = parser
        self._malformed: dict[str, str] = {}
        in_text = isinstance(parser, TextFormat)
        self._renderer = parser if isinstance(parser, _Renders) and not in_text else None
        self._tools = tools if self._renderer is not None else ()
        self._length = 0
        self._said: str | None = None
        self.sampled_tokens = 0

    @property
    def parser(self) -> Parser:
        """Of what the model writes, and of what stands for its calls."""
        return self

    def parse(self, text: str) -> Parsed:
        """As the agent's parser; calls of the API that cannot be read are malformed."""
        parsed = self._parser.parse(text)
        wrong = [self._malformed.get(_key(call), "") for call in parsed.calls]
        calls = [call for call, problem in zip(parsed.calls, wrong, strict=True) if not problem]
        return Parsed(parsed.content, calls, [*parsed.malformed, *filter(None, wrong)])

    def __len__(self) -> int:
        return self._length

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the model is shown."""
        return list(self._messages)

    def length_of(self, messages: Messages) -> int:
        """Tokens that these messages would be, by their characters."""
        return round(self._length * _characters(messages) / max(1, _characters(self._messages)))

    async def answer(self, sampling: Sampling, deadline: float) -> str:
        """Ask for the next turn; returns why it stopped.

        Raises:
            ModelUnavailable, ModelRefused: see ``ChatModel``.
        """
        told = with_calls(self._messages, self.parse) if self._renderer else self._messages
        got = await self._model.chat(
            _for_api(told, self._media.urls), tools=self._tools, sampling=sampling, deadline=deadline
        )
        calls = [self._as_text(call, self._renderer) for call in got.calls] if self._renderer else []
        self._said = "\n".join(filter(None, [got.text, *calls]))
        self._length = got.prompt_tokens + got.sampled_tokens
        self.sampled_tokens += max(1, got.sampled_tokens)  # a server that does not count has answered too
        return got.finish_reason

    def _as_text(self, call: ChatCall, renderer: _Renders) -> str:
        try:
            arguments, end = decode_json(call.arguments or "{}")
            if call.arguments[end:].strip():
                raise ValueError("not valid JSON: there is text behind the arguments")
            if not isinstance(arguments, dict):
                raise ValueError('"arguments" is not a JSON object')
            return renderer.render(ToolCall(call.name, arguments))
        except (ValueError, RecursionError) as error:
            # A call that every parser can write stands for the text; `parse` finds it as it is read again.
            text = renderer.render(ToolCall(call.name, {"arguments": call.arguments}))
            self._malformed |= {_key(stands): reason(error) for stands in self._parser.parse(text).calls}
            return text

    def end_turn(self) -> str:
        """Close the turn and return its text.

        Raises:
            InvalidSample: there was no answer.
        """
        if self._said is None:
            raise InvalidSample("sample: the model's turn has no answer")
        text, self._said = self._said, None
        self._messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, messages: Messages) -> None:
        """Add messages after a closed turn."""
        self._messages += [dict(message) for message in messages]

    def restart(self, messages: Messages) -> None:
        """Go on from other messages than those so far."""
        self._length = self.length_of(messages)
        self._messages = [dict(message) for message in messages]

    def rows(self, credits: Mapping[int, Credit] | None = None) -> list[Row]:
        """None: there are no token ids."""
        return []

    def drift(self) -> Drift:
        """Of no tokens."""
        return Drift()


def _characters(messages: Messages) -> int:
    return sum(len(text_of(message["content"])) for message in messages)


def _key(call: ToolCall) -> str:
    return json.dumps([call.name, call.arguments])


def _for_api(messages: Messages, urls: Sequence[str]) -> list[dict[str, Any]]:
    """APIs want the arguments of a call as text, and name nobody in a tool's message. What a tool shows they
    take from a user, behind all that the tools of the turn said."""
    told: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool" and shown:
            told.append({"role": "user", "content": shown})
            shown = []
        said = {key: value for key, value in message.items() if key != "name"}
        content = message.get("content") or ""
        if not isinstance(content, str):
            parts = [_part_for_api(part, urls) for part in content]
            if message["role"] == "tool":
                shown += [part for part in parts if part["type"] == "image_url"]
                said["content"] = text_of(content)
            else:
                said["content"] = parts
        if calls := message.get("tool_calls"):
            said["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
                }
                for call in calls
            ]
        told.append(said)
    return [*told, {"role": "user", "content": shown}] if shown else told


def _part_for_api(part: Mapping[str, Any], urls: Sequence[str]) -> dict[str, Any]:
    if is_image(part):
        return {"type": "image_url", "image_url": {"url": urls[part["image"]]}}
    return dict(part)
