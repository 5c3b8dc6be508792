"""Turning points of a run, as events for people.

Guarantees:
1. What a status says for the first time is one event; what it says again is none.
2. Failures and what waits for a person are Warnings; all else is Normal.
"""

from collections.abc import Iterator
from typing import Literal

from agentfly.api import RolloutJobStatus, TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason, Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly_operator.plan.run_attempt import OVER
from agentfly_operator.plan.run_engine import FALLBACK
from agentfly_operator.plan.said import condition_of, message_of
from agentfly_operator.plan.turns import Event

_PHASES = {
    Phase.Running: (EventReason.TrainingStarted, "attempt {attempt} finished its first step"),
    Phase.Suspending: (EventReason.SuspendRequested, "{message}"),
    Phase.Suspended: (EventReason.Suspended, "{message}"),
    Phase.Restarting: (EventReason.Restarting, "{message}"),
    Phase.Succeeded: (EventReason.Succeeded, "{message}"),
    Phase.Failed: (EventReason.Failed, "{message}"),
}


def run_turns(before: TrainingRunStatus, after: TrainingRunStatus) -> tuple[Event, ...]:
    """What happened between two statuses."""
    return tuple(
        Event(kind, reason, note, f"{reason.value} {after.attempt} {after.restarts}")
        for kind, reason, note in _turns(before, after)
    )


def _turns(
    before: TrainingRunStatus, after: TrainingRunStatus
) -> Iterator[tuple[Literal["Normal", "Warning"], EventReason, str]]:
    failure = after.last_failure
    if before.phase is Phase.Suspended and after.phase not in (Phase.Suspended, *OVER):
        yield "Normal", EventReason.Resumed, "spec.suspend is false again"
    if failure is not None and failure != before.last_failure:
        yield "Warning", EventReason.AttemptFailed, f"{failure.reason}: {failure.message}"
    yield from admissions(before, after)
    now = condition_of(after, Type.Reconciling)
    was = condition_of(before, Type.Reconciling)
    if now is not None and now.reason == Reason.Preparing and (was is None or was.reason != now.reason):
        yield "Normal", EventReason.Preparing, now.message
    yield from _stalls(before, after)
    if after.attempt > before.attempt:
        yield "Normal", EventReason.AttemptStarted, f"attempt {after.attempt}"
    if after.engine is not None and after.engine.message == FALLBACK and before.engine != after.engine:
        yield "Normal", EventReason.EngineFallback, f"trainer pods without a RayCluster: {FALLBACK}"
    if after.phase is not before.phase and after.phase in _PHASES:
        reason, text = _PHASES[after.phase]
        kind: Literal["Normal", "Warning"] = "Warning" if after.phase is Phase.Failed else "Normal"
        yield kind, reason, text.format(attempt=after.attempt, message=message_of(after))


def admissions(
    before: TrainingRunStatus | RolloutJobStatus, after: TrainingRunStatus | RolloutJobStatus
) -> Iterator[tuple[Literal["Normal", "Warning"], EventReason, str]]:
    """What its queue has decided; of a run or a job."""
    now, was = condition_of(after, Type.Admitted), condition_of(before, Type.Admitted)
    if now is None:
        return
    if after.phase == Phase.Queued and before.phase != Phase.Queued:
        yield "Normal", EventReason.Queued, now.message or "it waits for quota"
    if was is not None and was.reason == now.reason:
        return
    if now.reason == Reason.Admitted:
        yield "Normal", EventReason.Admitted, "its quota is kept for it"
    elif now.reason == Reason.Evicted:
        yield "Warning", EventReason.Evicted, now.message


def _stalls(
    before: TrainingRunStatus, after: TrainingRunStatus
) -> Iterator[tuple[Literal["Warning"], EventReason, str]]:
    now, was = condition_of(after, Type.Stalled), condition_of(before, Type.Stalled)
    if (
        after.phase in OVER
        or now is None
        or now.status != "True"
        or now.reason not in EventReason.__members__
    ):
        return
    if was is None or was.status != "True" or (was.reason, was.message) != (now.reason, now.message):
        yield "Warning", EventReason(now.reason), now.message
