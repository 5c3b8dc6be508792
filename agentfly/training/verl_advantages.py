"""agentfly's estimators as an advantage estimator of verl; runs in the trainer environment.

Guarantees:
1. verl knows the estimator by one name, after `register`; it computes what the run's algorithm says.
2. Called for other rows than those it was told of, or for none, it raises.

verl gives an estimator rewards, mask and group of each row and nothing else. Which rows are one rollout, its
turns and the critic's values are known to the trainer, which says so around the call.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import register_adv_est

from agentfly.roles.trainer import current_config
from agentfly.training.algorithm_config import ESTIMATOR
from agentfly.training.estimators_steps import Step
from agentfly.training.estimators_tokens import Array, Batch, Span, advantages


@dataclass(frozen=True)
class Rows:
    """What verl does not pass on of the rows of a batch, in their order.

    Attributes:
        keys: names in verl's queue: ``{group}_{rollout}_{row}``.
        scores: the reward of the rollout; verl gives it to each row.
        extra: ``extra_fields``, see ``verl_rows``.
        values: what the critic says before each token, (rows, tokens); None without one.
    """

    keys: Sequence[str]
    scores: Sequence[float]
    extra: Sequence[Mapping[str, Any]]
    values: torch.Tensor | None = None


_rows: ContextVar[Rows | None] = ContextVar("agentfly_rows", default=None)


@contextmanager
def rows_are(rows: Rows) -> Iterator[None]:
    """Within this block the estimator is called for these rows."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def register() -> None:
    """Make the estimator known to verl."""
    register_adv_est(ESTIMATOR)(estimate)


def estimate(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both (rows, tokens); as verl's ``AdvantageEstimatorFn``."""
    rows = _rows.get()
    if rows is None or len(rows.keys) != len(response_mask):
        known = 0 if rows is None else len(rows.keys)
        raise RuntimeError(
            f"advantages: {len(response_mask)} rows came, {known} are known: use agentfly's trainer"
        )
    batch = batch_of(token_level_rewards.numpy(force=True), response_mask.numpy(force=True), rows)
    found = advantages(batch, current_config().algorithm)
    first, second = (torch.from_numpy(each).to(token_level_rewards) for each in found)
    return first, second


def batch_of(rewards: Array, mask: Array, rows: Rows) -> Batch:
    """The rows of verl as agentfly's estimators take them: each rollout has its reward once."""
    numbers = [int(key.rsplit("_", 1)[1]) for key in rows.keys]
    rollouts = [key.rsplit("_", 1)[0] for key in rows.keys]
    last: dict[str, int] = {}
    for rollout, number in zip(rollouts, numbers, strict=True):
        last[rollout] = max(number, last.get(rollout, 0))
    rewards = rewards.astype(np.float64)
    for row, (rollout, number) in enumerate(zip(rollouts, numbers, strict=True)):
        if number < last[rollout]:
            rewards[row, np.flatnonzero(mask[row])[-1]] -= rows.scores[row]
    return Batch(
        rewards=rewards,
        mask=mask,
        groups=[rollout.rsplit("_", 1)[0] for rollout in rollouts],
        rollouts=rollouts,
        numbers=numbers,
        spans=[
            [Span(start, end, Step(anchor, reward)) for start, end, anchor, reward in extra["steps"]]
            for extra in rows.extra
        ],
        values=None if rows.values is None else rows.values.numpy(force=True).astype(np.float64),
    )
