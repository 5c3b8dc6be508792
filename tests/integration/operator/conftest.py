"""Fixtures of the operator's integration tests."""

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentfly.kube import Kube
from tests.cluster.cluster import Cluster
from tests.integration.operator.world import (
    FakeBroker,
    OperatorProcess,
    fake_broker,
    install,
    namespace,
    operator,
)

numbers = itertools.count()


@pytest.fixture(scope="session")
def installed(control_plane: Cluster) -> Path:
    return install(control_plane)


@pytest.fixture
async def kube(control_plane: Cluster, installed: Path) -> AsyncIterator[Kube]:
    async with Kube.connect("agentfly-test", kubeconfig=control_plane.kubeconfig) as found:
        yield found


@pytest.fixture
async def space(kube: Kube) -> AsyncIterator[str]:
    async with namespace(kube, f"op-{next(numbers)}-{time.monotonic_ns() % 10**6}") as name:
        yield name


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with fake_broker() as found:
        found.serves("shell", ready=2, leased=1)
        yield found


@pytest.fixture
def running(installed: Path, tmp_path: Path, broker: FakeBroker, space: str) -> Iterator[OperatorProcess]:
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
        yield process
