"""Keeps the status of a training run: what was seen last, written and shown when it changed.

Guarantees:
1. The status is written when it changed; a change of phase at once, anything else once a second at most.
2. What is on disk (steps, checkpoints) is read again, not added up: after a restart the status is the same.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from agentfly.api import PoolUse, TrainingRun, TrainingRunStatus
from agentfly.api.reasons import Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.api.trainingrun import Failure
from agentfly.local.rundir import RunDir
from agentfly.roles.status import RunSeen, training_status
from agentfly.training import checkpoints

WRITE_EVERY_S = 1.0
Show = Callable[[TrainingRun], None]


class Keeper:
    """The status of one run in its folder. ``show`` is called with the run whenever its status changed."""

    def __init__(self, run: TrainingRun, folder: RunDir, show: Show) -> None:
        stored = folder.read_status()
        before = TrainingRunStatus.model_validate(stored) if stored is not None else TrainingRunStatus()
        self.run = run.model_copy(update={"status": before})
        self.seen = RunSeen(
            phase=before.phase or Phase.Pending,
            attempt=before.attempt,
            restarts=before.restarts,
            failures=before.failures,
            attempt_time=before.attempt_time,
            resumed_step=before.resumed_step,
            start_time=before.start_time,
            completion_time=before.completion_time,
            steps=folder.read_metrics(),
            checkpoint=checkpoints.newest(folder.checkpoints),
            failure=before.last_failure,
        )
        self._folder = folder
        self._show = show
        self._written = -WRITE_EVERY_S
        self._metrics_size = folder.metrics_size()

    @property
    def finished(self) -> bool:
        """The run came to its end, for good."""
        return self.seen.phase in (Phase.Succeeded, Phase.Failed)

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint, 0 if there is none."""
        return self.seen.checkpoint.latest_step if self.seen.checkpoint else 0

    def update(self, **changes: Any) -> None:
        """Change what is seen, and write it."""
        phase = changes.get("phase")
        if phase is Phase.Running and self.seen.start_time is None:
            changes["start_time"] = datetime.now(UTC)
        if phase in (Phase.Succeeded, Phase.Failed):
            changes["completion_time"] = datetime.now(UTC)
        if phase in (Phase.Succeeded, Phase.Failed, Phase.Suspended, Phase.Restarting):
            changes |= {"roles": {}, "pools": {}}
        if phase is not None and phase is not Phase.Restarting:
            changes["restart_time"] = None
        self.seen = replace(self.seen, **changes)
        self._publish()

    def observe(self, pools: Mapping[str, PoolUse]) -> bool:
        """Look at the folder again; True if a step was finished: the caller publishes it."""
        size = self._folder.metrics_size()
        stepped, self._metrics_size = size > self._metrics_size, size
        if stepped:
            self.seen = replace(self.seen, steps=self._folder.read_metrics())
        self.seen = replace(self.seen, checkpoint=checkpoints.newest(self._folder.checkpoints), pools=pools)
        if not stepped and time.monotonic() - self._written >= WRITE_EVERY_S:
            self._publish()
        return stepped

    def failed(self, attempt: int, reason: Reason, message: str, exit_code: int | None) -> None:
        """Remember how an attempt failed."""
        failure = Failure(
            attempt=attempt,
            reason=reason.value,
            message=message[:4096],
            exit_code=exit_code,
            time=datetime.now(UTC),
        )
        self.update(failure=failure)

    def _publish(self) -> None:
        status = training_status(self.run, self.seen, datetime.now(UTC))
        if status == self.run.status:
            return
        self.run = self.run.model_copy(update={"status": status})
        self._folder.write_status(status.to_json())
        self._written = time.monotonic()
        self._show(self.run)
