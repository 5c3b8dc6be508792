"""What estimators that credit steps need to know of each turn: the state it was taken in, and its own reward.

Guarantees:
1. The first turn's state is "": there all rollouts of a group begin.
2. A later turn's state is the anchor that the tools of the turn before said last. It is the state before,
   where that turn ran no tool, and None, which compares with nothing, where its tools said none.
3. A turn's reward is the sum of its calls' step rewards, 0 without any.
"""

from collections.abc import Sequence

from agentfly.rollout.ledger import Credit
from agentfly.rollout.trajectory import ToolCallRecord

_NOT_RUN = ("unknown_tool", "invalid_arguments")


def credits_of(turns: int, calls: Sequence[ToolCallRecord]) -> dict[int, Credit]:
    """By number of the turn; calls in the order in which they were made."""
    found: dict[int, Credit] = {}
    anchor: str | None = ""
    for turn in range(1, turns + 1):
        made = [call for call in calls if call.turn == turn]
        found[turn] = anchor, sum(call.step_reward or 0.0 for call in made)
        if any(call.error not in _NOT_RUN for call in made):
            said = [call.anchor for call in made if call.anchor is not None]
            anchor = said[-1] if said else None
    return found
