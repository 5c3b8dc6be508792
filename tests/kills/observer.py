"""Watches of a cluster's objects, for as long as a block lasts.

Guarantees:
1. Each kind is followed from one list on by watches that miss nothing; where one was cut off for too long to
   go on, that is told, because then something may have been missed.
2. What the book says is wrong is taken by whoever asks next, once.
"""

import contextlib
import http.client
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, Self

from tests.cluster.api import Api
from tests.cluster.machine import ClusterError
from tests.kills.book import Book, Object

WATCH_S = 240
_GONE = 410
_PAUSE_S = 0.5


class Observer:
    """A book that watches fill. ``paths`` are lists of the API by kind and a word for people."""

    def __init__(self, api: Api, paths: Mapping[tuple[str, str], str], most: Mapping[str, int]) -> None:
        self._api, self._paths = api, paths
        self._book, self._lock = Book(most), threading.Lock()
        self._versions: dict[str, str] = {}
        self._taken = 0
        self._cut_off: list[str] = []
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Self]:
        """Watches for the length of the block.

        Raises:
            ClusterError: the API server does not give a list.
        """
        threads = []
        for (kind, _), path in self._paths.items():
            self._list(kind, path)
            threads.append(
                threading.Thread(target=self._follow, args=(kind, path), name=f"watch {kind}", daemon=True)
            )
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._ended.set()  # threads end with their next line, or with the process

    def of(self, kind: str) -> list[Object]:
        """The objects of a kind that are there now."""
        with self._lock:
            return self._book.of(kind)

    def take_wrongs(self) -> list[str]:
        """What must never be, and was since the last call."""
        with self._lock:
            found = self._book.wrongs[self._taken :] + self._cut_off
            self._taken, self._cut_off = len(self._book.wrongs), []
            return found

    def _list(self, kind: str, path: str) -> None:
        found = self._api.get(path)
        with self._lock:
            for obj in found["items"]:
                self._book.see(kind, "ADDED", obj)
            listed = {obj["metadata"]["uid"] for obj in found["items"]}
            for obj in self._book.of(kind):
                here = f"/namespaces/{obj['metadata']['namespace']}/" in path
                if here and obj["metadata"]["uid"] not in listed:
                    self._book.see(kind, "DELETED", obj)
        self._versions[path] = str(found["metadata"]["resourceVersion"])

    def _follow(self, kind: str, path: str) -> None:
        while not self._ended.is_set():
            try:
                self._watch(kind, path)
            except (OSError, http.client.HTTPException, ValueError):
                self._ended.wait(_PAUSE_S)
            except _Expired:
                with self._lock:
                    self._cut_off.append(f"the watch of {kind} was cut off: something may have been missed")
                with contextlib.suppress(OSError, ClusterError):
                    self._list(kind, path)

    def _watch(self, kind: str, path: str) -> None:
        """Follows one watch to its end, from the version that the last one came to."""
        url = urllib.parse.urlsplit(self._api.server)
        connection = http.client.HTTPSConnection(
            url.hostname or "", url.port or 443, timeout=WATCH_S + 30, context=self._api.ssl
        )
        query = f"watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
        try:
            target = f"{url.path}{path}?{query}&resourceVersion={self._versions[path]}"
            connection.request("GET", target, headers=self._api.headers)
            response = connection.getresponse()
            if response.status == _GONE:
                raise _Expired
            if response.status != 200:
                raise OSError(f"watch of {kind}: {response.status}")
            while not self._ended.is_set() and (line := response.readline()):
                self._versions[path] = self._take(kind, json.loads(line))
        finally:
            connection.close()

    def _take(self, kind: str, event: dict[str, Any]) -> str:
        obj = event["object"]
        if event["type"] == "ERROR":
            raise _Expired
        if event["type"] != "BOOKMARK":
            with self._lock:
                self._book.see(kind, event["type"], obj)
        return str(obj["metadata"]["resourceVersion"])


class _Expired(Exception):
    """The API server has forgotten the version from which a watch was to go on."""
