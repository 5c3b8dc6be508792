"""verl's synchronous trainer, with agentfly's advantages; runs in the trainer environment.

Guarantees:
1. Advantages are estimated from whole rollouts: their rows, turns and values reach the estimator.
2. A step makes as many updates as its settings say, however many rows its rollouts have: verl's own numbers
   count groups, as if each rollout had one row.

Known to verl as ``trainer.v1.trainer_mode=agentfly``.
"""

import math
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from agentfly.training.algorithm_config import TRAINER
from agentfly.training.verl_advantages import Rows, rows_are


def register() -> None:
    """Make the trainer known to verl."""
    register_trainer(TRAINER)(Trainer)


class Trainer(PPOTrainerSync):  # type: ignore[misc]
    """Lives in the process of verl's trainer loop."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trainer_mode = (
            "sync"  # verl asks for this name to know that no rollouts run ahead of the weights
        )
        groups = config.actor_rollout_ref.actor.ppo_mini_batch_size
        self._updates = max(1, config.data.train_batch_size // groups)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        names = ["rm_scores", "extra_fields", *(["values"] if self.use_critic else [])]
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=names
        )
        rows = Rows(
            keys=batch.keys,
            scores=[float(row.sum()) for row in data["rm_scores"].unbind()],
            extra=[getattr(extra, "data", extra) for extra in data["extra_fields"]],
            values=data.select("values").to_padded_tensor()["values"] if self.use_critic else None,
        )
        with rows_are(rows):
            return super()._compute_advantage(batch, metrics)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows that every update, rank and pass has a whole number of; verl fills up with empty ones."""
        actor = self.config.actor_rollout_ref
        parts: list[int] = [actor.rollout.n, dp_size * (actor.actor.ppo_micro_batch_size_per_gpu or 1)]
        if self.use_critic:
            parts.append(dp_size * (self.config.critic.ppo_micro_batch_size_per_gpu or 1))
        return math.lcm(*parts) * int(self._updates)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.config.actor_rollout_ref.actor.ppo_mini_batch_size = self._groups(batch)
        return super()._update_actor(batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.config.critic.ppo_mini_batch_size = self._groups(batch)
        return super()._update_critic(batch, metrics)

    def _groups(self, batch: Any) -> int:
        """The rows of one update as verl counts them: in groups of ``rollout.n`` rows."""
        rows: int = len(batch) // self._updates
        return rows // int(self.config.actor_rollout_ref.rollout.n)
