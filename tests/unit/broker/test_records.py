"""Leases that their holders keep, over a restart of the broker. Numbers are those of records.py (R), of
server.py (S) and client.py (C)."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.broker.records import Records
from agentfly.broker.server import Front
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.lease import LeaseInfo, Request
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec
from tests.unit.broker.test_tcp import DEADLINE, TOKEN, ask, client_of, free_port, set_ready, up
from tests.unit.resources.engines import recovered
from tests.unit.resources.harness import FakeRunner

KEY, OTHER = b"k" * 32, b"o" * 32
MODEL = ModelServiceSpec(model="m", max_model_len=8)
JUDGE = PoolSpec(name="judge", resource=MODEL, shared=True, lease_ttl_s=3.0)
INFO = LeaseInfo(
    lease_id="l1", pool="judge", owner="a", key="k", share="job", image="", member_id="judge-ab12-1",
    incarnation=2, kind="model-service", address="http://10.0.0.1:8000", token="t", ttl_s=30.0,
)  # fmt: skip


# R1, R2. What a record is, and what is none.


def test_record_says_what_it_said() -> None:
    text = Records(KEY).write(INFO, attempt=3)
    assert text is not None
    record = Records(KEY).read(text)
    assert record is not None
    assert (record.member_id, record.incarnation) == ("judge-ab12-1", 2)
    kept = record.note.model_dump()
    assert kept == {"attempt": 3} | {name: getattr(INFO, name) for name in kept if name != "attempt"}


def test_nobody_without_the_key_writes_or_changes_a_record() -> None:
    text = Records(KEY).write(INFO, 0)
    assert text is not None
    assert Records(OTHER).read(text) is None
    content, _, mac = text.partition(".")
    said = json.loads(base64.urlsafe_b64decode(content + "=="))
    said["note"]["owner"] = "somebody else"
    forged = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    wrong = [f"{forged}.{mac}", content, f"{content}.", f"{content}.{mac[:-2]}", "", ".", "x.y", "é.é", "{}"]
    assert [Records(KEY).read(each) for each in wrong] == [None] * len(wrong)


def test_broker_takes_none_of_its_own() -> None:
    records = Records(KEY)
    text = records.write(INFO, 0)
    assert text is not None
    assert records.read(text) is None


@pytest.mark.parametrize("kind", ["container", "in-process"])
def test_members_that_keep_leases_or_lose_them_have_no_records(kind: str) -> None:
    assert Records(KEY).write(INFO.model_copy(update={"kind": kind}), 0) is None


# S8, C8. A restart.


def front(key: bytes = KEY) -> Front:
    return Front(lambda token: token == TOKEN, set_ready(), records=Records(key))


@asynccontextmanager
async def next_broker(runner: FakeRunner, port: int, key: bytes = KEY) -> AsyncIterator[ResourceEngine]:
    engine = await recovered(runner, JUDGE)
    async with up(engine, port, front(key)):
        yield engine
    await engine.detach()


@asynccontextmanager
async def held(runner: FakeRunner, *owners: str) -> AsyncIterator[tuple[BrokerClient, int, list]]:
    """A client with leases of a broker that is gone, and the port at which the next one may come."""
    port = free_port()
    async with client_of(f"http://127.0.0.1:{port}") as client:
        async with next_broker(runner, port):
            leases = [await client.acquire("judge", owner, key="k", deadline=DEADLINE) for owner in owners]
        yield client, port, leases


def judges() -> FakeRunner:
    return FakeRunner(MODEL.runner, shared=True)


async def test_shared_leases_go_on_at_the_next_broker() -> None:
    runner = judges()
    async with held(runner, "a", "b") as (client, port, leases), next_broker(runner, port) as engine:
        await asyncio.sleep(2.0)
        assert {each.lease_id for each in engine.leases()} == {lease.info.lease_id for lease in leases}
        assert not any(lease.lost for lease in leases)
        await client.close()


async def test_owner_that_asks_first_has_its_own_lease() -> None:
    runner = judges()
    async with held(runner, "a", "b") as (client, port, (first, second)), next_broker(runner, port) as engine:
        assert await client.acquire("judge", "a", key="k", deadline=DEADLINE) is first
        (again,) = await client.acquire_many([Request("judge", key="k")], "b", deadline=DEADLINE)
        assert again is second
        assert len(engine.leases()) == 2
        await client.close()


async def test_released_lease_does_not_come_back() -> None:
    runner = judges()
    async with held(runner, "a") as (client, port, (lease,)), next_broker(runner, port) as engine:
        await lease.release()
        assert await client.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: False}
        assert engine.leases() == []


async def test_broker_with_another_key_knows_none_of_them() -> None:
    runner = judges()
    async with held(runner, "a") as (client, port, (lease,)), next_broker(runner, port, OTHER):
        assert await client.heartbeat([lease.info.lease_id]) == {lease.info.lease_id: False}
        await client.close()


async def test_sandboxes_have_no_record_and_restores_need_the_token() -> None:
    box = PoolSpec(name="shell", resource=ContainerSpec())
    async with ResourceEngine([FakeRunner()], [box]) as engine, up(engine, front=front()) as address:
        async with client_of(address) as client:
            await client.acquire("shell", "a", deadline=DEADLINE)
            assert client._records == {}
        assert (await ask("POST", address + wire.RESTORE, {}))[0] == 401
