"""The step strategy: every turn has a prompt of its own, made of the task and the last turns.

Guarantees:
1. For the same sampled ids the environment sees the same as under ``Chain``: the same calls in the same
   order.
2. A prompt is what the builder makes of a ``StepView``, and nothing else; a builder whose messages are none
   is a ``PromptError`` of the rollout, one that takes longer than a turn may a ``PromptTimeout``. The first
   prompt above ``max_prompt_tokens`` is ``Failed("PromptTooLong")``, a later one ends the rollout with
   ``context``.
3. At most ``max_turns`` turns; the calls of the last turn still run, because the reward judges what they did.
4. Each turn is a row of its own, unless its prompt goes on from a row (see ``sequences``).
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentfly.agent.content import problem_of
from agentfly.context import Context
from agentfly.errors import AgentflyError
from agentfly.rollout.outcomes import Failed
from agentfly.rollout.play import Ended, Play
from agentfly.rollout.turns import Limits, take_turn


@dataclass(frozen=True)
class StepTurn:
    """One turn that is over: what the policy wrote, and the messages that it was answered with."""

    text: str
    observations: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class StepView:
    """What the prompt of a turn is made of.

    Attributes:
        task: the task's row, read-only.
        opening: the agent's chat before the first turn.
        turns: the last turns, oldest first, as many as the strategy's ``history``.
        number: of the turn to come, from 1.
        ctx: the rollout's context: for objects of tool classes, and what else a memory is made of.
    """

    task: Mapping[str, Any]
    opening: Sequence[Mapping[str, Any]]
    turns: Sequence[StepTurn]
    number: int
    ctx: Context


Prompt = Sequence[Mapping[str, Any]]
"""Chat messages, each with a role and content (see ``agent.content``)."""


class PromptBuilder(Protocol):
    """Makes the prompt of a turn, at once or, where it has to ask somebody, as a coroutine."""

    def __call__(self, view: StepView) -> Prompt | Awaitable[Prompt]:
        """The prompt."""
        ...


def window(view: StepView) -> list[Mapping[str, Any]]:
    """The opening and the last turns, as if there had been none between them."""
    messages = list(view.opening)
    for turn in view.turns:
        messages += [{"role": "assistant", "content": turn.text}, *turn.observations]
    return messages


@dataclass(frozen=True)
class Step(Limits):
    """Prompt, answer, tool calls, and again from a new prompt.

    Args:
        history: turns that a prompt shows.
        prompt_builder: makes it.
    """

    history: int = 2
    prompt_builder: PromptBuilder = window

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 0:
            raise AgentflyError(
                f"history: {self.history} is less than 0", hints=["set history to 0 to show the task alone"]
            )

    async def run(self, play: Play) -> str:
        """Play until an answer has no call, a tool ends it, or turns are used up."""
        opening, turns = play.ledger.messages, list[StepTurn]()
        while play.turns < self.max_turns:
            play.phase = "prompt"
            shown = turns[len(turns) - self.history :] if self.history < len(turns) else turns
            view = StepView(play.ctx.task, opening, tuple(shown), play.turns + 1, play.ctx)
            play.ledger.restart(await play.media.take(_checked(await self._built(view)), spelled=False))
            if not turns:
                self.check_prompt(play)
            if len(play.ledger) > self.max_prompt_tokens or self.room(play) < 1:
                return "context"
            turn = await take_turn(play, self)
            if turn.stop:
                return turn.stop
            turns.append(StepTurn(turn.text, turn.observations))
        return "turns"

    async def _built(self, view: StepView) -> Prompt:
        made = self.prompt_builder(view)
        if not isinstance(made, Awaitable):
            return made
        seconds, limit = view.ctx.deadlines.turn, None
        try:
            async with view.ctx.limit(seconds) as limit:
                return await made
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            what = f"prompt of turn {view.number} took more than {seconds:g} s"
            raise Ended(Failed("PromptTimeout", what)) from None


def _checked(made: Any) -> Prompt:
    if not isinstance(made, list | tuple) or not made:
        raise TypeError("the prompt builder gave no messages: return a list of dicts with role and content")
    for at, message in enumerate(made):
        if (problem := problem_of(message)) is not None:
            raise TypeError(f"the prompt builder's message {at} {problem}")
    return made
