"""The one account of which tokens a rollout consists of.

Guarantees:
1. The next prompt is the previous prompt, what was sampled, and the ids of the new messages, in this order:
   nothing that was sampled is ever tokenised again.
2. The mask is 1 on exactly the sampled ids, and their log-probabilities stand beside them; elsewhere both
   are 0.
3. A row ends on a sampled token: observations that nobody answered are not part of it.
4. A turn may end with the template's end token, with another stop token, or be cut: what the template puts
   after a turn is completed, never doubled.
5. A template that rewrites what came before is an error that names what it did (``TemplateNotAppendOnly``);
   white space is not rewriting, and shows as drift.
6. Drift is counted against what re-rendering and re-tokenising all messages would give.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.models import Sampled
from agentfly.rollout.drift import count_drift
from agentfly.rollout.errors import InvalidSample, TemplateNotAppendOnly
from agentfly.rollout.template import ChatTemplate, Messages, Tokenizer
from agentfly.rollout.trajectory import Drift, Row, WeightSpan


class TokenLedger:
    """Tokens, masks and log-probabilities of one conversation.

    Args:
        tokenizer: the policy's tokenizer.
        messages: the chat before the first turn.
        tools: schemas for the template.
        stop_token_ids: further ids that end a turn.

    Attributes:
        messages: the whole conversation so far.
        stop_token_ids: every id at which sampling should stop, except the tokenizer's own end of text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        tools: Sequence[dict[str, Any]] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools, messages)
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        ends = [self._template.end_id] if self._template.end_id is not None else []
        self.stop_token_ids = tuple(dict.fromkeys([*stop_token_ids, *ends]))
        self._prompt = self._template.ids(messages, generation=True)
        self._text = self._template.text(messages, generation=True)
        self._response: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._turn: list[int] = []
        self._last_turn: list[int] = []

    def __len__(self) -> int:
        return len(self._prompt) + len(self._response)

    @property
    def prompt_ids(self) -> list[int]:
        """What the model is to go on from."""
        return [*self._prompt, *self._response]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return sum(self._mask)

    def append(self, sampled: Sampled) -> None:
        """Take in what the model sampled after ``prompt_ids``; several pieces may make one turn.

        Raises:
            InvalidSample: the answer cannot be trained on.
        """
        if len(sampled.ids) != len(sampled.logprobs):
            raise InvalidSample(
                f"sample: {len(sampled.ids)} ids have {len(sampled.logprobs)} log-probabilities"
            )
        if not all(math.isfinite(logprob) for logprob in sampled.logprobs):
            raise InvalidSample("sample: a log-probability is not a finite number")
        start = len(self._response)
        self._extend(sampled.ids, sampled.logprobs, 1)
        if sampled.ids:
            end = len(self._response)
            self._spans.append(WeightSpan(version=sampled.weight_version, start=start, end=end))
        self._turn.extend(sampled.ids)

    def end_turn(self) -> str:
        """Close the turn and return its text, without the token that ended it.

        Raises:
            InvalidSample: nothing was sampled in it.
        """
        if not self._turn:
            raise InvalidSample("sample: the model's turn has no tokens")
        ends = {self._tokenizer.eos_token_id, *self.stop_token_ids}
        ids = self._turn[:-1] if self._turn[-1] in ends else self._turn
        text = self._tokenizer.decode(list(ids))
        self.messages.append({"role": "assistant", "content": text})
        self._text += text
        self._last_turn, self._turn = self._turn, []
        return text

    def observe(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages after a closed turn, and the start of the next turn.

        Raises:
            TemplateNotAppendOnly: the template changes earlier turns because of them.
        """
        tail = self._template.tail(messages)
        ids = self._template.encode_tail(tail)
        if self._last_turn[-1:] == [self._template.end_id]:
            ids = self._without_end(ids)
        conversation = [*self.messages, *(dict(message) for message in messages)]
        self._check_append_only(conversation, self._text + tail, str(messages[0]["role"]))
        self.messages[:] = conversation
        self._text += tail
        self._extend(ids, [0.0] * len(ids), 0)

    def row(self) -> Row | None:
        """The training row, or None if nothing was sampled."""
        length = self._length()
        if not length:
            return None
        return Row(
            prompt_ids=list(self._prompt),
            response_ids=self._response[:length],
            response_mask=self._mask[:length],
            logprobs=self._logprobs[:length],
            weight_versions=list(self._spans),
        )

    def drift(self) -> Drift:
        """Tokens of the row, and how many of them text would not give back."""
        length = self._length()
        if not length:
            return Drift()
        last = max(at for at, message in enumerate(self.messages) if message["role"] == "assistant")
        retokenised = self._template.ids(self.messages[: last + 1], generation=False)
        tokens = [*self._prompt, *self._response[:length]]
        return Drift(tokens=len(tokens), drifted=count_drift(tokens, retokenised))

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], bit: int) -> None:
        self._response.extend(ids)
        self._mask.extend([bit] * len(ids))
        self._logprobs.extend(logprobs)

    def _without_end(self, tail: list[int]) -> list[int]:
        """A tail behind a turn whose end token was sampled."""
        end = self._template.end_id
        if end not in tail:
            return tail
        at = tail.index(end)
        # A template may end turns only when nothing follows; then this end is that of a later message.
        return tail[at + 1 :] if not self._tokenizer.decode(tail[:at]).strip() else tail

    def _length(self) -> int:
        """Length of the response up to its last sampled token."""
        length = len(self._mask)
        while length and not self._mask[length - 1]:
            length -= 1
        return length

    def _check_append_only(self, conversation: Messages, ours: str, role: str) -> None:
        theirs = _dense(self._template.text(conversation, generation=True))
        if theirs == _dense(ours):
            return
        at = 0
        for number, message in enumerate(m for m in conversation if m["role"] == "assistant"):
            content = _dense(str(message["content"]))
            found = theirs.find(content, at)
            if found < 0:
                visible = _dense(str(message["content"]).rpartition("</think>")[2])
                does = "removes the thinking" if visible and visible in theirs[at:] else "rewrites the text"
                raise _not_append_only(f"{does} of assistant turn {number + 1}", role)
            at = found + len(content)
        raise _not_append_only("renders the messages before it differently", role)


def _dense(text: str) -> str:
    return "".join(text.split())


def _not_append_only(does: str, role: str) -> TemplateNotAppendOnly:
    return TemplateNotAppendOnly(
        f"chat template: {does} when a {role} message follows",
        hints=["use a template that keeps earlier turns as they were", "switch the model's thinking off"],
    )
