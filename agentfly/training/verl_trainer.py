"""verl's trainer with agentfly's advantages, and one with rollouts ahead; runs in the trainer environment.

Guarantees:
1. Advantages are estimated from whole rollouts: their rows, turns and values reach the estimator.
2. A step makes as many updates as its settings say, however many rows its rollouts have: verl's own numbers
   count groups, as if each rollout had one row.
3. Rollouts ahead are those of the next ``max_staleness`` steps, and each step trains on its own. A checkpoint
   has them: groups that were finished are trained on after it, the others are played again. After the last
   step none is left.

Known to verl by ``trainer.v1.trainer_mode``.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import assign_non_tensor_data

from agentfly.roles.trainer import current_config
from agentfly.training.algorithm_config import AHEAD, TRAINER
from agentfly.training.verl_advantages import Rows, rows_are

_TRAIN = "train"
"""verl's name for what is trained on."""


def register() -> None:
    """Make the trainers known to verl."""
    register_trainer(TRAINER)(Trainer)
    register_trainer(AHEAD)(AheadTrainer)


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


class AheadTrainer(Trainer):
    """A step trains on its own tasks, whose rollouts were begun so many steps before."""

    global_steps: int

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.trainer_mode = AHEAD  # any name but "sync": checkpoints then have what was played ahead
        self._ahead = current_config().ahead

    def on_train_begin(self) -> None:
        """Begin the rollouts of the first steps, but for those that the checkpoint has."""
        known = {tag["global_steps"] for tag in _prompts().values()}
        for step in range(self.global_steps, self.global_steps + self._ahead):
            if step not in known:
                self._begin(step)

    def prepare_step(self) -> dict[str, Any]:
        """Begin the rollouts of the step that is so many later."""
        self._begin(self.global_steps + self._ahead)
        return {}

    def _begin(self, step: int) -> None:
        if step <= self.total_training_steps:
            with self._as(step):
                self._add_batch_to_generate()

    @contextlib.contextmanager
    def _as(self, step: int) -> Iterator[None]:
        """verl takes the step that it is in for that of the rollouts it begins."""
        now = int(self.global_steps)
        self.global_steps = step
        try:
            yield
        finally:
            self.global_steps = now

    def _reissue_inflight_prompts(self, partition_id: str = _TRAIN) -> int:
        """Play what a checkpoint has of unfinished groups again; verl would do so for the next step alone."""
        begun = {key: tag for key, tag in _prompts().items() if tag["status"] in ("pending", "running")}
        rows = [key for key in _listed() if key not in begun and key.split("_", 1)[0] in begun]
        if rows:
            transfer_queue.kv_clear(keys=rows, partition_id=partition_id)
        for step in sorted({tag["global_steps"] for tag in begun.values()}):
            keys = [key for key, tag in begun.items() if tag["global_steps"] == step]
            batch = transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id)
            assign_non_tensor_data(batch, "global_steps", step)
            waiting = [{"is_prompt": True, "status": "pending", "global_steps": step}] * len(keys)
            transfer_queue.kv_batch_put(keys=keys, partition_id=partition_id, tags=waiting)
            self.agent_loop_manager.generate_sequences(batch)
        return len(begun)


def _listed() -> dict[str, dict[str, Any]]:
    """Tags of all that verl's queue has to train on, by key."""
    return dict((transfer_queue.kv_list(_TRAIN) or {}).get(_TRAIN, {}))


def _prompts() -> dict[str, dict[str, Any]]:
    """Those of groups."""
    return {key: tag for key, tag in _listed().items() if tag.get("is_prompt")}
