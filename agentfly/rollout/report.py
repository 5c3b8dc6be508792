"""What many rollouts came to, in numbers.

Guarantees:
1. Every rollout is counted once, under its outcome; reasons are counted under their own names.
2. Reward statistics cover scored rollouts only, and are None without any.
3. The size of a report does not grow with the number of rollouts: of messages the first of each reason is
   kept, up to a length.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from agentfly.rollout.outcomes import Failed, Masked, Scored
from agentfly.rollout.trajectory import Trajectory

MESSAGE_CHARS = 1000


@dataclass(frozen=True)
class RewardStats:
    """Of scored rollouts; ``std`` is the standard deviation of the population."""

    mean: float
    std: float
    min: float
    max: float


@dataclass
class RolloutReport:
    """Running totals.

    Attributes:
        total: rollouts that were to be played.
        resumed: of these, how many an earlier run had finished.
        masked, failed: reason -> rollouts.
        messages: reason -> the first message.
        tool_errors: exceptions of tools.
        sampled_tokens: tokens that the policy sampled.
        tokens, drifted_tokens: tokens whose drift was measured, and those that drifted.
        drifted_rollouts: rollouts with at least one drifted token.
        forks: rows that had to be begun because the chat template rewrote what came before.
        seconds: wall time of this run.
    """

    total: int
    resumed: int = 0
    scored: int = 0
    masked: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    sampled_tokens: int = 0
    tokens: int = 0
    drifted_tokens: int = 0
    drifted_rollouts: int = 0
    forks: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    seconds: float = 0.0
    _mean: float = 0.0
    _squares: float = 0.0
    _min: float = math.inf
    _max: float = -math.inf

    @property
    def failures(self) -> int:
        """Failed rollouts."""
        return sum(self.failed.values())

    @property
    def finished(self) -> int:
        """Rollouts with an outcome."""
        return self.scored + sum(self.masked.values()) + self.failures

    @property
    def drift_fraction(self) -> float:
        """Drifted tokens over measured tokens, 0 without any."""
        return self.drifted_tokens / self.tokens if self.tokens else 0.0

    @property
    def reward(self) -> RewardStats | None:
        """Statistics of the rewards so far."""
        if not self.scored:
            return None
        return RewardStats(self._mean, math.sqrt(self._squares / self.scored), self._min, self._max)

    def add(self, trajectory: Trajectory) -> None:
        """Count one rollout."""
        match trajectory.outcome:
            case Scored(reward=reward):
                self._add_reward(reward)
            case Masked(reason=reason, message=message):
                self.masked[reason] = self.masked.get(reason, 0) + 1
                self.messages.setdefault(reason, message[:MESSAGE_CHARS])
            case Failed(reason=reason, message=message):
                self.failed[reason] = self.failed.get(reason, 0) + 1
                self.messages.setdefault(reason, message[:MESSAGE_CHARS])
        self.sampled_tokens += trajectory.sampled_tokens
        self.tokens += trajectory.drift.tokens
        self.drifted_tokens += trajectory.drift.drifted
        self.drifted_rollouts += trajectory.drift.drifted > 0
        self.forks += trajectory.drift.forks
        self.tool_calls += len(trajectory.tool_calls)
        self.tool_errors += round(trajectory.metrics.get("tool_errors", 0.0))

    def told(self, log: Path) -> list[str]:
        """Lines for people: each reason with its count and first message, and errors of tools.

        Args:
            log: where the tracebacks of tools are.
        """
        lines = [
            ": ".join(filter(None, [f"{what} {count} ({reason})", self.messages[reason]]))
            for what, counts in (("masked", self.masked), ("failed", self.failed))
            for reason, count in sorted(counts.items())
        ]
        errors = [f"tool_errors {self.tool_errors}: tracebacks are in {log}"] if self.tool_errors else []
        return [*lines, *errors]

    def _add_reward(self, reward: float) -> None:
        """Welford's update: the sum of squared deviations without cancellation."""
        self.scored += 1
        before = reward - self._mean
        self._mean += before / self.scored
        self._squares += before * (reward - self._mean)
        self._min, self._max = min(self._min, reward), max(self._max, reward)
