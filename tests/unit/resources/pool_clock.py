"""A pool as a table plays it: events and passing time, the actions of each step, and the wanted ones.

A script is a list of steps. A step is ``(event, arguments...)`` or a number: that many seconds pass. After
every step the pool decides, as its engine makes it do. Keywords of an event are a mapping at its end. Members
are ``p-1``, ``p-2``; tickets are 1, 2.
"""

from collections.abc import Sequence
from typing import Any

from agentfly.resources.actions import Action
from agentfly.resources.pool import Pool
from agentfly.resources.spec import ContainerSpec, PoolSpec

Step = float | tuple[Any, ...]

TIMED = {
    "withdraw",
    "started",
    "start_failed",
    "leased",
    "renewed",
    "reset_done",
    "lost",
    "probed",
    "adopt",
}


def spec(**fields: Any) -> PoolSpec:
    return PoolSpec.model_validate({"name": "p", "resource": ContainerSpec(), **fields})


class Clock:
    """A pool, its time, and the actions of the last step."""

    def __init__(self, *, unnamed: bool = False, **fields: Any) -> None:
        self.pool = Pool(spec(**fields), unnamed=unnamed)
        self.now = 100.0
        self.actions: list[Action] = self.pool.decide(self.now)

    def play(self, steps: Sequence[Step]) -> list[Action]:
        for step in steps:
            if isinstance(step, tuple):
                self.event(*step)
            else:
                self.now += step
            self.actions = self.pool.decide(self.now)
            assert self.pool.decide(self.now) == [], "12: decide settles"
        return self.actions

    def event(self, name: str, *args: Any) -> Any:
        named: dict[str, Any] = {}
        if args and isinstance(args[-1], dict) and name != "demand":
            *args, named = args  # type: ignore[assignment]
        if name == "dirty":
            name, named = "withdraw", {"dirty": True}
        if name == "change":
            return self.pool.change(spec(**named))
        return getattr(self.pool, name)(*args, *([self.now] if name in TIMED else []), **named)


def held(ticket: int = 1, member: str = "p-1") -> list[Step]:
    """The first waiter holds the first member."""
    return [("ask",), ("started", member), ("leased", ticket)]


FREE: list[Step] = [*held(), ("withdraw", 1), ("reset_done", "p-1", True)]
ASK: Step = ("ask",)

Case = tuple[dict[str, Any], Sequence[Step], list[Action]]


def check(case: Case, **fields: Any) -> None:
    """Play the steps of a case and compare the actions of the last one."""
    own, steps, want = case
    clock = Clock(**fields, **own)
    clock.play(steps)
    assert clock.actions == want
