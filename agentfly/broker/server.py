"""The engine as an HTTP service: on a unix socket for one machine, on a TCP port for a namespace.

Guarantees:
1. An acquire is a long poll with the deadline in its body. A client that goes away while it waits is a
   cancelled acquire: nothing of it is left.
2. A lease whose answer does not reach its client, and every lease of a client that died, ends at its TTL.
3. The broker sends no heartbeats of its own: a lease lives only as long as its client says so.
4. The socket is open to the broker's own user alone. Over TCP every request needs the token, but for
   ``/healthz``, which says nothing of pools and leases. Only pools are served there, by their names: a spec
   would say what others' machines run.
5. What is shown of pools and leases, to people and to Prometheus, contains no token.
6. A defect of the broker is an answer too, ``Infra`` with its name; its trace is in the log.
7. Before a broker is ready, requests wait for it for up to ``READY_S``, and are then told to come again.
8. A lease that its member does not keep goes on at the next broker, where its holder brings its record.

Not here: who gets what (``resources``), what the bodies are (``wire``).
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import ValidationError

from agentfly.broker import wire
from agentfly.broker.access import HEADER, TOKEN_FILE
from agentfly.broker.metrics import Metrics, metrics_of
from agentfly.broker.records import Records
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import Infra, ResourceError, Saturated
from agentfly.resources.finish import finished
from agentfly.resources.lease import LeaseInfo

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1.0  # for answers that are being written; waiting acquires are cancelled
READY_S = 5.0  # half of what a client allows beyond its deadline
BACKLOG = 1024  # connections of workers that all start at once
MAX_BODY = 1 << 20  # bytes: heartbeats of thousands of leases

B = TypeVar("B", bound=wire.Body)


@dataclass(frozen=True)
class Front:
    """What a broker has that others than its own user reach.

    Attributes:
        admits: whether a token opens it.
        ready: is set while it serves.
        problems: of pools that it cannot serve as they are written, by name.
        records: of leases that holders bring to the next broker; None: there is none.
    """

    admits: Callable[[str], bool]
    ready: asyncio.Event
    problems: Callable[[], Mapping[str, Sequence[str]]] = field(default=dict)
    records: Records | None = None


class BrokerServer:
    """Serves an engine at a socket path for as long as it is entered. The engine stays the caller's."""

    def __init__(self, engine: ResourceEngine, path: str | Path) -> None:
        self.path = Path(path)
        self._engine = engine
        self._life = AsyncExitStack()

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix://{self.path}"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as life:
            listener = _listen(self.path)
            life.callback(self.path.unlink, missing_ok=True)
            await life.enter_async_context(serving(make_app(self._engine), listener))
            self._life = life.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._life.aclose()


@asynccontextmanager
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an application on a bound socket, which is closed at the end."""
    # A handler whose client went away must be cancelled: its acquire would wait for nobody.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    try:
        await runner.setup()
        # A cancelled start would leave a server that nobody knows.
        await finished(web.SockSite(runner, listener, backlog=BACKLOG).start())
        yield
    finally:
        await finished(runner.cleanup())
        listener.close()


def listen_tcp(host: str, port: int) -> socket.socket:
    """A socket bound to this address; port 0 is any that is free.

    Raises:
        ResourceError: it cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a broker that was killed
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(f"listen: {host}:{port}: {error.strerror or error}") from None
    return listener


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


def make_app(engine: ResourceEngine, front: Front | None = None) -> web.Application:
    """The application; where it listens is the caller's choice. Without a front everybody is admitted."""
    routes = _Routes(engine, metrics_of(engine), front)
    middlewares: list[Middleware] = [_typed_errors] if front is None else [_typed_errors, _guard(front)]
    app = web.Application(client_max_size=MAX_BODY, middlewares=middlewares)
    app.router.add_post(wire.ACQUIRE, routes.acquire)
    app.router.add_post(wire.ACQUIRE_MANY, routes.acquire_many)
    app.router.add_post(wire.RELEASE, routes.release)
    app.router.add_post(wire.RELEASE_OWNER, routes.release_owner)
    app.router.add_post(wire.HEARTBEAT, routes.heartbeat)
    app.router.add_post(wire.RESTORE, routes.restore)
    app.router.add_post(wire.DEMAND, routes.demand)
    app.router.add_post(wire.RESET, routes.reset)
    app.router.add_get(wire.POOLS, routes.pools)
    app.router.add_get(wire.LEASES, routes.leases)
    app.router.add_get(wire.METRICS, routes.metrics)
    app.router.add_get(wire.HEALTH, routes.health)
    return app


