"""What the broker of a namespace is told at its start.

Guarantees:
1. Everything has a variable of the environment; a value that cannot be used is refused with its name.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentfly.resources.errors import ResourceError

NAMESPACE = "AGENTFLY_NAMESPACE"
LISTEN = "AGENTFLY_LISTEN"
GATEWAY_LISTEN = "AGENTFLY_GATEWAY_LISTEN"
GATEWAY_URL = "AGENTFLY_GATEWAY_URL"
SIGNING_KEY_FILE = "AGENTFLY_SIGNING_KEY_FILE"
CLIENT_TOKEN_FILE = "AGENTFLY_CLIENT_TOKEN_FILE"
IN_PROCESS_MODULES = "AGENTFLY_IN_PROCESS_MODULES"
LOG_FORMAT = "AGENTFLY_LOG_FORMAT"
SANDBOXD_IMAGE = "AGENTFLY_SANDBOXD_IMAGE"

DEFAULT_LISTEN, DEFAULT_GATEWAY_LISTEN = "0.0.0.0:7080", "0.0.0.0:7081"
DEFAULT_SANDBOXD_IMAGE = "agentfly/sandboxd:dev"
SERVICE = "agentfly-broker"
KEY_BYTES = 32  # the seed of an Ed25519 key

Address = tuple[str, int]


@dataclass(frozen=True)
class BrokerConfig:
    """Where a broker serves, and what it may use.

    Attributes:
        namespace: whose pools it serves; None is its own.
        sandboxd_image: with the daemon of sandboxes.
        gateway_url: where others reach ``gateway_listen``; None is the Service of the namespace.
        modules: what InProcess pools may load.
        kubeconfig: to reach the API server from outside; None for what the pod mounts.
    """

    listen: Address
    gateway_listen: Address
    signing_key_file: Path
    client_token_file: Path
    sandboxd_image: str = DEFAULT_SANDBOXD_IMAGE
    namespace: str | None = None
    gateway_url: str | None = None
    modules: tuple[str, ...] = ()
    kubeconfig: Path | None = None
    context: str | None = None

    def signing_key(self) -> bytes:
        """The seed with which admin rights on members are signed.

        Raises:
            ResourceError: the file holds none.
        """
        try:
            key = self.signing_key_file.read_bytes()
        except OSError as error:
            raise _bad(SIGNING_KEY_FILE, self.signing_key_file, str(error.strerror)) from None
        if len(key) != KEY_BYTES:
            try:
                key = base64.b64decode(key.strip(), validate=True)
            except binascii.Error:
                key = b""
        if len(key) != KEY_BYTES:
            raise _bad(SIGNING_KEY_FILE, self.signing_key_file, f"does not hold {KEY_BYTES} bytes")
        return key

    def gateway(self, namespace: str) -> str:
        """The address of the gateways for those in other pods."""
        return self.gateway_url or f"http://{SERVICE}.{namespace}.svc:{self.gateway_listen[1]}"


def config_from(variables: Mapping[str, str]) -> BrokerConfig:
    """The configuration that the environment holds.

    Raises:
        ResourceError: a value that is needed is missing or cannot be used.
    """
    modules = (each.strip() for each in variables.get(IN_PROCESS_MODULES, "").split(","))
    return BrokerConfig(
        namespace=variables.get(NAMESPACE) or None,
        listen=_address(LISTEN, variables.get(LISTEN) or DEFAULT_LISTEN),
        gateway_listen=_address(GATEWAY_LISTEN, variables.get(GATEWAY_LISTEN) or DEFAULT_GATEWAY_LISTEN),
        gateway_url=variables.get(GATEWAY_URL) or None,
        signing_key_file=_path(SIGNING_KEY_FILE, variables),
        client_token_file=_path(CLIENT_TOKEN_FILE, variables),
        sandboxd_image=variables.get(SANDBOXD_IMAGE) or DEFAULT_SANDBOXD_IMAGE,
        modules=tuple(filter(None, modules)),
    )


def _path(name: str, variables: Mapping[str, str]) -> Path:
    if not (text := variables.get(name)):
        raise ResourceError(f"{name}: is not set", hints=(f"set {name} to a file of a mounted Secret",))
    return Path(text)


def _address(name: str, text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ResourceError(f"{name}: {text} is no address", hints=("write it as 0.0.0.0:7080",))
    return host.strip("[]"), int(port)


def _bad(name: str, path: Path, why: str) -> ResourceError:
    return ResourceError(
        f"{name}: {path}: {why}", hints=("mount the key signing-key of Secret agentfly-broker",)
    )
