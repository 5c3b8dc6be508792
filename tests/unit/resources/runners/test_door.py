"""What a runner serves behind one port of its process, as in a cluster. Numbers are those of door.py (D), of
external/api.py (A), of external/gate.py (G), of instance/runner.py and instance/calls.py (C)."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agentfly.errors import AgentflyError
from agentfly.resources.errors import CallRaised, Infra, LeaseLost, StartFailed
from agentfly.resources.instance import InstanceClient
from agentfly.resources.runners.door import SharedDoor
from agentfly.resources.runners.external import api as external_api
from agentfly.resources.runners.external import gate as external_gate
from agentfly.resources.runners.external.api import ExternalAPIRunner
from agentfly.resources.runners.external.keys import KEY_MAX
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.spec import InProcessSpec
from tests.unit.resources.runners import games
from tests.unit.resources.runners.misbehaving_api import API, CHAT, KEY, OTHER, TOKEN, spec, status


@asynccontextmanager
async def door_at(port: int = 0) -> AsyncIterator[SharedDoor]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    door = SharedDoor(f"http://127.0.0.1:{port}")
    runner = web.AppRunner(door.app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield door
    finally:
        await runner.cleanup()


async def ask(address: str, path: str = "/chat/completions", token: str = TOKEN) -> tuple[int, dict, dict]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(address + path, json=CHAT, headers=headers) as answer,
    ):
        return answer.status, await answer.json(content_type=None), dict(answer.headers)


# D2, A1. One port, a path for each pool; the API knows nothing of it.


async def test_gateway_has_the_path_of_its_pool_and_the_api_sees_none_of_it(api: API) -> None:
    async with door_at() as door:
        runner = ExternalAPIRunner(door)
        member = await runner.start(spec(api), "judge-ab12-7")
        assert member.address == f"{door._url}/judge"
        await runner.lease(member, "owner", 0, TOKEN, 30.0)
        assert (await ask(member.address))[0] == 200
        assert api.seen[0].path == "/v1/chat/completions"
        assert api.keys == [KEY]
        code, body, _ = await ask(member.address, "/../../secret")
        assert (code, body["error"]["code"]) in ((400, "request"), (503, "Infra"))
        assert (await ask(member.address, ""))[0] == 400
        assert len(api.seen) == 1
        await runner.stop(member)


# D2, A5. The next process serves the same address, and knows the lease as soon as the engine does.


async def test_lease_is_good_in_the_next_process_at_the_same_address(api: API) -> None:
    async with door_at() as door:
        first = await ExternalAPIRunner(door).start(spec(api), "judge-ab12-7")
        await ExternalAPIRunner(door).stop(first)
        port = int(door._url.rpartition(":")[2])
        code, _, headers = await ask(first.address)
        assert (code, headers["Retry-After"]) == (503, "1")
    async with door_at(port) as door:
        runner = ExternalAPIRunner(door)
        member = await runner.start(spec(api), "judge-cd34-1")
        assert member.address == first.address
        code, body, headers = await ask(member.address)
        assert (code, body["error"]["code"], headers["Retry-After"]) == (503, "busy", "1")
        await runner.lease(member, "owner", 0, TOKEN, 30.0)
        assert (await ask(member.address))[0] == 200
        await runner.stop(member)


async def test_unknown_token_is_refused_for_good_once_all_leases_are_known(
    api: API, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_api, "GRACE_S", 0.0)
    async with door_at() as door:
        runner = ExternalAPIRunner(door)
        member = await runner.start(spec(api), "judge-ab12-7")
        code, body, _ = await ask(member.address)
        assert (code, body["error"]["code"]) == (401, "lease")
        await runner.stop(member)


async def test_stop_of_a_member_leaves_the_one_that_replaced_it(api: API) -> None:
    async with door_at() as door:
        runner = ExternalAPIRunner(door)
        old = await runner.start(spec(api), "judge-ab12-1")
        new = await runner.start(spec(api), "judge-ab12-2")
        await runner.stop(old)
        await runner.lease(new, "owner", 0, TOKEN, 30.0)
        assert (await ask(new.address))[0] == 200
        await runner.stop(new)


# G3. Secrets.


class Secrets:
    """What the API server has; ``read`` counts."""

    def __init__(self, **keys: str) -> None:
        self.keys = {name.replace("_", "/"): value for name, value in keys.items()}
        self.reads: list[str] = []

    async def read(self, name: str) -> str:
        self.reads.append(name)
        if name not in self.keys:
            raise AgentflyError(f"Secret {name}: does not exist")
        return self.keys[name]


@asynccontextmanager
async def leased(api: API, secrets: Secrets, *credentials: str) -> AsyncIterator[str]:
    async with door_at() as door:
        runner = ExternalAPIRunner(door, secrets.read)
        member = await runner.start(spec(api, *credentials), "judge-ab12-1")
        await runner.lease(member, "owner", 0, TOKEN, 30.0)
        yield member.address
        await runner.stop(member)


async def test_secret_is_read_once_while_its_key_works(api: API, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_gate, "REREAD_S", 0.0)
    monkeypatch.setattr(external_gate, "SECRET_S", 0.0)
    secrets = Secrets(judge_key=KEY + "\n")
    async with leased(api, secrets, "secret:judge/key") as address:
        for _ in range(5):
            assert (await ask(address))[0] == 200
    assert api.keys == [KEY] * 5
    assert secrets.reads == ["judge/key"]


async def test_replaced_secret_is_read_when_its_key_is_refused(
    api: API, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_gate, "REREAD_S", 0.0)
    secrets = Secrets(judge_key=KEY)
    async with leased(api, secrets, "secret:judge/key") as address:
        assert (await ask(address))[0] == 200
        secrets.keys["judge/key"] = OTHER
        api.script.append(status(401))
        assert (await ask(address))[0] == 200
    assert api.keys == [KEY, KEY, OTHER]
    assert secrets.reads == ["judge/key"] * 2


async def test_refused_secret_that_stays_as_it_is_is_read_seldom(
    api: API, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_gate, "REREAD_S", 0.0)
    secrets = Secrets(judge_key=KEY)
    api.default = status(401)
    async with leased(api, secrets, "secret:judge/key") as address:
        for _ in range(6):
            assert (await ask(address))[0] == 502
        assert secrets.reads == ["judge/key"] * 2
        monkeypatch.setattr(external_gate, "SECRET_S", 0.0)
        secrets.keys["judge/key"] = OTHER
        api.default = None
        assert (await ask(address))[0] == 200
    assert api.keys[-1] == OTHER


async def test_secret_that_is_missing_or_no_key_is_named_and_never_quoted(api: API) -> None:
    secrets = Secrets(judge_key="two words", judge_long="x" * (KEY_MAX + 1), judge_empty=" ")
    runner = ExternalAPIRunner(read_secret=secrets.read)
    wanted = spec(api, *(f"secret:judge/{name}" for name in ("key", "long", "empty", "none")))
    with pytest.raises(StartFailed) as error:
        await runner.start(wanted, "judge-ab12-1")
    assert "secret:judge/key: is not a key" in error.value.message
    assert "secret:judge/long: is not a key" in error.value.message
    assert "secret:judge/empty: is empty" in error.value.message
    assert "secret:judge/none: Secret judge/none: does not exist" in error.value.message
    assert "two words" not in error.value.render()
    with pytest.raises(StartFailed, match="there are no Secrets outside a cluster"):
        await ExternalAPIRunner().start(spec(api, "secret:judge/key"), "judge-ab12-1")


# C1, C2. Objects.


@asynccontextmanager
async def game(tmp_path: Path, name: str = "Counter") -> AsyncIterator[tuple[str, str]]:
    """A leased object behind a door: its address, and the token of its owner."""
    async with door_at() as door:
        runner = InProcessRunner(tmp_path / "r", door=door)
        wanted = InProcessSpec(entrypoint=f"{Path(games.__file__)}:{name}")
        member = await runner.start(wanted, "game-ab12-1")
        await runner.lease(member, "owner", 0, TOKEN, 30.0)
        try:
            yield member.address, member.admin_token
        finally:
            await runner.stop(member)
            runner.close()


async def call(client: InstanceClient, method: str, *args: object) -> object:
    try:
        return await client.call(method, *args)
    finally:
        await client.close()


async def test_object_is_called_from_another_machine(tmp_path: Path) -> None:
    async with game(tmp_path) as (address, _):
        assert address.startswith("http://127.0.0.1:")
        assert address.endswith("/game-ab12-1")
        first = await call(InstanceClient(address, TOKEN), "add", 2)
        assert await call(InstanceClient(address, TOKEN), "add", 3) == first + 3  # type: ignore[operator]
        with pytest.raises(CallRaised, match="is not a method"):
            await call(InstanceClient(address, TOKEN), "nothing")
        with pytest.raises(LeaseLost):
            await call(InstanceClient(address, "another token"), "add", 1)
    with pytest.raises(Infra):
        await call(InstanceClient(address, TOKEN), "add", 1)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset"), ("POST", "/lease"), ("GET", "/healthz"), ("GET", "/call")]
)
async def test_nothing_but_calls_comes_in_even_with_the_owners_token(
    tmp_path: Path, method: str, path: str
) -> None:
    async with game(tmp_path) as (address, admin), aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {admin}"}
        for where in (path, f"/call/..{path}", f"/call?{path}"):
            if method == "POST" and where.startswith("/call?"):
                continue  # a call like any other: refused by its token
            async with session.request(method, address + where, json={}, headers=headers) as answer:
                assert answer.status == 404
        assert await call(InstanceClient(address, TOKEN), "add", 1) is not None


async def test_caller_that_goes_away_does_not_stop_the_call(tmp_path: Path) -> None:
    async with game(tmp_path) as (address, _):
        client = InstanceClient(address, TOKEN)
        going = asyncio.create_task(client.call("hang"))
        await asyncio.sleep(0.5)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        await client.close()
        began = asyncio.get_running_loop().time()
        assert await call(InstanceClient(address, TOKEN), "add", 1) == 1
        assert asyncio.get_running_loop().time() - began > 0.5, "the first call was still on"
