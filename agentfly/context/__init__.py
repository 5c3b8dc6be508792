"""Layer III: what a tool or a reward may know and acquire during one rollout."""

from agentfly.context.context import Context, ContextClosed, Use
from agentfly.context.deadlines import Deadlines

__all__ = ["Context", "ContextClosed", "Deadlines", "Use"]
