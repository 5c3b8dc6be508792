"""Events that people read in `kubectl describe`.

Guarantees:
1. Of what is about the same, one event is posted in `QUIET_S` seconds.
2. An event that cannot be posted is logged, and costs nothing else.
"""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from agentfly.api.base import API_VERSION
from agentfly.kube import Kube, KubeError, Resource
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.plan.turns import Event

logger = logging.getLogger(__name__)

EVENTS = Resource("events.k8s.io", "v1", "events")
QUIET_S = 600.0
_NOTE_MAX = 1024
_REMEMBERED = 10_000


class Events:
    """Posts events of one operator."""

    def __init__(self, kube: Kube, identity: str, metrics: Metrics) -> None:
        self._kube = kube
        self._identity = identity
        self._metrics = metrics
        self._posted: dict[tuple[str, str], float] = {}

    async def post(self, obj: Mapping[str, Any], event: Event) -> None:
        """Post an event about an object of ours."""
        meta = obj["metadata"]
        now = time.monotonic()
        if now - self._posted.get((meta["uid"], event.about), -QUIET_S) < QUIET_S:
            return
        body = _body(meta, str(obj["kind"]), event, self._identity, datetime.now(UTC))
        try:
            await self._kube.create(EVENTS, body, meta["namespace"])
        except KubeError as error:
            logger.warning("event %s of %s/%s: %s", event.reason, meta["namespace"], meta["name"], error)
            return
        self._remember((meta["uid"], event.about), now)
        self._metrics.writes.labels("event").inc()

    def _remember(self, key: tuple[str, str], now: float) -> None:
        if len(self._posted) >= _REMEMBERED:
            self._posted = {k: at for k, at in self._posted.items() if now - at < QUIET_S}
        self._posted[key] = now


def _body(meta: Mapping[str, Any], kind: str, event: Event, identity: str, now: datetime) -> dict[str, Any]:
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    regarding = {"apiVersion": API_VERSION, "kind": kind, "namespace": meta["namespace"]}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": f"{meta['name']}.{int(now.timestamp() * 1e6):x}",
            "namespace": meta["namespace"],
        },
        "eventTime": stamp,
        "type": event.kind,
        "reason": event.reason.value,
        "action": "Reconcile",
        "note": event.note[:_NOTE_MAX],
        "regarding": {**regarding, "name": meta["name"], "uid": meta["uid"]},
        "reportingController": "agentfly.dev/operator",
        "reportingInstance": identity[:128],
    }
