"""Passes over one TrainingRun whose pods KubeRay makes, against an API server in memory."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentfly.kube import (
    PODS,
    RAY_CLUSTERS,
    KubeError,
)
from agentfly.roles.launch import Report
from agentfly_operator.cluster import works as works_module
from tests.unit.operator.pass_world import Obj, OneRun, ended


class RayWorld(OneRun):
    """With KubeRay's kinds, and somebody who makes pods of RayClusters."""

    def __init__(self) -> None:
        super().__init__()
        self.defined.add(RAY_CLUSTERS)

    def pod_of(self, name: str, uid: str, index: int | None = None, **status: Any) -> Obj:
        (cluster,) = (obj for key, obj in self.kube.objects.items() if key[0] == "rayclusters")
        group = "headGroupSpec" if index == 0 else "workerGroupSpecs"
        found = cluster["spec"][group]
        template = (found if index == 0 else found[0])["template"]
        meta = {**template["metadata"], "name": name, "namespace": "team", "uid": uid}
        owner = {"kind": "RayCluster", "name": cluster["metadata"]["name"], "uid": cluster["metadata"]["uid"]}
        meta["ownerReferences"] = [{**owner, "controller": True}]
        return self.kube.put(PODS, {"kind": "Pod", "metadata": meta, "status": status})


@pytest.fixture
async def rays(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayWorld]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    made = RayWorld()
    yield made
    await made.heads.close()


async def to_cluster(rays: RayWorld) -> None:
    with pytest.raises(AssertionError):
        await rays.to_pods()  # it makes none itself
    assert rays.kube.names(RAY_CLUSTERS) == {"first-trainer-1"}


RUNS: Obj = {"state": {"running": {"startedAt": "2026-11-30T12:00:00Z"}}, "name": "trainer"}


async def test_a_run_by_kuberay_from_its_beginning_to_its_end(rays: RayWorld) -> None:
    rays.create(trainer={"nodes": 2})
    await to_cluster(rays)
    assert rays.status["engine"]["kind"] == "KubeRay"
    assert rays.kube.names(PODS) == set()
    made = [call for call in rays.kube.writes() if call[1] == "rayclusters"]
    assert made == [("create", "rayclusters", "first-trainer-1")]
    rays.pod_of("head-a", "a", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    rays.pod_of("node-b", "b", phase="Running", containerStatuses=[RUNS])
    await rays.look(2)
    assert rays.status["engine"]["head"] == "a"
    assert rays.status["roles"]["trainer"]["desired"] == 2
    rays.live(PODS, "head-a")["status"] = ended(Report(attempt=1, phase="Ended", exit_code=0))
    rays.show()
    del rays.kube.objects["pods", "team", "head-a"]  # KubeRay
    rays.pod_of("head-c", "c", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    await rays.until("Succeeded")
    await rays.look(3)
    assert rays.kube.propagations["rayclusters", "first-trainer-1"] == "Foreground"
    assert rays.kube.names(RAY_CLUSTERS) == set()


async def test_the_head_that_ran_first_is_the_one_that_is_asked(
    rays: RayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[str] = []
    monkeypatch.setattr(rays.heads, "follow", lambda _, head: followed.append(head.name))
    rays.create(trainer={"nodes": 2})
    await to_cluster(rays)
    rays.pod_of("head-b", "b", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    rays.pod_of("node-b", "n", phase="Running", containerStatuses=[RUNS])
    await rays.look(3)
    assert set(followed) == {"head-b"}
    followed.clear()
    rays.pod_of("head-a", "a", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    await rays.look(2)
    del rays.kube.objects["pods", "team", "head-b"]
    await rays.look(2)
    assert set(followed) <= {"head-b"}
    assert rays.status["lastFailure"]["podName"] == "head-b"


async def test_a_cluster_that_kuberay_no_longer_knows_is_not_made(rays: RayWorld) -> None:
    rays.create(trainer={"nodes": 2, "engine": "KubeRay"})
    rays.kube.refuses["create", "rayclusters"] = KubeError("exceeded quota", status=403)
    with pytest.raises(AssertionError):
        await rays.to_pods()
    assert rays.status["attempt"] == 1
    rays.defined.clear()
    rays.kube.refuses.clear()
    rays.looks._memories.clear()
    await rays.look(4)
    assert rays.kube.names(RAY_CLUSTERS) == set()
    assert rays.condition("Stalled").startswith("True KubeRayMissing: ")
