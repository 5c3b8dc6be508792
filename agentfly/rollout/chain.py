"""The chain strategy: one growing conversation.

Guarantees:
1. A first prompt above ``max_prompt_tokens`` is ``Failed("PromptTooLong")``.
2. At most ``max_turns`` turns; the calls of the last turn still run, because the reward judges what they did.
3. What happens when the context is full is ``when_full``. "stop": turns go on while one token is left, then
   the rollout ends with ``context``. "drop_oldest": when an answer of full length no longer fits, the oldest
   turns are left out of the prompt until at most half of the context is used, or one turn is left.
   "summarise": when two such answers no longer fit, the policy writes down what it needs to go on, and from
   then on sees the task and that. Where neither makes room, the rollout stops as with "stop".
4. What is left out is counted (``dropped_turns``, ``summaries``) and stays in the trajectory's messages.

Why to half: every time that turns are left out begins another row, so it should not be every turn.
"""

import bisect
from dataclasses import dataclass
from typing import Any, Literal

from agentfly.agent.content import joined
from agentfly.errors import AgentflyError
from agentfly.rollout.play import Play
from agentfly.rollout.turns import Limits, Turn, take_turn, write

WhenFull = Literal["stop", "drop_oldest", "summarise"]

SUMMARY_REQUEST = (
    "The conversation is about to exceed its limit. Write down everything that you need to go on with the "
    "task: what you found out, what you did, and what is left to do. You will see the task and what you "
    "write now, and nothing else of this conversation. Call no tools."
)
SUMMARY_HEAD = "You have worked on this before, and wrote down:"


@dataclass(frozen=True)
class Chain(Limits):
    """Prompt, answer, tool calls, answer, and so on."""

    when_full: WhenFull = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.when_full not in (known := ("stop", "drop_oldest", "summarise")):
            raise AgentflyError(
                f"when_full: {self.when_full!r} is not known", hints=[f"use one of {', '.join(known)}"]
            )

    async def run(self, play: Play) -> str:
        """Play until an answer has no call, a tool ends it, or turns or context are used up."""
        self.check_prompt(play)
        first = opening = play.ledger.messages
        turns: list[Turn] = []
        while play.turns < self.max_turns:
            if turns and self.when_full == "drop_oldest":
                self._drop(play, opening, turns)
            if turns and self.when_full == "summarise":
                opening = await self._summarised(play, first, opening, turns)
                if play.turns >= self.max_turns:
                    break
            if self.room(play) < 1:
                return "context"
            turn = await take_turn(play, self)
            if turn.observations:
                play.ledger.observe(turn.observations)
            if turn.stop:
                return turn.stop
            turns.append(turn)
        return "turns"

    def _drop(self, play: Play, opening: list[dict[str, Any]], turns: list[Turn]) -> None:
        """Leave out the oldest turns, of the prompt and of ``turns``, if an answer no longer fits."""
        if len(turns) < 2 or self.room(play) >= self.max_tokens_per_turn:
            return

        def fits(dropped: int) -> bool:
            return play.ledger.length_of(shown(dropped)) <= self.max_context_tokens // 2

        def shown(dropped: int) -> list[dict[str, Any]]:
            return [*opening, *(message for turn in turns[dropped:] for message in _messages(turn))]

        dropped = 1 + bisect.bisect_left(range(1, len(turns) - 1), True, key=fits)
        play.ledger.restart(shown(dropped))
        play.count("dropped_turns", dropped)
        del turns[:dropped]

    async def _summarised(
        self, play: Play, first: list[dict[str, Any]], opening: list[dict[str, Any]], turns: list[Turn]
    ) -> list[dict[str, Any]]:
        """Let the policy write a summary if it is time for one; returns the messages that now come first."""
        if self.room(play) >= 2 * self.max_tokens_per_turn:
            return opening
        request = _with_text(play.ledger.messages, SUMMARY_REQUEST)
        if play.ledger.length_of(request) >= self.max_context_tokens:
            return opening
        play.ledger.restart(request)
        text = await write(play, self)
        play.count("summaries")
        summary = text.rpartition("</think>")[2].strip()
        told = _with_text(first, f"{SUMMARY_HEAD}\n{summary}")
        play.ledger.restart(told)
        turns.clear()
        return told


def _messages(turn: Turn) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": turn.text}, *turn.observations]


def _with_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text at their end; within the last one, since templates want roles to alternate."""
    *before, last = messages
    return [*before, {**last, "content": joined(last["content"], text, "\n\n")}]
