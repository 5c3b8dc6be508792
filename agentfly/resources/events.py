"""What happens in an engine, as values: for logs, metrics and whoever watches.

Guarantees:
1. Every event names its pool and its kind; everything else is there where it means something.
2. An event carries no token and nothing of what a holder did in a member.
3. ``reason`` is a constant out of a bounded set, ``detail`` is prose.
4. Each event is one line of the log, ``kind key=value ...``, and goes to every observer. An observer that
   raises is logged, and disturbs neither the engine nor the other observers.

Not here: what an event leads to (``pool``), and how it is counted (``agentfly.broker.metrics``).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

logger = logging.getLogger(__name__)


class EventKind(StrEnum):
    """What happened. API: dashboards may rely on its members."""

    MEMBER_STARTED = "MemberStarted"
    MEMBER_ADOPTED = "MemberAdopted"
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


class LeaseEnd(StrEnum):
    """Why a lease was lost. API, as ``EventKind``."""

    NO_HEARTBEAT = "NoHeartbeat"
    MEMBER_LOST = "MemberLost"
    POOL_DELETED = "PoolDeleted"


TROUBLE = frozenset(
    {
        EventKind.START_FAILED,
        EventKind.RESET_FAILED,
        EventKind.MEMBER_QUARANTINED,
        EventKind.MEMBER_LOST,
        EventKind.LEASE_LOST,
    }
)
"""What an operator may have to look at: logged as a warning."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``seconds`` is how long it took: a start, a reset, a wait, a hold, a life.

    ``reason`` is a ``Reason`` of a member that was stopped or quarantined, and of one that was handed back
    dirty; a ``LeaseEnd`` of a lost lease; the type of the error of an acquire that failed; else empty.
    """

    kind: EventKind
    pool: str
    member: str = ""
    lease: str = ""
    owner: str = ""
    share: str = ""
    reason: str = ""
    detail: str = ""
    seconds: float | None = None
    warm: bool | None = None  # of a grant: a member was free when it was asked for

    def line(self) -> str:
        """The event as text: what it has, as ``key=value``."""
        parts = [str(self.kind)]
        for name in ("pool", "member", "lease", "owner", "share", "reason"):
            if value := getattr(self, name):
                parts.append(f"{name}={value}")
        if self.seconds is not None:
            parts.append(f"seconds={self.seconds:.3f}")
        if self.warm is not None:
            parts.append(f"warm={str(self.warm).lower()}")
        if self.detail:
            parts.append(f"detail={self.detail!r}")
        return " ".join(parts)


Observer = Callable[[Event], None]


class Events:
    """Where the events of one engine go."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        """Tell this one too, from now on."""
        self._observers.append(observer)

    def emit(self, event: Event) -> None:
        """Log an event and tell everybody who watches."""
        level = logging.WARNING if event.kind in TROUBLE else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", event.line())
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("an observer failed at %s of pool %s", event.kind, event.pool)
