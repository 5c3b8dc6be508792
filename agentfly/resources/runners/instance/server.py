"""A host behind a unix socket; as a program, the process of one isolated instance.

Guarantees:
1. ``/call`` needs the token of a lease, everything else the token of the owner.
2. As a program it ends with its standard input, whatever the instance does in its thread.

Not here: the rules of calls (``host``).
"""

import asyncio
import hmac
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from agentfly.resources.errors import CallRaised, Infra, LeaseLost, ResourceError, StartFailed
from agentfly.resources.finish import finished
from agentfly.resources.runners.instance.host import Host
from agentfly.resources.spec import InProcessSpec

CODES: dict[str, tuple[type[ResourceError], int]] = {
    "LeaseLost": (LeaseLost, 410),
    "CallRaised": (CallRaised, 422),
    "Infra": (Infra, 504),
}
"""Name on the wire -> error and status."""
BODY_MAX = 64 << 20  # bytes of arguments: an observation with images, and no accident


class _Call(BaseModel):
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


@asynccontextmanager
async def serving(host: Host, path: Path, admin_token: str) -> AsyncIterator[None]:
    """Serve a started host at a socket path, which is the caller's to remove."""
    app = web.Application(client_max_size=BODY_MAX, middlewares=[_typed])
    routes = _Routes(host, admin_token)
    app.router.add_post("/call", routes.call)
    app.router.add_post("/lease", routes.lease)
    app.router.add_post("/reset", routes.reset)
    app.router.add_get("/healthz", routes.health)
    # A caller that went away does not stop the call: the thread goes on, and the next call must wait for it.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=False)
    await runner.setup()
    try:
        # A cancelled start would leave a server that nobody knows.
        await finished(web.UnixSite(runner, str(path)).start())
        yield
    finally:
        await runner.cleanup()


class _Routes:
    def __init__(self, host: Host, admin_token: str) -> None:
        self._host, self._admin_token = host, admin_token

    async def call(self, request: web.Request) -> web.Response:
        try:
            body = _Call.model_validate_json(await request.read())
        except ValidationError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        answer = await self._host.call(_bearer(request), body.method, body.args, body.kwargs)
        return web.json_response({"value": answer})

    async def lease(self, request: web.Request) -> web.Response:
        self._admit(request)
        body = await request.json()
        self._host.lease(body["owner"], body["attempt"], body["token"], body["ttl_s"])
        return web.json_response({})

    async def reset(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"clean": await self._host.reset(), "reason": self._host.broken})

    async def health(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.json_response({"broken": self._host.broken})

    def _admit(self, request: web.Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._admin_token.encode()):
            raise web.HTTPUnauthorized


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


@web.middleware
async def _typed(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ResourceError as error:
        name = type(error).__name__
        body: dict[str, Any] = {"code": name, "message": error.message, "hints": list(error.hints)}
        if isinstance(error, CallRaised):
            body["type_name"] = error.type_name
        return web.json_response(body, status=CODES[name][1])


async def _main(status: int) -> None:
    config = json.loads(await asyncio.to_thread(sys.stdin.readline))
    threading.Thread(target=_die_with_owner, daemon=True).start()
    host = Host(InProcessSpec.model_validate(config["spec"]))
    try:
        await host.start()
    except StartFailed as error:
        _tell(status, {"failed": error.message, "hints": list(error.hints)})
        os._exit(1)
    async with serving(host, Path(config["socket"]), config["admin_token"]):
        _tell(status, {})
        await asyncio.Event().wait()


def _tell(status: int, what: dict[str, Any]) -> None:
    os.write(status, json.dumps(what).encode() + b"\n")
    os.close(status)


def _die_with_owner() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
