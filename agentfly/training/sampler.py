"""verl's replay buffer with agentfly's rules about groups; runs in the trainer environment.

Guarantees:
1. A group with fewer scored rollouts than the algorithm compares is left out of its step.
2. With dapo, groups that teach nothing are replaced by other tasks, of which a step plays at most
   ``max_batches * tasks_per_step``. Those that are left then stay in the step, so that it always ends.
3. A group that raised ends the attempt.
4. Where rollouts run ahead, a step waits for its own groups and takes no others.

Selected by ``trainer.v1.sampler.custom_sampler``. It also asks for finished rollouts five times a second:
verl's own interval of two seconds is most of a step of a small model.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from agentfly.roles.trainer import current_config
from agentfly.training.groups import silent_groups, split_groups

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class _Groups(ReplayBuffer):  # type: ignore[misc]
    """Samples whole groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._minimum = current_config().algorithm.least_rollouts
        super().__init__(*args, poll_interval=_POLL_S, **kwargs)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        """The groups of the step and the rows that verl may take from them."""
        self._refuse_raised(partition_id)
        selected, rows, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == "train":
            chosen = set(selected)
            ours = [key for key in rows if key.split("_", 1)[0] in chosen]
            kept, dropped = split_groups(ours, self._minimum)
            if not kept:
                least = self._minimum
                wanted = "a scored rollout" if least == 1 else f"{least} scored rollouts"
                raise RuntimeError(f"no group of this step has {wanted}: nothing to learn from")
            if dropped:
                logger.warning("%d rows dropped: their groups have too few scored rollouts", len(dropped))
                transfer_queue.kv_clear(partition_id=partition_id, keys=dropped)
            rows = {key: rows[key] for key in kept}
        return selected, rows, steps

    def _refuse_raised(self, partition_id: str) -> None:
        raised = self.failure_keys[partition_id]
        if raised:
            # What goes wrong with a rollout is an outcome; an exception is our fault, or stale weights.
            raise RuntimeError(f"{len(raised)} groups raised an exception, the log above has it")


class GroupSampler(_Groups):
    """Samples whole groups for synchronous training."""

    def __init__(self, *args: Any, refill_fn: Callable[[int], object], **kwargs: Any) -> None:
        run = current_config()
        self._size = run.tasks_per_step
        dapo = run.algorithm.of_dapo
        self._batches = 1 if dapo is None else dapo.max_batches
        self._play = refill_fn
        self._played = self._replaced = 0
        if dapo is not None:
            kwargs |= {"filter_groups_metric": "outcome", "train_batch_size": self._size, "gen_batch_size": 1}
        super().__init__(*args, refill_fn=self._play_more, **kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """The rows of one step; see ``ReplayBuffer``."""
        self._played, self._replaced = batch_size, 0
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)

    def _play_more(self, groups: int) -> None:
        allowed = min(groups, self._batches * self._size - self._played)
        if allowed > 0:
            self._played += allowed
            self._play(allowed)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        """Finished groups to replace; verl's own rule counts rows, and cannot do with a group of none."""
        room = (self._batches - 1) * self._size - self._replaced
        finished = sorted(self.finished_keys[partition_id])
        if partition_id != "train" or room <= 0 or not finished:
            return set(), Counter()
        silent = silent_groups(finished, self._outcomes(partition_id, set(finished)))[:room]
        self._replaced += len(silent)
        return set(silent), Counter()

    def _outcomes(self, partition_id: str, groups: set[str]) -> dict[str, float]:
        """What the agent's reward said, by key."""
        keys = [key for key in self.partitions[partition_id] if key.split("_", 1)[0] in groups]
        if not keys:
            return {}
        data = transfer_queue.kv_batch_get(
            keys=keys, partition_id=partition_id, select_fields=["extra_fields"]
        )
        extra = [getattr(each, "data", each) for each in data["extra_fields"]]
        return {key: float(each["outcome"]) for key, each in zip(keys, extra, strict=True)}


class AheadSampler(_Groups, ReplayBufferAsync):  # type: ignore[misc]
    """Samples the groups of the step, while those of later ones are played."""

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        """verl would play others in the place of groups that raised."""
        self._refuse_raised(partition_id)
        return super()._terminal_eviction_reasons(global_steps, partition_id)
