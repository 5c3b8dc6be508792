"""The daemons of pods that only run as far as the API shows, as a process of its own.

python -m tests.bench.cluster.daemons KUBECONFIG NAMESPACE

It claims a node (``tests.cluster.fake_kubelet``), answers as every pod's sandboxd at port 7070 of all
addresses, prints a line once it does, and ends with its standard input. A real daemon needs more time for a
reset and runs elsewhere: what is measured against this one is the broker.

Guarantees:
1. A daemon is there as long as its pod, knows the broker's key only, and keeps lease, note and incarnation
   as a real one does.
2. What opened a daemon once is not verified again.
"""

import asyncio
import base64
import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from agentfly.kube import PODS, Informer, Kube, Obj
from agentfly.resources.runners.kubernetes import MEMBER_LABELS
from agentfly.resources.runners.kubernetes.pod import PORT
from tests.cluster.fake_kubelet import FakeKubelet

SANDBOXD = "AGENTFLY_SANDBOXD"
Answer = tuple[int, dict[str, Any]]


@dataclass
class Daemon:
    """One pod's daemon. ``config`` is what its pod tells it."""

    config: dict[str, Any]
    boot: str = field(default_factory=lambda: secrets.token_hex(16))
    state: str = "free"
    incarnation: int = 1
    lease: dict[str, Any] = field(default_factory=dict)
    opened: str = ""

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> Answer:
        """What it says to one request: a status and a body."""
        if path == "/healthz":
            return 200, self._health()
        if not self._admits(authorization):
            return _refused(401, "Unauthorized", "authorization: not the owner's")
        if (method, path) == ("GET", "/lease"):
            return 200, self._holding()
        if (method, path) == ("POST", "/lease"):
            return self._take(json.loads(body))
        if (method, path) == ("POST", "/reset"):
            self.state, self.incarnation, self.lease = "free", self.incarnation + 1, {}
            return 200, {"clean": True, "method": "overlay", "incarnation": self.incarnation}
        return _refused(404, "NotFound", f"{method} {path}: is not served")

    def _admits(self, authorization: str) -> bool:
        if self.opened and authorization == self.opened:
            return True
        given = authorization.removeprefix("Bearer ")
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(self.config["adminKey"]))
        message = f"agentfly-admin:{self.config['member']}:{self.boot}".encode()
        try:
            key.verify(base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)), message)
        except (InvalidSignature, ValueError):
            return False
        self.opened = authorization
        return True

    def _health(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "incarnation": self.incarnation,
            "leases": 0,
            "owner": self.lease.get("owner"),
            "expiresInSeconds": None,
            "idleSeconds": 0.0,
            "version": "bench",
            "boot": self.boot,
            "member": self.config["member"],
            "ownerKey": self.config["adminKey"],
            "reset": {"method": "overlay"},
        }

    def _holding(self) -> dict[str, Any]:
        held = {"state": self.state, "incarnation": self.incarnation, "owner": self.lease.get("owner")}
        held |= {"attempt": self.lease.get("attempt", 0), "note": self.lease.get("note", "")}
        return held | {"expiresInSeconds": self.lease.get("ttlSeconds")}

    def _take(self, wanted: dict[str, Any]) -> Answer:
        holder = (self.lease.get("owner"), self.lease.get("token"))
        if self.lease and holder != (wanted["owner"], wanted["token"]):
            return _refused(409, "Busy", "lease: has another owner")
        self.state, self.lease = "leased", wanted
        return 200, {"state": "leased", "incarnation": self.incarnation}


class Daemons:
    """The daemons of a namespace, by address."""

    def __init__(self) -> None:
        self.living: dict[str, Daemon] = {}

    def changed(self, kind: str, pod: Obj) -> None:
        """Take note of a pod, as an informer with ``project`` tells it."""
        if not (address := pod["address"]):
            return
        if kind == "DELETED":
            self.living.pop(address, None)
        elif address not in self.living:
            config = json.loads(pod["config"])
            self.living[address] = Daemon(config, incarnation=config["incarnation"])


def project(pod: Obj) -> Obj:
    """What is needed of a pod."""
    meta = pod["metadata"]
    (container,) = pod["spec"]["containers"]
    return {
        "metadata": {name: meta[name] for name in ("uid", "namespace", "name", "resourceVersion")},
        "address": pod.get("status", {}).get("podIP", ""),
        "config": next(each["value"] for each in container["env"] if each["name"] == SANDBOXD),
    }


class Connection(asyncio.Protocol):
    """HTTP as far as the broker's client speaks it: little work, so that the broker is what is measured."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self._transport: asyncio.Transport | None = None
        self._address = ""
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._address = transport, transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        """Answers each request that is complete."""
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._received[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            whole = end + 4 + int(headers.get("content-length", "0"))
            if len(self._received) < whole:
                return
            body, self._received = self._received[end + 4 : whole], self._received[whole:]
            method, path, _ = first.split(" ")
            self._answer(method, path, headers.get("authorization", ""), body)

    def _answer(self, method: str, path: str, authorization: str, body: bytes) -> None:
        assert self._transport is not None
        daemon = self._daemons.living.get(self._address)
        if daemon is None:
            self._transport.abort()
            return
        status, said = daemon.answer(method, path, authorization, body)
        content = json.dumps(said).encode()
        head = (
            f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._transport.write(head.encode() + content)


def _refused(status: int, code: str, message: str) -> Answer:
    return status, {"error": {"code": code, "message": message}}


async def serve(kubeconfig: str, namespace: str) -> None:
    """Answer until standard input ends."""
    loop, daemons = asyncio.get_running_loop(), Daemons()
    server = await loop.create_server(lambda: Connection(daemons), "0.0.0.0", PORT, backlog=4096)
    async with server, Kube.connect("agentfly-bench-daemons/1", kubeconfig=kubeconfig) as kube:
        pods = Informer(kube, PODS, namespace, MEMBER_LABELS, project=project)
        pods.subscribe(daemons.changed)
        async with pods:
            await pods.synced()
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)


def main(kubeconfig: str, namespace: str) -> None:
    """Claim a node and answer."""
    with FakeKubelet(Path(kubeconfig)):
        asyncio.run(serve(kubeconfig, namespace))


if __name__ == "__main__":
    main(*sys.argv[1:])
