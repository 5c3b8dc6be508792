"""How long one call, one turn and one rollout may take.

Guarantees:
1. Every limit is a positive number of seconds, and a wider one is never shorter than a narrower one.
"""

from dataclasses import dataclass

from agentfly.errors import AgentflyError


@dataclass(frozen=True)
class Deadlines:
    """Limits in seconds; time spent waiting for a resource counts for the rollout alone.

    Args:
        call: one tool call.
        turn: one generation with its tool calls; also the reward.
        rollout: one attempt at the whole rollout, waiting for resources included.
    """

    call: float = 30.0
    turn: float = 120.0
    rollout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("call", "turn", "rollout"):
            if not getattr(self, name) > 0:
                raise AgentflyError(
                    f"deadlines.{name}: {getattr(self, name)} is not a positive number of seconds",
                    hints=[f"leave {name} out for the default of {getattr(Deadlines, name)} s"],
                )
        for narrow, wide in (("call", "turn"), ("turn", "rollout")):
            if getattr(self, narrow) > getattr(self, wide):
                raise AgentflyError(
                    f"deadlines.{narrow}: {getattr(self, narrow)} s is longer than {wide}"
                    f" ({getattr(self, wide)} s), so it would never be reached",
                    hints=[f"set {wide} to {getattr(self, narrow)} or more"],
                )
