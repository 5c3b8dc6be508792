"""What a stored status says in its conditions."""

from agentfly.api import Condition
from agentfly.api.common import WorkStatus
from agentfly.api.reasons import ConditionType as Type


def condition_of(status: WorkStatus, kind: Type) -> Condition | None:
    """The condition of this type; None: nothing is said of it."""
    return next((each for each in status.conditions if each.type == kind), None)


def is_true(status: WorkStatus, kind: Type) -> bool:
    """Whether it is said to be so."""
    return any(each.type == kind and each.status == "True" for each in status.conditions)


def message_of(status: WorkStatus) -> str:
    """What the conditions that are true say."""
    return next((each.message for each in status.conditions if each.status == "True" and each.message), "")
