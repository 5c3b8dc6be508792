"""The operator as a whole: what it hears of, and what it waits for before it acts."""

import asyncio
from typing import Any, Self, cast

import pytest

from agentfly.kube import TRAINING_RUNS, Kube, NotFound
from agentfly.kube.access import Login
from agentfly_operator import handlers
from agentfly_operator.cluster import operator as module
from agentfly_operator.cluster.leader import LeaderLease
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.operator import Operator
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import META, SPEC


class Silent:
    """An informer that lists nothing; ``listed`` is when it has."""

    listed: asyncio.Event

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def subscribe(self, callback: object) -> None:
        pass

    async def synced(self, timeout: float) -> None:
        await self.listed.wait()


class Led:
    def is_held(self) -> bool:
        return True


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    async def listen(*_: object) -> None:
        await asyncio.Event().wait()

    Silent.listed = asyncio.Event()
    monkeypatch.setattr(module, "Informer", Silent)
    monkeypatch.setattr("agentfly_operator.cluster.children.Informer", Silent)
    monkeypatch.setattr(module, "listen", listen)
    monkeypatch.setattr(module, "DEFINITION_S", 0.01)
    return FakeKube()


def operator(kube: FakeKube) -> Operator:
    lease = cast(LeaderLease, Led())
    return Operator(cast(Kube, kube), cast(Login, None), CONFIG, ("team",), lease, Metrics())


async def begun(of: Operator) -> None:
    async with of:
        await asyncio.Event().wait()


async def settle() -> None:
    await asyncio.sleep(0.1)


async def test_nothing_is_looked_at_before_its_children_were_listed(kube: FakeKube) -> None:
    kube.put(TRAINING_RUNS, {"kind": "TrainingRun", "metadata": {**META, "generation": 1}, "spec": SPEC})
    task = asyncio.create_task(begun(operator(kube)))
    await settle()
    assert ("get", "trainingruns", "first") not in kube.calls
    assert kube.writes() == []
    Silent.listed.set()
    await settle()
    assert ("get", "trainingruns", "first") in kube.calls
    task.cancel()
    await asyncio.wait({task})


async def test_a_kind_that_is_not_defined_yet_is_waited_for(kube: FakeKube) -> None:
    Silent.listed.set()
    kube.refuses["list", "rolloutjobs"] = NotFound("no such kind", status=404)
    task = asyncio.create_task(begun(operator(kube)))
    await settle()
    assert not task.done()
    assert not any(call[0] == "get" for call in kube.calls)
    kube.refuses.clear()
    kube.put(TRAINING_RUNS, {"kind": "TrainingRun", "metadata": {**META, "generation": 1}, "spec": SPEC})
    await settle()
    assert ("get", "trainingruns", "first") in kube.calls
    task.cancel()
    await asyncio.wait({task})


async def test_a_kind_that_is_taken_away_ends_it(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SURVEY_S", 0.02)
    Silent.listed.set()
    async with operator(kube) as running:
        kube.refuses["list", "trainingruns"] = NotFound("no such kind", status=404)
        async with asyncio.timeout(5):
            assert (await running.ended()).startswith("survey ended: no such kind")


async def test_objects_of_all_kinds_are_heard_of() -> None:
    heard: list[tuple[str, str, str]] = []
    made = handlers.registry(lambda *what: heard.append(what), cast(Login, None))
    for handler in made._watching.get_all_handlers():
        call = cast(Any, handler.fn)
        await call(namespace="team", name=str(handler.selector.any_name), param=handler.param)
    assert heard == [
        ("ResourcePool", "team", "resourcepools"),
        ("TrainingRun", "team", "trainingruns"),
        ("RolloutJob", "team", "rolloutjobs"),
    ]
