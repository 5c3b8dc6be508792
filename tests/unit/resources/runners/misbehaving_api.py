"""A real HTTP server on the loopback that does what it is told, request by request."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from agentfly.resources.runners.base import Member
from agentfly.resources.runners.external.account import Usage
from agentfly.resources.runners.external.api import ExternalAPIRunner, Gateway
from agentfly.resources.spec import ExternalAPISpec

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN = "token-of-a-lease"
KEY, OTHER = "sk-first-key-0123456789", "sk-other-key-9876543210"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}


@dataclass
class API:
    """``script`` holds what the next requests get; afterwards all get a completion of 10 and 5 tokens."""

    url: str = ""
    script: list[Behaviour] = field(default_factory=list)
    default: Behaviour | None = None
    seen: list[web.Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    in_flight: int = 0
    most: int = 0
    cut: asyncio.Event = field(default_factory=asyncio.Event)  # a request was ended by its sender

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        behave = self.script.pop(0) if self.script else self.default or completion
        try:
            self.bodies.append(await request.read())
            return await behave(request)
        except (asyncio.CancelledError, ConnectionError):
            self.cut.set()
            raise
        finally:
            self.in_flight -= 1

    @property
    def keys(self) -> list[str]:
        return [request.headers.get("Authorization", "").removeprefix("Bearer ") for request in self.seen]


@asynccontextmanager
async def misbehaving() -> AsyncIterator[API]:
    api = API()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield api
    finally:
        await runner.cleanup()


def spec(api: API, *credentials: str, **fields: Any) -> ExternalAPISpec:
    return ExternalAPISpec.model_validate(
        {"base_url": api.url, "credentials": credentials or ("env:FIRST",), "timeout_s": 5.0, **fields}
    )


@dataclass
class Held:
    """A started member with a holder, as the holder's client sees it."""

    runner: ExternalAPIRunner
    member: Member
    session: aiohttp.ClientSession

    def post(self, body: Any = CHAT, path: str = "/chat/completions", token: str = TOKEN, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}", **more.pop("headers", {})}
        return self.session.post(self.member.address + path, json=body, headers=headers, **more)

    async def ask(self, body: Any = CHAT, **more: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        async with self.post(body, **more) as answer:
            return answer.status, json.loads(await answer.read())

    async def code(self, **more: Any) -> tuple[int, str]:
        """The status and the code of a refusal of the gateway."""
        status, body = await self.ask(**more)
        assert body["error"]["type"] == "agentfly", body
        return status, body["error"]["code"]

    @property
    def usage(self) -> Usage:
        assert isinstance(self.member.handle, Gateway)
        return self.member.handle.usage()


@asynccontextmanager
async def held(spec: ExternalAPISpec, ttl_s: float = 30.0) -> AsyncIterator[Held]:
    runner = ExternalAPIRunner()
    member = await runner.start(spec, "api-1")
    try:
        await runner.lease(member, "owner", 0, TOKEN, ttl_s)
        async with aiohttp.ClientSession() as session:
            yield Held(runner, member, session)
    finally:
        await runner.stop(member)
    usage = member.handle.usage()  # type: ignore[attr-defined]
    assert (usage.in_flight, usage.waiting) == (0, 0), "a request outlived its gateway"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not holds():  # noqa: ASYNC110 -- what is waited for is at the other end of a socket
            await asyncio.sleep(0.002)


# What it can do.


async def completion(request: web.Request) -> web.StreamResponse:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return web.json_response({"choices": [{"message": {"content": "yes"}}], "usage": usage})


def status(code: int, text: str = "no", **headers: str) -> Behaviour:
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def behave(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=code, headers=named)

    return behave


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody ended it")


def slow(seconds: float) -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await completion(request)

    return behave


def raw(data: bytes) -> Behaviour:
    """These bytes, and the end of the connection."""

    async def behave(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(data)
        request.transport.close()
        return web.Response()

    return behave


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def stream(*pieces: bytes, pause: float = 0.0, kind: str = "text/event-stream") -> Behaviour:
    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause)
        return response

    return behave
