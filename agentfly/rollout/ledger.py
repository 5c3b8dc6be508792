"""The one account of which tokens a rollout consists of.

Guarantees:
1. The next prompt is the previous prompt, what was sampled, and the ids of the new messages, in this order:
   nothing that was sampled is ever tokenised again.
2. The mask is 1 on exactly the sampled ids, and their log-probabilities stand beside them; elsewhere both
   are 0.
3. A row ends on a sampled token: observations that nobody answered are not part of it.
4. A turn may end with the template's end token, with another stop token, or be cut: what the template puts
   after a turn is completed, never doubled.
5. Where the template rewrites what came before, or other messages are asked for, the next prompt is what the
   template writes, and keeps the ids up to where its text differs. What becomes of the rows is decided by
   ``sequences``: the row goes on, is realigned, or forks; the last two are counted. White space is not
   rewriting: what was sampled stays, and shows as drift.
6. Drift is counted against what re-rendering and re-tokenising all messages would give; where the template no
   longer shows what was sampled, against re-tokenising the row's own text.
7. An image is one id in all of this (see ``media``), and its own number of tokens in ``len`` and in rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.agent import HermesParser, Parser
from agentfly.models import Sampled
from agentfly.rollout.agreement import Piece, agreement
from agentfly.rollout.dialect import Messages
from agentfly.rollout.drift import count_drift
from agentfly.rollout.errors import InvalidSample
from agentfly.rollout.media import Media
from agentfly.rollout.sequences import Segment, Span, merge
from agentfly.rollout.template import ChatTemplate, Tokenizer
from agentfly.rollout.trajectory import Drift, Row, RowStep, WeightSpan

# (state in which the turn was taken, reward of the turn alone)
Credit = tuple[str | None, float]
_NO_CREDIT: Credit = (None, 0.0)


class TokenLedger:
    """Tokens, masks and log-probabilities of one rollout.

    Args:
        tokenizer: the policy's tokenizer.
        messages: the chat before the first turn.
        tools: schemas for the template.
        stop_token_ids: further ids that end a turn.
        parser: how the policy writes calls.
        media: the images of the messages.

    Attributes:
        parser: how the policy writes calls.
        stop_token_ids: every id at which sampling should stop, except the tokenizer's own end of text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        tools: Sequence[dict[str, Any]] = (),
        stop_token_ids: Sequence[int] = (),
        parser: Parser | None = None,
        media: Media | None = None,
    ) -> None:
        self.parser = parser or HermesParser()
        self._media = media or Media()
        self._tokenizer = self._media.tokenizer(tokenizer)
        self._template = ChatTemplate(self._tokenizer, tools, messages, self.parser)
        ends = [self._template.end_id] if self._template.end_id is not None else []
        self.stop_token_ids = tuple(dict.fromkeys([*stop_token_ids, *ends]))
        self._text = self._template.text(messages, generation=True)  # without the tokens that ended turns
        self._segments = [
            Segment(self._template.ids(messages, generation=True), [dict(message) for message in messages])
        ]
        self._pieces = [Piece(len(self._now.ids), self._text)]
        self._turn: list[int] = []
        self._last_turn: list[int] = []

    def __len__(self) -> int:
        return self._media.length(self._now.ids)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that the prompt renders."""
        return list(self._now.messages)

    @property
    def prompt_ids(self) -> list[int]:
        """What the model is to go on from, with one placeholder for each of the ``images``."""
        return self._media.for_server(self._now.ids)

    @property
    def images(self) -> list[str]:
        """The images in the prompt as data URLs, in order."""
        return [self._media.urls[number] for number in self._media.shown(self._now.ids)]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return sum(span.end - span.start for segment in self._segments for span in segment.spans)

    def length_of(self, messages: Messages) -> int:
        """Tokens of the prompt that these messages would be."""
        return self._media.length(self._template.ids(messages, generation=True))

    def append(self, sampled: Sampled, turn: int) -> None:
        """Take in what the model sampled after ``prompt_ids``; several pieces may make one turn.

        Args:
            turn: its number, from 1; never less than that of the piece before.

        Raises:
            InvalidSample: the answer cannot be trained on.
        """
        if len(sampled.ids) != len(sampled.logprobs):
            raise InvalidSample(
                f"sample: {len(sampled.ids)} ids have {len(sampled.logprobs)} log-probabilities"
            )
        if not all(math.isfinite(logprob) for logprob in sampled.logprobs):
            raise InvalidSample("sample: a log-probability is not a finite number")
        if not sampled.ids:
            return
        start = len(self._now.ids)
        self._now.ids.extend(sampled.ids)
        end = len(self._now.ids)
        self._now.spans.append(Span(start, end, turn, sampled.weight_version, tuple(sampled.logprobs)))
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
        self._now.messages.append({"role": "assistant", "content": text})
        self._text += text
        self._pieces.append(Piece(len(self._now.ids), self._tokenizer.decode(list(self._turn))))
        self._last_turn, self._turn = self._turn, []
        return text

    def observe(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages after a closed turn, and the start of the next turn.

        Raises:
            TemplateRefused: the template does not take them.
        """
        conversation = [*self._now.messages, *(dict(message) for message in messages)]
        theirs = self._template.text(conversation, generation=True)
        tail = self._template.tail(messages)
        if tail is None or _dense(self._text + tail) != _dense(theirs):
            self._write(conversation, theirs, rewritten=True)
            return
        ids = self._template.encode_tail(tail)
        completed = self._ended(ids) if self._last_turn[-1:] == [self._template.end_id] else 0
        self._now.ids.extend(ids[completed:])
        self._now.messages[:] = conversation
        self._text += tail
        rest = tail[len(self._tokenizer.decode(ids[:completed])) :]
        self._pieces.append(Piece(len(self._now.ids), rest))

    def restart(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Go on from other messages than those so far.

        Raises:
            TemplateRefused: the template does not take them.
        """
        conversation = [dict(message) for message in messages]
        self._write(conversation, self._template.text(conversation, generation=True), rewritten=False)

    def rows(self, credits: Mapping[int, Credit] | None = None) -> list[Row]:
        """The training rows, in the order of their first turns.

        Args:
            credits: of each turn what estimators that credit steps need to know.
        """
        return [self._row(sequence, credits or {}) for sequence in merge(self._segments).sequences]

    def drift(self) -> Drift:
        """Tokens of the rows, how many of them text would not give back, and what rewriting did."""
        merged = merge(self._segments)
        tokens = sum(len(sequence.ids) for sequence in merged.sequences)
        drifted = sum(count_drift(sequence.ids, self._retokenised(sequence)) for sequence in merged.sequences)
        return Drift(
            tokens=tokens,
            drifted=min(tokens, drifted + merged.realigned),
            forks=merged.forks,
            realigned=merged.realigned,
        )

    @property
    def _now(self) -> Segment:
        return self._segments[-1]

    def _write(self, conversation: list[dict[str, Any]], theirs: str, *, rewritten: bool) -> None:
        """Make the prompt what the template writes; ids stay as far as their text is the same."""
        before = self._now
        pieces = agreement(self._pieces, before.ids, theirs, self._tokenizer.decode)
        kept = pieces[-1].end if pieces else 0
        rest = theirs[sum(len(piece.text) for piece in pieces) :]
        ids = (
            [*before.ids[:kept], *self._template.encode_tail(rest)]
            if kept
            else self._template.ids(conversation, generation=True)
        )
        if kept == len(before.ids) or not before.spans:
            self._segments[-1] = Segment(ids, conversation, before.rewritten, before.spans)
        else:
            self._segments.append(Segment(ids, conversation, rewritten))
        self._text = theirs
        self._pieces = [*pieces, Piece(len(ids), rest)]

    def _retokenised(self, sequence: Segment) -> list[int]:
        """What a trainer would get that is given the text of a row."""
        last = max(at for at, message in enumerate(sequence.messages) if message["role"] == "assistant")
        messages = sequence.messages[: last + 1]
        ours = self._tokenizer.decode(sequence.ids)
        if _dense(self._template.text(messages, generation=False)).startswith(_dense(ours)):
            return self._template.ids(messages, generation=False)
        return self._tokenizer.encode(ours, add_special_tokens=False)

    def _row(self, sequence: Segment, credits: Mapping[int, Credit]) -> Row:
        tokens, begins = self._media.expanded(sequence.ids)
        at = begins[sequence.spans[0].start]
        mask, logprobs = [0] * (len(tokens) - at), [0.0] * (len(tokens) - at)
        versions: list[WeightSpan] = []
        steps: dict[int, RowStep] = {}
        for span in sequence.spans:
            start, end = begins[span.start] - at, begins[span.end] - at
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = span.logprobs
            versions.append(WeightSpan(version=span.version, start=start, end=end))
            anchor, reward = credits.get(span.turn, _NO_CREDIT)
            begin = steps[span.turn].start if span.turn in steps else start
            steps[span.turn] = RowStep(
                turn=span.turn, start=begin, end=end, anchor=anchor, step_reward=reward
            )
        return Row(
            prompt_ids=tokens[:at],
            response_ids=tokens[at:],
            response_mask=mask,
            logprobs=logprobs,
            weight_versions=versions,
            steps=list(steps.values()),
            images=self._media.shown(sequence.ids),
        )

    def _ended(self, tail: Sequence[int]) -> int:
        """How many ids of a tail a turn has already whose end token was sampled."""
        end = self._template.end_id
        if end not in tail:
            return 0
        at = tail.index(end)
        # A template may end turns only when nothing follows; then this end is that of a later message.
        return 0 if self._tokenizer.decode(list(tail[:at])).strip() else at + 1


def _dense(text: str) -> str:
    return "".join(text.split())
