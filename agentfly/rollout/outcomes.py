"""The three ways in which a rollout ends.

Guarantees:
1. Only ``Scored`` has a reward, and it is a finite number: nothing that went wrong is ever a reward of 0.
2. ``Masked`` and ``Failed`` carry a reason that code can count; the message beside it is for people.

Reasons of ``Masked``: ``unscored`` (the reward returned None), ``deadline``, ``turn_deadline`` (its answer or
its calls took too long), ``reward_deadline``. Reasons of ``Failed`` are names in CamelCase, such as
``StartFailed``, ``SandboxLost`` or ``RewardInvalid``; only these count against a failure budget.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True)
class Scored:
    """The rollout ran to its end and was judged."""

    reward: float
    type: Literal["scored"] = "scored"

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward: {self.reward} is not a finite number")


@dataclass(frozen=True)
class Masked:
    """The rollout ended by a rule that leaves nothing to learn from: no reward, not a failure."""

    reason: str
    message: str = ""
    type: Literal["masked"] = "masked"


@dataclass(frozen=True)
class Failed:
    """Something broke: no reward, and it counts against the failure budget."""

    reason: str
    message: str = ""
    type: Literal["failed"] = "failed"


Outcome = Annotated[Scored | Masked | Failed, Field(discriminator="type")]
