"""The chain strategy: one growing conversation, one training row.

Guarantees:
1. The context budget is checked before generating: prompt plus answer never exceed ``max_context_tokens``,
   and a first prompt above ``max_prompt_tokens`` is ``Failed("PromptTooLong")``.
2. At most ``max_turns`` turns; the calls of the last turn still run, because the reward judges what they did.
3. A turn over its deadline ends the rollout as ``Masked("turn_deadline")``, also while the server answers
   (see below). ``ModelUnavailable`` is for a server that cannot be reached, refuses or hangs up.
4. An answer that the server aborts is continued from where it stopped, by whichever weights answer then.
5. A seed gives each turn of each rollout a seed of its own: a group is not one answer many times.

Why an answer that takes too long is not the infrastructure's: long answers are the ones that are cut. Drawing
them again until one is in time would select short answers, and what is selected is what is trained. A server
that accepts a request and stays silent looks the same from here, so it is masked too.
"""

import hashlib
from dataclasses import dataclass, replace

from agentfly.errors import AgentflyError
from agentfly.models import ModelUnavailable, Sampling
from agentfly.rollout.calls import run_calls
from agentfly.rollout.outcomes import Failed, Masked
from agentfly.rollout.play import Ended, Play


@dataclass(frozen=True)
class Chain:
    """Prompt, answer, tool calls, answer, and so on. Limits are in turns and tokens."""

    max_turns: int = 10
    max_tokens_per_turn: int = 512
    max_context_tokens: int = 4096
    max_prompt_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_turn", "max_context_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise AgentflyError(
                    f"{name}: {getattr(self, name)} is less than 1",
                    hints=[f"leave {name} out for the default of {getattr(Chain, name)}"],
                )

    async def run(self, play: Play) -> str:
        """Play until an answer has no call, a tool ends it, or turns or context are used up."""
        if len(play.ledger) > self.max_prompt_tokens:
            what = f"prompt: {len(play.ledger)} tokens, over the limit of {self.max_prompt_tokens}"
            raise Ended(Failed("PromptTooLong", what))
        while play.turns < self.max_turns:
            if len(play.ledger) >= self.max_context_tokens:
                return "context"
            stop = await self._turn(play)
            if stop:
                return stop
        return "turns"

    async def _turn(self, play: Play) -> str:
        play.turns += 1
        seconds = play.ctx.deadlines.turn
        limit = None
        try:
            async with play.ctx.limit(seconds) as limit:
                return await self._answer_and_calls(play)
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            what = f"turn {play.turns} took more than {seconds:g} s ({play.phase})"
            raise Ended(Masked("turn_deadline", what)) from None

    async def _answer_and_calls(self, play: Play) -> str:
        play.phase = "generate"
        finish = await self._generate(play)
        text = play.ledger.end_turn()
        play.phase = "parse"
        parsed = play.agent.parser.parse(text)
        if not parsed.calls and not parsed.malformed:
            return "length" if finish == "length" else "done"
        play.phase = "tool"
        messages, end = await run_calls(play, parsed)
        play.ledger.observe(messages)
        return "end" if end else ""

    async def _generate(self, play: Play) -> str:
        """Sample one turn into the ledger; returns why it stopped."""
        left = self.max_tokens_per_turn
        while True:
            room = min(left, self.max_context_tokens - len(play.ledger))
            if room < 1:
                return "length"
            part = f"{play.turns}.{self.max_tokens_per_turn - left}"
            sampled = await play.model.generate(
                play.ledger.prompt_ids,
                _for_request(play, room, part),
                request_id=f"{play.ctx.owner}.{part}",
                deadline=play.ctx.deadlines.turn,
            )
            play.ledger.append(sampled)
            if sampled.finish_reason != "abort":
                return sampled.finish_reason
            if not sampled.ids:
                raise ModelUnavailable("model: aborted the answer before its first token")
            left -= len(sampled.ids)


def _for_request(play: Play, room: int, part: str) -> Sampling:
    sampling = replace(play.sampling, max_tokens=room, stop_token_ids=play.ledger.stop_token_ids)
    if sampling.seed is None:
        return sampling
    digest = hashlib.sha256(f"{sampling.seed}/{play.ctx.rollout_id}/{part}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(digest[:4], "big"))
