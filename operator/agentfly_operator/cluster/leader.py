"""Which of several operators acts: the one that holds the Lease.

Guarantees:
1. A Lease is taken from another only if it was not renewed for its whole duration as this process saw it:
   clocks of two machines are never compared.
2. Two that try at once: the API server accepts one.
3. `is_held` turns false by itself, by this process' clock alone, before anybody else may take the Lease; a
   process that was stopped for a while finds it false when it goes on.
4. A holder that ends in order gives the Lease back, so that nobody waits for its end.

Not here: what to do when it is lost. The process exits: nothing is left that could go on acting.
"""

import asyncio
import contextlib
import logging
import time
from datetime import UTC, datetime
from typing import Any

from agentfly.kube import LEASES, Conflict, Kube, KubeError, NotFound
from agentfly_operator.names import OPERATOR

logger = logging.getLogger(__name__)

DURATION_S = 15  # the figures of client-go
RENEW_WITHIN_S = 10.0
EVERY_S = 2.0
_REQUEST_S = 4.0

Object = dict[str, Any]


class LeaderLease:
    """The Lease of the operator, as one process sees it.

    Args:
        identity: differs from that of every other process.
    """

    def __init__(self, kube: Kube, namespace: str, identity: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._identity = identity
        self._lease: Object | None = None
        self._seen: tuple[Any, float] = (None, 0.0)  # what the Lease said, and since when by our clock
        self._renewed: float | None = None

    def is_held(self) -> bool:
        """Whether this process may act now."""
        return self._renewed is not None and time.monotonic() < self._renewed + RENEW_WITHIN_S

    async def acquire(self) -> None:
        """Wait until this process leads."""
        told = ""
        while not await self._try():
            holder = str((self._lease or {}).get("spec", {}).get("holderIdentity", ""))
            if holder != told:
                logger.info(
                    "lease %s/%s is held by %s, waiting", self._namespace, OPERATOR, holder or "nobody"
                )
                told = holder
            await asyncio.sleep(EVERY_S)
        logger.info("%s leads", self._identity)

    async def hold(self) -> None:
        """Renew for as long as that is possible; return when it is lost."""
        while self.is_held():
            await asyncio.sleep(EVERY_S)
            if not await self._try() and self._lease is not None and not self._is_mine(self._lease):
                break
        self._renewed = None

    async def release(self) -> None:
        """Let the next one begin at once."""
        if not self.is_held() or self._lease is None:
            return
        self._renewed = None
        spec = {**self._lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        with contextlib.suppress(KubeError):
            await self._send("PUT", {**self._lease, "spec": spec})

    async def _try(self) -> bool:
        """One attempt to take or renew; failures are answers too."""
        began = time.monotonic()
        try:
            if self._lease is None or not self._is_mine(self._lease):
                self._lease = await self._read()
            if self._lease is not None and not self._may_take(self._lease):
                return False
            wanted = _next(self._lease, self._identity, self._namespace, datetime.now(UTC))
            self._lease = await self._send("POST" if self._lease is None else "PUT", wanted)
        except Conflict:
            self._lease = None  # somebody wrote in between: look again
            return False
        except KubeError as error:
            logger.warning("lease %s/%s: %s", self._namespace, OPERATOR, error)
            return False
        self._renewed = began
        return True

    def _may_take(self, lease: Object) -> bool:
        spec = lease.get("spec", {})
        said = (spec.get("holderIdentity"), spec.get("renewTime"), lease["metadata"]["resourceVersion"])
        if said != self._seen[0]:
            self._seen = (said, time.monotonic())
        expired = time.monotonic() >= self._seen[1] + float(spec.get("leaseDurationSeconds") or DURATION_S)
        return self._is_mine(lease) or not spec.get("holderIdentity") or expired

    def _is_mine(self, lease: Object) -> bool:
        return bool(lease.get("spec", {}).get("holderIdentity") == self._identity)

    async def _read(self) -> Object | None:
        path = LEASES.path(self._namespace, OPERATOR)
        try:
            return await self._kube.request("GET", path, deadline_s=_REQUEST_S)
        except NotFound:
            return None

    async def _send(self, method: str, lease: Object) -> Object:
        path = LEASES.path(self._namespace, "" if method == "POST" else OPERATOR)
        return await self._kube.request(method, path, body=lease, deadline_s=_REQUEST_S)


def _next(lease: Object | None, identity: str, namespace: str, now: datetime) -> Object:
    """The Lease as its holder writes it."""
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    before = (lease or {}).get("spec", {})
    mine = before.get("holderIdentity") == identity
    spec = {
        "holderIdentity": identity,
        "leaseDurationSeconds": DURATION_S,
        "acquireTime": before.get("acquireTime", stamp) if mine else stamp,
        "renewTime": stamp,
        "leaseTransitions": int(before.get("leaseTransitions") or 0) + (not mine and lease is not None),
    }
    if lease is not None:
        return {**lease, "spec": spec}
    metadata = {"name": OPERATOR, "namespace": namespace}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
