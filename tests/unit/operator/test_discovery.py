"""Kinds that others define: when they are there, who is told, and what a silent API server changes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from agentfly.kube import Kube, KubeError, Resource, Unreachable
from agentfly_operator.cluster import discovery as module
from agentfly_operator.cluster.discovery import Discovery
from agentfly_operator.cluster.metrics import Metrics
from tests.unit.operator.fake_kube import FakeKube

CLUSTERS = Resource("ray.io", "v1", "rayclusters")
QUEUES = Resource("queues.example", "v1", "queues")


class Watcher:
    """Follows kinds, and sees what is answered meanwhile."""

    def __init__(self) -> None:
        self.discovery: Discovery | None = None
        self.told: list[tuple[str, str]] = []
        self.seen: list[bool] = []
        self.failure: KubeError | None = None

    async def follow(self, resource: Resource) -> None:
        if self.failure is not None:
            raise self.failure
        assert self.discovery is not None
        self.seen.append(self.discovery.has(resource))
        self.told.append(("follow", resource.plural))

    async def leave(self, resource: Resource) -> None:
        assert self.discovery is not None
        self.seen.append(self.discovery.has(resource))
        self.told.append(("leave", resource.plural))

    def changed(self, resource: Resource) -> None:
        assert self.discovery is not None
        self.told.append(("there" if self.discovery.has(resource) else "gone", resource.plural))


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    return FakeKube()


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
async def discovery(kube: FakeKube, watcher: Watcher) -> AsyncIterator[Discovery]:
    metrics = Metrics()
    found = Discovery(cast(Kube, kube), (CLUSTERS, QUEUES), watcher, watcher.changed, metrics)
    watcher.discovery = found
    yield found
    for resource in (CLUSTERS, QUEUES):
        api = {"api": module.name_of(resource)}
        value = metrics.registry.get_sample_value("agentfly_operator_optional_api_available", api)
        assert value in (None, float(found.has(resource)))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def looked(kube: FakeKube, times: int = 2) -> None:
    """Until it looked so often from now on."""
    before = len(kube.calls)
    await until(lambda: len(kube.calls) >= before + 2 * times)


async def test_a_kind_is_there_from_the_start_if_one_of_its_versions_serves_it(
    kube: FakeKube, discovery: Discovery, watcher: Watcher
) -> None:
    kube.served = {"ray.io/v1": ["rayjobs", "rayclusters"], "queues.example/v1": ["others"]}
    async with discovery:
        assert discovery.has(CLUSTERS)
        assert not discovery.has(QUEUES)
        asked = len(kube.calls)
        assert discovery.has(CLUSTERS)
        assert len(kube.calls) == asked
        await looked(kube)
    assert watcher.told == [("follow", "rayclusters")]  # at the start nobody waits for news
    assert {verb for verb, _, _ in kube.calls} == {"discover"}


async def test_what_comes_and_goes_is_told_once_and_counts_only_while_it_is_followed(
    kube: FakeKube, discovery: Discovery, watcher: Watcher
) -> None:
    async with discovery:
        kube.served = {"ray.io/v1": ["rayclusters"]}
        await until(lambda: discovery.has(CLUSTERS))
        await looked(kube)
        assert watcher.told == [("follow", "rayclusters"), ("there", "rayclusters")]
        kube.served = {"ray.io/v1": ["rayjobs"]}
        await until(lambda: not discovery.has(CLUSTERS))
        await looked(kube)
        assert watcher.told[2:] == [("leave", "rayclusters"), ("gone", "rayclusters")]
    assert watcher.seen == [False, False]


async def test_a_kind_whose_objects_cannot_be_listed_is_not_there_yet(
    kube: FakeKube, discovery: Discovery, watcher: Watcher
) -> None:
    watcher.failure = Unreachable("not listed")
    kube.served = {"ray.io/v1": ["rayclusters"]}
    async with discovery:
        await looked(kube)
        assert not discovery.has(CLUSTERS)
        assert watcher.told == []
        assert discovery.why_not(CLUSTERS) == "not listed"
        assert discovery.why_not(QUEUES) == "queues of queues.example/v1 are not served by this cluster"
        watcher.failure = None
        await until(lambda: discovery.has(CLUSTERS))
        assert discovery.why_not(CLUSTERS) == ""
        kube.served = {}
        await until(lambda: not discovery.has(CLUSTERS))
        assert discovery.why_not(CLUSTERS) == "rayclusters of ray.io/v1 are not served by this cluster"
        assert watcher.told[0] == ("follow", "rayclusters")


async def test_an_api_server_that_does_not_say_has_what_it_had(
    kube: FakeKube, discovery: Discovery, watcher: Watcher
) -> None:
    kube.served = {"ray.io/v1": ["rayclusters"]}
    async with discovery:
        kube.served = {}
        kube.refuses["discover", "ray.io/v1"] = Unreachable("no answer")
        await looked(kube)
        assert discovery.has(CLUSTERS)
        kube.refuses.clear()
        await until(lambda: not discovery.has(CLUSTERS))
    asked = len(kube.calls)
    await asyncio.sleep(0.05)
    assert len(kube.calls) == asked  # nothing of it is left running
