"""When an attempt of a run must be ended, and what follows it: pure rules, for one machine and a cluster.

Guarantees:
1. An exit that was asked for, with its checkpoint written, suspends the run and counts as no failure.
2. A failed attempt counts towards ``backoffLimit`` only if it brought no new checkpoint: a run of a week does
   not die of its fourth node failure.
3. The pause before a restart doubles from 10 s up to 6 minutes, and is 10 s after an attempt that progressed.
4. What would fail again is not tried again: the trainer says so by its exit code, and why in a file.
5. Of two attempts that run at a time, because one is on a node that nobody reaches, the earlier one can learn
   that it is over.
6. An attempt has one head, the pod that came first, and one set of pods, those with which it began: whoever
   replaces one of them later can learn that.
7. A hang is found by the lack of progress, not by an exit code: the first step has a deadline, every next
   step has one, and so has the time a run may spend running in all.
"""

import json
import os
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
    """Keep why an attempt ended, in the trainer's own words, for whoever started it."""
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


def begin_attempt(run_dir: Path, attempt: int) -> int | None:
    """Say that this attempt has begun; instead gives the later one if one has."""
    if (newer := newer_attempt(run_dir, attempt)) is not None:
        return newer
    path = _attempt_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"attempt-{attempt}.partial")
    fresh.write_text(str(attempt))
    os.replace(fresh, path)
    return None


def newer_attempt(run_dir: Path, attempt: int) -> int | None:
    """A later attempt of the run that has begun; None if this is the newest.

    Raises:
        OSError: nobody can tell.
    """
    try:
        begun = int(_attempt_file(run_dir).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return begun if begun > attempt else None


def take_head(run_dir: Path, attempt: int, name: str, uid: str) -> str | None:
    """Be the head of this attempt; instead gives the name of the pod that is, if another one came first."""
    path = run_dir / "control" / f"head-{attempt}"
    try:
        with path.open("x") as file:
            file.write(f"{uid} {name}")
        return None
    except FileExistsError:
        first, _, named = path.read_text().partition(" ")
        return None if first == uid and named else named or "of another name"


def close_attempt(run_dir: Path, attempt: int) -> None:
    """Say that this attempt has all the pods that it will ever have."""
    _closed_file(run_dir, attempt).touch()


def is_closed(run_dir: Path, attempt: int) -> bool:
    """Whether no pod may join this attempt any more."""
    return _closed_file(run_dir, attempt).exists()


def _closed_file(run_dir: Path, attempt: int) -> Path:
    return run_dir / "control" / f"joined-{attempt}"


def _attempt_file(run_dir: Path) -> Path:
    return run_dir / "control" / "attempt"


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
