"""Leases that no member keeps, kept by their holders: a record that only the broker of a namespace can write.

A sandbox tells the next broker who holds it. A model server, or the gateway of an external API, knows of no
lease that it could tell: there the holder has a record of its lease, and brings it to a broker that does not
know the lease.

Guarantees:
1. A record says what it said when it was written; what was changed in it, or written by anybody without the
   key, is none.
2. The broker that wrote a record takes none of its own: what it does not know of those is over.
"""

import base64
import binascii
import hmac
import json
import secrets
from hashlib import sha256

from pydantic import BaseModel, ValidationError

from agentfly.resources.lease import LeaseInfo
from agentfly.resources.note import LeaseNote

KEPT_BY_HOLDERS = {"model-service", "external-api"}
"""Kinds whose members keep no lease, and lose nothing of it with the broker."""
_PURPOSE = b"agentfly-lease-record"


class Record(BaseModel):
    """A lease on a member, and which broker gave it."""

    note: LeaseNote
    member_id: str
    incarnation: int
    broker: str


class Records:
    """Writes and reads records. ``key`` is a secret of all brokers of the namespace."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, _PURPOSE, "sha256")
        self._broker = secrets.token_hex(8)

    def write(self, info: LeaseInfo, attempt: int) -> str | None:
        """The record of a lease; None where its member keeps it, or nobody can."""
        if info.kind not in KEPT_BY_HOLDERS:
            return None
        names = {"lease_id", "pool", "owner", "key", "share", "image", "token", "ttl_s"}
        note = LeaseNote(attempt=attempt, **info.model_dump(include=names))
        record = Record(
            note=note, member_id=info.member_id, incarnation=info.incarnation, broker=self._broker
        )
        content = record.model_dump_json().encode()
        return f"{_text(content)}.{_text(self._mac(content))}"

    def read(self, text: str) -> Record | None:
        """The lease that a record of an earlier broker is of; None if it is none."""
        content, _, mac = text.partition(".")
        try:
            said = _bytes(content)
            if not hmac.compare_digest(_bytes(mac), self._mac(said)):
                return None
            record = Record.model_validate(json.loads(said))
        except (ValueError, ValidationError):
            return None
        return None if record.broker == self._broker else record

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, sha256)


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("is not base64") from error
