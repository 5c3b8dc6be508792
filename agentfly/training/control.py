"""Checkpoints on request and their clean-up, as verl's checkpoint callback; runs in the trainer environment.

Guarantees:
1. A suspend file that appears during a step ends that step with a checkpoint and the run with it.
2. ``suspended`` exists only after the checkpoint it names is complete.
3. An attempt that is over, because a later one has begun, removes no checkpoints and does not go on.
4. After a save the newest ``checkpoint_keep_last`` checkpoints are there, older ones are not.

verl reads ``save_freq`` at the end of every step and ``total_training_steps`` before the next one; both are
ours to set, so nothing is patched.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from agentfly.roles.life import newer_attempt
from agentfly.roles.trainer import current_config
from agentfly.training.checkpoints import remove_old

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class Control(CheckpointCallback):  # type: ignore[misc]
    """Lives in the process of verl's trainer loop."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._run = current_config()
        threading.Thread(target=self._watch, name="agentfly-suspend", daemon=True).start()

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **_: Any
    ) -> None:
        """Called by verl after a checkpoint is on disk."""
        if (newer := newer_attempt(self._run.run_dir, self._run.attempt)) is not None:
            raise RuntimeError(f"attempt {newer} has begun: this one is over")
        remove_old(Path(checkpoint_dir).parent, self._run.checkpoint_keep_last)
        if self._run.suspend_file.exists():
            self._run.suspended_file.write_text(str(global_step))
            trainer.total_training_steps = trainer.global_steps

    def _watch(self) -> None:
        while not self._run.suspend_file.exists():
            time.sleep(_POLL_S)
        logger.warning("suspend asked for: a checkpoint after this step, then the end")
        self.config.trainer.save_freq = 1
