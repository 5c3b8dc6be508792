"""What to do when the trainer of a run has ended: pure rules, the same on one machine and on Kubernetes.

Guarantees:
1. An exit that was asked for, with its checkpoint written, suspends the run and counts as no failure.
2. A failed attempt counts towards ``backoffLimit`` only if it brought no new checkpoint: a run of a week does not
   die of its fourth node failure.
3. The pause before a restart doubles from 10 s up to 6 minutes, and starts again at 10 s after an attempt that
   progressed.
"""

from dataclasses import dataclass
from typing import Literal

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
    """What follows: the next phase, the failures that count so far, and the pause before a restart in seconds."""

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
    if ended.progressed:
        return Verdict("Restarting", failures, FIRST_PAUSE_S)
    if failures >= backoff_limit:
        return Verdict("Failed", failures + 1)
    return Verdict("Restarting", failures + 1, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures))
