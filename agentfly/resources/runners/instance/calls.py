"""Calls of holders on other machines: from a door to the socket of an instance.

Guarantees:
1. ``POST /call`` with the holder's own token is all that passes. What the owner may do stays at the socket.
2. A caller that goes away does not stop the call: the next one waits for its end.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from agentfly.resources.runners.door import Door

CALL = "/call"


@asynccontextmanager
async def calls_through(door: Door, name: str, socket: Path) -> AsyncIterator[str]:
    """Let calls in under this name; the address of the instance at the door."""
    timeout = aiohttp.ClientTimeout(total=None)  # the instance has its own deadline
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def serve(request: web.Request) -> web.StreamResponse:
            if request.method != "POST" or request.path != opened.prefix + CALL:
                raise web.HTTPNotFound
            headers = {"Authorization": request.headers.get("Authorization", "")}
            body = await request.read()
            try:
                async with session.post(f"http://instance{CALL}", data=body, headers=headers) as answer:
                    content, kind = await answer.read(), answer.content_type
                    return web.Response(status=answer.status, body=content, content_type=kind)
            except (aiohttp.ClientError, OSError) as error:
                body_of = {"code": "Infra", "message": f"instance: {error}", "hints": []}
                return web.json_response(body_of, status=504)

        opened = await door.open(name, serve)
        try:
            yield opened.address
        finally:
            await opened.close()
