"""Prompts of ``Step`` that remember more than the last turns; each is made of another one.

Guarantees:
1. What is remembered stands at the end of the opening's last message: roles alternate as they did.
2. ``with_notes`` shows what the policy wrote into ``Notes``, as it is at this turn; nothing if that is empty.
3. ``Summarised`` folds each turn that leaves the window into a summary, once and in order: ``by`` is given
   the summary so far and what was said in that turn. A rollout's summary is its own.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from agentfly.agent.content import joined, text_of
from agentfly.agent.memory import Notes
from agentfly.context import Context
from agentfly.errors import AgentflyError
from agentfly.rollout.step import Prompt, PromptBuilder, StepTurn, StepView, window

Build = Callable[[StepView], Prompt]
Summarise = Callable[[Context, str], Awaitable[str]]
"""From the context and a text to a shorter text."""

NOTES_HEAD = "Your notes:"
SUMMARY_HEAD = "What happened before:"


def with_notes(builder: Build = window) -> PromptBuilder:
    """The prompt of another builder, with the rollout's ``Notes``, which the agent has among its tools."""

    def build(view: StepView) -> Prompt:
        notes = view.ctx.instance(Notes)
        return builder(_with(view, f"{NOTES_HEAD}\n{notes}") if len(notes) else view)

    return build


@dataclass(frozen=True)
class Summarised:
    """The prompt of another builder, with the last turns and a summary of those before.

    Args:
        by: makes the summary, such as by a model.
        keep: turns that are shown as they are. The strategy's ``history`` is one more: what leaves is read.
        builder: of the rest.
    """

    by: Summarise
    keep: int = 2
    builder: Build = window

    async def __call__(self, view: StepView) -> Prompt:
        """The prompt."""
        if view.number - 1 <= self.keep:
            return self.builder(view)
        if len(view.turns) <= self.keep:
            raise AgentflyError(
                f"Summarised: keep={self.keep} reads {self.keep + 1} turns, and is shown {len(view.turns)}",
                hints=[f"set the strategy's history to {self.keep + 1}"],
            )
        leaving, shown = view.turns[-self.keep - 1], view.turns[len(view.turns) - self.keep :]
        so_far = view.ctx.instances.get(Summarised, "")
        summary = await self.by(view.ctx, f"{so_far}\n\n{_said(leaving)}".strip())
        view.ctx.instances[Summarised] = summary
        return self.builder(_with(replace(view, turns=shown), f"{SUMMARY_HEAD}\n{summary}"))


def _with(view: StepView, text: str) -> StepView:
    *before, last = view.opening
    return replace(view, opening=[*before, {**last, "content": joined(last["content"], text, "\n\n")}])


def _said(turn: StepTurn) -> str:
    return "\n".join([turn.text, *(text_of(message["content"]) for message in turn.observations)])
