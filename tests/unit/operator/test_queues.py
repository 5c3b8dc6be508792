"""Passes over runs and jobs in queues, against an API server in memory; decisions are tested elsewhere."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentfly.kube import (
    JOBS,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_FLAVORS,
    RESOURCE_POOLS,
    TRAINING_RUNS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Conflict,
    KubeError,
)
from agentfly_operator.cluster import absent as absent_module
from agentfly_operator.cluster import queues as module
from agentfly_operator.cluster import works as works_module
from tests.unit.operator.kueue import GPU
from tests.unit.operator.pass_world import OneRun

Obj = dict[str, Any]
LABELS = {"kueue.x-k8s.io/queue-name": "team-a"}


class World(OneRun):
    """One run in a queue."""

    def create(self, priority: str = "", **spec: Any) -> None:
        super().create(**spec)
        labels = LABELS | ({"kueue.x-k8s.io/priority-class": priority} if priority else {})
        self.live(TRAINING_RUNS, "first")["metadata"]["labels"] = labels

    async def look(self, times: int = 1, *, shown: bool = True) -> float | None:
        after = None
        for _ in range(times):
            self.kueue.show()
            after = await super().look(1, shown=shown)
        return after

    @property
    def workload(self) -> Obj:
        return self.live(WORKLOADS, "first")

    async def to_pods(self) -> None:
        await self.look(3)
        self.kueue.admits()
        await super().to_pods()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    monkeypatch.setattr(absent_module, "MISSING_S", 0.0)
    monkeypatch.setattr(module, "MISSING_S", 0.0)
    made = World()
    yield made
    await made.heads.close()


async def test_a_run_in_a_queue_is_made_only_when_and_where_it_has_quota(world: World) -> None:
    world.kueue.install("team-a")
    world.create("high")
    await world.look(3)
    assert world.status["phase"] == "Queued"
    spec = world.workload["spec"]
    assert (spec["queueName"], spec["priority"]) == ("team-a", 1000)
    assert world.kube.names(JOBS) | world.kube.names(PODS) | world.kube.names(RESOURCE_POOLS) == set()
    world.kueue.admits()
    await world.look(3)
    job = world.live(JOBS, "first-prepare")["spec"]["template"]["spec"]
    assert (job["nodeSelector"], job["tolerations"]) == ({"gpu": "h200"}, [GPU])
    assert "labels" not in job
    await world.to_pods()
    pod = world.live(PODS, "first-trainer-1-0")
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"gpu": "h200"}, [GPU])
    placement = world.live(RESOURCE_POOLS, "first-policy")["spec"]["placement"]
    assert (placement["nodeSelector"], placement["tolerations"]) == ({"gpu": "h200"}, [GPU])
    for made in (pod, world.live(JOBS, "first-prepare"), world.live(RESOURCE_POOLS, "first-policy")):
        assert not LABELS.keys() & made["metadata"]["labels"].keys()


async def test_a_ray_cluster_is_made_where_it_has_quota_and_is_in_no_queue(world: World) -> None:
    world.kueue.install("team-a")
    world.defined.add(RAY_CLUSTERS)
    world.create(trainer={"nodes": 2})
    await world.look(3)
    world.kueue.admits()
    await world.look(3)
    world.prepared()
    await world.look(6)
    cluster = world.live(RAY_CLUSTERS, "first-trainer-1")
    assert not LABELS.keys() & cluster["metadata"]["labels"].keys()
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert (pod["nodeSelector"], pod["tolerations"]) == ({"gpu": "h200"}, [GPU])
        assert not LABELS.keys() & group["template"]["metadata"]["labels"].keys()
    cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "default"
    cluster["spec"]["suspend"] = True
    await world.look(2)
    text = "True QuotaModeConflict: Kueue holds RayCluster first-trainer-1"
    assert world.condition("Stalled").startswith(text)


async def test_quota_is_returned_over_the_version_that_was_seen(world: World) -> None:
    world.kueue.install("team-a")
    world.create()
    await world.look(3)
    world.kueue.admits()
    world.kueue.says(Evicted="Preempted")
    world.kube.refuses["patch", "workloads"] = Conflict("changed", status=409)
    await world.look(2)
    assert world.workload["status"]["admission"] is not None
    del world.kube.refuses["patch", "workloads"]
    await world.look(1)
    status = world.workload["status"]
    assert status["admission"] is None
    found = {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}
    assert found["QuotaReserved"] == ("False", "Pending")
    assert found["Requeued"] == ("True", "Preempted")
    assert world.kube.names(JOBS) == set()


async def test_quota_stays_while_a_pod_of_a_server_is_there(world: World) -> None:
    world.kueue.install("team-a")
    world.create()
    await world.look(3)
    world.kueue.admits()
    pod = {
        "metadata": {"uid": "m-1", "namespace": "team", "deletionTimestamp": "2026-11-30T12:00:00Z"},
        "agentfly.dev/pool": "first-policy",
        "fact": None,
    }
    world.kueue.members.heard("ADDED", pod)
    world.kueue.says(Evicted="Preempted")
    await world.look(3)
    assert world.workload["status"]["admission"] is not None
    world.kueue.members.heard("DELETED", pod)
    await world.look(2)
    assert world.workload["status"]["admission"] is None


async def test_without_kueue_a_run_asks_for_nothing(world: World) -> None:
    world.create()
    await world.look(2)
    assert world.condition("Stalled").startswith("True KueueMissing: ")
    assert world.kube.names(JOBS) | world.kube.names(WORKLOADS) == set()
    world.kueue.install()
    await world.look(2)
    assert world.condition("Stalled") == "True MissingObject: not there: LocalQueue team-a"
    world.kueue.install("team-a")
    await world.look(2)
    assert world.status["phase"] == "Queued"


async def test_a_priority_that_is_not_there_is_named(world: World) -> None:
    world.kueue.install("team-a")
    world.create("urgent")
    await world.look(2)
    assert world.condition("Stalled") == "True MissingObject: not there: WorkloadPriorityClass urgent"
    world.kube.put(WORKLOAD_PRIORITY_CLASSES, {"metadata": {"name": "urgent", "namespace": ""}, "value": 5})
    await world.look(3)
    assert world.workload["spec"]["priority"] == 5


@pytest.mark.parametrize(
    "resource", [WORKLOAD_PRIORITY_CLASSES, RESOURCE_FLAVORS], ids=lambda each: each.plural
)
async def test_what_the_operator_may_not_read_is_told_with_the_remedy(world: World, resource: Any) -> None:
    world.kueue.install("team-a")
    world.create("high")
    refusal = KubeError("kubernetes: forbidden", status=403, hints=["grant it with a Role"])
    if resource is RESOURCE_FLAVORS:
        await world.look(3)
        world.kueue.admits()
    world.kube.refuses["get", resource.plural] = refusal
    await world.look(3)
    text = world.condition("Stalled")
    assert text.startswith("True StartFailed: ")
    assert "cannot be read: kubernetes: forbidden (grant it with a Role)" in text
    assert world.kube.names(JOBS) == set()
    del world.kube.refuses["get", resource.plural]
    await world.look(3)
    assert world.condition("Stalled").startswith("False")


async def test_a_run_that_is_in_no_queue_costs_no_request_for_one(world: World) -> None:
    world.kueue.install("team-a")
    OneRun.create(world)
    await OneRun.to_pods(world)
    kinds = {resource for _, resource, _ in world.kube.calls}
    assert not kinds & {"workloads", "localqueues", "resourceflavors", "workloadpriorityclasses"}


async def test_another_request_is_another_workload(world: World) -> None:
    world.kueue.install("team-a")
    world.create()
    await world.look(3)
    first = world.workload["metadata"]["uid"]
    world.live(TRAINING_RUNS, "first")["spec"]["trainer"] = {"nodes": 2}
    await world.look(4)
    assert world.workload["metadata"]["uid"] != first
    assert world.workload["spec"]["podSets"][0]["count"] == 2


async def test_a_preparation_that_kueue_holds_is_told(world: World) -> None:
    world.kueue.install("team-a")
    world.create()
    await world.look(3)
    world.kueue.admits()
    await world.look(3)
    job = world.live(JOBS, "first-prepare")
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "default"
    job["spec"]["suspend"] = True
    await world.look(2)
    assert world.condition("Stalled").startswith("True QuotaModeConflict: Kueue holds Job first-prepare")
