"""What the bytes say that the API server answers with.

Guarantees:
1. A large answer is parsed without the garbage collector, which would walk all that was parsed so far, again
   and again.
2. An event of a watch is given as soon as its line is whole, however the bytes are cut.
3. An event of the kind ERROR is raised as what it means; a line that is none ends the watch.
"""

import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from agentfly.kube.errors import KubeError, Unreachable, refused

Obj = dict[str, Any]
"""An object as the API server has it in JSON."""

_LARGE_BYTES = 1 << 18


def parsed(content: bytes) -> Obj:
    """The body of an answer.

    Raises:
        KubeError: it is no JSON.
    """
    paused = len(content) > _LARGE_BYTES and gc.isenabled()
    if paused:
        gc.disable()
    try:
        body: Obj = json.loads(content) if content else {}
    except ValueError as error:
        raise KubeError(f"kubernetes: an answer that is no JSON: {error}") from error
    finally:
        if paused:
            gc.enable()
    return body


async def events(content: aiohttp.StreamReader, request: str) -> AsyncIterator[Obj]:
    """The events of an answer to ``request``.

    Raises:
        Gone, KubeError: the server says so in an event. ``Unreachable``: what came is no event.
    """
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield _event(line, request)


def _event(line: bytes, request: str) -> Obj:
    try:
        event: Obj = json.loads(line)
    except ValueError as error:
        raise Unreachable(f"kubernetes: {request} ended: a line that is no JSON: {error}") from error
    if event["type"] == "ERROR":
        status = event["object"]
        raise refused(request, int(status.get("code") or 500), json.dumps(status).encode())
    return event
