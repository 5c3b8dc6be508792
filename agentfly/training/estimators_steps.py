"""Advantages of the single turns of rollouts: GiGPO and HGPO; pure, on plain numbers.

Guarantees:
1. Turns are compared within a group of rollouts, where their states (anchors) are equal. A turn without an
   anchor, or with one that no other turn of the group has, gets a turn's advantage of 0.
2. The reward of a rollout is earned by its last turn, on top of that turn's own.
3. A rollout that is alone in its group gets 0 for all of its turns.
4. The order of rollouts changes nothing, to the last bit; whether turns stand in one row or in many neither.

Sources: GiGPO arXiv 2505.10978, equations 3 to 8; HGPO 2602.22817, with the weights of its authors' recipe in
verl-agent (a level counts only where it says something: its advantage is not 0).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from agentfly.api.algorithm import Gigpo, Hgpo
from agentfly.training.estimators import members, normalized

_NOTHING = 1e-12
"""Below it an advantage is 0 but for rounding."""


@dataclass(frozen=True)
class Step:
    """One turn: the state it answered in, and what it was given for that alone."""

    anchor: str | None
    reward: float = 0.0


@dataclass(frozen=True)
class Rollout:
    """One rollout: its group, the reward of its end, and its turns in their order, at least one."""

    group: str
    reward: float
    steps: tuple[Step, ...]

    @property
    def total(self) -> float:
        """All rewards of the rollout, undiscounted."""
        return math.fsum([self.reward, *(step.reward for step in self.steps)])

    def returns(self, gamma: float) -> list[float]:
        """What each turn led to: its own reward, and ``gamma`` times what the next one led to."""
        found: list[float] = []
        later = 0.0
        for step in reversed(self.steps):
            own = step.reward if found else step.reward + self.reward
            later = own + gamma * later
            found.append(later)
        return found[::-1]


def gigpo(rollouts: Sequence[Rollout], gamma: float, settings: Gigpo) -> list[list[float]]:
    """The advantage of each turn: that of its rollout, plus ``step_weight`` times its own."""
    scale = settings.normalization == "MeanStd"
    keys = [rollout.group for rollout in rollouts]
    counts = [len(rollout.steps) for rollout in rollouts] if settings.mean_over == "Steps" else None
    whole = normalized([rollout.total for rollout in rollouts], keys, scale=scale, counts=counts)
    values, states = _by_state(rollouts, gamma, 0)
    own = normalized(values, states, scale=scale)
    both = [
        whole[number] + settings.step_weight * advantage
        for (number, _), advantage in zip(_places(rollouts), own, strict=True)
    ]
    return _unflat(rollouts, both)


def hgpo(rollouts: Sequence[Rollout], gamma: float, settings: Hgpo) -> list[list[float]]:
    """The advantage of each turn: a mean of those over its last 1 to ``history + 1`` states.

    A comparison over n states has weight ``(n + 1) ** length_exponent``.
    """
    sums = [0.0] * sum(len(rollout.steps) for rollout in rollouts)
    weights = list(sums)
    for history in range(settings.history + 1):
        weight = (history + 2) ** settings.length_exponent
        values, states = _by_state(rollouts, gamma, history)
        advantages = normalized(values, states, scale=settings.normalization == "MeanStd", population=True)
        for place, advantage in enumerate(advantages):
            if abs(advantage) > _NOTHING:
                sums[place] += weight * advantage
                weights[place] += weight
    means = [total / weight if weight else 0.0 for total, weight in zip(sums, weights, strict=True)]
    return _unflat(rollouts, means)


def _places(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """(number of the rollout, number of the turn) of all turns, one rollout after the other."""
    return [(number, turn) for number, rollout in enumerate(rollouts) for turn in range(len(rollout.steps))]


def _by_state(rollouts: Sequence[Rollout], gamma: float, history: int) -> tuple[list[float], list[Hashable]]:
    """Of all turns: what they led to, and what they may be compared by.

    That is the group, the state and the ``history`` states before it; a turn that has not so many, or an
    unknown one among them, or whose rollout is alone, is comparable with itself only.
    """
    sizes = {key: len(found) for key, found in members([rollout.group for rollout in rollouts]).items()}
    values: list[float] = []
    keys: list[Hashable] = []
    for number, rollout in enumerate(rollouts):
        values += rollout.returns(gamma)
        for turn in range(len(rollout.steps)):
            states = tuple(step.anchor for step in rollout.steps[max(0, turn - history) : turn + 1])
            alone = turn < history or None in states or sizes[rollout.group] < 2
            keys.append((number, turn) if alone else (rollout.group, states))
    return values, keys


def _unflat(rollouts: Sequence[Rollout], values: Sequence[float]) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in rollouts]
    for (number, _), value in zip(_places(rollouts), values, strict=True):
        found[number].append(value)
    return found
