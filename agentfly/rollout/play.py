"""One attempt at a rollout while it runs: what a strategy works with and leaves its notes in.

Guarantees:
1. A play belongs to one attempt; nothing in it is shared with another.
2. The metrics below are always there, so that all trajectories have the same ones; each is a finite number.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentfly.agent import Agent
from agentfly.context import Context
from agentfly.models import ChatModel, Sampling, TokenModel
from agentfly.rollout.ledger import TokenLedger
from agentfly.rollout.media import Media
from agentfly.rollout.outcomes import Failed, Masked
from agentfly.rollout.trajectory import ToolCallRecord
from agentfly.rollout.transcript import Transcript

COUNTED = (
    "tool_calls",
    "tool_errors",
    "tool_timeouts",
    "unknown_tools",
    "invalid_arguments",
    "malformed_calls",
    "dropped_turns",
    "summaries",
)


class Ended(Exception):
    """Leave the rollout with this outcome."""

    def __init__(self, outcome: Masked | Failed) -> None:
        super().__init__(outcome.reason)
        self.outcome = outcome


@dataclass
class Play:
    """Inputs and notes of one attempt.

    Attributes:
        ledger: what was said, in tokens or, with a ``ChatModel``, in text.
        messages: all that was said, whatever of it a strategy shows to the policy.
        media: the images in it.
        phase: where it is, for errors and deadlines.
        turns: generations so far.
    """

    agent: Agent
    ctx: Context
    model: TokenModel | ChatModel
    ledger: TokenLedger | Transcript
    sampling: Sampling
    messages: list[dict[str, Any]]
    media: Media
    phase: str = "setup"
    turns: int = 0
    calls: list[ToolCallRecord] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))

    def count(self, name: str, value: float = 1.0) -> None:
        """Add a finite value to a metric; a sum beyond floats stays at the largest one."""
        total = self.metrics.get(name, 0.0) + float(value)
        self.metrics[name] = max(-sys.float_info.max, min(sys.float_info.max, total))


class Strategy(Protocol):
    """How a rollout goes from its prompt to its last turn."""

    async def run(self, play: Play) -> str:
        """Play to the end and return the stop reason (see ``Trajectory``)."""
        ...
