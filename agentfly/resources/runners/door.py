"""Where holders reach what a runner serves by HTTP from its own process.

Guarantees:
1. On one machine each member has a port of the loopback to itself.
2. In a cluster all members of a process share one port, and each has a path there. An address depends on the
   name of the member alone: it is the same in the next process, and behind another pod address.
3. Who asks for a member that is not there is told to come again: the next process may have just begun.

Not here: who may ask (each member's own matter).
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from agentfly.resources.finish import finished

REQUEST_MAX = 64 << 20  # bytes: prompts and observations with images, and no accident
STOP_S = 1.0  # for the last words to holders that were cut off


@dataclass(frozen=True, slots=True)
class Opened:
    """A member that is served. ``prefix`` is in front of the path of every request that it gets."""

    address: str
    prefix: str
    close: Callable[[], Awaitable[None]]


class Door(Protocol):
    """Lets holders in to members.

    ``lasts`` says that its addresses outlive the process, so that a holder may come with a lease of an
    earlier one.
    """

    lasts: bool

    async def open(self, name: str, serve: Handler) -> Opened:
        """Serve a member under this name from now on."""
        ...


class LoopbackDoor:
    """A port of the loopback for each."""

    lasts = False

    async def open(self, name: str, serve: Handler) -> Opened:
        """See ``Door.open``."""
        async with AsyncExitStack() as life:
            app = web.Application(client_max_size=REQUEST_MAX)
            app.router.add_route("*", "/{path:.*}", serve)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S, handler_cancellation=True)
            await runner.setup()
            life.push_async_callback(runner.cleanup)
            # A cancelled start would leave a server that nobody knows.
            await finished(web.TCPSite(runner, "127.0.0.1", 0).start())
            kept = life.pop_all()
        host, port = runner.addresses[0]
        return Opened(f"http://{host}:{port}", "", kept.aclose)


class SharedDoor:
    """One application for all, which the caller serves at ``url``."""

    lasts = True

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._members: dict[str, Handler] = {}
        self.app = web.Application(client_max_size=REQUEST_MAX)
        self.app.router.add_route("*", "/{member}", self._serve)
        self.app.router.add_route("*", "/{member}/{path:.*}", self._serve)

    async def open(self, name: str, serve: Handler) -> Opened:
        """See ``Door.open``. A member of the same name is replaced."""
        self._members[name] = serve

        async def close() -> None:
            if self._members.get(name) is serve:
                del self._members[name]

        return Opened(f"{self._url}/{name}", f"/{name}", close)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["member"]
        serve = self._members.get(name)
        if serve is None:
            text = f"{name}: is not served here now"
            error = {"message": text, "type": "agentfly", "code": "Infra", "hints": ["try again"]}
            body = {"error": error, "message": text, "code": "Infra", "hints": []}
            return web.json_response(body, status=503, headers={"Retry-After": "1"})
        return await serve(request)
