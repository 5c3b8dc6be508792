"""Broker and client over TCP. Numbers are those of server.py (S), access.py (A), client.py (C)."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from agentfly.broker import access, server, wire
from agentfly.broker.access import HEADER, TOKEN_FILE, TokenFile
from agentfly.broker.client import BrokerClient
from agentfly.broker.server import Front, listen_tcp, make_app, serving
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import Infra, ResourceError, StartFailed
from agentfly.resources.lease import Request
from agentfly.resources.spec import ContainerSpec, InProcessSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner

DEADLINE = 10.0
TOKEN = "open-sesame"


def set_ready() -> asyncio.Event:
    ready = asyncio.Event()
    ready.set()
    return ready


def engine_of(runner: FakeRunner, ttl: float = 30.0) -> ResourceEngine:
    return ResourceEngine(
        [runner], [PoolSpec(name="shell", resource=ContainerSpec(), max=2, lease_ttl_s=ttl)]
    )


@asynccontextmanager
async def up(engine: ResourceEngine, port: int = 0, front: Front | None = None) -> AsyncIterator[str]:
    """The broker of this engine at a port of the loopback; its address."""
    listener = listen_tcp("127.0.0.1", port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    front = front or Front(lambda token: token == TOKEN, set_ready())
    async with serving(make_app(engine, front), listener):
        yield address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def client_of(address: str) -> BrokerClient:
    return BrokerClient(address, token=TOKEN)


async def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, json={}) as response,
    ):
        return response.status, await response.json()


# S4. Every request needs the token, but for /healthz.


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", wire.POOLS), ("GET", wire.LEASES), ("GET", wire.METRICS), ("GET", "/v1/nothing")]
    + [("POST", path) for path in (wire.ACQUIRE, wire.RELEASE, wire.RELEASE_OWNER, wire.HEARTBEAT)]
    + [("POST", path) for path in (wire.ACQUIRE_MANY, wire.DEMAND, wire.RESET)],
)
async def test_nothing_is_done_without_the_token(method, path):
    async with engine_of(FakeRunner()) as engine, up(engine) as address:
        for headers, what in (({}, "is missing"), ({HEADER: "open"}, "is not the broker's")):
            status, body = await ask(method, address + path, headers)
            assert (status, body["error"]["code"]) == (401, "Unauthorized")
            assert body["error"]["message"] == f"{HEADER}: {what}"
            assert TOKEN_FILE in body["error"]["hints"][0]
        assert engine.leases() == []


async def test_monitors_bring_the_token_as_a_bearer():
    async with engine_of(FakeRunner()) as engine, up(engine) as address, aiohttp.ClientSession() as session:
        for given, code in ((TOKEN, 200), ("open", 401)):
            headers = {"Authorization": f"Bearer {given}"}
            async with session.get(address + wire.METRICS, headers=headers) as answer:
                assert answer.status == code


async def test_spec_is_refused_so_that_no_client_says_what_the_broker_runs():
    async with engine_of(FakeRunner()) as engine, up(engine) as address, client_of(address) as client:
        for spec in (ContainerSpec(), InProcessSpec(entrypoint="os:system", kwargs={"command": "id"})):
            with pytest.raises(ResourceError, match="a spec is not served"):
                await client.acquire(spec, "a", deadline=DEADLINE)
            with pytest.raises(ResourceError, match="a spec is not served"):
                await client.acquire_many([Request("shell"), Request(spec)], "a", deadline=DEADLINE)
        assert set(engine.pool_status()) == {"shell"}


async def test_health_needs_no_token_and_tells_of_no_pool():
    ready = asyncio.Event()
    front = Front(lambda token: False, ready)
    async with engine_of(FakeRunner()) as engine, up(engine, front=front) as address:
        assert await ask("GET", address + wire.HEALTH, {}) == (200, {"live": True, "ready": False})
        assert (await ask("GET", address + wire.HEALTH + "?ready", {}))[0] == 503
        ready.set()
        assert await ask("GET", address + wire.HEALTH + "?ready", {}) == (200, {"live": True, "ready": True})


async def test_client_without_the_token_is_told_at_once_and_typed():
    async with (
        engine_of(FakeRunner()) as engine,
        up(engine) as address,
        BrokerClient(address, token="open") as client,
    ):
        with pytest.raises(wire.Unauthorized, match="is not the broker's") as refused:
            await client.acquire("shell", "a", deadline=DEADLINE)
        assert refused.value.hints
        with pytest.raises(wire.Unauthorized):
            await client.status()


async def test_port_that_is_taken_is_a_clear_error():
    with listen_tcp("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ResourceError, match=r"^listen: 127.0.0.1:\d+: Address already in use$"):
            listen_tcp("127.0.0.1", taken.getsockname()[1])


# S7. A broker that is not ready.


async def test_requests_wait_until_the_broker_is_ready():
    ready = asyncio.Event()
    front = Front(lambda token: token == TOKEN, ready)
    async with (
        engine_of(FakeRunner()) as engine,
        up(engine, front=front) as address,
        client_of(address) as client,
    ):
        waiting = asyncio.create_task(client.acquire("shell", "a", deadline=DEADLINE))
        beating = asyncio.create_task(client.heartbeat(["l"]))
        await asyncio.sleep(0.2)
        assert engine.pool_status()["shell"].queued == 0
        assert not waiting.done()
        assert not beating.done()
        ready.set()
        assert (await waiting).info.pool == "shell"
        assert await beating == {"l": False}


async def test_client_asks_a_starting_broker_again(monkeypatch):
    monkeypatch.setattr(server, "READY_S", 0.05)
    ready = asyncio.Event()
    front = Front(lambda token: token == TOKEN, ready)
    async with engine_of(FakeRunner()) as engine, up(engine, front=front) as address:
        status, body = await ask("GET", address + wire.POOLS, {HEADER: TOKEN})
        assert (status, body["error"]["code"]) == (503, "NotReady")
        async with client_of(address) as client:
            with pytest.raises(Infra, match="is starting"):
                await client.acquire("shell", "a", deadline=0.3)
            waiting = asyncio.create_task(client.acquire("shell", "a", deadline=DEADLINE))
            await asyncio.sleep(0.3)
            ready.set()
            assert (await waiting).info.pool == "shell"


# S5. Pools that cannot be served are shown with what is wrong with them.


async def test_problems_stand_beside_the_counts():
    problems = {"shell": ["capacity: is wrong"], "other": ["type: is wrong", "more"]}
    front = Front(lambda token: token == TOKEN, set_ready(), lambda: problems)
    async with engine_of(FakeRunner()) as engine, up(engine, front=front) as address:
        _, pools = await ask("GET", address + wire.POOLS, {HEADER: TOKEN})
        assert (pools["shell"]["max"], pools["shell"]["problems"]) == (2, ["capacity: is wrong"])
        assert (pools["other"]["max"], pools["other"]["problems"]) == (0, ["type: is wrong", "more"])
        assert (pools["other"]["reason"], pools["other"]["message"]) == ("InvalidSpec", "type: is wrong")
        async with client_of(address) as client:
            assert (await client.status())["other"].reason == "InvalidSpec"


# A1-A4. Tokens in files.


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(access, "LOOK_S", 0.0)
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


def test_replaced_token_opens_and_the_one_before_for_a_while(file, monkeypatch):
    token = TokenFile(file)
    assert token.admits(TOKEN)
    assert not any(token.admits(wrong) for wrong in ("", "open", TOKEN + "x", "\udcff"))
    file.write_text("second")
    assert token.admits("second")
    assert token.admits(TOKEN)
    monkeypatch.setattr(access.time, "monotonic", lambda: 1e9)
    assert token.admits("second")
    assert not token.admits(TOKEN)


def test_token_that_was_replaced_twice_does_not_come_back(file):
    token = TokenFile(file)
    for text in ("second", "third"):
        file.write_text(text)
        assert token.renewed()
    assert [token.admits(each) for each in ("third", "second", TOKEN)] == [True, True, False]


def test_file_is_looked_at_once_a_second_at_most(file, monkeypatch):
    monkeypatch.setattr(access, "LOOK_S", 1.0)
    now = 100.0
    monkeypatch.setattr(access.time, "monotonic", lambda: now)
    token = TokenFile(file)
    file.write_text("second")
    assert not token.admits("second")
    now = 101.0
    assert token.admits("second")


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"x" * 5000])
def test_file_that_breaks_leaves_the_token_and_is_refused_at_first(file, content):
    token = TokenFile(file)
    file.write_bytes(content)
    assert token.admits(TOKEN)
    with pytest.raises(ResourceError, match=r"^broker token: .*/token: ") as refused:
        TokenFile(file)
    assert "open-sesame" not in refused.value.render()
    file.unlink()
    assert token.admits(TOKEN)
    with pytest.raises(ResourceError, match="No such file"):
        TokenFile(file)


# C7. A refused token is read again.


async def test_client_follows_a_replaced_token(file, monkeypatch):
    monkeypatch.setenv(TOKEN_FILE, str(file))
    valid = {TOKEN}
    front = Front(lambda token: token in valid, set_ready())
    async with (
        engine_of(FakeRunner()) as engine,
        up(engine, front=front) as address,
        BrokerClient(address) as client,
    ):
        assert set(await client.status()) == {"shell"}
        file.write_text("second")
        valid = {"second"}
        assert (await client.acquire("shell", "a", deadline=DEADLINE)).info.pool == "shell"
        valid = {"third"}
        with pytest.raises(wire.Unauthorized):
            await client.status()


async def test_token_file_is_for_brokers_over_tcp(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "none"))
    await BrokerClient("unix:///nowhere").close()
    with pytest.raises(ResourceError, match="broker token"):
        BrokerClient("http://127.0.0.1:1")


# C2. A broker that goes away and comes back.


async def test_acquire_outlasts_a_broker_that_is_not_there_yet():
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        waiting = asyncio.create_task(client.acquire("shell", "a", deadline=DEADLINE))
        await asyncio.sleep(0.5)
        async with engine_of(FakeRunner()) as engine, up(engine, port):
            assert (await waiting).info.pool == "shell"
            await client.close()


async def test_acquire_that_waits_outlasts_a_restart():
    port = free_port()
    runner = FakeRunner(start_s=60)
    async with client_of(f"http://127.0.0.1:{port}") as client:
        async with engine_of(runner) as engine:
            async with up(engine, port):
                waiting = asyncio.create_task(client.acquire("shell", "a", deadline=DEADLINE))
                while engine.pool_status()["shell"].queued == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            runner.start_s = 0.0
        async with engine_of(FakeRunner()) as engine, up(engine, port):
            assert (await waiting).info.pool == "shell"
            await client.close()


async def test_lease_outlives_a_broker_that_is_away_for_less_than_its_ttl():
    port = free_port()
    async with (
        engine_of(FakeRunner(), ttl=2.0) as engine,
        client_of(f"http://127.0.0.1:{port}") as client,
    ):
        async with up(engine, port):
            lease = await client.acquire("shell", "a", deadline=DEADLINE)
        await asyncio.sleep(1.3)
        async with up(engine, port):
            await asyncio.sleep(1.5)
            assert not lease.lost
            assert [held.lease_id for held in engine.leases()] == [lease.info.lease_id]
            await client.close()


async def test_release_reaches_a_broker_that_comes_back():
    port = free_port()
    async with engine_of(FakeRunner()) as engine, client_of(f"http://127.0.0.1:{port}") as client:
        async with up(engine, port):
            lease = await client.acquire("shell", "a", deadline=DEADLINE)
        release = asyncio.create_task(lease.release())
        await asyncio.sleep(0.5)
        assert len(engine.leases()) == 1
        async with up(engine, port):
            await release
            assert engine.leases() == []


async def test_deadline_bounds_all_tries_together(caplog):
    caplog.set_level(logging.WARNING, "agentfly.broker.client")
    loop = asyncio.get_running_loop()
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        began = loop.time()
        with pytest.raises(Infra, match="/v1/acquire got no answer: Cannot connect"):
            await client.acquire("shell", "a", deadline=0.7)
        assert loop.time() - began < 2.0
        assert "comes again" in caplog.text


async def test_each_try_has_what_is_left_of_the_deadline():
    told: list[float] = []

    async def acquire(request: web.Request) -> web.Response:
        told.append((await request.json())["deadline_s"])
        return web.Response(status=503, text="upstream connect error")

    app = web.Application()
    app.router.add_post(wire.ACQUIRE, acquire)
    listener = listen_tcp("127.0.0.1", 0)
    async with serving(app, listener), client_of(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        with pytest.raises(Infra, match="upstream connect error"):
            await client.acquire("shell", "a", deadline=1.0)
    assert told[0] == pytest.approx(1.0, abs=0.05)
    assert len(told) > 2
    assert told == sorted(told, reverse=True)
    assert told[-1] < told[0] - 0.1


async def test_what_people_ask_for_is_not_repeated():
    loop = asyncio.get_running_loop()
    async with client_of(f"http://127.0.0.1:{free_port()}") as client:
        began = loop.time()
        with pytest.raises(Infra, match="/pools got no answer"):
            await client.status()
        assert loop.time() - began < 1.0


async def test_broker_on_a_socket_is_not_waited_for(tmp_path):
    loop = asyncio.get_running_loop()
    async with BrokerClient(f"unix://{tmp_path}/none") as client:
        began = loop.time()
        with pytest.raises(Infra):
            await client.acquire("shell", "a", deadline=30)
        assert loop.time() - began < 1.0


async def test_failed_start_is_final_though_its_status_is_that_of_a_proxy():
    runner = FakeRunner()
    runner.fail_starts = range(100)
    async with engine_of(runner) as engine, up(engine) as address, client_of(address) as client:
        with pytest.raises(StartFailed, match="image is broken"):
            await client.acquire("shell", "a", deadline=DEADLINE)


async def test_address_that_is_none_is_an_error_at_once():
    async with BrokerClient("http://", token=TOKEN) as client:
        with pytest.raises(Infra, match="is no address"):
            await client.acquire("shell", "a", deadline=DEADLINE)


# C8. A broker whose machine is gone.


async def test_connections_probe_the_other_side():
    async with engine_of(FakeRunner()) as engine, up(engine) as address, client_of(address) as client:
        await client.status()
        session = client._session
        assert session is not None
        pooled = next(iter(session.connector._conns.values()))  # type: ignore[union-attr]
        made = pooled[0][0].transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        found = [
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
        assert found[0] + found[1] * found[2] <= 60
