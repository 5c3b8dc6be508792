"""Children of kinds that another operator defines: guarantee 5 of `cluster.children`."""

from typing import Any, Self, cast

import pytest

from agentfly.kube import RAY_CLUSTERS, WORKLOADS, Kube, Resource, Unreachable
from agentfly_operator.cluster import children as module
from agentfly_operator.cluster.children import Children
from agentfly_operator.plan.children import WorkKey, cluster_of
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make_children import RUN, UID, Obj, meta, pod, told


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def news() -> list[WorkKey]:
    return []


@pytest.fixture
def children(kube: FakeKube, news: list[WorkKey]) -> Children:
    return Children(cast(Kube, kube), (), news.append)


class Lists:
    """An informer that lists at once, or not at all."""

    entered: list[str]
    left: list[str]
    lists = True

    def __init__(self, _: object, resource: Resource, *__: object, **___: object) -> None:
        self.plural = resource.plural

    async def __aenter__(self) -> Self:
        self.entered.append(self.plural)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left.append(self.plural)

    def subscribe(self, _: object) -> None:
        pass

    async def synced(self, _: float) -> None:
        if not self.lists:
            raise Unreachable("not listed")


@pytest.fixture
def informers(monkeypatch: pytest.MonkeyPatch) -> type[Lists]:
    monkeypatch.setattr(module, "Informer", Lists)
    monkeypatch.setattr(Lists, "entered", [], raising=False)
    monkeypatch.setattr(Lists, "left", [], raising=False)
    return Lists


def cluster(uid: str = "c", **status: Any) -> Obj:
    return {
        "kind": "RayCluster",
        "metadata": meta("first-trainer-1", uid, "trainer", **{"agentfly.dev/attempt": "1"}),
        "status": status,
    }


def test_the_words_for_a_cluster() -> None:
    found = cluster_of(cluster())
    assert (found.name, found.attempt, found.taken, found.trouble) == ("first-trainer-1", 1, False, "")
    failing = {"type": "ReplicaFailure", "status": "True"}
    failing |= {"reason": "FailedCreateHeadPod", "message": "quota"}
    assert cluster_of(cluster(conditions=[failing])).trouble == "FailedCreateHeadPod: quota"
    held = cluster()
    held["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "default"
    held["spec"] = {"suspend": True}
    assert (cluster_of(held).queue, cluster_of(held).suspended) == ("default", True)
    assert (cluster_of(cluster()).queue, cluster_of(cluster()).suspended) == ("", False)
    fine = cluster(observedGeneration=1, conditions=[{**failing, "status": "False"}])
    assert (cluster_of(fine).taken, cluster_of(fine).trouble) == (True, "")


async def test_a_kind_of_another_operator_is_watched_while_it_is_there(
    children: Children, news: list[WorkKey], informers: type[Lists]
) -> None:
    async with children:
        await children.begin(1)
        assert sorted(informers.entered) == ["jobs", "pods", "resourcepools"]
        await children.follow(RAY_CLUSTERS)
        assert informers.entered[3:] == ["rayclusters"]
        told("RayCluster", "ADDED", cluster(), children)
        told("Pod", "ADDED", pod(), children)
        children.saw({**cluster("d"), "kind": "RayCluster"})  # its watch will never show it
        assert [each.uid for each in children.clusters(RUN, UID)] == ["c", "d"]
        assert children.clusters(RUN, "uid-of-next") == []
        before = len(news)
        await children.leave(RAY_CLUSTERS)
        assert informers.left == ["rayclusters"]
        assert children.clusters(RUN, UID) == []
        assert len(news) == before + 1
        assert [each.uid for each in children.pods(RUN, "trainer", UID)] == ["p"]
        await children.follow(RAY_CLUSTERS)
    assert sorted(informers.left) == ["jobs", "pods", "rayclusters", "rayclusters", "resourcepools"]


def workload(name: str = "first", owner: Obj | None = None, **status: Any) -> Obj:
    reference = {"kind": "TrainingRun", "name": "first", "uid": UID, "controller": True}
    place = {"name": name, "namespace": "team", "uid": f"uid-{name}", "resourceVersion": "1"}
    made = {"metadata": {**place, "ownerReferences": [owner or reference]}, "spec": {}, "status": status}
    return {"kind": "Workload", **made}


async def test_workloads_are_watched_while_kueue_is_there(
    children: Children, news: list[WorkKey], informers: type[Lists]
) -> None:
    async with children:
        await children.follow(WORKLOADS)
        assert informers.entered == ["workloads"]
        children.saw(workload())  # it was made a moment ago
        assert children.workload(RUN, UID) is not None
        told("Workload", "ADDED", workload(), children)
        told("Workload", "MODIFIED", workload(requeueState={"count": 1}), children)
        assert news == [RUN, RUN]
        evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for b"}
        told("Workload", "MODIFIED", workload(conditions=[evicted]), children)
        found = children.workload(RUN, UID)
        assert found is not None
        assert (found.evicted, found.why) == ("Preempted", "for b")
        assert children.workload(RUN, "uid-of-next") is None
        assert len(news) == 3
        await children.leave(WORKLOADS)
        assert informers.left == ["workloads"]
        assert children.workload(RUN, UID) is None
        assert len(news) == 4


def test_a_workload_that_kueue_made_is_that_of_the_job_and_of_others_nothing_is_kept(
    children: Children, news: list[WorkKey]
) -> None:
    owner = {"kind": "Job", "name": "first-workers", "uid": "job-1", "controller": True}
    work: WorkKey = ("RolloutJob", "team", "first")
    over = {"type": "Finished", "status": "True"}
    told("Workload", "ADDED", workload("a", owner, conditions=[over]), children)
    told("Workload", "ADDED", workload("b", owner), children)
    found = children.workload(work, "job-1")
    assert found is not None
    assert found.name == "b"  # of two the one that is not over
    assert news == [work, work]
    told("Workload", "ADDED", workload("x", {**owner, "name": "mine"}), children)
    told("Workload", "DELETED", workload("x", {**owner, "name": "mine"}), children)
    assert news == [work, work]


async def test_a_watch_that_lists_nothing_is_stopped_again(
    children: Children, informers: type[Lists], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informers, "lists", False)
    with pytest.raises(Unreachable):
        await children.follow(RAY_CLUSTERS)
    assert informers.left == informers.entered == ["rayclusters"]
