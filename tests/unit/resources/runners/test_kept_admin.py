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
async def daemon(path: Path) -> AsyncIterator[dict[int, list[str]]]:
    """The connections over which it was asked for a lease, and what was shown on each."""
    connections: dict[int, list[str]] = {}

    async def lease(request: web.Request) -> web.Response:
        connections.setdefault(id(request.protocol), []).append(request.headers["Authorization"])
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
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", lambda: "token")
    async with daemon(tmp_path / "s") as connections:
        for _ in range(5):
            await ask(admin)
        assert len(connections) == 1
        await admin.close()


def test_another_loop_opens_its_own_and_leaves_nothing_of_the_first(tmp_path):
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", lambda: "token")

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
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", lambda: "token")
    async with daemon(tmp_path / "s") as connections:
        await ask(admin)
        for _ in range(2):
            await admin.close()
        with pytest.raises(SandboxUnreachable, match="was stopped"):
            await ask(admin)
        assert len(connections) == 1


# 3. Rest.


async def test_at_rest_it_costs_nothing_until_the_next_request(tmp_path):
    admin = KeptAdmin(f"unix://{tmp_path / 's'}", lambda: "token")
    async with daemon(tmp_path / "s") as connections:
        await ask(admin)
        await admin.rest()
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("keep ")]
        await ask(admin)
        assert len(connections) == 2
        await admin.close()
