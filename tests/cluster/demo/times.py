"""How long the parts of a TrainingRun's life took, by the times that its status keeps.

Guarantees:
1. A time is that of the condition, which the operator writes within a second of what it sees; heads are asked
   every five. A condition that is not true has none.
"""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Times:
    """Seconds; None of what did not happen.

    Attributes:
        roles_ready: from the creation of the run until every role answers,
        first_step: and until it makes steps.
        suspended: from the change of its spec until the checkpoint is written and its pods are over,
        released: and until neither a pod nor a server of it is left.
        next_step: from the change back until it makes steps again.
    """

    roles_ready: float | None = None
    first_step: float | None = None
    suspended: float | None = None
    released: float | None = None
    next_step: float | None = None

    def __str__(self) -> str:
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(
            f"{name.replace('_', ' ')} {took:.0f} s" for name, took in known.items() if took is not None
        )


def became_true(run: Document, condition: str) -> datetime | None:
    """When a condition did that is true now."""
    for each in run.get("status", {}).get("conditions", ()):
        if each["type"] == condition and each["status"] == "True":
            return _read(each["lastTransitionTime"])
    return None


def until_true(run: Document, condition: str, since: datetime | None = None) -> float | None:
    """Seconds until a condition became true, since a time or the creation of the run."""
    begun = since or _read(run["metadata"]["creationTimestamp"])
    became = became_true(run, condition)
    return None if became is None else max(0.0, (became - begun).total_seconds())


def _read(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)
