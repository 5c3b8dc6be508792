"""Training that does not wait for its rollouts: how old they may be, and how that is made up for.

Guarantees:
1. What would be wrong without an error is refused: servers that stand still while there is an update, and
   groups that are replaced within a step.
"""

from typing import Any

from pydantic import Field

from agentfly.api.base import ApiModel, Int, Rule


class Asynchronous(ApiModel):
    """Rollouts go on while the policy is updated, and are trained on a few updates later."""

    max_staleness: Int = Field(
        default=1,
        ge=1,
        le=16,
        description="Updates that may lie between the weights that sampled a token and those that train with "
        "it. So many steps of rollouts are played ahead. Default 1.",
    )
    importance_cap: float = Field(
        default=2.0,
        ge=1,
        le=100,
        description="The ratio of a token's probability under the trained weights to that under those which "
        "sampled it weighs its loss, up to this. Default 2.",
    )


def _rule(cel: str, holds: Any, problem: str, hint: str) -> Rule:
    return Rule(
        cel=f"!has(self.asynchronous) || {cel}",
        holds=lambda self: self.asynchronous is None or holds(self),
        field="asynchronous",
        problem=problem,
        hint=hint,
    )


WITH_THE_REST: tuple[Rule, ...] = (
    _rule(
        "self.inference.mode == 'Separate'",
        lambda self: not self.inference.colocated,
        "needs servers that go on while the policy is updated, and inference.mode is Colocated",
        "set inference.mode to Separate, or remove asynchronous",
    ),
    _rule(
        "self.algorithm.name != 'dapo'",
        lambda self: self.algorithm.name != "dapo",
        "plays the tasks of later steps ahead, and dapo replaces groups within their step",
        "set algorithm.name to grpo, or remove asynchronous",
    ),
)
"""What it asks of the rest of a TrainingRun's spec."""
