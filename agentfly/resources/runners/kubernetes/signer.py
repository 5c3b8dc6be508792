"""The broker's proof to a daemon that it is its owner, without a secret in any pod.

Guarantees:
1. A token opens one member, from one start of its daemon to its end; the daemon has the public half only.
"""

import base64
from typing import Any

from agentfly.resources.errors import ResourceError

SEED_BYTES = 32


class Signer:
    """An Ed25519 key.

    Args:
        seed: its private half, 32 bytes.

    Raises:
        ResourceError: it is not 32 bytes long, or the package cryptography is missing.
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ResourceError(
                f"signing key: has {len(seed)} bytes, not {SEED_BYTES}",
                hints=("the Secret agentfly-broker holds 32 random bytes under signing-key",),
            )
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError as error:
            raise ResourceError(
                "signing key: the package cryptography is not installed",
                hints=('pip install "agentfly[operator]"',),
            ) from error
        self._key: Any = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = base64.b64encode(self._key.public_key().public_bytes_raw()).decode()
        """The public half, 32 bytes in base64."""

    def token(self, member: str, boot: str) -> str:
        """What opens this member's daemon since its start ``boot``."""
        signed: bytes = self._key.sign(f"agentfly-admin:{member}:{boot}".encode())
        return base64.urlsafe_b64encode(signed).decode().rstrip("=")
