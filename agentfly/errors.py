"""The one base of every error that agentfly shows to a person.

Guarantees:
1. An error's text names the field or object, its value, and what is wrong with it.
2. What to do about it travels separately, as hints, so that the terminal, an event and a condition can each
   show it in their own way.
"""

from collections.abc import Sequence


class AgentflyError(Exception):
    """An error a person can act on.

    Args:
        message: one line, ``<field or object>: <value> <what is wrong>``.
        hints: remedies, each one action with the concrete value to use.
    """

    def __init__(self, message: str, *, hints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)

    def render(self) -> str:
        """The message followed by one indented ``hint:`` line for each remedy."""
        return "\n".join([self.message, *(f"  hint: {hint}" for hint in self.hints)])
