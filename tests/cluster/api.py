"""The few requests that the launcher and the fixtures themselves make to an API server.

Guarantees:
1. One connection per request, each with a deadline: a restarted API server needs no reconnect.
2. Requests carry the user agent `agentfly-test-cluster`, so that nobody counts them as the product's.
"""

import base64
import http.client
import json
import os
import ssl
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.machine import ClusterError

USER_AGENT = "agentfly-test-cluster"


class Api:
    """An API server as the user of a kubeconfig."""

    def __init__(self, kubeconfig: Path, *, timeout_s: float = 30.0) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        context = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], context["cluster"])["cluster"]
        user = _named(document["users"], context["user"])["user"]
        self.server: str = cluster["server"]
        self._url = urllib.parse.urlsplit(self.server)
        self._timeout_s = timeout_s
        self.ssl = _ssl(cluster, user)
        self.headers = {"User-Agent": USER_AGENT, "Accept": "application/json"}
        if token := user.get("token"):
            self.headers["Authorization"] = f"Bearer {token}"

    def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """One request: its status, and its body, decoded if it is one JSON document.

        Raises:
            OSError: the API server cannot be reached.
        """
        port = self._url.port or 443
        connection = http.client.HTTPSConnection(
            self._url.hostname or "", port, timeout=self._timeout_s, context=self.ssl
        )
        try:
            data = None if body is None else json.dumps(body)
            headers = self.headers if body is None else {**self.headers, "Content-Type": kind}
            connection.request(method, self._url.path + path, body=data, headers=headers)
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text.decode(errors="replace")

    def get(self, path: str) -> Any:
        """The object or list at a path.

        Raises:
            ClusterError: the API server does not answer 200.
        """
        status, body = self.call("GET", path)
        if status != 200:
            raise ClusterError(f"GET {path}: {status} {body}")
        return body

    def create(self, path: str, body: Any) -> Any:
        """Creates an object; one of the same name that is already there is left as it is.

        Raises:
            ClusterError: the API server refuses it.
        """
        status, answer = self.call("POST", path, body)
        if status not in (200, 201, 202, 409):
            raise ClusterError(f"POST {path}: {status} {answer}")
        return answer

    def ready(self) -> bool:
        """Whether the API server says so, by its status: a failing one too has lines with `ok`."""
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def exists(self, path: str) -> bool:
        """Whether there is something at a path."""
        try:
            return self.call("GET", path)[0] == 200
        except OSError:
            return False


def wait(
    what: str, done: Callable[[], bool], within_s: float, hint: str = "", every_s: float = 0.05
) -> float:
    """Waits until something is so; how long it took, in seconds.

    Raises:
        ClusterError: it is not so in time.
    """
    begun = time.monotonic()
    while not done():
        if time.monotonic() - begun > within_s:
            raise ClusterError(f"{what}: not so within {within_s:g} s", hints=[hint] if hint else [])
        time.sleep(every_s)
    return time.monotonic() - begun


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _ssl(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    authority = cluster.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"),
        cadata=base64.b64decode(authority).decode() if authority else None,
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate := user.get("client-certificate"):
        context.load_cert_chain(certificate, user["client-key"])
    elif inline := user.get("client-certificate-data"):
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_bytes(
                base64.b64decode(inline) + os.linesep.encode() + base64.b64decode(user["client-key-data"])
            )
            context.load_cert_chain(pair)
    return context
