"""Section numbers are the guarantees of host.py; then those of instance.py and runner.py."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentfly.errors import AgentflyError
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.errors import CallRaised, Infra, LeaseLost, StartFailed
from agentfly.resources.instance import InstanceClient
from agentfly.resources.runners import guard
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.instance import runner as instance_runner
from agentfly.resources.runners.instance.host import Host
from agentfly.resources.runners.instance.runner import InProcessRunner
from agentfly.resources.runners.instance.server import serving
from agentfly.resources.spec import InProcessSpec, PoolSpec
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners import games

GAMES = Path(games.__file__)


def spec_of(name: str, **fields: Any) -> InProcessSpec:
    return InProcessSpec(entrypoint=f"{GAMES}:{name}", **fields)


class TestInProcess(RunnerContract):
    exclusive = False  # the engine decides whether an instance is shared

    @pytest.fixture
    def runner(self, tmp_path):
        self.folder = tmp_path / "r"
        return InProcessRunner(self.folder)

    @pytest.fixture
    def spec(self):
        return spec_of("Counter")

    def left(self, runner):
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def runner(tmp_path):
    return InProcessRunner(tmp_path / "r")


@asynccontextmanager
async def member_of(runner: InProcessRunner, spec: InProcessSpec) -> AsyncIterator[Member]:
    member = await runner.start(spec, "game-1")
    try:
        yield member
    finally:
        await runner.stop(member)


@asynccontextmanager
async def held(runner: InProcessRunner, spec: InProcessSpec) -> AsyncIterator[InstanceClient]:
    async with member_of(runner, spec) as member:
        await runner.lease(member, "owner", 0, "token", 30)
        client = InstanceClient(member.address, "token")
        try:
            yield client
        finally:
            await client.close()


# 1. One thread, one call at a time.


@pytest.mark.parametrize("method", ["add", "add_later"])
async def test_calls_take_turns(runner, method):
    async with held(runner, spec_of("Counter", kwargs={"start": 5})) as game:
        answers = await asyncio.gather(*(game.call(method, 2) for _ in range(10)))
        assert answers == [7, 9, 11, 13, 15, 17, 19, 21, 23, 25]


async def test_a_factory_may_be_asynchronous(runner):
    async with held(runner, spec_of("later", kwargs={"start": 3})) as game:
        assert await game.call("add", n=1) == 4


async def test_a_call_does_not_block_the_event_loop(runner):
    async with held(runner, spec_of("Counter", call_timeout_s=0.3)) as game:
        loop = asyncio.get_running_loop()
        hanging = asyncio.create_task(game.call("hang"))
        began = loop.time()
        await asyncio.sleep(0.02)
        assert loop.time() - began < 0.25
        with pytest.raises(Infra):
            await hanging


# 2. Tokens.


async def test_only_the_token_of_a_live_lease_calls(runner):
    async with member_of(runner, spec_of("Counter")) as member:
        for token in ("", "token", member.admin_token):
            client = InstanceClient(member.address, token)
            with pytest.raises(LeaseLost, match="no lease with this token"):
                await client.call("add")
            await client.close()


async def test_a_lease_ends_at_its_ttl_and_is_not_revived(runner):
    async with member_of(runner, spec_of("Counter")) as member:
        await runner.lease(member, "owner", 0, "token", 1.0)
        client = InstanceClient(member.address, "token")
        assert await client.call("add") == 1
        await asyncio.sleep(1.05)
        with pytest.raises(LeaseLost):
            await client.call("add")
        with pytest.raises(LeaseLost, match="member game-1: instance: the lease of owner ran out"):
            await runner.lease(member, "owner", 0, "token", 30)
        await client.close()


async def test_a_holder_cannot_do_what_the_owner_does(runner):
    async with held(runner, spec_of("Counter")) as game:
        for method, path in (("POST", "/lease"), ("POST", "/reset"), ("GET", "/healthz")):
            with pytest.raises(Infra, match="401"):
                await game.request(method, path, {}, within=5)


async def test_private_names_and_attributes_cannot_be_called(runner):
    async with held(runner, spec_of("Counter")) as game:
        for name in ("_secret", "__init__", "value", "nothing"):
            with pytest.raises(CallRaised, match=f"{name}: is not a method; there are: add, ") as caught:
                await game.call(name)
            assert caught.value.type_name == "AttributeError"


# 3. JSON, and exceptions as answers.


async def test_results_are_plain_json(runner):
    async with held(runner, spec_of("Counter")) as game:
        assert await game.call("pair") == [1, 2]
        assert await game.call("note", "é\x00") is None
        assert await game.call("see") == {"value": 0, "notes": ["é\x00"]}
        with pytest.raises(CallRaised, match="thing: returned what is not JSON") as caught:
            await game.call("thing")
        assert caught.value.hints == ("return numbers, text, lists and dicts, such as array.tolist()",)


@pytest.mark.parametrize(
    ("method", "args", "kind", "text"),
    [
        ("fail", (), "ValueError", "fail: ValueError: no such move"),
        ("late", (), "TimeoutError", "late: TimeoutError: the opponent did not answer"),
        ("add", ("x",), "TypeError", "add: TypeError: unsupported operand"),
        ("end", (), "RuntimeError", "end: RuntimeError: SystemExit: 3"),
    ],
)
async def test_what_the_object_raises_is_an_answer_and_it_lives_on(runner, method, args, kind, text):
    async with held(runner, spec_of("Counter")) as game:
        with pytest.raises(CallRaised, match=text) as caught:
            await game.call(method, *args)
        assert caught.value.type_name == kind
        assert await game.call("add") == 1


# 4. A hanging call breaks it.


async def test_a_call_beyond_its_deadline_breaks_the_member(runner):
    async with member_of(runner, spec_of("Counter", call_timeout_s=0.05)) as member:
        await runner.lease(member, "owner", 0, "token", 30)
        client = InstanceClient(member.address, "token")
        with pytest.raises(Infra, match=r"hang did not return in 0\.05 s") as caught:
            await client.call("hang")
        assert caught.value.hints == ("raise callTimeoutSeconds",)
        with pytest.raises(LeaseLost, match="hang did not return"):
            await client.call("add")
        assert not (await runner.probe(member)).alive
        assert await runner.reset(member) is None
        await client.close()


# 5. Reset.


async def test_an_object_that_proves_its_reset_is_kept(runner):
    async with member_of(runner, spec_of("Careful", kwargs={"start": 1})) as member:
        await runner.lease(member, "one", 0, "first", 30)
        one = InstanceClient(member.address, "first")
        await one.call("add", 5)
        again = await runner.reset(member)
        assert again is not None
        assert again.incarnation == 2
        with pytest.raises(LeaseLost):
            await one.call("see")
        await runner.lease(again, "two", 0, "second", 30)
        two = InstanceClient(again.address, "second")
        assert await two.call("see") == {"value": 1, "notes": []}
        await one.close()
        await two.close()


async def test_an_object_whose_reset_leaves_something_is_made_anew(runner):
    async with member_of(runner, spec_of("Careful")) as member:
        await runner.lease(member, "one", 0, "first", 30)
        one = InstanceClient(member.address, "first")
        await one.call("note", "canary")
        assert await runner.reset(member) is not None
        await runner.lease(member, "two", 0, "second", 30)
        two = InstanceClient(member.address, "second")
        assert await two.call("see") == {"value": 0, "notes": []}
        await one.close()
        await two.close()


async def test_an_object_without_a_proof_is_closed_and_made_anew(runner):
    async with member_of(runner, spec_of("Closing")) as member:
        await runner.lease(member, "one", 0, "first", 30)
        one = InstanceClient(member.address, "first")
        await one.call("add", 7)
        assert await runner.reset(member) is not None
        await runner.lease(member, "two", 0, "second", 30)
        two = InstanceClient(member.address, "second")
        assert await two.call("see") == {"value": 0, "notes": []}
        await one.close()
        await two.close()


# Starts that fail.


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("broken", {}, "entrypoint: .*games.py:broken: RuntimeError: no board"),
        ("Countr", {}, "entrypoint: .*games.py has no Countr"),
        ("Counter", {"kwargs": {"begin": 1}}, "unexpected keyword argument 'begin'"),
        ("slow", {"start_timeout_s": 0.05}, r"its factory took longer than 0\.05 s"),
    ],
)
async def test_a_start_that_fails_says_why_and_leaves_nothing(runner, tmp_path, name, fields, text):
    with pytest.raises(StartFailed, match=text):
        await runner.start(spec_of(name, **fields), "game-1")
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("steps", range(8))
async def test_a_server_whose_start_is_cancelled_leaves_no_socket(tmp_path, steps):
    async def serve() -> None:
        async with serving(Host(spec_of("Counter")), tmp_path / "s", "admin"):
            await asyncio.sleep(60)

    task = asyncio.create_task(serve())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    gc.collect()  # a socket that nobody closed is a warning, which is an error here


# Through the engine.


async def test_two_holders_of_a_shared_instance_see_one_object(tmp_path):
    pool = PoolSpec(name="judge", resource=spec_of("Counter"), shared=True)
    async with ResourceEngine([InProcessRunner(tmp_path / "r")], [pool]) as engine:
        one = await engine.acquire("judge", "a", scope="global")
        two = await engine.acquire("judge", "b", scope="global")
        assert await one.instance.call("add") == 1
        assert await two.instance.call("add") == 2
        await one.release()
        assert await two.instance.call("add") == 3
        await two.release()


async def test_an_exclusive_instance_is_reset_between_holders(tmp_path):
    pool = PoolSpec(name="chess", resource=spec_of("Counter"), max=1)
    async with ResourceEngine([InProcessRunner(tmp_path / "r")], [pool]) as engine:
        async with await engine.acquire("chess", "a") as one:
            await one.instance.call("note", "canary")
        async with await engine.acquire("chess", "b") as two:
            assert (two.info.member_id, two.info.incarnation) == (one.info.member_id, 2)
            assert await two.instance.call("see") == {"value": 0, "notes": []}


async def test_closing_the_runner_leaves_no_folder(runner, tmp_path):
    runner.close()
    async with member_of(runner, spec_of("Counter")):
        assert (tmp_path / "r").is_dir()
    runner.close()
    assert list(tmp_path.iterdir()) == []


async def test_the_socket_is_for_this_user_alone(runner):
    async with member_of(runner, spec_of("Counter")) as member:
        path = Path(member.address.removeprefix("unix://"))
        assert os.stat(path.parent).st_mode & 0o077 == 0


async def test_a_body_that_is_no_call_is_refused_and_harms_nothing(runner):
    async with held(runner, spec_of("Counter")) as game:
        for body in (b"{", b"[]", b'{"method": 1, "args": 2, "kwargs": 3}'):
            connector = aiohttp.UnixConnector(game._address.removeprefix("unix://"))
            headers = {"Authorization": "Bearer token"}
            async with (
                aiohttp.ClientSession(connector=connector, headers=headers) as session,
                session.post("http://instance/call", data=body) as response,
            ):
                assert response.status == 400
        assert await game.call("add") == 1


async def test_in_a_container_an_isolated_instance_needs_no_bubblewrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise AgentflyError("bubblewrap: is not installed")

    monkeypatch.setattr(instance_runner, "find_bubblewrap", none)
    monkeypatch.setattr(guard, "find_bubblewrap", none)
    runner = InProcessRunner(tmp_path / "r", contained=True)
    assert runner.check() is None
    assert InProcessRunner(tmp_path / "r").check() is not None
    member = await runner.start(spec_of("Counter", isolated=True), "game-1")
    process = member.handle.process  # type: ignore[attr-defined]
    await runner.lease(member, "owner", 0, "token", 30)
    assert (await runner.probe(member)).memory_mb
    assert await runner.reset(member) is not None
    await runner.stop(member)
    assert process.returncode is not None
