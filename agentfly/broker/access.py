"""The token that opens a broker over TCP: what the broker admits, and what a client brings.

Guarantees:
1. How long a comparison takes says nothing about how much of a token was right.
2. Tokens in files are read again, once a second at most, when they do not open: a Secret may be replaced
   while both sides run. For ``GRACE_S`` the one before opens too, because mounted Secrets change in one pod
   after the other.
3. A file that cannot be read, for a moment or for good, leaves the token as it was.
4. A token is in no message, no log and no ``repr``.
"""

import hmac
import time
from pathlib import Path

from agentfly.resources.errors import ResourceError

HEADER = "X-Agentfly-Token"  # not Authorization, which the service proxy of an API server keeps for itself
TOKEN_FILE = "AGENTFLY_BROKER_TOKEN_FILE"
"""Environment variable: the file with the token of the clients of this process."""
GRACE_S = 300.0  # kubelet brings a changed Secret to a pod within about a minute
LOOK_S = 1.0  # between two looks into a file
TOKEN_MAX = 4096  # bytes


class TokenFile:
    """The token in a file, and the one that was there before.

    Raises:
        ResourceError: there is none to begin with.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked = time.monotonic()
        self._before: tuple[str, float] | None = None  # with the time until which it opens
        self._now = self._read()

    @property
    def token(self) -> str:
        """As it was when it was read last."""
        return self._now

    def admits(self, token: str) -> bool:
        """Whether this is the token."""
        return self._equals(token) or (self.renewed() and self._equals(token))

    def renewed(self) -> bool:
        """Look again; True if there is another token now."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        try:
            found = self._read()
        except ResourceError:
            return False
        if found == self._now:
            return False
        self._now, self._before = found, (self._now, now + GRACE_S)
        return True

    def _equals(self, token: str) -> bool:
        given = token.encode(errors="replace")
        right = hmac.compare_digest(given, self._now.encode())
        if self._before is not None:
            before, until = self._before
            right |= time.monotonic() < until and hmac.compare_digest(given, before.encode())
        return right

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                token = file.read(TOKEN_MAX + 1).decode("ascii").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "is not text"
            raise ResourceError(
                f"broker token: {self._path}: {why}",
                hints=("mount the key client-token of the Secret agentfly-broker-client there",),
            ) from None
        if not token or len(token) > TOKEN_MAX:
            raise ResourceError(f"broker token: {self._path}: holds no token of at most {TOKEN_MAX} bytes")
        return token
