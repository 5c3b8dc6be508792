"""What the owner of a sandbox that outlives it can ask, against a daemon that is told what to answer."""

import json

import pytest
from aiohttp import web

from agentfly.sandbox import Holding, SandboxAdmin, SandboxError

HEALTH = {
    "state": "free",
    "incarnation": 2,
    "leases": 1,
    "owner": None,
    "expiresInSeconds": None,
    "idleSeconds": 0.5,
    "version": "1",
}


class Daemon:
    def __init__(self):
        self.bodies = []
        self.answer = (200, {})

    async def handle(self, request):
        self.bodies.append((request.method, request.path, await request.text()))
        status, body = self.answer
        return web.json_response(body, status=status)


@pytest.fixture
async def daemon():
    made = Daemon()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


async def test_note_travels_with_the_lease_and_only_where_there_is_one(daemon):
    async with SandboxAdmin(daemon.address, "admin") as sandbox:
        await sandbox.lease("o", 1, "t", 30, "a note")
        await sandbox.lease("o", 1, "t", 30)
    assert json.loads(daemon.bodies[0][2])["note"] == "a note"
    assert "note" not in json.loads(daemon.bodies[1][2])


async def test_holding_is_what_the_daemon_keeps_of_its_lease(daemon):
    async with SandboxAdmin(daemon.address, "admin") as sandbox:
        body = {"state": "leased", "incarnation": 3, "owner": "o", "attempt": 1}
        daemon.answer = (200, body | {"note": "n", "expiresInSeconds": 12.5})
        assert await sandbox.holding() == Holding("leased", 3, "n", 12.5)
        daemon.answer = (200, {"state": "free", "incarnation": 4, "note": "", "expiresInSeconds": None})
        assert await sandbox.holding() == Holding("free", 4, "", 0.0)
    assert daemon.bodies[0][:2] == ("GET", "/lease")


async def test_who_is_not_the_owner_is_refused(daemon):
    daemon.answer = (401, {"error": {"code": "Unauthorized", "message": "no"}})
    async with SandboxAdmin(daemon.address, "x") as sandbox:
        with pytest.raises(SandboxError) as caught:
            await sandbox.holding()
    assert caught.value.code == "Unauthorized"


async def test_boot_is_read_where_the_daemon_has_one(daemon):
    async with SandboxAdmin(daemon.address, "") as sandbox:
        daemon.answer = (200, HEALTH)
        assert (await sandbox.health()).boot == ""
        daemon.answer = (200, HEALTH | {"boot": "abc", "member": "m"})
        assert (await sandbox.health()).boot == "abc"


@pytest.mark.parametrize(
    ("answer", "incarnation"), [({"clean": True, "incarnation": 7}, 7), ({"clean": True}, None)]
)
async def test_reset_says_which_incarnation_comes_next_if_the_daemon_does(daemon, answer, incarnation):
    daemon.answer = (200, answer)
    async with SandboxAdmin(daemon.address, "admin") as sandbox:
        assert (await sandbox.reset()).incarnation == incarnation
