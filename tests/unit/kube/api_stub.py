"""An API server in miniature: it answers what a test tells it to, and remembers what it was asked.

``answers`` are taken in order, each by one request; then ``default`` answers. An answer is a status and a
body, with headers if there are three; "cut" breaks the connection, "hang" never answers.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from agentfly.kube.access import Access, Login
from agentfly.kube.client import Kube


@dataclass
class Seen:
    method: str
    path: str
    query: dict
    headers: dict
    body: object


@dataclass
class ApiStub:
    answers: list = field(default_factory=list)
    default: object = (200, {})
    seen: list[Seen] = field(default_factory=list)
    at_once: int = 0
    most: int = 0
    takes_s: float = 0.0
    url: str = ""

    async def handle(self, request):
        text = await request.text()
        body = json.loads(text) if text else None
        self.seen.append(Seen(request.method, request.path, dict(request.query), dict(request.headers), body))
        answer = self.answers.pop(0) if self.answers else self.default
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(self.takes_s)
            if callable(answer):
                return await answer(request)
            if answer == "cut":
                request.transport.abort()
                return web.Response()
            if answer == "hang":
                await asyncio.sleep(3600)
            status, content, *headers = answer
            return web.json_response(content, status=status, headers=headers[0] if headers else None)
        finally:
            self.at_once -= 1

    def methods(self):
        return [each.method for each in self.seen]

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = site._server.sockets[0].getsockname()[:2]
            self.url = f"http://{host}:{port}"
            yield self
        finally:
            await runner.cleanup()


class StubLogin(Login):
    """Gives one token after the other, the last one for ever."""

    valid_s = 3600.0

    def __init__(self, url, tokens=("one",)):
        super().__init__()
        self.url = url
        self.tokens = list(tokens)
        self.reads = 0

    def read(self):
        self.reads += 1
        token = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        return Access(self.url, "home", f"Bearer {token}")


@asynccontextmanager
async def connected(stub, tokens=("one",)):
    async with stub.serving(), Kube("agentfly-test/1", StubLogin(stub.url, tokens)) as kube:
        yield kube


def status(code, reason, message="no", **details):
    return {"kind": "Status", "code": code, "reason": reason, "message": message, **details}
