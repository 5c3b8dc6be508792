"""Asking brokers: how often, what is told, and what is kept when they fall silent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from agentfly.errors import AgentflyError
from agentfly_operator.cluster import brokers as module
from agentfly_operator.cluster.brokers import Brokers
from agentfly_operator.cluster.members import Members, project
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.pools import differs
from agentfly_operator.plan.facts import PodFacts
from tests.unit.operator.make import CONFIG, report


class Broker:
    def __init__(self) -> None:
        self.pools: Any = {"shell": report(ready=1).model_dump(mode="json")}
        self.status = 200
        self.tokens: list[str] = []


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Broker, Brokers, list[str]]]:
    monkeypatch.setattr(module, "LEAST_S", 0.01)
    monkeypatch.setattr(module, "BUSY_S", 0.03)
    monkeypatch.setattr(module, "IDLE_S", 0.3)
    broker, told = Broker(), []

    async def answer(request: web.Request) -> web.Response:
        broker.tokens.append(request.headers["X-Agentfly-Token"])
        return web.json_response(broker.pools, status=broker.status)

    app = web.Application()
    app.router.add_get("/pools", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def token(namespace: str) -> str:
        if namespace == "new":
            raise AgentflyError("secret new/agentfly-broker-client: is not there yet")
        return "token-of-" + namespace

    config = replace(CONFIG, broker_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    brokers = Brokers(config, token, told.append, Metrics())
    yield broker, brokers, told
    await brokers.close()
    await runner.cleanup()


async def looks(broker: Broker, number: int) -> None:
    """Waits until it was asked so often; what it said to all but the last question has been read then."""
    await until(lambda: len(broker.tokens) >= number)


async def until(holds: Callable[[], bool]) -> None:
    """Waits until this holds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# 1. how often


async def test_a_quiet_broker_is_asked_seldom_and_soon_when_poked(
    world: tuple[Broker, Brokers, list[str]],
) -> None:
    broker, brokers, _ = world
    brokers.follow("team")
    await asyncio.sleep(0.2)
    asked = len(broker.tokens)
    assert asked <= 3
    brokers.poke("team")
    await looks(broker, asked + 1)
    assert set(broker.tokens) == {"token-of-team"}


async def test_a_busy_broker_is_asked_often_and_never_too_often(
    world: tuple[Broker, Brokers, list[str]],
) -> None:
    broker, brokers, _ = world
    broker.pools["shell"]["queued"] = 1
    brokers.follow("team")
    for _ in range(30):
        brokers.poke("team")
        await asyncio.sleep(0.01)
    assert 8 <= len(broker.tokens) <= 31


async def test_who_is_left_is_asked_no_more(world: tuple[Broker, Brokers, list[str]]) -> None:
    broker, brokers, _ = world
    brokers.follow("team")
    await until(lambda: "shell" in brokers.seen("team").pools)
    brokers.leave("team")
    asked = len(broker.tokens)
    await asyncio.sleep(0.4)
    assert len(broker.tokens) == asked


# 2. what is told


async def test_only_news_is_told(world: tuple[Broker, Brokers, list[str]]) -> None:
    broker, brokers, told = world
    broker.pools["shell"] |= {"queued": 1, "short_s": 1.0, "retry_in_s": 9.0}
    brokers.follow("team")
    await looks(broker, 3)
    broker.pools["shell"] |= {"short_s": 2.0, "retry_in_s": 8.0}  # clocks are no news
    await looks(broker, len(broker.tokens) + 3)
    assert told == ["team"]
    broker.pools["shell"]["ready"] = 5
    await looks(broker, len(broker.tokens) + 3)
    assert told == ["team", "team"]
    assert brokers.seen("team").pools["shell"].ready == 5


async def test_problems_of_a_pool_come_with_it(world: tuple[Broker, Brokers, list[str]]) -> None:
    broker, brokers, _ = world
    broker.pools["shell"]["problems"] = ["no image"]
    brokers.follow("team")
    await until(lambda: "shell" in brokers.seen("team").pools)
    assert brokers.seen("team").pools["shell"].problems == ("no image",)


# 3. silence


