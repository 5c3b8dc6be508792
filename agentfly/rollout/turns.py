"""One turn of a rollout, the same for every strategy: an answer, and the calls in it.

Guarantees:
1. The context budget is checked before generating: prompt plus answer never exceed ``max_context_tokens``.
2. A turn over its deadline ends the rollout as ``Masked("turn_deadline")``, also while the server answers
   (see below). ``ModelUnavailable`` is for a server that cannot be reached, refuses or hangs up.
3. An answer that the server aborts is continued from where it stopped, by whichever weights answer then. A
   server that aborts the same answer `_ABORTS` times before it writes a token is taken for broken.
4. A seed gives each turn of each rollout a seed of its own: a group is not one answer many times.
5. For the same sampled ids a turn is the same under every strategy: the same calls in the same order, and the
   same messages.
6. A policy that writes the placeholder of an image ends its rollout as ``Masked("placeholder")``: no trainer
   could tell it from an image. A server that has another number of tokens for an image than the row would
   have fails it.

Why an answer that takes too long is not the infrastructure's: long answers are the ones that are cut. Drawing
them again until one is in time would select short answers, and what is selected is what is trained. A server
that accepts a request and stays silent looks the same from here, so it is masked too.
"""

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.models import ChatModel, ModelUnavailable, Sampling
from agentfly.rollout.calls import run_calls
from agentfly.rollout.errors import ImageTokensDiffer
from agentfly.rollout.outcomes import Failed, Masked
from agentfly.rollout.play import Ended, Play
from agentfly.rollout.transcript import Transcript

_ABORTS = 3


@dataclass(frozen=True)
class Limits:
    """Of every strategy, in turns and tokens; a turn is one generation."""

    max_turns: int = 10
    max_tokens_per_turn: int = 512
    max_context_tokens: int = 4096
    max_prompt_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_turn", "max_context_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise AgentflyError(
                    f"{name}: {getattr(self, name)} is less than 1",
                    hints=[f"leave {name} out for the default of {getattr(Limits, name)}"],
                )

    def check_prompt(self, play: Play) -> None:
        """End a rollout whose prompt is too long before the model is asked."""
        if len(play.ledger) > self.max_prompt_tokens:
            what = f"prompt: {len(play.ledger)} tokens, over the limit of {self.max_prompt_tokens}"
            raise Ended(Failed("PromptTooLong", what))

    def room(self, play: Play) -> int:
        """Tokens that the context has left."""
        return self.max_context_tokens - len(play.ledger)


@dataclass(frozen=True)
class Turn:
    """A turn that is over.

    Attributes:
        text: what the policy wrote, without the token that ended it.
        observations: the messages that it is answered with; none if it made no call.
        stop: why the rollout ends with it (see ``Trajectory``), or empty.
    """

    text: str
    observations: tuple[dict[str, Any], ...] = ()
    stop: str = ""


async def take_turn(play: Play, limits: Limits) -> Turn:
    """Let the policy answer the ledger's prompt, and run its calls."""
    async with _turn(play):
        play.phase = "generate"
        finish = await _generate(play, limits)
        text = _ended(play)
        play.messages.append({"role": "assistant", "content": text})
        play.phase = "parse"
        parsed = play.ledger.parser.parse(text)
        for call in parsed.calls if play.media.sees else ():  # JSON can spell what the text does not
            _check_written(play, [], json.dumps([call.name, call.arguments], ensure_ascii=False))
        if not parsed.calls and not parsed.malformed:
            return Turn(text, stop="length" if finish == "length" else "done")
        play.phase = "tool"
        observations, end = await run_calls(play, parsed)
        play.messages.extend(observations)
        return Turn(text, tuple(observations), "end" if end else "")


async def write(play: Play, limits: Limits) -> str:
    """Let the policy answer the ledger's prompt with text of which no calls are made."""
    async with _turn(play):
        play.phase = "generate"
        await _generate(play, limits)
        return _ended(play)


@contextlib.asynccontextmanager
async def _turn(play: Play) -> AsyncIterator[None]:
    play.turns += 1
    seconds = play.ctx.deadlines.turn
    limit = None
    try:
        async with play.ctx.limit(seconds) as limit:
            yield
    except TimeoutError:
        if limit is None or not limit.expired():
            raise
        what = f"turn {play.turns} took more than {seconds:g} s ({play.phase})"
        raise Ended(Masked("turn_deadline", what)) from None


async def _generate(play: Play, limits: Limits) -> str:
    """Sample one turn into the ledger; returns why it stopped."""
    left, ledger, aborts = limits.max_tokens_per_turn, play.ledger, 0
    if isinstance(ledger, Transcript):
        sampling = _for_request(play, min(left, limits.room(play)), f"{play.turns}.0")
        return await ledger.answer(sampling, play.ctx.deadlines.turn)
    assert not isinstance(play.model, ChatModel)  # whose ledger is a Transcript
    while True:
        room = min(left, limits.room(play))
        if room < 1:
            return "length"
        part, images = f"{play.turns}.{limits.max_tokens_per_turn - left}", ledger.images
        sampled = await play.model.generate(
            ledger.prompt_ids,
            _for_request(play, room, part),
            request_id=f"{play.ctx.owner}.{part}",
            deadline=play.ctx.deadlines.turn,
            images=images,
        )
        _check_written(play, sampled.ids, "")
        if images and sampled.prompt_tokens not in (None, len(ledger)):
            raise ImageTokensDiffer(
                f"images: the server read a prompt of {sampled.prompt_tokens} tokens, not {len(ledger)}",
                hints=["serve the model with the processor's own settings: no --mm-processor-kwargs"],
            )
        ledger.append(sampled, play.turns)
        if sampled.finish_reason != "abort":
            return sampled.finish_reason
        aborts = 0 if sampled.ids else aborts + 1
        if aborts == _ABORTS:
            raise ModelUnavailable(f"model: aborted the answer {aborts} times before a token of it")
        left -= len(sampled.ids)


def _ended(play: Play) -> str:
    text = play.ledger.end_turn()
    _check_written(play, [], text)
    return text


def _check_written(play: Play, ids: Sequence[int], text: str) -> None:
    if (placeholder := play.media.wrote(ids, text)) is not None:
        raise Ended(Masked("placeholder", f"the policy wrote {placeholder}"))


def _for_request(play: Play, room: int, part: str) -> Sampling:
    sampling = replace(play.sampling, max_tokens=room, stop_token_ids=play.ledger.stop_token_ids)
    if sampling.seed is None:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}/{play.ctx.rollout_id}/{part}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:4], "big"))
