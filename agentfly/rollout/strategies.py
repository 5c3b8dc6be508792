"""The strategy that a manifest names.

Guarantees:
1. A prompt builder that cannot be loaded or called is an error that names field and value, before anything
   starts.
"""

from pathlib import Path
from typing import Protocol

from agentfly.api import Strategy as StrategySpec
from agentfly.errors import AgentflyError
from agentfly.refs import load
from agentfly.rollout.chain import Chain, WhenFull
from agentfly.rollout.step import PromptBuilder, Step, window

_WHEN_FULL: dict[str, WhenFull] = {"Stop": "stop", "DropOldest": "drop_oldest", "Summarise": "summarise"}


class Shape(Protocol):
    """What a run or a job says of its rollouts."""

    @property
    def strategy(self) -> StrategySpec: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def max_tokens_per_turn(self) -> int: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def max_prompt_tokens(self) -> int: ...


def strategy_of(shape: Shape, base_dir: Path) -> Chain | Step:
    """Make the strategy; its builder is relative to the folder of the manifest.

    Raises:
        AgentflyError: the prompt builder is none.
    """
    spec = shape.strategy
    limits = (shape.max_turns, shape.max_tokens_per_turn, shape.max_context_tokens, shape.max_prompt_tokens)
    if spec.type == "Chain":
        return Chain(*limits, when_full=_WHEN_FULL[spec.when_full])
    builder = window if spec.prompt_builder is None else _builder(spec.prompt_builder, base_dir)
    return Step(*limits, history=spec.turns_shown, prompt_builder=builder)


def _builder(entrypoint: str, base_dir: Path) -> PromptBuilder:
    field = "spec.rollout.strategy.promptBuilder"
    try:
        found = load(entrypoint, base_dir)
    except AgentflyError as error:
        raise AgentflyError(f"{field}: {error.message}", hints=error.hints) from error
    if not callable(found):
        raise AgentflyError(
            f"{field}: {entrypoint} is of type {type(found).__name__}, not a function of a StepView",
            hints=["name a function that takes a StepView and returns chat messages"],
        )
    builder: PromptBuilder = found
    return builder
