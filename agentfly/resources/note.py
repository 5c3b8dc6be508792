"""What a member's daemon keeps of its lease for an engine that comes later.

Guarantees:
1. A lease is as it was from its note alone: who holds it, under which key and on whose account, what opens
   the member, and for how long it is renewed each time.
2. A note is at most ``NOTE_BYTES`` long: names that would make it longer are refused before a lease.
3. What is no note of ours is None, whatever it is.

Not here: where notes are kept (``runners``), and what is made of them (``engine``).
"""

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.resources.errors import ResourceError

NOTE_BYTES = 8192  # what a daemon keeps
NAMES_LENGTH = 1024  # characters: six bytes each, as JSON may need, leave room for the rest


class LeaseNote(BaseModel):
    """A lease, for its member's daemon. ``token`` opens the member, ``ttl_s`` is in seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lease_id: str = Field(min_length=1)
    pool: str
    owner: str
    key: str
    share: str = ""
    image: str = ""
    attempt: int
    token: str = Field(min_length=1)
    ttl_s: float = Field(gt=0)

    def text(self) -> str:
        """The note as its daemon keeps it."""
        return self.model_dump_json()


def read_note(text: str) -> LeaseNote | None:
    """The lease that a note is of; None if it is no note."""
    try:
        return LeaseNote.model_validate_json(text)
    except ValidationError:
        return None


def check_names(owner: str, key: str, share: str, image: str) -> None:
    """Refuse names that no note could hold.

    Raises:
        ResourceError: they are too long together.
    """
    length = len(owner) + len(key) + len(share) + len(image)
    if length > NAMES_LENGTH:
        raise ResourceError(
            f"owner {owner[:40]}: is {length} characters long with its key, share and image, "
            f"of which a lease has room for {NAMES_LENGTH}",
            hints=("use shorter names: a hash of what they say will do",),
        )
