"""Advantages of the tokens of a step: from rows as verl has them to what its loss multiplies.

Guarantees:
1. A token that was not sampled gets 0, and so does a row that verl made up to fill a batch.
2. The rows of a rollout are one episode: its reward enters once, what comes in a later row comes later, and
   each rollout counts once in its group however many rows it has.
3. A reward is never lost: one that stands on a token that was not sampled was earned by the sampled token
   before it.
4. The order of rows changes nothing but the order of the result.

Arrays are (rows, tokens) of numpy, padded on the right. Sources: REINFORCE++ arXiv 2501.03262, GSPO
2507.18071, the generalized advantage estimate of PPO 1506.02438; the others are in ``estimators`` and
``estimators_steps``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from agentfly.api.algorithm import Algorithm
from agentfly.errors import AgentflyError
from agentfly.training.estimators import leave_one_out, members, normalized
from agentfly.training.estimators_steps import Rollout, Step, gigpo, hgpo

Array = Any  # numpy.ndarray; its own annotations need a newer interpreter than verl's


@dataclass(frozen=True)
class Span:
    """Response tokens ``start`` to ``end`` (exclusive) of a row: one turn, and what is known of it."""

    start: int
    end: int
    step: Step


@dataclass(frozen=True)
class Batch:
    """The rows of one training step.

    Attributes:
        rewards: of each token; the reward of a rollout stands in one of its rows, on its last token.
        mask: 1 where the policy sampled the token.
        groups: of each row, the group of its rollout.
        rollouts: of each row, its rollout.
        numbers: of each row, its place in its rollout.
        spans: of each row, its turns in their order; empty where turns were not recorded.
        values: what the critic says before each token; None without one.
    """

    rewards: Array
    mask: Array
    groups: Sequence[str]
    rollouts: Sequence[str]
    numbers: Sequence[int]
    spans: Sequence[Sequence[Span]]
    values: Array | None = None

    @cached_property
    def episodes(self) -> list[list[int]]:
        """The rows of each rollout in their order; rows without a sampled token belong to none."""
        sampled = self.mask.any(axis=1)
        found = members(self.rollouts).values()
        kept = ([row for row in sorted(rows, key=self.numbers.__getitem__) if sampled[row]] for rows in found)
        return [rows for rows in kept if rows]

    @cached_property
    def totals(self) -> list[float]:
        """All rewards of each episode."""
        return [float(self.rewards[rows].sum()) for rows in self.episodes]

    @cached_property
    def keys(self) -> list[str]:
        """The group of each episode."""
        return [self.groups[rows[0]] for rows in self.episodes]

    def spread(self, values: Sequence[float]) -> Array:
        """One number for each episode, given to all of its sampled tokens."""
        result = np.zeros(self.mask.shape)
        for rows, value in zip(self.episodes, values, strict=True):
            result[rows] = self.mask[rows] * value
        return result


def advantages(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    """Advantages and returns, both (rows, tokens); returns are what a critic learns."""
    return _ESTIMATORS[algorithm.name](batch, algorithm)


def whitened(values: Array, mask: Array) -> Array:
    """Values of masked tokens with mean 0 and variance 1 over all of them; 0 elsewhere."""
    inside = values[mask > 0]
    if inside.size < 2 or inside.min() == inside.max():
        return np.zeros(values.shape)
    return (values - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8) * mask


def _grpo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    return _alike(batch.spread(normalized(batch.totals, batch.keys, scale=True)))


def _dr_grpo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    """The loss sums over tokens and divides by rows: here by rollouts, whatever the rows are."""
    more = len(batch.mask) / max(1, len(batch.episodes))
    return _alike(batch.spread(normalized(batch.totals, batch.keys, scale=False)) * more)


def _gspo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    """The loss takes a mean over the tokens of a row, then over rows: here a mean over rollouts."""
    shares = np.zeros((len(batch.mask), 1))
    for rows in batch.episodes:
        lengths = batch.mask[rows].sum(axis=1, keepdims=True)
        shares[rows] = lengths / lengths.sum()
    more = len(batch.mask) / max(1, len(batch.episodes))
    return _alike(batch.spread(normalized(batch.totals, batch.keys, scale=True)) * shares * more)


def _rloo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    return _alike(batch.spread(leave_one_out(batch.totals, batch.keys)))


def _reinforce_plus_plus_baseline(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    sizes = {key: len(found) for key, found in members(batch.keys).items()}
    compared = batch.spread([float(sizes[key] > 1) for key in batch.keys])
    return _alike(whitened(batch.spread(normalized(batch.totals, batch.keys, scale=False)), compared))


def _reinforce_plus_plus(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    line = _Line(batch)
    rewards = line.rewards()
    returns = np.zeros(rewards.shape)
    later = np.zeros(len(rewards))
    for token in range(rewards.shape[1] - 1, -1, -1):
        later = rewards[:, token] + algorithm.discount * later
        returns[:, token] = later
    given = line.back(returns)
    return whitened(given, batch.mask), given


def _ppo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    assert batch.values is not None
    line = _Line(batch)
    rewards, values = line.rewards(), line.of(batch.values)
    raw = np.zeros(rewards.shape)
    later = following = np.zeros(len(rewards))
    for token in range(rewards.shape[1] - 1, -1, -1):
        error = rewards[:, token] + algorithm.discount * following - values[:, token]
        later = error + algorithm.discount * algorithm.of_ppo.gae_lambda * later
        # Beyond the end of an episode all is 0, so that the recursion starts at its last token.
        raw[:, token], following = later, values[:, token]
    estimates = line.back(raw)
    return whitened(estimates, batch.mask), line.back(raw + values)


def _gigpo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    return _of_steps(batch, gigpo(_turns(batch), algorithm.discount, algorithm.of_gigpo))


def _hgpo(batch: Batch, algorithm: Algorithm) -> tuple[Array, Array]:
    return _of_steps(batch, hgpo(_turns(batch), algorithm.discount, algorithm.of_hgpo))


def _alike(found: Array) -> tuple[Array, Array]:
    return found, found


def _turns(batch: Batch) -> list[Rollout]:
    rollouts = []
    for rows, key, total in zip(batch.episodes, batch.keys, batch.totals, strict=True):
        steps = tuple(span.step for row in rows for span in batch.spans[row])
        if not steps:
            raise AgentflyError(
                f"trajectory {batch.rollouts[rows[0]]}: does not say which turn sampled which token",
                hints=["set spec.algorithm.name to one that compares rollouts, such as grpo"],
            )
        rollouts.append(Rollout(key, total, steps))
    return rollouts


def _of_steps(batch: Batch, found: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    result = np.zeros(batch.mask.shape)
    for rows, values in zip(batch.episodes, found, strict=True):
        spans = [(row, span) for row in rows for span in batch.spans[row]]
        for (row, span), value in zip(spans, values, strict=True):
            result[row, span.start : span.end] = value
    return _alike(result * batch.mask)


class _Line:
    """The sampled tokens of each episode in one line, padded at its end: (episodes, tokens)."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._places = [self._of(rows) for rows in batch.episodes]
        self._width = max((len(rows) for rows, _ in self._places), default=0)

    def _of(self, rows: Sequence[int]) -> tuple[Array, Array]:
        found = [np.flatnonzero(self._batch.mask[row]) for row in rows]
        return np.repeat(rows, [len(columns) for columns in found]), np.concatenate(found)

    def of(self, array: Array) -> Array:
        """What stands on the sampled tokens."""
        result = np.zeros((len(self._places), self._width))
        for number, place in enumerate(self._places):
            result[number, : len(place[0])] = array[place]
        return result

    def rewards(self) -> Array:
        """Of the sampled tokens, each with those of the tokens after it that were not sampled."""
        given = self._batch.rewards
        result = np.zeros((len(self._places), self._width))
        for number, rows in enumerate(self._batch.episodes):
            mask = self._batch.mask[rows].reshape(-1)
            # What stands before the first sampled token nobody earned by a choice; it goes to that token.
            owner = np.maximum(np.cumsum(mask) - 1, 0).astype(int)
            np.add.at(result[number], owner, given[rows].reshape(-1))
        return result

    def back(self, lines: Array) -> Array:
        """The lines where their tokens are."""
        result = np.zeros(self._batch.mask.shape)
        for number, place in enumerate(self._places):
            result[place] = lines[number, : len(place[0])]
        return result


_ESTIMATORS: dict[str, Callable[[Batch, Algorithm], tuple[Array, Array]]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "ppo": _ppo,
    "gigpo": _gigpo,
    "hgpo": _hgpo,
    "dapo": _grpo,
    "gspo": _gspo,
}
