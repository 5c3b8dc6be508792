"""When an attempt of a run must be ended, and what follows it: pure rules, for one machine and a cluster.

Guarantees:
1. An exit that was asked for, with its checkpoint written, suspends the run and counts as no failure.
2. A failed attempt counts towards ``backoffLimit`` only if it brought no new checkpoint: a run of a week does
   not die of its fourth node failure.
3. The pause before a restart doubles from 10 s up to 6 minutes, and is 10 s after an attempt that progressed.
4. What would fail again is not tried again: the trainer says so by its exit code, and why in a file.
5. A hang is found by the lack of progress, not by an exit code: the first step has a deadline, every next
   step has one, and so has the time a run may spend running in all.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentfly.api.reasons import Reason
from agentfly.api.trainingrun import TrainingRunPolicy
from agentfly.roles.trainer import EXIT_INVALID

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 360.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How one attempt ended.

    Attributes:
        exit_code: of the trainer; negative for a signal.
        suspended: the trainer says that it wrote the checkpoint it was asked for.
        progressed: the newest checkpoint is newer than the one the attempt started from.
    """

    exit_code: int
    suspended: bool
    progressed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows: the phase, the failures that count so far, the pause before a restart in seconds."""

    phase: Literal["Succeeded", "Suspended", "Restarting", "Failed"]
    failures: int
    pause_s: float = 0.0


def after_attempt(ended: Ended, failures: int, backoff_limit: int) -> Verdict:
    """Decide what follows an attempt.

    Args:
        ended: how it ended.
        failures: attempts so far that counted towards the limit.
        backoff_limit: attempts without progress that a run may have before it fails.
    """
    if ended.suspended:
        return Verdict("Suspended", failures)
    if ended.exit_code == 0:
        return Verdict("Succeeded", failures)
    if ended.exit_code == EXIT_INVALID:
        return Verdict("Failed", failures + 1)
    if ended.progressed:
        return Verdict("Restarting", failures, FIRST_PAUSE_S)
    if failures >= backoff_limit:
        return Verdict("Failed", failures + 1)
    return Verdict("Restarting", failures + 1, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures))


def write_failure(run_dir: Path, attempt: int, reason: Reason, message: str) -> None:
    """Keep why an attempt ended with ``EXIT_INVALID``, for whoever started it."""
    path = _failure_file(run_dir, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"reason": reason, "message": message}))


def read_failure(run_dir: Path, attempt: int) -> tuple[Reason, str] | None:
    """What `write_failure` kept; None if the attempt ended without it."""
    try:
        kept = json.loads(_failure_file(run_dir, attempt).read_text())
        return Reason(kept["reason"]), str(kept["message"])
    except (FileNotFoundError, ValueError):
        return None


def _failure_file(run_dir: Path, attempt: int) -> Path:
    return run_dir / "control" / f"failure-{attempt}.json"


@dataclass(frozen=True, slots=True)
class Clock:
    """When things happened, in seconds of one monotonic clock.

    Attributes:
        began: the attempt was started.
        last_step: the newest step was finished; None before the first of this attempt.
        ran: seconds that earlier attempts spent running, from their first step on.
        first_step: the first step of this attempt was finished.
        suspend_asked: a suspension was asked for; None if none was.
    """

    now: float
    began: float
    first_step: float | None
    last_step: float | None
    ran: float
    suspend_asked: float | None


def overdue(clock: Clock, policy: TrainingRunPolicy) -> tuple[Reason, str] | None:
    """Why the attempt must be ended now, with a sentence for people; None while all is well.

    A suspension waits for the step that is being made, so it has the time a step may take.
    """
    if clock.suspend_asked is not None and clock.now - clock.suspend_asked >= policy.stall_timeout_seconds:
        return (
            Reason.SaveFailed,
            f"no checkpoint within {policy.stall_timeout_seconds} s of the request to suspend",
        )
    if clock.first_step is None or clock.last_step is None:
        if clock.now - clock.began >= policy.startup_deadline_seconds:
            return (
                Reason.StartupDeadlineExceeded,
                f"no step within spec.runPolicy.startupDeadlineSeconds ({policy.startup_deadline_seconds})",
            )
        return None
    deadline = policy.active_deadline_seconds
    if deadline is not None and clock.ran + clock.now - clock.first_step >= deadline:
        return Reason.DeadlineExceeded, f"spec.runPolicy.activeDeadlineSeconds ({deadline}) is over"
    if clock.now - clock.last_step >= policy.stall_timeout_seconds:
        return (
            Reason.NoProgress,
            f"no step within spec.runPolicy.stallTimeoutSeconds ({policy.stall_timeout_seconds})",
        )
    return None
