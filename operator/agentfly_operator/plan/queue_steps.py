"""What can be told to Kueue: data that `plan` makes and `cluster` carries out.

Guarantees:
1. Every step may be carried out again: what Kueue was told already is not told anew.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MakeWorkload:
    """Create the Workload of a run."""


@dataclass(frozen=True, slots=True)
class SwitchWorkload:
    """Let Kueue admit a Workload, or have it take back what it has, if it still has this uid."""

    name: str
    uid: str
    active: bool


@dataclass(frozen=True, slots=True)
class TellReady:
    """Say that all pods of a Workload run, or that they do not any more."""

    name: str
    uid: str
    ready: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Return the quota of a Workload that was evicted; Kueue may admit it again then."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class FinishWorkload:
    """Say that a Workload needs its quota no more, and how what it stood for ended."""

    name: str
    uid: str
    succeeded: bool


QueueStep = MakeWorkload | SwitchWorkload | TellReady | GiveBack | FinishWorkload
