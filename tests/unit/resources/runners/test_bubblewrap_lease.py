"""What the engine is told of a daemon's refusal. The daemon is a stand-in; real ones: tests/local."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agentfly.resources.errors import Infra, LeaseLost, ResourceError
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.kept_admin import KeptAdmin
from agentfly.resources.runners.sandboxd.runner import Sandbox
from agentfly.resources.spec import ContainerSpec


class Started(Sandbox):
    """A sandbox of which only the daemon matters."""

    def __init__(self, admin: KeptAdmin) -> None:
        self.admin = admin

    async def launch(self, config: bytes) -> None: ...

    async def dies_within(self, seconds: float) -> bool:
        return False

    def last_words(self) -> str:
        return ""

    def residue(self, declared: bool) -> str | None: ...

    async def remove(self) -> None: ...


@pytest.fixture
async def refusing(tmp_path: Path) -> AsyncIterator[Callable[[int, str], Member]]:
    """A member whose daemon answers every lease with this status and code."""
    refusal = {"status": 200, "code": ""}

    async def lease(request: web.Request) -> web.Response:
        error = {"code": refusal["code"], "message": "refused"}
        return web.json_response({"error": error}, status=int(refusal["status"]))

    address = f"unix://{tmp_path / 's'}"
    admin = KeptAdmin(address, lambda: "token")
    app = web.Application()
    app.router.add_post("/lease", lease)
    server = web.AppRunner(app)
    await server.setup()
    await web.UnixSite(server, str(tmp_path / "s")).start()

    def member(status: int, code: str) -> Member:
        refusal.update(status=status, code=code)
        return Member("m1", ContainerSpec(), 3, address, handle=Started(admin))

    yield member
    await admin.close()
    await server.cleanup()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (409, "Busy", LeaseLost),
        (409, "Dirty", LeaseLost),
        (410, "LeaseLost", LeaseLost),
        (500, "Internal", Infra),
        (400, "BadRequest", Infra),
        (401, "Unauthorized", Infra),
        (504, "Timeout", Infra),
        (502, "Unknown", Infra),
    ],
)
async def test_only_a_daemon_that_has_no_such_lease_loses_it(
    refusing: Callable[[int, str], Member], tmp_path: Path, status: int, code: str, error: type[ResourceError]
) -> None:
    runner = BubblewrapRunner(tmp_path / "run", Path("/sandboxd"), Path("/bwrap"))
    with pytest.raises(ResourceError, match=rf"member m1: .*refused \({status} {code}\)") as refused:
        await runner.lease(refusing(status, code), "owner", 0, "token", 30)
    assert type(refused.value) is error
    if isinstance(refused.value, LeaseLost):
        assert refused.value.incarnation == 3
