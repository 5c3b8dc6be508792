"""Calls of one rollout, put together into as few training sequences as their tokens allow.

Guarantees:
1. A sampled token is in one sequence, once, behind exactly the tokens that the model had read when it drew
   it.
2. A call whose prompt begins with all of a sequence, up to its last sampled token, continues that sequence;
   of several the longest. Of two calls that could continue one sequence the first does; for the other one,
   what came before is prompt.
3. Where a prompt leaves a sequence only in the tail of its last answer, the sequence is continued too: the
   tail is replaced by what the prompt has there, untrained and counted. A tail is at most ``REALIGN_TOKENS``
   tokens and half of the answer. Any other call begins a sequence of its own.
4. A sequence ends on a sampled token.

Why a tail may be given up: another sequence would repeat the whole context for these few tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

REALIGN_TOKENS = 16


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end`` (exclusive) of a segment were sampled in one call."""

    start: int
    end: int
    turn: int
    version: str | None
    logprobs: tuple[float, ...]

    def until(self, end: int) -> "Span":
        """The part before ``end``."""
        return replace(self, end=end, logprobs=self.logprobs[: end - self.start])


@dataclass
class Segment:
    """Tokens of calls that went on from one another.

    Attributes:
        spans: what of ``ids`` was sampled, in order.
        messages: the conversation whose rendering this is.
        rewritten: the chat template changed what came before, and so made this segment necessary.
    """

    ids: list[int]
    messages: list[dict[str, Any]]
    rewritten: bool = False
    spans: list[Span] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Behind the last sampled token; only of a segment that has one."""
        return self.spans[-1].end

    @property
    def prompt(self) -> list[int]:
        """What stands before the first sampled token."""
        return self.ids[: self.spans[0].start]

    @property
    def answer(self) -> int:
        """Where the last answer begins; an answer that was continued has several spans."""
        last = self.spans[-1].turn
        return next(span.start for span in self.spans if span.turn == last)


@dataclass(frozen=True)
class Merged:
    """The sequences, in the order of their first turns.

    Attributes:
        forks: sequences that had to be begun because the template rewrote what came before.
        realigned: sampled tokens that were given up.
    """

    sequences: list[Segment]
    forks: int
    realigned: int


def merge(segments: Sequence[Segment]) -> Merged:
    """Put segments together, in the order in which they were begun; those without a sampled token are left
    out."""
    merged: list[Segment] = []
    forks = realigned = 0
    for segment in segments:
        if not segment.spans:
            continue
        prompt = segment.prompt
        costs = [
            (cost, -before.end, at)
            for at, before in enumerate(merged)
            if (cost := _lost(before, prompt)) is not None
        ]
        if costs:
            cost, _, at = min(costs)
            merged[at] = _continued(merged[at], segment, cost)
            realigned += cost
        else:
            merged.append(segment)
            forks += segment.rewritten
    return Merged([replace(each, ids=each.ids[: each.end]) for each in merged], forks, realigned)


def _lost(before: Segment, prompt: Sequence[int]) -> int | None:
    """How many sampled tokens of a sequence are lost if a prompt continues it; None: it does not."""
    end, answer = before.end, before.answer
    if prompt[:end] == before.ids[:end]:
        return 0
    if prompt[:answer] != before.ids[:answer]:
        return None
    pairs = zip(before.ids[answer:end], prompt[answer:end], strict=False)
    agreed = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(prompt) - answer)
    lost = end - answer - agreed
    return lost if lost <= min(REALIGN_TOKENS, (end - answer) // 2) else None


def _continued(before: Segment, segment: Segment, lost: int) -> Segment:
    end = before.end - lost
    kept = [span.until(min(span.end, end)) for span in before.spans if span.start < end]
    return replace(segment, rewritten=before.rewritten, spans=[*kept, *segment.spans])
