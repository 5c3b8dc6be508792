"""What watches the children of runs misses nothing, against a real API server."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.machine import ClusterError
from tests.kills.observer import Observer

Obj = dict[str, Any]
SEEN_S = 20.0


@pytest.fixture
def space(control_plane: Cluster) -> Iterator[str]:
    name = f"kills-{secrets.token_hex(3)}"
    api = control_plane.api
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait("service account", lambda: api.exists(account), SEEN_S)
    yield name
    api.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def observer(control_plane: Cluster, space: str) -> Iterator[Observer]:
    path = f"/api/v1/namespaces/{space}/pods"
    with Observer(control_plane.api, {("Pod", space): path}, {}).watching() as found:
        yield found


def trainer(attempt: int) -> Obj:
    labels = {"training-run": "r", "role": "trainer", "attempt": str(attempt), "index": "0"}
    return {
        "metadata": {
            "name": f"r-trainer-{attempt}-0",
            "labels": {f"agentfly.dev/{key}": value for key, value in labels.items()},
        },
        "spec": {
            "schedulerName": "none",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "trainer", "image": "none"}],
        },
    }


def test_a_pod_that_lived_for_a_moment_is_seen_and_judged(
    control_plane: Cluster, space: str, observer: Observer
) -> None:
    api, pods = control_plane.api, f"/api/v1/namespaces/{space}/pods"
    api.create(pods, trainer(1))
    api.create(pods, trainer(2))
    api.call("DELETE", f"{pods}/r-trainer-1-0")
    wrong = "run r: pods of two attempts at a time: r-trainer-1-0, r-trainer-2-0"
    found: list[str] = []
    wait("what is wrong", lambda: bool(found.extend(observer.take_wrongs()) or found), SEEN_S)
    assert found == [wrong]
    wait("one pod", lambda: len(observer.of("Pod")) == 1, SEEN_S)
    assert observer.take_wrongs() == []


def test_a_connection_that_is_cut_costs_nothing(
    control_plane: Cluster, space: str, observer: Observer
) -> None:
    api, pods = control_plane.api, f"/api/v1/namespaces/{space}/pods"
    api.create(pods, trainer(1))
    wait("the first pod", lambda: len(observer.of("Pod")) == 1, SEEN_S)
    control_plane.cut()
    time.sleep(1)
    control_plane.mend()
    api.call("DELETE", f"{pods}/r-trainer-1-0")
    api.create(pods, trainer(2))
    wait("the second pod", lambda: [_name(pod) for pod in observer.of("Pod")] == ["r-trainer-2-0"], SEEN_S)
    assert observer.take_wrongs() == []


def test_what_is_not_there_to_be_watched_is_an_error(control_plane: Cluster, space: str) -> None:
    path = f"/api/v1/namespaces/{space}/nothing"
    with (
        pytest.raises(ClusterError, match="404"),
        Observer(control_plane.api, {("Pod", space): path}, {}).watching(),
    ):
        pass


def _name(pod: Any) -> str:
    return str(pod["metadata"]["name"])
