"""A tokenizer's chat template, and what it puts after a turn.

Guarantees:
1. ``tail`` is the text between the end of an assistant turn and the start of the next one, as the template
   writes it: end-of-turn token, newline, new messages, generation prompt. A template that must know the calls
   of a turn to show what they gave has no tail: None.
2. It depends on the first messages and the new ones alone, so its cost does not grow with the conversation.
3. Observations have the first form (see ``dialect``) that the template neither refuses nor leaves out.
4. A template that raises gives ``TemplateRefused`` with the roles that it was given.
5. Of a template that tells the policy of none of its tools the log says so, once.

The tail is found by rendering a synthetic conversation with a marker as the assistant's text and cutting at
the marker. This needs nothing of a template but that it shows the assistant's text.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from agentfly.agent import Parsed, Parser, ToolCall
from agentfly.rollout.dialect import FORMS, Form, Messages, plain, with_calls
from agentfly.rollout.errors import TemplateRefused

# Letters only: templates strip, split and escape other things. Long enough not to occur by chance.
MARKER = "AgentflyAssistantTurn"

logger = logging.getLogger(__name__)

_CHECKED: set[str] = set()
"""Tools of which a template of this process was tried."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a rollout uses."""

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if there is one."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any:
        """Token ids, or the text if ``tokenize`` is false."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; text that spells a special token becomes that token."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        ...


class ChatTemplate:
    """The template of one tokenizer with one set of tools.

    Args:
        first: messages before the first turn, which the template takes.
        parser: how calls are written, for a template that wants them apart from the text.

    Attributes:
        end_id: the token that the template puts after an assistant's text, or None if that is not one token.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]], first: Messages, parser: Parser
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._first = list(first)
        self._parser = parser
        self._form: Form | None = None
        self._check_tools()
        end = self.encode_tail(self._cut([], generation=False).strip())
        self.end_id = end[0] if len(end) == 1 else None

    def text(self, messages: Messages, *, generation: bool) -> str:
        """The conversation as text, with the generation prompt if ``generation``."""
        return str(self._apply(messages, generation, tokenize=False))

    def ids(self, messages: Messages, *, generation: bool) -> list[int]:
        """The conversation as token ids."""
        return [int(token) for token in self._apply(messages, generation, tokenize=True)]

    def tail(self, new: Messages) -> str | None:
        """What follows an assistant turn when ``new`` messages come and the assistant is to go on."""
        if _has_observations(new) and self._form_for(new) is with_calls:
            return None
        return self._cut(new, generation=True)

    def encode_tail(self, tail: str) -> list[int]:
        """Token ids of a tail, as they stand behind other text.

        Some tokenizers mark the start of a text; encoding behind the marker keeps that mark away.
        """
        marker = self._tokenizer.encode(MARKER, add_special_tokens=False)
        behind = self._tokenizer.encode(MARKER + tail, add_special_tokens=False)
        if behind[: len(marker)] == marker:
            return list(behind[len(marker) :])
        return list(self._tokenizer.encode(tail, add_special_tokens=False))

    def _check_tools(self) -> None:
        names = ", ".join(tool["function"]["name"] for tool in self._tools or ())
        if not names or names in _CHECKED:
            return
        _CHECKED.add(names)
        first = [dict(message) for message in self._first]
        try:
            told, untold = (
                self._render(first, False, tools, tokenize=False) for tools in (self._tools, None)
            )
        except TemplateRefused:
            return  # of an agent whose prompt has more than a question; what it wants is found out later
        if told == untold:
            logger.warning(
                "chat template: tells the policy of no tools (%s); if it was not trained to call them, "
                "say in system= how, or use a parser that does, such as react",
                names,
            )

    def _cut(self, new: Messages, *, generation: bool) -> str:
        turn = {"role": "assistant", "content": MARKER}
        text = self.text([*self._first, turn, *new], generation=generation)
        _, found, tail = text.partition(MARKER)
        if not found:
            raise TemplateRefused("chat template: does not show the text of an assistant turn")
        return tail

    def _apply(self, messages: Messages, generation: bool, *, tokenize: bool) -> Any:
        if any(message["role"] in ("assistant", "tool") for message in messages):
            form = self._form_for(messages)
        else:
            form = plain
        return self._render(form(messages, self._parser.parse), generation, self._tools, tokenize=tokenize)

    def _form_for(self, messages: Messages) -> Form:
        if self._form is None:
            try:
                self._form = self._first_form_that_works()
            except TemplateRefused:
                if _has_observations(messages):
                    raise
                return plain
        return self._form

    def _first_form_that_works(self) -> Form:
        call = ToolCall(self._tools[0]["function"]["name"] if self._tools else "tool", {})
        probe: Messages = [
            *self._first,
            {"role": "assistant", "content": ""},
            {"role": "tool", "name": call.name, "content": MARKER},
        ]
        refusal: TemplateRefused | None = None
        for form in FORMS:
            try:
                text = self._render(
                    form(probe, lambda _: Parsed("", [call])), True, self._tools, tokenize=False
                )
            except TemplateRefused as error:
                refusal = refusal or error
            else:
                if MARKER in text:
                    return form
        raise refusal or TemplateRefused(
            "chat template: does not show what a tool gave", hints=["use another model"]
        )

    def _render(
        self,
        told: list[dict[str, Any]],
        generation: bool,
        tools: list[dict[str, Any]] | None,
        *,
        tokenize: bool,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                told,
                tools=tools,
                add_generation_prompt=generation,
                tokenize=tokenize,
                return_dict=False,
            )
        except TemplateRefused:
            raise
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in told)
            raise TemplateRefused(
                f"chat template: refuses the roles {roles}: {error}",
                hints=["use a prompt with roles that the model's template knows", "use another model"],
            ) from error


def _has_observations(messages: Messages) -> bool:
    return any(message["role"] == "tool" for message in messages)
