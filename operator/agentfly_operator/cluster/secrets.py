"""The two secrets of a namespace's broker.

Guarantees:
1. A secret is made of fresh randomness, and only where there is none. A signing key that another made then
   stays; of two client tokens the later one stays, and all who have the other follow.
2. What is in them is in no log, message, status or repr; the operator keeps the client token of a namespace
   in memory alone, and reads it again after a minute.
"""

import base64
import secrets
import time
from collections.abc import Mapping
from typing import Any

from agentfly.errors import AgentflyError
from agentfly.kube import SECRETS, Kube, KubeError, NotFound
from agentfly_operator.names import BROKER, CLIENT_SECRET, CLIENT_TOKEN, SIGNING_KEY
from agentfly_operator.plan.namespace import owned_by
from agentfly_operator.render.broker import broker_secret

KEPT_S = 60.0
_SEED_BYTES = 32  # an Ed25519 private key
_TOKEN_BYTES = 32


def fresh_secret(namespace: str, name: str) -> dict[str, Any]:
    """A secret that never was before."""
    made = {
        BROKER: (SIGNING_KEY, secrets.token_bytes(_SEED_BYTES)),
        CLIENT_SECRET: (CLIENT_TOKEN, secrets.token_urlsafe(_TOKEN_BYTES).encode()),
    }
    key, value = made[name]
    return broker_secret(namespace, name, {key: base64.b64encode(value).decode()})


class BrokerSecrets:
    """Makes and reads them."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._tokens: dict[str, tuple[str, float]] = {}

    async def make(self, namespace: str, name: str, owners: tuple[dict[str, Any], ...]) -> None:
        """Make one of them, unless it is there by now."""
        try:
            await self._kube.apply(SECRETS, owned_by(fresh_secret(namespace, name), owners), namespace)
        except KubeError as error:
            # Immutable: an apply over another's signing key is refused, which is what makes this safe.
            if error.status != 422:
                raise

    async def token(self, namespace: str) -> str:
        """The client token.

        Raises:
            AgentflyError: there is none yet, or it cannot be read.
        """
        token, read = self._tokens.get(namespace, ("", 0.0))
        if token and time.monotonic() - read < KEPT_S:
            return token
        try:
            secret = await self._kube.get(SECRETS, CLIENT_SECRET, namespace)
        except NotFound:
            raise AgentflyError(f"secret {namespace}/{CLIENT_SECRET}: is not there yet") from None
        token = _token_in(secret, namespace)
        self._tokens[namespace] = token, time.monotonic()
        return token

    def forget(self, namespace: str) -> None:
        """Read it anew at the next question."""
        self._tokens.pop(namespace, None)


def _token_in(secret: Mapping[str, Any], namespace: str) -> str:
    try:
        token = base64.b64decode((secret.get("data") or {})[CLIENT_TOKEN], validate=True).decode().strip()
    except (KeyError, ValueError):
        token = ""
    if not token:
        raise AgentflyError(
            f"secret {namespace}/{CLIENT_SECRET}: has no usable key {CLIENT_TOKEN}",
            hints=[f"kubectl -n {namespace} delete secret {CLIENT_SECRET}, and it is made anew"],
        )
    return token
