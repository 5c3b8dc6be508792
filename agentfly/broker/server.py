"""The engine as an HTTP service on a unix socket.

Guarantees:
1. An acquire is a long poll with the deadline in its body. A client that goes away while it waits is a
   cancelled acquire: nothing of it is left.
2. A lease whose answer does not reach its client, and every lease of a client that died, ends at its TTL.
3. The broker sends no heartbeats of its own: a lease lives only as long as its client says so.
4. The socket is open to the broker's own user alone.
5. What is shown of pools and leases, to people and to Prometheus, contains no token.
6. A defect of the broker is an answer too, ``Infra`` with its name; its trace is in the log.

Not here: who gets what (``resources``), what the bodies are (``wire``).
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web
from pydantic import ValidationError

from agentfly.broker import wire
from agentfly.broker.metrics import Metrics, metrics_of
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import Infra, ResourceError, Saturated
from agentfly.resources.finish import finished

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1.0  # for answers that are being written; waiting acquires are cancelled
MAX_BODY = 1 << 20  # bytes: heartbeats of thousands of leases

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=wire.Body)


class BrokerServer:
    """Serves an engine at a socket path for as long as it is entered. The engine stays the caller's."""

    def __init__(self, engine: ResourceEngine, path: str | Path) -> None:
        self.path = Path(path)
        # A handler whose client went away must be cancelled: its acquire would wait for nobody.
        self._runner = web.AppRunner(
            make_app(engine), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix://{self.path}"

    async def __aenter__(self) -> Self:
        listener = _listen(self.path)
        try:
            await self._runner.setup()
            # A cancelled start would leave a server that nobody knows.
            await finished(web.SockSite(self._runner, listener).start())
        except BaseException:
            await finished(self._runner.cleanup())
            listener.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        self.path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as other:
        if other.connect_ex(str(path)) == 0:
            raise ResourceError(f"broker socket: {path} is served by another broker")
    path.unlink(missing_ok=True)  # of a broker that was killed
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)  # at no moment open to others; nothing is awaited while it holds
    try:
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def make_app(engine: ResourceEngine) -> web.Application:
    """The application; where it listens is the caller's choice."""
    routes = _Routes(engine, metrics_of(engine))
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_typed_errors])
    app.router.add_post(wire.ACQUIRE, routes.acquire)
    app.router.add_post(wire.ACQUIRE_MANY, routes.acquire_many)
    app.router.add_post(wire.RELEASE, routes.release)
    app.router.add_post(wire.RELEASE_OWNER, routes.release_owner)
    app.router.add_post(wire.HEARTBEAT, routes.heartbeat)
    app.router.add_post(wire.DEMAND, routes.demand)
    app.router.add_post(wire.RESET, routes.reset)
    app.router.add_get(wire.POOLS, routes.pools)
    app.router.add_get(wire.LEASES, routes.leases)
    app.router.add_get(wire.METRICS, routes.metrics)
    return app


class _Routes:
    def __init__(self, engine: ResourceEngine, metrics: Metrics | None) -> None:
        self._engine = engine
        self._metrics = metrics

    async def acquire(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AcquireBody)
        infos = await self._engine.claim_many(
            [body.request()], body.owner, attempt=body.attempt, deadline=body.deadline_s
        )
        return _answer(infos[0].model_dump())

    async def acquire_many(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AcquireManyBody)
        wanted = [each.request() for each in body.requests]
        infos = await self._engine.claim_many(
            wanted, body.owner, attempt=body.attempt, deadline=body.deadline_s
        )
        return _answer([info.model_dump() for info in infos])

    async def release(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.ReleaseBody)
        await self._engine.release(body.lease_id, dirty=body.dirty)
        return _answer({})

    async def release_owner(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.ReleaseOwnerBody)
        await self._engine.release_owner(body.owner, attempt=body.attempt)
        return _answer({})

    async def heartbeat(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.HeartbeatBody)
        return _answer(await self._engine.heartbeat(body.lease_ids))

    async def demand(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.DemandBody)
        await self._engine.demand(body.pool, body.wanted, body.owner)
        return _answer({})

    async def reset(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.ResetBody)
        return _answer((await self._engine.reset(body.lease_id)).model_dump())

    async def pools(self, request: web.Request) -> web.Response:
        return _answer({name: status.model_dump() for name, status in self._engine.pool_status().items()})

    async def leases(self, request: web.Request) -> web.Response:
        return _answer([lease.model_dump() for lease in self._engine.leases()])

    async def metrics(self, request: web.Request) -> web.Response:
        if self._metrics is None:
            raise ResourceError(
                "metrics: prometheus-client is not installed where the broker runs",
                hints=('pip install "agentfly[local]"',),
            )
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})


async def _read(request: web.Request, model: type[B]) -> B:
    return model.model_validate_json(await request.read())


def _answer(value: Any) -> web.Response:
    return web.json_response(value)


@web.middleware
async def _typed_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        failure = ResourceError(f"{request.path} {field}: {first['msg']}")
    except ResourceError as error:
        failure = error
    except web.HTTPException:
        raise
    except Exception as error:
        logger.exception("%s failed", request.path)
        failure = Infra(
            f"broker: {request.path} failed: {type(error).__name__}: {error}",
            hints=("report it with the trace in the log of the broker",),
        )
    status, body = wire.error_to_wire(failure)
    headers = {"Retry-After": f"{failure.retry_after:.0f}"} if isinstance(failure, Saturated) else None
    return web.json_response(body, status=status, headers=headers)
