"""A way to an API server that answers some requests itself, with what API servers under stress answer.

Guarantees:
1. While there is no fault, everything passes unchanged, watches event by event.
2. A fault is drawn for each request on its own, from a fixed seed; every one that was given is counted.
3. The beginning of a fault ends open watches too: with an error event where the fault is of watches (410),
   else by a broken connection.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml
from aiohttp import web

from tests.cluster.api import Api

REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}


@dataclass(frozen=True)
class Fault:
    """An answer to a part of all requests.

    Args:
        methods: of the requests that may get it.
        share: how many of them do.
        retry_after_s: what a 429 says.
        carried_out: the request takes effect, and its answer is lost.
    """

    status: int
    methods: tuple[str, ...] = ("GET", "POST", "PUT", "PATCH", "DELETE")
    share: float = 0.5
    retry_after_s: int | None = None
    carried_out: bool = False

    def answer(self) -> web.Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response(self.body(), status=self.status, headers=headers)

    def body(self) -> dict[str, Any]:
        said = {"status": "Failure", "reason": REASONS[self.status], "message": "a fault of this test"}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": self.status, **said}


WRITES = ("POST", "PUT", "PATCH", "DELETE")
FAULTS = {
    "409": Fault(409, WRITES),
    "410": Fault(410, ("GET",), share=0.7),
    "429": Fault(429, retry_after_s=1),
    "500": Fault(500),
    "500 of what was done": Fault(500, WRITES, share=0.7, carried_out=True),
}
"""One of each kind."""


class FaultyApi:
    """Passes requests on to the API server of a kubeconfig; `kubeconfig` leads here."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = folder / "faulty.kubeconfig"
        self.given: Counter[tuple[str, str]] = Counter()
        """How often a fault was given, by method and kind of object."""
        self._api, self._config = Api(kubeconfig), yaml.safe_load(kubeconfig.read_text())
        self._fault: Fault | None = None
        self._random = random.Random(7)
        self._watches: set[asyncio.Task[Any]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "FaultyApi":
        connector = aiohttp.TCPConnector(ssl=self._api.ssl, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        users = [each for each in self._config["users"] if "token" in each["user"]]
        names = {each["name"] for each in users}
        others = [each["name"] for each in self._config["users"] if each["name"] not in names]
        config = {
            **self._config,
            "clusters": [
                {"name": each["name"], "cluster": {"server": f"http://127.0.0.1:{port}"}}
                for each in self._config["clusters"]
            ],
            "users": [*users, *({"name": name, "user": {}} for name in others)],
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        assert self._runner is not None
        await self._runner.cleanup()
        await self._session.close()

    def begin(self, fault: Fault) -> None:
        """Answers so until `end`."""
        self._fault = fault
        self.given.clear()
        for task in self._watches:
            task.cancel()

    def end(self) -> None:
        self._fault = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fault = self._drawn(request)
        if fault is not None and not fault.carried_out:
            return fault.answer()
        assert self._session is not None
        dropped = ("host", "content-length", "connection", "accept-encoding")
        headers = {key: value for key, value in request.headers.items() if key.lower() not in dropped}
        async with self._session.request(
            request.method,
            self._api.server + request.raw_path,
            headers=self._api.headers | headers,
            data=await request.read() or None,
        ) as answer:
            if request.query.get("watch") in ("1", "true") and answer.status == 200:
                return await self._follow(request, answer)
            body = await answer.read()
            if fault is not None:
                return fault.answer()
            kept = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            return web.Response(status=answer.status, body=body, headers=kept)

    async def _follow(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        passed = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
        await passed.prepare(request)
        copying = asyncio.create_task(_copy(answer, passed))
        self._watches.add(copying)
        try:
            await asyncio.wait({copying})
        finally:
            copying.cancel()
            self._watches.discard(copying)
        fault = self._fault
        if copying.cancelled() and fault is not None and fault.status == 410:
            await passed.write(json.dumps({"type": "ERROR", "object": fault.body()}).encode() + b"\n")
            self.given["WATCH", "event"] += 1
            return passed
        if request.transport is not None:
            request.transport.abort()
        return passed

    def _drawn(self, request: web.Request) -> Fault | None:
        fault = self._fault
        if fault is None or request.method not in fault.methods or self._random.random() >= fault.share:
            return None
        parts = urlsplit(request.raw_path).path.split("/")
        kinds = ("pods", "resourcepools", "leases", "events")
        kind = next((part for part in parts if part in kinds), "others")
        self.given[request.method, kind] += 1
        return fault


async def _copy(answer: aiohttp.ClientResponse, passed: web.StreamResponse) -> None:
    async for piece in answer.content.iter_any():
        await passed.write(piece)
