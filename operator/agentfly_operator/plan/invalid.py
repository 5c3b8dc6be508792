"""The status of a run or job whose spec this release cannot read, and the event that tells of it.

Guarantees:
1. What the status says of the past stays: only conditions, generation and an absent phase are set.
2. A finished one stays finished.
3. One complaint is one event, however often it is made.
"""

from datetime import datetime
from typing import TypeVar

from agentfly.api import Condition, TrainingRunStatus
from agentfly.api.common import WorkStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason, Reason, RolloutJobPhase, TrainingRunPhase
from agentfly_operator.plan.said import condition_of
from agentfly_operator.plan.turns import Event

S = TypeVar("S", bound=WorkStatus)
_OVER = ("Succeeded", "Failed")


def invalid_status(generation: int, message: str, before: S, now: datetime) -> S:
    """The status after ``before``; ``message`` says why the spec cannot be read."""
    if before.phase in _OVER:
        return before.model_copy(update={"observed_generation": generation})
    conditions = {each.type: each for each in before.conditions}
    for kind, word in ((Type.Reconciling, "False"), (Type.Stalled, "True")):
        old = conditions.get(kind)
        conditions[kind] = Condition.model_validate(
            {
                "type": kind.value,
                "status": word,
                "observedGeneration": generation,
                "lastTransitionTime": old.last_transition_time if old and old.status == word else now,
                "reason": Reason.InvalidSpec.value,
                "message": message if word == "True" else "",
            }
        )
    phases = TrainingRunPhase if isinstance(before, TrainingRunStatus) else RolloutJobPhase
    return before.model_copy(
        update={
            "observed_generation": generation,
            "phase": before.phase or phases.Pending,
            "conditions": tuple(conditions.values()),
        }
    )


def invalid_turns(before: S, after: S) -> tuple[Event, ...]:
    """What to tell of the status that `invalid_status` made of another."""
    was, now = condition_of(before, Type.Stalled), condition_of(after, Type.Stalled)
    if after.phase in _OVER or now is None or (was is not None and _said(was) == _said(now)):
        return ()
    reason = EventReason.InvalidSpec
    return (Event("Warning", reason, now.message, f"{reason.value} {now.message}"),)


def _said(condition: Condition) -> tuple[str, str, str]:
    return condition.status, condition.reason, condition.message