async def test_a_silent_broker_keeps_its_last_answer_and_since_when(
    world: tuple[Broker, Brokers, list[str]],
) -> None:
    broker, brokers, told = world
    brokers.follow("team")
    await until(lambda: "shell" in brokers.seen("team").pools)
    before = brokers.seen("team")
    assert before.error == ""
    broker.status = 503
    brokers.poke("team")
    await until(lambda: brokers.seen("team").error != "")
    silent = brokers.seen("team")
    assert (silent.error, silent.pools) == ("answered with status 503", before.pools)
    assert silent.since > before.since
    await looks(broker, len(broker.tokens) + 3)
    assert brokers.seen("team").since == silent.since
    assert told == ["team", "team"]
    broker.status = 200
    await until(lambda: brokers.seen("team").error == "")
    assert told == ["team", "team", "team"]


@pytest.mark.parametrize("answer", [[], {"shell": {"kind": "container"}}, {"shell": 7}, "text"])
async def test_an_answer_that_is_none_is_silence(
    world: tuple[Broker, Brokers, list[str]], answer: Any
) -> None:
    broker, brokers, _ = world
    broker.pools = answer
    brokers.follow("team")
    await until(lambda: brokers.seen("team").error != "")
    assert brokers.seen("team").error == "answered what is no list of pools"


async def test_a_broker_without_a_secret_yet_is_waited_for(
    world: tuple[Broker, Brokers, list[str]],
) -> None:
    _, brokers, _ = world
    brokers.follow("new")
    await until(lambda: "yet" in brokers.seen("new").error)
    assert "is not there yet" in brokers.seen("new").error


async def test_a_broker_that_is_not_there_is_told_in_words() -> None:
    async def token(_: str) -> str:
        return "t"

    brokers = Brokers(replace(CONFIG, broker_url="http://127.0.0.1:1"), token, lambda _: None, Metrics())
    brokers.follow("team")
    await until(lambda: brokers.seen("team").error == "connection refused")
    await brokers.close()


# Members: facts by pool


def pod(uid: str, *, pool: str = "shell", ready: bool = True, going: bool = False) -> dict[str, Any]:
    meta = {
        "uid": uid,
        "namespace": "team",
        "name": uid,
        "resourceVersion": "1",
        "labels": {"agentfly.dev/pool": pool},
    }
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    return project({"metadata": {**meta, **({"deletionTimestamp": "t"} if going else {})}, "status": status})


def test_a_pool_is_told_of_changes_that_matter_and_of_no_others() -> None:
    told: list[tuple[str, str]] = []
    members = Members(told.append)
    members.heard("ADDED", pod("a"))
    members.heard("MODIFIED", pod("a"))
    assert told == [("team", "shell")]
    members.heard("MODIFIED", pod("a", ready=False))
    members.heard("MODIFIED", pod("a", going=True))
    assert len(told) == 3
    assert (len(members), members.held(("team", "shell"))) == (0, 1)
    members.heard("ADDED", pod("b", going=True))
    members.heard("DELETED", pod("a", going=True))
    assert (len(told), members.held(("team", "shell"))) == (3, 1)
    members.heard("DELETED", pod("b", going=True))
    assert (len(told), members.held(("team", "shell"))) == (4, 0)


def test_facts_are_those_of_one_pool() -> None:
    members = Members(lambda _: None)
    for each in (pod("a"), pod("b", ready=False), pod("c", pool="other")):
        members.heard("ADDED", each)
    assert members.facts(("team", "shell")) == PodFacts(total=2, running=2, ready=1)
    members.heard("DELETED", pod("a"))
    assert members.facts(("team", "shell")).total == 1
    assert members.facts(("team", "none")) == PodFacts()


# Whether a status has to be written

READY = {"type": "Ready", "status": "True"}
THEIRS = {"type": "Theirs", "status": "True"}


@pytest.mark.parametrize(
    ("live", "written", "want"),
    [
        ({"x": 1, "conditions": [READY]}, None, False),
        ({"x": 1, "conditions": [READY, THEIRS]}, None, False),
        ({"x": 2, "conditions": [READY]}, None, True),
        ({"x": 1, "old": 1, "conditions": [READY]}, None, True),
        ({"x": 1, "theirs": 1, "conditions": [READY]}, {"x": 1, "conditions": [READY]}, False),
        ({"x": 2, "conditions": [READY]}, {"x": 1, "conditions": [READY]}, True),
        ({"x": 1, "conditions": [READY]}, {"x": 0, "conditions": [READY]}, True),
        ({}, None, True),
    ],
)
def test_a_status_is_written_if_it_says_something_new(
    live: dict[str, Any], written: dict[str, Any] | None, want: bool
) -> None:
    assert differs(live, {"x": 1, "conditions": [READY]}, written) is want
