"""What an agent writes down for itself, in one rollout.

Guarantees:
1. Notes are the rollout's own; they are gone with it.
2. There are never more than ``NOTES`` of them, and none is longer than ``NOTE_CHARS``: what is beyond is
   refused, and the policy is told, so that a prompt that shows them stays bounded.
"""

from agentfly.agent.tool import tool

NOTES = 32
NOTE_CHARS = 1000


@tool
class Notes:
    """A key-value memory that the policy keeps by itself: ``Agent(tools=[Notes, ...])``."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join(f"- {key}: {text}" for key, text in self._notes.items())

    def __len__(self) -> int:
        return len(self._notes)

    @tool
    def remember(self, key: str, text: str) -> str:
        """Write a note down, or replace the one of this key.

        Args:
            key: a short name.
            text: what to remember.
        """
        if len(key) + len(text) > NOTE_CHARS:
            return f"not written: a note has at most {NOTE_CHARS} characters"
        if key not in self._notes and len(self._notes) >= NOTES:
            return f"not written: there are {NOTES} notes; forget one first"
        self._notes[key] = text
        return "written"

    @tool
    def recall(self, key: str) -> str:
        """Read a note.

        Args:
            key: its name.
        """
        known = ", ".join(self._notes) or "none"
        return self._notes.get(key) or f"there is no note {key}; there are: {known}"

    @tool
    def forget(self, key: str) -> str:
        """Remove a note.

        Args:
            key: its name.
        """
        return "forgotten" if self._notes.pop(key, None) is not None else f"there is no note {key}"
