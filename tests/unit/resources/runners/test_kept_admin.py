"""Section numbers are the guarantees of kept_admin.py. The daemon is a stand-in that counts connections."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agentfly.resources.runners.sandboxd.kept_admin import KeptAdmin
from agentfly.sandbox import SandboxUnreachable


@contextlib.asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[set[int]]:
    """The connections over which it was asked for a lease."""
    connections: set[int] = set()

    async def lease(request: web.Request) -> web.Response:
        connections.add(id(request.protocol))
        kept.append(request.protocol)
        return web.json_response({})

    kept: list[object] = []  # an id must not be used again
    app = web.Application()
    app.router.add_post("/lease", lease)
    server = web.AppRunner(app)
    await server.setup()
    await web.UnixSite(server, str(path)).start()
    try:
        yield connections
    finally:
        await server.cleanup()


async def ask(admin: KeptAdmin) -> None:
    await admin.open().lease("owner", 0, "token", 30)


# 1. One session in each loop.


async def test_all_requests_go_through_one_connection(tmp_path):
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", "token")
    async with daemon(tmp_path / "s") as connections:
        for _ in range(5):
            await ask(admin)
        assert len(connections) == 1
        await admin.close()


def test_another_loop_opens_its_own_and_leaves_nothing_of_the_first(tmp_path):
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", "token")

    async def use(last: bool) -> None:
        async with daemon(tmp_path / "s") as connections:
            await ask(admin)
            assert len(connections) == 1
            if last:
                await admin.close()

    asyncio.run(use(last=False))
    asyncio.run(use(last=True))
    gc.collect()  # what was not closed would warn here, which fails the test


# 2. Closing.


async def test_what_was_closed_stays_closed(tmp_path):
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", "token")
    async with daemon(tmp_path / "s") as connections:
        await ask(admin)
        for _ in range(2):
            await admin.close()
        with pytest.raises(SandboxUnreachable, match="was stopped"):
            await ask(admin)
        assert len(connections) == 1
