"""Gateways of external APIs: the contract of runners, leases, and the engine over them."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import Infra, LeaseLost, ResourceError, StartFailed
from agentfly.resources.lease import Lease
from agentfly.resources.runners.external.api import ExternalAPIRunner
from agentfly.resources.spec import Budget, ExternalAPISpec, PoolSpec
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners.misbehaving_api import (
    API,
    CHAT,
    KEY,
    OTHER,
    TOKEN,
    hang,
    held,
    spec,
    status,
    stream,
    until,
)

SPEC = ExternalAPISpec(base_url="http://127.0.0.1:9/v1")


def listening() -> set[str]:
    """The TCP sockets on which this process listens."""
    with Path("/proc/net/tcp").open() as table:
        rows = [line.split() for line in table.readlines()[1:]]
    inodes = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target in inodes:
            found.add(inodes[target])
    return found


class TestExternalAPI(RunnerContract):
    exclusive = False

    @pytest.fixture
    def runner(self):
        self.before = listening()
        return ExternalAPIRunner()

    @pytest.fixture
    def spec(self):
        return SPEC

    def left(self, runner):
        return listening() - self.before


# Starts.


async def test_start_without_any_key_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NONE", raising=False)
    wanted = ExternalAPISpec(base_url="http://a/v1", credentials=("env:NONE", f"file:{tmp_path}/key"))
    with pytest.raises(StartFailed) as error:
        await ExternalAPIRunner().start(wanted, "api-1")
    assert "env:NONE: is not set" in error.value.message
    assert f"file:{tmp_path}/key: No such file" in error.value.message
    assert error.value.hints


async def test_start_with_one_key_of_two_works_and_says_what_is_missing(
    api: API, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(spec(api, "env:NONE", "env:FIRST")) as holder:
        assert (await holder.ask())[0] == 200
        assert holder.usage.keys == {"env:NONE": "missing", "env:FIRST": "ready"}
    assert "env:NONE: is not set" in caplog.text
    assert api.keys == [KEY]


async def test_start_with_a_password_in_the_url_is_refused_without_it() -> None:
    with pytest.raises(StartFailed) as error:
        await ExternalAPIRunner().start(ExternalAPISpec(base_url="https://me:hunter2@api/v1"), "api-1")
    assert "hunter2" not in error.value.render()


async def test_start_asks_the_api_nothing_and_an_api_that_is_down_is_no_dead_member() -> None:
    async with held(SPEC) as holder:
        assert (await holder.runner.probe(holder.member)).alive


# 1. Leases.


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
async def test_token_of_no_lease_is_refused_with_what_to_do(api: API, token: str) -> None:
    async with held(spec(api)) as holder, holder.post(token=token) as answer:
        error = json.loads(await answer.read())["error"]
        assert (answer.status, error["code"]) == (401, "lease")
        assert error["hints"]
    assert api.seen == []


async def test_lease_ends_with_its_ttl_unless_it_is_renewed(api: API) -> None:
    async with held(spec(api), ttl_s=0.2) as holder:
        await holder.runner.lease(holder.member, "another", 0, "token-two", 0.2)
        await asyncio.sleep(0.15)
        await holder.runner.lease(holder.member, "another", 0, "token-two", 30.0)
        await asyncio.sleep(0.1)
        assert await holder.code() == (401, "lease")
        assert (await holder.ask(token="token-two"))[0] == 200


async def test_lease_that_ends_in_a_request_cuts_it_off(api: API) -> None:
    api.script = [hang, stream(*[b"data: x\n\n"] * 1000, pause=0.01)]
    async with held(spec(api), ttl_s=0.4) as holder:
        waiting = asyncio.create_task(holder.code())
        await until(lambda: api.in_flight == 1)
        async with holder.post() as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert await waiting == (401, "lease")
        await until(lambda: api.in_flight == 0)
        assert holder.usage.failures == 0, "it says nothing about the API"


async def test_renewal_keeps_a_request_that_outlasts_a_ttl(api: API) -> None:
    api.script = [stream(*[b"data: x\n\n"] * 50, pause=0.01)]
    async with held(spec(api), ttl_s=0.4) as holder, holder.post() as answer:
        await answer.content.readuntil(b"\n\n")
        await holder.runner.lease(holder.member, "owner", 0, TOKEN, 30.0)
        assert await answer.read() == 49 * b"data: x\n\n"


@pytest.mark.parametrize("end", ["reset", "stop"])
async def test_reset_and_stop_cut_everybody_off(api: API, end: str) -> None:
    api.script = [hang]
    async with held(spec(api)) as holder:
        request = asyncio.create_task(holder.code())
        await until(lambda: api.in_flight == 1)
        await getattr(holder.runner, end)(holder.member)
        assert await request == (401, "lease")
        await asyncio.wait_for(api.cut.wait(), 2)
        if end == "reset":
            assert await holder.code() == (401, "lease")


async def test_holder_that_is_killed_ends_its_request_there(api: API) -> None:
    api.script = [hang]
    program = (
        "import sys, urllib.request as u\n"
        "u.urlopen(u.Request(sys.argv[1] + '/chat', b'{}', {'Authorization': 'Bearer ' + sys.argv[2]}))"
    )
    async with held(spec(api, concurrency=1)) as holder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, holder.member.address, TOKEN
        )
        await until(lambda: api.in_flight == 1)
        process.kill()
        await process.wait()
        await asyncio.wait_for(api.cut.wait(), 2)
        assert (await holder.ask())[0] == 200


# 2. What belongs to the API.


async def test_spending_and_refused_keys_outlast_a_member(api: API) -> None:
    runner = ExternalAPIRunner()
    wanted = spec(api, "env:FIRST", "env:OTHER", budget=Budget(calls=3))
    api.script = [status(401)]
    codes = []
    for name in ("api-1", "api-2"):
        member = await runner.start(wanted, name)
        await runner.lease(member, "owner", 0, TOKEN, 30.0)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            codes += [await _status(session, member.address) for _ in range(2)]
        await runner.stop(member)
    assert codes == [200, 200, 402, 402], "the refused try counts too"
    assert api.keys == [KEY, OTHER, OTHER]


# The engine over it.


def engine(wanted: ExternalAPISpec, **fields: Any) -> ResourceEngine:
    pool = {"name": "judge", "resource": wanted, "shared": True, "max": 1, "lease_ttl_s": 1.0, **fields}
    return ResourceEngine([ExternalAPIRunner()], [PoolSpec.model_validate(pool)])


async def test_holders_share_one_member_and_each_has_a_key_of_its_own(api: API) -> None:
    async with engine(spec(api)) as resources, aiohttp.ClientSession() as session:
        one = await resources.acquire("judge", "one", deadline=5)
        two = await resources.acquire("judge", "two", deadline=5)
        assert one.base_url == two.base_url
        assert one.info.token != two.info.token
        assert [await _chat(session, lease) for lease in (one, two)] == [200, 200]
        address, token = one.base_url, one.info.token
        await one.release()
        with pytest.raises(LeaseLost):
            _ = one.base_url
        assert await _chat(session, two) == 200
        with pytest.raises(ResourceError, match="is of type external-api, not container"):
            _ = two.sandbox
        await asyncio.sleep(1.1)
        headers = {"Authorization": f"Bearer {token}"}
        async with session.post(f"{address}/chat", json=CHAT, headers=headers) as answer:
            assert answer.status == 401, "not renewed after the release"
        assert await _chat(session, two) == 200, "renewed by its heartbeats"
        assert (await resources.status())["judge"].leased == 1
    assert api.keys == [KEY] * 4


async def test_pool_that_is_kept_goes_on_after_its_last_holder_and_spends_from_one_budget(api: API) -> None:
    for least in (0, 1):
        api.seen.clear()
        wanted = spec(api, budget=Budget(calls=2))
        async with engine(wanted, min=least) as resources, aiohttp.ClientSession() as session:
            answers = []
            for _ in range(3):
                async with await resources.acquire("judge", "one", deadline=5) as lease:
                    answers.append(await _chat(session, lease))
        assert answers == [200, 200, 402]


async def test_engine_says_why_no_member_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NONE", raising=False)
    async with engine(ExternalAPISpec(base_url="http://a/v1", credentials=("env:NONE",))) as resources:
        with pytest.raises(StartFailed, match="env:NONE: is not set"):
            await resources.acquire("judge", "one", deadline=0.3)


async def test_stopped_member_takes_no_lease() -> None:
    runner = ExternalAPIRunner()
    member = await runner.start(SPEC, "api-1")
    await runner.stop(member)
    with pytest.raises(Infra, match="api-1: was stopped"):
        await runner.lease(member, "owner", 0, TOKEN, 1.0)


async def _chat(session: aiohttp.ClientSession, lease: Lease) -> int:
    headers = {"Authorization": f"Bearer {lease.info.token}"}
    async with session.post(f"{lease.base_url}/chat/completions", json=CHAT, headers=headers) as answer:
        return answer.status


async def _status(session: aiohttp.ClientSession, address: str) -> int:
    async with session.post(f"{address}/chat/completions", json=CHAT) as answer:
        return answer.status
