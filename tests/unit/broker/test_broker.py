"""Broker and client over a real unix socket. Section numbers are those of server.py (S), client.py (C)."""

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import test_utils

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.broker.server import BrokerServer, make_app
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import (
    Infra,
    LeaseLost,
    PoolNotFound,
    ResourceError,
    Saturated,
    SpecMismatch,
    StartFailed,
    Timeout,
)
from agentfly.resources.lease import PoolStatus, Request
from agentfly.resources.spec import ContainerSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner

DEADLINE = 5.0

WORKER = """
import asyncio, sys
from agentfly.broker.client import BrokerClient

async def one(client, name):
    async with await client.acquire("shell", name, deadline=20):
        await asyncio.sleep(0.02)

async def main(address, name, mode):
    async with BrokerClient(address) as client:
        if mode == "hold":
            lease = await client.acquire("shell", name, deadline=20)
            print(lease.info.lease_id, flush=True)
            await asyncio.sleep(60)
        await asyncio.gather(*(one(client, f"{name}-{i}") for i in range(12)))
        print("done", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Rig:
    def __init__(self, engine: ResourceEngine, runner: FakeRunner, server: BrokerServer) -> None:
        self.engine, self.runner, self.server = engine, runner, server

    @property
    def shell(self) -> PoolStatus:
        return self.engine.pool_status()["shell"]

    async def until(self, what: str, count: int) -> None:
        await eventually(lambda: getattr(self.shell, what) == count)


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come true in 5 s")


@asynccontextmanager
async def broker(path: Path, *, maximum: int = 2, ttl: float = 30.0, pending: int = 64) -> AsyncIterator[Rig]:
    runner = FakeRunner(start_s=0.002)
    pool = PoolSpec(name="shell", resource=ContainerSpec(), max=maximum, lease_ttl_s=ttl, max_pending=pending)
    async with asyncio.timeout(40):
        async with (
            ResourceEngine([runner], [pool]) as engine,
            BrokerServer(engine, path / "broker.sock") as server,
        ):
            yield Rig(engine, runner, server)
    assert runner.faults == []
    assert runner.existing == set()


async def worker(rig: Rig, name: str, mode: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, rig.server.address, name, mode, stdout=asyncio.subprocess.PIPE
    )


# S1. An acquire is a long poll; a client that goes away while it waits leaves nothing.


async def test_acquire_waits_until_a_member_is_free(tmp_path):
    async with broker(tmp_path, maximum=1) as rig, BrokerClient(rig.server.address) as client:
        first = await client.acquire("shell", "a", deadline=DEADLINE)
        second = asyncio.create_task(client.acquire("shell", "b", deadline=DEADLINE))
        await rig.until("queued", 1)
        await first.release()
        lease = await second
        assert lease.info.member_id == first.info.member_id
        assert lease.info.incarnation == first.info.incarnation + 1
        assert lease.info.token != first.info.token


async def test_killed_connection_ends_the_wait(tmp_path):
    async with broker(tmp_path, maximum=1) as rig, BrokerClient(rig.server.address) as client:
        held = await client.acquire("shell", "a", deadline=DEADLINE)
        reader, writer = await asyncio.open_unix_connection(str(rig.server.path))
        body = json.dumps({"pool": "shell", "owner": "b", "deadline_s": 60}).encode()
        head = f"POST {wire.ACQUIRE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await rig.until("queued", 1)
        writer.transport.abort()
        await rig.until("queued", 0)
        await held.release()
        await rig.until("ready", 1)
        assert rig.shell.starts == 1
        del reader


async def test_cancelled_client_leaves_no_waiter_and_no_start(tmp_path):
    async with broker(tmp_path, maximum=1) as rig, BrokerClient(rig.server.address) as client:
        rig.runner.start_s = 30
        waiting = asyncio.create_task(client.acquire("shell", "a", deadline=60))
        await rig.until("starting", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await rig.until("starting", 0)
        await rig.until("stopping", 0)
        assert rig.shell.queued == 0
        assert rig.runner.existing == set()


async def test_cancelled_acquire_of_several_gives_back_what_came(tmp_path):
    async with broker(tmp_path, maximum=2) as rig, BrokerClient(rig.server.address) as client:
        held = await client.acquire("shell", "a", deadline=DEADLINE)
        wanted = [Request("shell", key="x"), Request("shell", key="y")]
        waiting = asyncio.create_task(client.acquire_many(wanted, "b", deadline=60))
        await rig.until("leased", 2)
        await rig.until("queued", 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await rig.until("ready", 1)
        assert (rig.shell.leased, rig.shell.queued) == (1, 0)
        await held.release()


async def test_asking_again_after_a_lost_answer_gives_the_same_lease(tmp_path):
    async with broker(tmp_path) as rig:
        async with BrokerClient(rig.server.address) as first, BrokerClient(rig.server.address) as second:
            one = await first.acquire("shell", "a", deadline=DEADLINE)
            two = await second.acquire("shell", "a", deadline=DEADLINE)
            assert two.info == one.info
        await rig.until("ready", 1)


async def test_broker_that_ends_is_infra_to_those_who_wait(tmp_path):
    runner = FakeRunner(start_s=30)
    async with ResourceEngine([runner], [PoolSpec(name="shell", resource=ContainerSpec())]) as engine:
        async with BrokerServer(engine, tmp_path / "b.sock") as server:
            client = BrokerClient(server.address)
            waiting = asyncio.create_task(client.acquire("shell", "a", deadline=60))
            await eventually(lambda: engine.pool_status()["shell"].queued == 1)
        with pytest.raises(Infra, match="got no answer"):
            await waiting
        assert engine.pool_status()["shell"].queued == 0
        assert not (tmp_path / "b.sock").exists()
        await client.close()
    assert runner.existing == set()


async def test_release_of_an_owner_ends_its_waiting_acquire(tmp_path):
    async with broker(tmp_path, maximum=1) as rig, BrokerClient(rig.server.address) as client:
        lease = await client.acquire("shell", "a", deadline=DEADLINE)
        waiting = asyncio.create_task(client.acquire("shell", "b", attempt=1, deadline=60))
        await rig.until("queued", 1)
        await client.release_owner("b", attempt=0)
        assert rig.shell.queued == 1
        await client.release_owner("b", attempt=1)
        with pytest.raises(LeaseLost, match="owner b: released all"):
            await waiting
        await client.release_owner("a")
        assert lease.lost
        await rig.until("ready", 1)


# S2, S3. Leases end at their TTL when the client no longer says that it lives.


async def test_leases_of_a_killed_process_come_back_clean(tmp_path):
    async with broker(tmp_path, maximum=1, ttl=0.6) as rig:
        process = await worker(rig, "a", "hold")
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 20)
        await asyncio.sleep(1.0)
        assert rig.shell.leased == 1, "its heartbeats kept it beyond the TTL"
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), DEADLINE)
        await rig.until("ready", 1)
        assert rig.shell.resets == 1
        async with BrokerClient(rig.server.address) as client:
            lease = await client.acquire("shell", "b", deadline=DEADLINE)
            assert lease.info.incarnation == 2


async def test_two_processes_never_exceed_max_together(tmp_path):
    async with broker(tmp_path, maximum=3) as rig:
        processes = [await worker(rig, name, "work") for name in ("a", "b")]
        for process in processes:
            output, _ = await asyncio.wait_for(process.communicate(), 30)
            assert output == b"done\n"
        assert rig.runner.peak == 3
        assert rig.shell.queued == 0
        await rig.until("ready", 3)


# S4. The socket.


async def test_socket_is_open_to_its_user_alone(tmp_path):
    async with broker(tmp_path) as rig:
        assert stat.S_IMODE(rig.server.path.stat().st_mode) == 0o600


async def test_second_broker_at_one_socket_is_refused(tmp_path):
    async with broker(tmp_path) as rig:
        with pytest.raises(ResourceError, match="another broker"):
            await BrokerServer(rig.engine, rig.server.path).__aenter__()


async def test_socket_of_a_killed_broker_is_replaced(tmp_path):
    (tmp_path / "broker.sock").touch()
    async with broker(tmp_path) as rig, BrokerClient(rig.server.address) as client:
        assert set(await client.status()) == {"shell"}


# C1. Errors keep their type and their fields; status and leases keep theirs.

ERRORS = [
    Timeout("pool shell: gave no member in 1 s", hints=("raise max",)),
    Saturated("pool shell: 4 waiters", retry_after=2.5, hints=("raise max", "wait")),
    LeaseLost("lease l: lost", incarnation=7),
    StartFailed("pool shell: no member could be started", reason="image is broken"),
    Infra("broker: gone"),
    SpecMismatch("owner a: key k stands for pool x, not for pool y"),
    PoolNotFound("pool x: does not exist"),
    ResourceError("pool x: scope global"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_round_trips_whole(error):
    status, body = wire.error_to_wire(error)
    again = wire.error_from_wire(json.loads(json.dumps(body)))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert status == wire.STATUS_OF[type(error)]


def test_foreign_answer_is_infra():
    assert isinstance(wire.error_from_wire(["<html>"]), Infra)
    assert isinstance(wire.error_from_wire({"error": {"code": "SystemExit"}}), Infra)


async def test_errors_of_the_engine_reach_the_client_typed(tmp_path):
    async with broker(tmp_path, maximum=1, pending=1) as rig, BrokerClient(rig.server.address) as client:
        with pytest.raises(PoolNotFound) as missing:
            await client.acquire("nope", "a", deadline=1)
        assert missing.value.hints == ("pools that do: shell",)
        held = await client.acquire("shell", "a", key="k", deadline=DEADLINE)
        with pytest.raises(SpecMismatch, match="spec-"):
            await client.acquire(ContainerSpec(memory_mb=1), "a", key="k", deadline=1)
        with pytest.raises(Timeout, match="1 of 1 leased"):
            await client.acquire("shell", "b", deadline=0.05)
        waiting = asyncio.create_task(client.acquire("shell", "c", deadline=DEADLINE))
        await rig.until("queued", 1)
        with pytest.raises(Saturated) as full:
            await client.acquire("shell", "d", deadline=DEADLINE)
        assert full.value.retry_after >= 1.0
        await held.release()
        rig.runner.kill((await waiting).info.member_id)
        assert await client.heartbeat([(await waiting).info.lease_id]) == {
            (await waiting).info.lease_id: False
        }
        with pytest.raises(LeaseLost) as lost:
            await client.acquire("shell", "c", deadline=1)
        assert lost.value.incarnation == 2


async def test_defect_of_the_broker_is_not_taken_for_one_that_is_gone(tmp_path, monkeypatch, caplog):
    async with broker(tmp_path) as rig, BrokerClient(rig.server.address) as client:
        monkeypatch.setattr(rig.engine, "leases", lambda: {}["l1"])
        with pytest.raises(Infra, match=r"^broker: /leases failed: KeyError: 'l1'$"):
            await client.leases()
        assert "/leases failed" in caplog.text
        with pytest.raises(Infra, match="not an answer: 404: Not Found"):
            await client._get("/nowhere")


async def test_malformed_body_names_the_field(tmp_path):
    async with broker(tmp_path) as rig:
        connector = aiohttp.UnixConnector(str(rig.server.path))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"http://broker{wire.RELEASE}", json={"lease": 1}) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"]["message"] == "/v1/release lease_id: Field required"
        with pytest.raises(ResourceError, match="not both"):
            wire.Wanted().request()


async def test_saturated_says_when_to_come_back_in_a_header_too(tmp_path):
    async with broker(tmp_path, maximum=1, pending=0) as rig:
        connector = aiohttp.UnixConnector(str(rig.server.path))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"http://broker{wire.ACQUIRE}", json={"pool": "shell", "owner": "a"}) as response,
        ):
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["retry_after"] == 1.0


async def test_client_works_over_tcp_as_well(tmp_path):
    async with broker(tmp_path) as rig:
        server = test_utils.TestServer(make_app(rig.engine))
        await server.start_server()
        async with BrokerClient(f"http://127.0.0.1:{server.port}") as client:
            async with await client.acquire("shell", "a", deadline=DEADLINE) as lease:
                assert lease.info.pool == "shell"
            with pytest.raises(LeaseLost, match="is over"):
                await client.reset(lease.info.lease_id)
        await server.close()


async def test_client_offers_all_that_the_engine_does(tmp_path):
    async with broker(tmp_path, maximum=3) as rig, BrokerClient(rig.server.address) as client:
        first, second = await client.acquire_many(
            [Request("shell", key="x"), Request(ContainerSpec(), key="w")], "a", deadline=DEADLINE
        )
        assert (first.info.key, second.info.key) == ("x", "w")
        assert await client.acquire("shell", "a", key="x", deadline=1) is first
        before = first.info
        await first.reset()
        assert first.info.lease_id == before.lease_id
        assert (first.info.incarnation, first.info.token != before.token) == (2, True)
        assert await client.heartbeat([first.info.lease_id, "unknown"]) == {
            first.info.lease_id: True,
            "unknown": False,
        }
        assert (await client.status())["shell"] == rig.shell
        await client.release(second.info.lease_id, dirty=True)
        await client.release_owner("a")
        await rig.until("ready", 1)
        assert rig.shell.leased == 0


# C2. A broker that cannot be reached.


async def test_unreachable_broker_is_infra_with_a_hint(tmp_path):
    async with BrokerClient(f"unix://{tmp_path}/none.sock") as client:
        with pytest.raises(Infra, match=r"none.sock: /v1/acquire got no answer"):
            await client.acquire("shell", "a", deadline=1)


async def test_request_without_an_answer_ends_at_its_deadline(tmp_path):
    path = tmp_path / "mute.sock"

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        hung_up.set()

    hung_up = asyncio.Event()
    server = await asyncio.start_unix_server(mute, path)
    async with server, BrokerClient(f"unix://{path}") as client:
        with pytest.raises(Infra, match="TimeoutError"):
            await client._post(wire.RELEASE, wire.ReleaseBody(lease_id="l"), within=0.1)
        await asyncio.wait_for(hung_up.wait(), DEADLINE)


# C3. One request renews all.


async def test_heartbeats_of_all_leases_travel_together(tmp_path):
    async with broker(tmp_path, maximum=5, ttl=1.5) as rig, BrokerClient(rig.server.address) as client:
        beats: list[int] = []
        heartbeat, clock = rig.engine.heartbeat, asyncio.get_running_loop().time

        async def counted(lease_ids):
            beats.append(len(lease_ids))
            return await heartbeat(lease_ids)

        rig.engine.heartbeat = counted  # type: ignore[method-assign]
        began = clock()
        leases = [await client.acquire("shell", f"o{i}", deadline=DEADLINE) for i in range(5)]
        async with asyncio.timeout(DEADLINE):
            while beats.count(5) < 2:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
        assert len(beats) <= 1 + (clock() - began) / 0.5  # three within a TTL
        assert not any(lease.lost for lease in leases)


async def test_heartbeat_without_an_answer_is_followed_by_another_in_time(tmp_path):
    async with broker(tmp_path, ttl=8.0) as rig, BrokerClient(rig.server.address) as client:
        heartbeat, hung = rig.engine.heartbeat, asyncio.Event()

        async def swallowed_once(lease_ids):
            rig.engine.heartbeat = heartbeat
            hung.set()
            await asyncio.Event().wait()

        lease = await client.acquire("shell", "a", deadline=DEADLINE)
        rig.engine.heartbeat = swallowed_once  # type: ignore[method-assign]
        await asyncio.wait_for(hung.wait(), DEADLINE)
        await asyncio.sleep(7.0)
        assert (lease.lost, rig.shell.leased) == (False, 1)


async def test_lost_lease_is_marked_at_the_next_heartbeat(tmp_path):
    async with broker(tmp_path, ttl=0.3) as rig, BrokerClient(rig.server.address) as client:
        lease = await client.acquire("shell", "a", deadline=DEADLINE)
        rig.runner.kill(lease.info.member_id)
        await eventually(lambda: lease.lost)
        with pytest.raises(LeaseLost):
            _ = lease.sandbox
        await lease.release()


# C4, C5. Releases.


async def test_cancelled_release_is_finished_all_the_same(tmp_path):
    async with broker(tmp_path) as rig, BrokerClient(rig.server.address) as client:
        lease = await client.acquire("shell", "a", deadline=DEADLINE)
        release = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        release.cancel()
        with pytest.raises(asyncio.CancelledError):
            await release
        await rig.until("ready", 1)


async def test_closing_the_client_releases_what_it_holds(tmp_path):
    async with broker(tmp_path) as rig:
        async with BrokerClient(rig.server.address) as client:
            await client.acquire("shell", "a", deadline=DEADLINE)
            await client.acquire("shell", "b", deadline=DEADLINE)
        await rig.until("ready", 2)


async def test_cancelled_close_releases_and_hangs_up_all_the_same(tmp_path):
    async with broker(tmp_path) as rig:
        client = BrokerClient(rig.server.address)
        await client.acquire("shell", "a", deadline=DEADLINE)
        session = client._session
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await rig.until("ready", 1)
        assert session is not None
        assert session.closed


async def test_release_survives_a_broker_that_is_gone(tmp_path):
    async with broker(tmp_path) as rig:
        client = BrokerClient(rig.server.address)
        lease = await client.acquire("shell", "a", deadline=DEADLINE)
    await lease.release()
    await client.close()
