"""What happens in an engine, as values: for logs, metrics and whoever watches.

Guarantees:
1. Every event names its pool and its kind; everything else is there where it means something.
2. An event carries no token and nothing of what a holder did in a member.

Not here: what an event leads to (``pool``), and how it is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What happened. API: dashboards may rely on its members."""

    MEMBER_STARTED = "MemberStarted"
    START_FAILED = "StartFailed"
    MEMBER_RESET = "MemberReset"
    RESET_FAILED = "ResetFailed"
    MEMBER_QUARANTINED = "MemberQuarantined"
    MEMBER_LOST = "MemberLost"
    MEMBER_STOPPED = "MemberStopped"
    LEASE_GRANTED = "LeaseGranted"
    LEASE_RELEASED = "LeaseReleased"
    LEASE_LOST = "LeaseLost"
    ACQUIRE_FAILED = "AcquireFailed"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``seconds`` is how long it took: a start, a reset, a wait, a hold, a life."""

    kind: EventKind
    pool: str
    member: str = ""
    lease: str = ""
    owner: str = ""
    share: str = ""
    reason: str = ""
    seconds: float | None = None
    warm: bool | None = None  # of a grant: a member was free when it was asked for


Observer = Callable[[Event], None]
