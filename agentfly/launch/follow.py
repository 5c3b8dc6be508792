"""What a trainer has finished, as its files on the claim say.

Guarantees:
1. The claim is read in a thread, one look at a time: a claim that hangs stops neither heartbeats nor answers.
2. What cannot be read is looked at again; it is logged once a minute at most and ends nothing.
3. Checkpoints are looked at again only when verl has named another one.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.roles.life import newer_attempt
from agentfly.roles.status import progress
from agentfly.roles.steps import read_steps
from agentfly.roles.trainer import TrainerConfig
from agentfly.training import checkpoints

logger = logging.getLogger(__name__)

LAST_S = 60.0  # for the look after the end
QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look found.

    Attributes:
        step_time: Unix time of this attempt's newest step; None before the first.
        newer: a later attempt that has begun.
    """

    progress: Progress | None
    checkpoint: CheckpointStatus | None
    step_time: float | None
    newer: int | None


class Follower:
    """Looks at one attempt."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._looking: asyncio.Task[Sight | None] | None = None
        self._metrics: object = self  # no stamp of a file is this
        self._named: object = self
        self._sight = Sight(None, None, None, None)
        self._quiet_until = 0.0
        self._suspending = False

    def look(self, suspend: bool) -> Sight | None:
        """What the look found that has ended since the last call; the next one begins.

        Args:
            suspend: it also asks the trainer to suspend.
        """
        if self._looking is not None and not self._looking.done():
            return None
        found = None if self._looking is None else self._looking.result()
        self._looking = asyncio.ensure_future(self._look(suspend))
        return found

    async def last(self) -> Sight | None:
        """What is there now that the trainer has ended; None if that cannot be read in time."""
        try:
            async with asyncio.timeout(LAST_S):
                if self._looking is not None:
                    await self._looking
                return await self._look()
        except TimeoutError:
            logger.error("%s: cannot be read within %.0f s", self._config.run_dir, LAST_S)
            return None

    async def _look(self, suspend: bool = False) -> Sight | None:
        try:
            if suspend and not self._suspending:
                await asyncio.to_thread(self._config.suspend_file.touch)
                self._suspending = True
            return await asyncio.to_thread(self._read)
        except OSError as error:
            now = asyncio.get_running_loop().time()
            if now >= self._quiet_until:
                logger.warning("%s: cannot be read, and is tried again: %s", self._config.run_dir, error)
                self._quiet_until = now + QUIET_S
            return None

    def _read(self) -> Sight:
        config, sight = self._config, self._sight
        metrics, named = _stamp(config.metrics_file), checkpoints.stamp(config.checkpoint_dir)
        reached, step_time, checkpoint = sight.progress, sight.step_time, sight.checkpoint
        if named != self._named:
            checkpoint = checkpoints.newest(config.checkpoint_dir)
        if metrics != self._metrics:
            steps = read_steps(config.metrics_file)
            reached = progress(steps, config.steps)
            ours = [step for step in steps if step.get("attempt") == config.attempt]
            step_time = float(ours[-1]["time"]) if ours else None
        newer = newer_attempt(config.run_dir, config.attempt)
        self._metrics, self._named = metrics, named
        self._sight = Sight(reached, checkpoint, step_time, newer)
        return self._sight


def _stamp(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
