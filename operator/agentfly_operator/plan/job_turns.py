"""Turning points of a rollout job, as events for people.

Guarantees:
1. What stays is no event; the first look at a job tells only of what is true.
2. Trouble is a Warning, everything else is Normal.
"""

from collections.abc import Iterator
from typing import Literal

from agentfly.api import RolloutJobStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason, Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly_operator.plan.run_turns import admissions
from agentfly_operator.plan.said import condition_of, message_of
from agentfly_operator.plan.turns import Event

_ENDS = {
    Phase.Suspended: EventReason.Suspended,
    Phase.Succeeded: EventReason.Succeeded,
    Phase.Failed: EventReason.Failed,
}
Kind = Literal["Normal", "Warning"]


def job_turns(before: RolloutJobStatus, after: RolloutJobStatus) -> tuple[Event, ...]:
    """What happened between two statuses."""
    return tuple(
        Event(kind, reason, note, f"{reason.value} {note if kind == 'Warning' else after.phase}")
        for kind, reason, note in _turns(before, after)
    )


def _turns(before: RolloutJobStatus, after: RolloutJobStatus) -> Iterator[tuple[Kind, EventReason, str]]:
    was, now = condition_of(before, Type.Reconciling), condition_of(after, Type.Reconciling)
    if before.phase is Phase.Suspended and after.phase not in _ENDS:
        yield "Normal", EventReason.Resumed, "spec.suspend is false again"
    if now is not None and now.reason == Reason.Preparing and (was is None or was.reason != now.reason):
        yield "Normal", EventReason.Preparing, now.message
    if after.phase is not before.phase and after.phase in _ENDS:
        kind: Kind = "Warning" if after.phase is Phase.Failed else "Normal"
        yield kind, _ENDS[after.phase], message_of(after)
    yield from admissions(before, after)
    was, now = condition_of(before, Type.Stalled), condition_of(after, Type.Stalled)
    if after.phase is Phase.Failed or now is None or now.status != "True":
        return
    news = was is None or was.status != "True" or (was.reason, was.message) != (now.reason, now.message)
    if news and now.reason in EventReason.__members__:
        yield "Warning", EventReason(now.reason), now.message
