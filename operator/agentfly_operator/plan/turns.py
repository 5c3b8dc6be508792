"""Turning points of a pool's conditions, as events for people.

Guarantees:
1. A condition that becomes true, or false after it was true, is one event; one that stays is none.
2. Trouble is a Warning; its end and good news are Normal.
3. The first look at an object tells only of what is true.
4. Two events of one `about` say the same, whatever figures stand in their notes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentfly.api import Condition
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason, Reason

_STALLS = {
    Reason.InvalidSpec: EventReason.InvalidSpec,
    Reason.MissingObject: EventReason.MissingObject,
    Reason.BrokerUnavailable: EventReason.BrokerUnavailable,
}
_TROUBLES = (
    Type.CapacityExhausted,
    Type.QueueSaturated,
    Type.Unschedulable,
    Type.ImagePullFailing,
    Type.ResetFailing,
    Type.CircuitOpen,
    Type.Degraded,
)


@dataclass(frozen=True, slots=True)
class Event:
    """An event about an object: ``reason`` for programs, ``note`` for people."""

    kind: Literal["Normal", "Warning"]
    reason: EventReason
    note: str
    about: str = field(default="", compare=False)


def turns(before: Sequence[Condition], after: Sequence[Condition]) -> tuple[Event, ...]:
    """What happened between two looks."""
    old, new = _by_type(before), _by_type(after)
    found = [*_ready(old.get(Type.Ready), new[Type.Ready]), *_rollout(old, new), *_stall(old, new)]
    for kind in _TROUBLES:
        was, condition = old.get(kind), new[kind]
        if condition.status == "True" and not _is_true(was):
            found.append(_event("Warning", EventReason(kind.value), condition.message, kind.value))
        elif condition.status == "False" and _is_true(was):
            found.append(_event("Normal", EventReason.Recovered, f"{kind.value} is over", f"-{kind.value}"))
    return tuple(found)


def _ready(was: Condition | None, now: Condition) -> list[Event]:
    if now.status == "True" and not _is_true(was):
        return [_event("Normal", EventReason.PoolReady, now.message, now.type)]
    if now.status == "False" and was is not None and was.status != "False":
        unavailable = now.reason == Reason.BrokerUnavailable
        reason = EventReason.BrokerUnavailable if unavailable else EventReason.PoolNotReady
        return [_event("Warning", reason, f"{now.reason}: {now.message}", now.reason)]
    return []


def _rollout(old: Mapping[str, Condition], new: Mapping[str, Condition]) -> list[Event]:
    rolled = Type.Reconciling in old and old[Type.Reconciling].reason == Reason.RollingOut
    now = new[Type.Reconciling]
    if now.reason == Reason.RollingOut and not rolled:
        return [_event("Normal", EventReason.RollingOut, now.message, str(now.observed_generation))]
    if rolled and now.reason == Reason.AllReady:
        about = str(now.observed_generation)
        return [_event("Normal", EventReason.RolledOut, "all members are of the present spec", about)]
    return []


def _stall(old: Mapping[str, Condition], new: Mapping[str, Condition]) -> list[Event]:
    now, was = new[Type.Stalled], old.get(Type.Stalled)
    reason = _STALLS.get(Reason(now.reason))
    if (
        now.status != "True"
        or reason is None
        or (was is not None and _is_true(was) and was.reason == now.reason)
    ):
        return []  # an open circuit has told of itself
    return [_event("Warning", reason, now.message, f"{now.reason} {now.observed_generation}")]


def _event(kind: Literal["Normal", "Warning"], reason: EventReason, note: str, about: str) -> Event:
    return Event(kind, reason, note, f"{reason.value} {about}")


def _is_true(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _by_type(conditions: Sequence[Condition]) -> dict[str, Condition]:
    return {condition.type: condition for condition in conditions}
