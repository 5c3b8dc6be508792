"""Fixtures of the tests with Kueue: a control plane of their own, since they change what it serves."""

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentfly.kube import NAMESPACES, Kube
from tests.cluster import kueue
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.fixtures import queueing
from tests.integration.operator.run_world import RUN, Players, storage
from tests.integration.operator.world import (
    FakeBroker,
    OperatorProcess,
    fake_broker,
    install,
    namespace,
    operator,
)
from tests.integration.queues.queues import NODE, SECOND

__all__ = ["queueing"]
numbers = itertools.count()


@pytest.fixture(scope="session")
def installed(queueing: Cluster) -> Path:
    return install(queueing)


@pytest.fixture(scope="session")
def with_kueue(queueing: Cluster) -> Cluster:
    """The cluster with Kueue, from the first test that asks for it."""
    queueing.define_kueue()
    queueing.add_kueue()
    return queueing


@pytest.fixture
async def kube(queueing: Cluster, installed: Path) -> AsyncIterator[Kube]:
    async with Kube.connect("agentfly-test", kubeconfig=queueing.kubeconfig) as found:
        yield found


@pytest.fixture
async def space(kube: Kube) -> AsyncIterator[str]:
    async with namespace(kube, f"queue-{next(numbers)}") as name:
        labels = {kueue.MANAGED: "true"}
        await kube.patch(NAMESPACES, name, {"metadata": {"labels": labels}})
        yield name


@pytest.fixture
def kubelet(queueing: Cluster) -> Iterator[FakeKubelet]:
    with FakeKubelet(queueing.kubeconfig, labels=NODE) as found:
        yield found


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with fake_broker() as found:
        for name in (RUN, SECOND):
            found.serves(f"{name}-policy", ready=1, leased=0, min=1, max=1)
        yield found


@pytest.fixture
async def running(
    installed: Path, tmp_path: Path, broker: FakeBroker, space: str
) -> AsyncIterator[OperatorProcess]:
    """An operator that acts; at its end it makes room for the next one."""
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
        await process.ready(120)
        await process.leads(120)
        yield process
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.stop)


@pytest.fixture
async def players(kube: Kube, space: str, kubelet: FakeKubelet) -> AsyncIterator[tuple[Players, Players]]:
    """The pods of two runs."""
    first, second = Players(kube, kubelet, space), Players(kube, kubelet, space, SECOND)
    async with storage(kube, space):
        yield first, second
        await first.close()
        await second.close()
