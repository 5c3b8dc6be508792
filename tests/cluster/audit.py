"""Requests to the API server, counted exactly by its audit log.

    with cluster.audit() as audit:
        ...
    assert audit.writes(agent="agentfly-broker") == {}

Guarantees:
1. Every request that finished inside the block counts, and nothing that finished before it: a sentinel
   request marks its end, and the log is written before a request is answered.
2. A watch counts once, when it starts, as verb `watch`.
"""

import collections
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.machine import ClusterError

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
SENTINEL = "audit-mark-"
SENTINEL_S = 10.0

Counts = dict[tuple[str, str], int]
"""(verb, resource or resource/subresource) to requests."""


class Audit:
    """A section of an API server's audit log.

    Args:
        log: the file that the API server writes.
        mark: makes any request with the given name in its address.
    """

    def __init__(self, log: Path, mark: Callable[[str], object]) -> None:
        self._log, self._mark = log, mark
        self._from = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Audit":
        self._from = self._log.stat().st_size if self._log.exists() else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.read()

    def read(self) -> None:
        """Reads what was logged since the block began, until now.

        Raises:
            ClusterError: the sentinel is not in the log within 10 s.
        """
        name = SENTINEL + secrets.token_hex(6)
        self._mark(name)
        deadline = time.monotonic() + SENTINEL_S
        while time.monotonic() < deadline:
            events = self._events()
            if any(name in event["requestURI"] for event in events):
                self.events = [event for event in events if SENTINEL not in event["requestURI"]]
                return
            time.sleep(0.02)
        raise ClusterError(f"audit log: {self._log} has no {name} after {SENTINEL_S:g} s")

    def counts(self, *, agent: str = "", user: str = "") -> Counts:
        """Requests by verb and resource of clients whose user agent and user name begin so."""
        found: collections.Counter[tuple[str, str]] = collections.Counter()
        for event in self.events:
            agents = event.get("userAgent", "").startswith(agent)
            if _counts(event) and agents and event["user"].get("username", "").startswith(user):
                found[event["verb"], _resource(event)] += 1
        return dict(found)

    def writes(self, *, agent: str = "", user: str = "") -> Counts:
        """As `counts`, of verbs that change something."""
        return {key: n for key, n in self.counts(agent=agent, user=user).items() if key[0] in WRITES}

    def agents(self) -> dict[str, int]:
        """Requests by user agent: who it was, when a count is not what was expected."""
        return dict(collections.Counter(e.get("userAgent", "") for e in self.events if _counts(e)))

    def _events(self) -> list[dict[str, Any]]:
        with self._log.open("rb") as file:
            file.seek(self._from)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]


def _counts(event: dict[str, Any]) -> bool:
    """A watch is logged when it starts and when it ends; everything else that streams, too."""
    if event["verb"] == "watch":
        return bool(event["stage"] == "ResponseStarted")
    return event["stage"] in ("ResponseComplete", "Panic")


def _resource(event: dict[str, Any]) -> str:
    ref = event.get("objectRef") or {}
    if not ref.get("resource"):
        return str(event["requestURI"]).partition("?")[0]
    return "/".join(filter(None, (ref["resource"], ref.get("subresource"))))
