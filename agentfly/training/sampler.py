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

    def _materialize_batch(
        self, partition_id: str, selected: list[str], snapshot: dict[str, dict[str, Any]]
    ) -> Any:
        raised = self.failure_keys[partition_id] & set(selected)
        if raised:
            # Whatever goes wrong with a rollout is an outcome; an exception is a fault of ours or of the
            # weights.
            raise RuntimeError(
                f"{len(raised)} of {len(selected)} groups raised an exception, see the log above"
            )
        if partition_id == "train":
            mine = [key for key in snapshot if key.split("_", 1)[0] in set(selected)]
            kept, dropped = split_groups(mine)
            if not kept:
                raise RuntimeError(
                    "no group of this step has two scored rollouts: there is nothing to learn from"
                )
            if dropped:
                logger.warning(
                    "%d rows dropped: their groups have fewer than two scored rollouts", len(dropped)
                )
                transfer_queue.kv_clear(partition_id=partition_id, keys=dropped)
            snapshot = {key: snapshot[key] for key in kept}
        return super()._materialize_batch(partition_id, selected, snapshot)
