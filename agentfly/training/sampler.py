"""verl's replay buffer with agentfly's rule about small groups; runs in the trainer environment.

Selected by ``trainer.v1.sampler.custom_sampler``. It also asks for finished rollouts five times a second:
verl's own interval of two seconds is most of a step of a small model.
"""

import logging
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from agentfly.training.groups import split_groups

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class GroupSampler(ReplayBuffer):  # type: ignore[misc]
    """Samples whole groups for synchronous training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=_POLL_S, **kwargs)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        """The groups of the step and the rows that verl may take from them."""
        raised = self.failure_keys[partition_id]
        if raised:
            # What goes wrong with a rollout is an outcome; an exception is our fault, or stale weights.
            raise RuntimeError(f"{len(raised)} groups raised an exception, the log above has it")
        selected, rows, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == "train":
            chosen = set(selected)
            kept, dropped = split_groups(key for key in rows if key.split("_", 1)[0] in chosen)
            if not kept:
                raise RuntimeError("no group of this step has two scored rollouts: nothing to learn from")
            if dropped:
                logger.warning("%d rows dropped: no second scored rollout in their groups", len(dropped))
                transfer_queue.kv_clear(partition_id=partition_id, keys=dropped)
            rows = {key: rows[key] for key in kept}
        return selected, rows, steps
