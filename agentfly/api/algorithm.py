"""The algorithm of a TrainingRun: how rewards become advantages, and advantages an update.

Guarantees:
1. A setting that the chosen algorithm does not read is refused, not ignored.
2. What is absent has the value that belongs to the algorithm; whoever reads a block asks its properties.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from agentfly.api.base import ApiModel, Int, Rule

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
    "gigpo",
    "hgpo",
    "dapo",
    "gspo",
]
Normalization = Literal["Mean", "MeanStd"]

NAMES: tuple[str, ...] = get_args(AlgorithmName)
WITHOUT_GROUPS = ("ppo", "reinforce_plus_plus")
"""They compare no rollouts of one task with each other."""
OF_STEPS = ("gigpo", "hgpo")
"""They compare the turns of rollouts with each other."""
DISCOUNTING = (*WITHOUT_GROUPS, *OF_STEPS)

_CLIPS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
_OTHER_CLIPS = (0.2, 0.28)


class Ppo(ApiModel):
    """The critic."""

    critic_learning_rate: float = Field(
        default=1e-5, gt=0, le=1, description="AdamW learning rate of the critic, constant. Default 1e-5."
    )
    gae_lambda: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Lambda of the generalized advantage estimate: 1 trusts rewards alone, 0 the critic's "
        "next value. Default 1.",
    )


class Gigpo(ApiModel):
    """Advantages of rollouts, and beside them of turns that answered in the same state."""

    step_weight: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Weight of a turn's advantage beside that of its rollout. Default 1.",
    )
    normalization: Normalization = Field(
        default="Mean",
        description="Mean: less the mean of the group. MeanStd: then divided by its standard deviation. "
        "Default Mean.",
    )
    mean_over: Literal["Rollouts", "Steps"] = Field(
        default="Rollouts",
        description="What counts once in mean and deviation of a group's rollouts: each rollout, or each of "
        "its turns, so that long rollouts weigh more. Default Rollouts.",
    )


class Hgpo(ApiModel):
    """Advantages of turns that answered in the same state after the same states."""

    history: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Most preceding states that must be the same too; fewer are compared as well. Default 2.",
    )
    length_exponent: float = Field(
        default=1.0,
        ge=0,
        le=8,
        description="A comparison over n states weighs (n + 1) to this power; 0 weighs all alike. Default 1.",
    )
    normalization: Normalization = Field(
        default="MeanStd",
        description="Mean: less the mean of the group. MeanStd: then divided by its standard deviation. "
        "Default MeanStd.",
    )


class Overlong(ApiModel):
    """A penalty for rollouts near the most tokens that they should have."""

    max_tokens: Int = Field(ge=2, description="Sampled tokens of a rollout from which on it loses 1.")
    buffer_tokens: Int = Field(
        ge=1, description="Tokens below maxTokens over which the penalty grows evenly from 0 to 1."
    )
    rules: ClassVar = (
        Rule(
            cel="self.bufferTokens < self.maxTokens",
            holds=lambda self: self.buffer_tokens < self.max_tokens,
            field="bufferTokens",
            problem="is not less than maxTokens: the shortest rollout would lose reward",
            hint="set bufferTokens to less than maxTokens",
        ),
    )

    def penalty(self, tokens: int) -> float:
        """What a rollout of so many sampled tokens loses, 0 to 1 (DAPO, arXiv 2503.14476, eq. 13)."""
        return min(1.0, max(0.0, (tokens - (self.max_tokens - self.buffer_tokens)) / self.buffer_tokens))


class Dapo(ApiModel):
    """Groups that teach nothing are replaced, and long rollouts may cost."""

    max_batches: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Tasks of one step are at most this many times tasksPerStep: groups whose rewards are "
        "all equal are replaced by other tasks until then, and kept from then on. Default 4.",
    )
    overlong: Overlong | None = Field(
        default=None,
        description="Penalty for long rollouts, as {maxTokens: N, bufferTokens: M}. Absent: none.",
    )


def _one_of(names: tuple[str, ...]) -> str:
    return f"self.name in [{', '.join(repr(name) for name in names)}]"


def _of_one(name: str) -> Rule:
    return Rule(
        cel=f"!has(self.{name}) || self.name == '{name}'",
        holds=lambda self: getattr(self, name) is None or self.name == name,
        field=name,
        problem="is of another algorithm than name",
        hint=f"remove it, or set name to {name}",
    )


def _default_clip(place: int) -> str:
    """CEL of what an absent clip is."""
    text = str(_OTHER_CLIPS[place])
    for name, clips in _CLIPS.items():
        text = f"(self.name == '{name}' ? {clips[place]} : {text})"
    return text


class Algorithm(ApiModel):
    """How rewards become advantages, and advantages an update."""

    name: AlgorithmName = Field(
        default="grpo", description="How advantages are estimated, and the loss that uses them. Default grpo."
    )
    learning_rate: float = Field(
        default=1e-6, gt=0, le=1, description="AdamW learning rate, constant. Default 1e-6."
    )
    clip_low: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="The probability ratio is clipped below at 1 - clipLow. Absent: 0.2, of gspo 0.0003.",
    )
    clip_high: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="The probability ratio is clipped above at 1 + clipHigh. Absent: 0.28, of ppo 0.2, of "
        "gspo 0.0004.",
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Discount of a later reward: for each token of ppo and reinforce_plus_plus, for each "
        "turn of gigpo and hgpo. Absent: 1, of gigpo and hgpo 0.95.",
    )
    ppo: Ppo | None = Field(default=None, description="Settings of ppo. Absent: their defaults.")
    gigpo: Gigpo | None = Field(default=None, description="Settings of gigpo. Absent: their defaults.")
    hgpo: Hgpo | None = Field(default=None, description="Settings of hgpo. Absent: their defaults.")
    dapo: Dapo | None = Field(default=None, description="Settings of dapo. Absent: their defaults.")
    rules: ClassVar = (
        Rule(
            cel=f"(has(self.clipLow) ? self.clipLow : {_default_clip(0)}) "
            f"<= (has(self.clipHigh) ? self.clipHigh : {_default_clip(1)})",
            holds=lambda self: self.clips[0] <= self.clips[1],
            field="clipHigh",
            problem="is less than clipLow",
            hint="raise clipHigh or lower clipLow",
        ),
        Rule(
            cel=f"!has(self.gamma) || {_one_of(DISCOUNTING)}",
            holds=lambda self: self.gamma is None or self.name in DISCOUNTING,
            field="gamma",
            problem="discounts later rewards, which this algorithm does not",
            hint=f"remove it, or set name to one of {', '.join(DISCOUNTING)}",
        ),
        *(_of_one(name) for name in ("ppo", "gigpo", "hgpo", "dapo")),
    )

    @property
    def clips(self) -> tuple[float, float]:
        """How far the ratio may fall below 1 and rise above it."""
        low, high = _CLIPS.get(self.name, _OTHER_CLIPS)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def discount(self) -> float:
        """Of a reward that comes one token, or one turn, later."""
        return self.gamma if self.gamma is not None else 0.95 if self.name in OF_STEPS else 1.0

    @property
    def least_rollouts(self) -> int:
        """Scored rollouts of one task without which none of them teaches anything."""
        return 1 if self.name in WITHOUT_GROUPS else 2

    @property
    def of_ppo(self) -> Ppo:
        """Its settings."""
        return self.ppo or Ppo()

    @property
    def of_gigpo(self) -> Gigpo:
        """Its settings."""
        return self.gigpo or Gigpo()

    @property
    def of_hgpo(self) -> Hgpo:
        """Its settings."""
        return self.hgpo or Hgpo()

    @property
    def of_dapo(self) -> Dapo | None:
        """Its settings; None of any other algorithm."""
        return (self.dapo or Dapo()) if self.name == "dapo" else None


def _spec_rule(
    names: tuple[str, ...], cel: str, holds: Callable[[Any], bool], problem: str, hint: str
) -> Rule:
    """Of a whole spec: what algorithms of these names ask of its rollouts."""
    return Rule(
        cel=f"!({_one_of(names).replace('self.', 'self.algorithm.', 1)}) || {cel}",
        holds=lambda self: self.algorithm.name not in names or holds(self),
        field="algorithm",
        problem=problem,
        hint=hint,
    )


WITH_ROLLOUTS: tuple[Rule, ...] = (
    _spec_rule(
        tuple(name for name in NAMES if name not in WITHOUT_GROUPS),
        "self.rollout.groupSize >= 2",
        lambda self: self.rollout.group_size >= 2,
        "compares the rollouts of one task with each other, and rollout.groupSize is 1",
        f"set rollout.groupSize to 2 or more, or name to one of {', '.join(WITHOUT_GROUPS)}",
    ),
    _spec_rule(
        OF_STEPS,
        "self.rollout.maxTurns >= 2",
        lambda self: self.rollout.max_turns >= 2,
        "compares turns with each other, and rollout.maxTurns is 1: it would count the one reward twice",
        "set rollout.maxTurns to 2 or more, or name to grpo",
    ),
    _spec_rule(
        ("gspo",),
        "(self.rollout.strategy.type == 'Chain' && self.rollout.strategy.whenFull == 'Stop')",
        lambda self: self.rollout.strategy.type == "Chain" and self.rollout.strategy.when_full == "Stop",
        "clips the probability of whole rollouts, and with this rollout.strategy they are cut into several "
        "rows",
        "set rollout.strategy to {type: Chain}, or name to grpo",
    ),
)
"""What an algorithm asks of the rest of a TrainingRun's spec."""