class _Routes:
    def __init__(self, engine: ResourceEngine, metrics: Metrics | None, front: Front | None) -> None:
        self._engine = engine
        self._metrics = metrics
        self._front = front

    async def acquire(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AcquireBody)
        self._check(body)
        self._restore(body.records)
        infos = await self._engine.claim_many(
            [body.request()], body.owner, attempt=body.attempt, deadline=body.deadline_s
        )
        return _answer(self._given(infos[0], body.attempt))

    async def acquire_many(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.AcquireManyBody)
        self._check(*body.requests)
        wanted = [each.request() for each in body.requests]
        self._restore(body.records)
        infos = await self._engine.claim_many(
            wanted, body.owner, attempt=body.attempt, deadline=body.deadline_s
        )
        return _answer([self._given(info, body.attempt) for info in infos])

    def _check(self, *wanted: wire.Wanted) -> None:
        if self._front is not None and any(each.spec is not None for each in wanted):
            raise ResourceError(
                "acquire: a spec is not served by the broker of a namespace",
                hints=("make a ResourcePool of it, and acquire that by its name",),
            )

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

    async def restore(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.RestoreBody)
        return _answer(self._restore(body.records))

    def _given(self, info: LeaseInfo, attempt: int) -> dict[str, Any]:
        """A lease, with its record if its holder is to keep it."""
        records = None if self._front is None else self._front.records
        record = None if records is None else records.write(info, attempt)
        return info.model_dump() if record is None else {**info.model_dump(), "record": record}

    def _restore(self, texts: Sequence[str]) -> list[bool]:
        """Whether the lease of each record lives."""
        records = None if self._front is None else self._front.records
        found = [None if records is None else records.read(text) for text in texts]
        return [
            each is not None and self._engine.restore(each.note, each.member_id, each.incarnation)
            for each in found
        ]

    async def demand(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.DemandBody)
        await self._engine.demand(body.pool, body.wanted, body.owner)
        return _answer({})

    async def reset(self, request: web.Request) -> web.Response:
        body = await _read(request, wire.ResetBody)
        return _answer((await self._engine.reset(body.lease_id)).model_dump())

    async def pools(self, request: web.Request) -> web.Response:
        problems = {} if self._front is None else self._front.problems()
        return _answer(wire.pools_to_wire(self._engine.pool_status(), problems))

    async def leases(self, request: web.Request) -> web.Response:
        return _answer([lease.model_dump() for lease in self._engine.leases()])

    async def health(self, request: web.Request) -> web.Response:
        ready = self._front is None or self._front.ready.is_set()
        status = 503 if "ready" in request.query and not ready else 200
        return web.json_response({"live": True, "ready": ready}, status=status)

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


def _guard(front: Front) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == wire.HEALTH:
            return await handler(request)
        token = request.headers.get(HEADER) or _bearer(request)
        if not front.admits(token):
            what = "is not the broker's" if token else "is missing"
            raise wire.Unauthorized(
                f"{HEADER}: {what}",
                hints=(f"set {TOKEN_FILE} to a mounted client-token of the Secret agentfly-broker-client",),
            )
        try:
            async with asyncio.timeout(READY_S):
                await front.ready.wait()
        except TimeoutError:
            raise wire.NotReady("broker: is starting, and finds out who holds what") from None
        return await handler(request)

    return guard


def _bearer(request: web.Request) -> str:
    """What monitors send, which know no other way."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


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
