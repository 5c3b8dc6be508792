"""The words in which a pool and its engine speak: states, reasons, and the actions of a decision.

Guarantees:
1. Actions are plain values: two equal decisions compare equal.
2. ``Reason`` is API: dashboards and tests may rely on its members. Messages are prose.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class State(Enum):
    """What a member is. Every state counts towards ``max``."""

    STARTING = "starting"
    FREE = "free"
    LEASED = "leased"
    RESETTING = "resetting"
    STOPPING = "stopping"
    QUARANTINED = "quarantined"  # its reset was not verified; it is kept as it is for a look


class Phase(Enum):
    """What a ticket is."""

    WAITING = "waiting"
    GRANTED = "granted"  # a member is set aside; the holder cannot use it before its daemon knows the lease
    HELD = "held"
    CLEANING = "cleaning"  # the holder asked for its own member to be reset


class Reason(StrEnum):
    """Why a pool is as it is, and why a member was stopped."""

    READY = "Ready"
    STARTING = "Starting"
    AT_MAX = "AtMax"
    START_FAILING = "StartFailing"
    CLOSED = "Closed"
    LOST = "Lost"
    DIRTY = "Dirty"
    RESET_FAILED = "ResetFailed"
    MAX_REUSES = "MaxReuses"
    MAX_LIFETIME = "MaxLifetime"
    IDLE = "Idle"
    NOT_NEEDED = "NotNeeded"
    MAX_MEMORY = "MaxMemory"
    EVICTED = "Evicted"  # a member of another image was needed in its place
    RESIZED = "Resized"  # max was lowered
    OUTDATED = "Outdated"  # of an older spec
    UNKNOWN = "Unknown"  # of an earlier process, and of no use to this one
    DELETED = "Deleted"  # its pool was


@dataclass(frozen=True, slots=True)
class Start:
    """Start a member of this id; ``image`` is "" for the pool's own."""

    member: str
    image: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """Lease the member to the holder of the ticket, and tell ``leased`` or ``lost``."""

    ticket: int
    member: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the member and verify it, and tell ``reset_done``."""

    member: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the member, whatever is being done to it, and tell ``stopped``."""

    member: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Leave the member as it is: nobody gets it, and nothing is done to it before its ``Stop``."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether the member still lives, and tell ``probed``."""

    member: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the waiter that there will be no member for it, why, and what to do about it."""

    ticket: int
    reason: str
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """Tell the holder that its lease is over, and why."""

    ticket: int
    reason: str


Action = Start | Grant | Reset | Stop | Quarantine | Probe | Reject | Lost
