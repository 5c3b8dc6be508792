"""What is known of children of runs: words, expectations, last words; what is made, what is missing."""

import asyncio
from typing import Any, Self, cast

import pytest

from agentfly.kube import (
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_POOLS,
    WORKLOADS,
    Conflict,
    Kube,
    KubeError,
    NotFound,
    Resource,
    Unreachable,
)
from agentfly.roles.launch import Report
from agentfly_operator.cluster import absent as absent_module
from agentfly_operator.cluster import children as module
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.children import Children, _projection
from agentfly_operator.cluster.hand import Hand, Leaving, Refused, Taken
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.pools import NotLeading
from agentfly_operator.cluster.works import named
from agentfly_operator.plan.children import WorkKey, cluster_of, job_of, pod_of, pool_of
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make_work import job, run

RUN: WorkKey = ("TrainingRun", "team", "first")
UID = "uid-of-run"
Obj = dict[str, Any]


def meta(name: str, uid: str, role: str, owner: str = UID, **marks: str) -> Obj:
    labels = {"agentfly.dev/training-run": "first", "agentfly.dev/role": role, **marks}
    return {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": "1",
        "labels": labels,
        "ownerReferences": [{"kind": "TrainingRun", "name": "first", "uid": owner, "controller": True}],
    }


def pod(
    name: str = "first-trainer-1-0", uid: str = "p", *, attempt: int = 1, index: int = 0, **status: Any
) -> Obj:
    marks = {"agentfly.dev/attempt": str(attempt), "agentfly.dev/index": str(index)}
    return {
        "kind": "Pod",
        "metadata": meta(name, uid, "trainer", **marks),
        "status": {"phase": "Running", **status},
    }


def ended(code: int, message: str = "", reason: str = "Error") -> Obj:
    terminated = {
        "exitCode": code,
        "reason": reason,
        "message": message,
        "finishedAt": "2026-11-30T12:00:00Z",
    }
    return {"containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}]}


def told(kind: str, change: str, obj: Obj, children: Children) -> None:
    children.heard(change, _projection(kind)(obj))


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def news() -> list[WorkKey]:
    return []


@pytest.fixture
def children(kube: FakeKube, news: list[WorkKey]) -> Children:
    return Children(cast(Kube, kube), (), news.append)


@pytest.fixture
def hand(kube: FakeKube, children: Children) -> Hand:
    return Hand(cast(Kube, kube), children, Metrics(), lambda: True)


# Words


def test_the_words_for_a_pod() -> None:
    report = Report(attempt=2, phase="Ended", exit_code=85, suspended=True)
    found = pod_of(
        pod(attempt=2, index=1, podIP="10.0.0.7", phase="Failed", **ended(85, report.termination_message()))
    )
    assert (found.attempt, found.index, found.ip, found.exit_code) == (2, 1, "10.0.0.7", 85)
    assert (found.report, found.message, found.waiting) == (report, "", "")
    assert found.finished is not None
    beside = {"name": "a-proxy", "state": {"terminated": {"exitCode": 0, "message": "bye"}}}
    states = ended(85, report.termination_message())["containerStatuses"]
    assert pod_of(pod(containerStatuses=[beside, *states])).exit_code == 85
    running = {"name": "trainer", "state": {"running": {"startedAt": "2026-11-30T12:00:00Z"}}}
    found = pod_of(pod(containerStatuses=[beside, running]))
    assert (found.exit_code, found.message, found.over) == (None, "", False)
    assert found.started is not None
    plain = pod_of(pod(phase="Failed", reason="Evicted", **ended(137, "killed", "OOMKilled")))
    assert (plain.report, plain.message, plain.reason) == (None, "killed", "Evicted")
    assert pod_of(pod(**ended(137, reason="OOMKilled"))).reason == "OOMKilled"
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    waits = pod_of(pod(phase="Pending", conditions=[{**unplaced, "message": "0/1 nodes: Insufficient cpu."}]))
    assert waits.waiting == "InsufficientCpu: 0/1 nodes: Insufficient cpu."


def test_the_words_for_a_job_and_a_pool() -> None:
    whole = {
        "metadata": meta("first-prepare", "j", "prepare"),
        "spec": {"parallelism": 0, "suspend": True},
        "status": {
            "active": 1,
            "failed": 2,
            "completedIndexes": "0-3",
            "conditions": [
                {"type": "Complete", "status": "False"},
                {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 87"},
            ],
        },
    }
    job = job_of(whole)
    assert (job.owner, job.parallelism, job.suspended, job.active, job.failures) == (UID, 0, True, 1, 2)
    assert (job.complete, job.failed, job.reason, job.message) == (
        False,
        True,
        "PodFailurePolicy",
        "exit code 87",
    )
    assert job.completed_indexes == "0-3"
    pool = pool_of(
        {
            "metadata": meta("first-policy", "q", "policy"),
            "spec": {"capacity": {"max": 2}},
            "status": {
                "members": {"ready": 2, "leased": 1},
                "queue": {"pending": 3},
                "conditions": [{"type": "Ready", "status": "True", "reason": "MinAvailable", "message": "2"}],
            },
        }
    )
    assert (pool.ready, pool.stalled, pool.reason, pool.owner) == (True, False, "MinAvailable", UID)
    assert (pool.use.ready, pool.use.leased, pool.use.queued, pool.use.max) == (2, 1, 3, 2)
    assert not pool_of({"metadata": meta("first-policy", "q", "policy")}).ready


# 1. who is told


def test_a_run_is_told_of_news_and_of_nothing_else(children: Children, news: list[WorkKey]) -> None:
    told("Pod", "ADDED", pod(), children)
    told("Pod", "MODIFIED", pod(startTime="2026-11-30T12:00:00Z"), children)
    assert news == [RUN]
    told("Pod", "MODIFIED", pod(podIP="10.0.0.7"), children)
    assert news == [RUN, RUN]
    stranger = pod()
    stranger["metadata"]["labels"] = {"agentfly.dev/role": "trainer"}
    told("Pod", "ADDED", stranger, children)
    assert len(news) == 2


def test_a_child_of_another_run_of_this_name_is_none(children: Children) -> None:
    told("Pod", "ADDED", pod(), children)
    assert [each.uid for each in children.pods(RUN, "trainer", UID)] == ["p"]
    assert children.pods(RUN, "trainer", "uid-of-next") == []
    assert children.pods(RUN, "prepare", UID) == []


# 2. what is gone


def test_what_is_gone_is_gone(children: Children, news: list[WorkKey]) -> None:
    told("Pod", "ADDED", pod(), children)
    told("ResourcePool", "ADDED", {"metadata": meta("first-policy", "q", "policy")}, children)
    assert children.pool("team", "first-policy") is not None
    told("Pod", "DELETED", pod(), children)
    told("ResourcePool", "DELETED", {"metadata": meta("first-policy", "q", "policy")}, children)
    assert children.pods(RUN, "trainer", UID) == []
    assert children.pool("team", "first-policy") is None
    assert len(news) == 4


def test_a_pool_made_again_outlives_the_deletion_of_the_one_before(children: Children) -> None:
    told("ResourcePool", "ADDED", {"metadata": meta("first-policy", "new", "policy")}, children)
    told("ResourcePool", "DELETED", {"metadata": meta("first-policy", "old", "policy")}, children)
    found = children.pool("team", "first-policy")
    assert found is not None
    assert found.uid == "new"


# 3. what was made a moment ago


async def test_what_was_made_is_seen_before_a_watch_shows_it(
    children: Children, hand: Hand, news: list[WorkKey]
) -> None:
    made = await hand.make(pod())
    uid = made["metadata"]["uid"]
    assert [each.uid for each in children.pods(RUN, "trainer", UID)] == [uid]
    assert news == [RUN]
    told("Pod", "ADDED", {**made, "status": {"phase": "Running", "podIP": "10.0.0.7"}}, children)
    assert [each.ip for each in children.pods(RUN, "trainer", UID)] == ["10.0.0.7"]
    children.saw(made)  # late: the watch knows better
    assert [each.ip for each in children.pods(RUN, "trainer", UID)] == ["10.0.0.7"]
    told("Pod", "DELETED", made, children)
    assert children.pods(RUN, "trainer", UID) == []


async def test_what_no_watch_shows_is_asked_for_and_lost_only_if_it_is_gone(
    children: Children, hand: Hand, kube: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPECTED_S", 0.02)
    made = await hand.make(pod())
    await children.confirm(RUN)
    assert ("get", "pods", "first-trainer-1-0") not in kube.calls
    await asyncio.sleep(0.03)
    await children.confirm(RUN)
    assert len(children.pods(RUN, "trainer", UID)) == 1  # it is there: expected for another while
    await asyncio.sleep(0.03)
    kube.refuses["get", "pods"] = KubeError("planted", status=500)
    with pytest.raises(KubeError, match="planted"):
        await children.confirm(RUN)
    assert len(children.pods(RUN, "trainer", UID)) == 1  # no answer is no loss
    del kube.refuses["get", "pods"]
    kube.objects.clear()
    await children.confirm(RUN)
    assert children.pods(RUN, "trainer", UID) == []
    kube.put(PODS, {**pod(), "metadata": {**made["metadata"], "uid": "another"}})
    children.saw(made)
    await asyncio.sleep(0.03)
    await children.confirm(RUN)
    assert children.pods(RUN, "trainer", UID) == []


async def test_jobs_and_pools_are_expected_too(children: Children, hand: Hand) -> None:
    await hand.make({"kind": "Job", "metadata": meta("first-prepare", "j", "prepare")})
    await hand.make({"kind": "ResourcePool", "metadata": meta("first-policy", "q", "policy")})
    await hand.make({"kind": "Service", "metadata": meta("first-trainer", "s", "trainer")})
    assert [job.name for job in children.jobs(RUN, "prepare", UID)] == ["first-prepare"]
    assert children.pool("team", "first-policy") is not None
    told("ResourcePool", "DELETED", {"metadata": meta("first-policy", "q", "policy")}, children)
    assert children.pool("team", "first-policy") is None


# 4. last words


def test_what_a_head_said_last_outlives_it(children: Children) -> None:
    report = Report(attempt=1, phase="Ended", exit_code=85, suspended=True)
    told("Pod", "ADDED", pod(), children)
    # The pod is gone half a second after it ended: nobody may have looked between.
    told("Pod", "DELETED", pod(**ended(85, report.termination_message())), children)
    assert children.pods(RUN, "trainer", UID) == []
    assert children.ended(RUN, UID, 1) == report
    assert children.ended(RUN, UID, 2) is None
    assert children.ended(RUN, "uid-of-next", 1) is None
    later = Report(attempt=2, phase="Ended", exit_code=0)
    told("Pod", "ADDED", pod(uid="p2", attempt=2, **ended(0, later.termination_message())), children)
    told("Pod", "ADDED", pod(uid="p3", attempt=1, **ended(85, report.termination_message())), children)
    assert children.ended(RUN, UID, 2) == later
    children.forget(RUN)
    assert children.ended(RUN, UID, 2) is None


def test_the_words_of_other_pods_are_not_those_of_the_head(children: Children) -> None:
    report = Report(attempt=1, phase="Ended", exit_code=1)
    told("Pod", "ADDED", pod(index=1, **ended(1, report.termination_message())), children)
    assert children.ended(RUN, UID, 1) is None


def of_cluster(name: str, uid: str, attempt: int = 1, *, index: int | None = None, **status: Any) -> Obj:
    """A pod that KubeRay made."""
    found = pod(name, uid, attempt=attempt, **status)
    marks = found["metadata"]["labels"] | {"agentfly.dev/training-run-uid": UID}
    del marks["agentfly.dev/index"]
    marks |= {} if index is None else {"agentfly.dev/index": str(index)}
    owner = {"kind": "RayCluster", "name": f"first-trainer-{attempt}", "uid": "c", "controller": True}
    found["metadata"] |= {"labels": marks, "ownerReferences": [owner]}
    return found


def test_pods_of_a_cluster_belong_to_its_run_and_outlive_themselves(children: Children) -> None:
    told("Pod", "ADDED", of_cluster("head", "h", index=0), children)
    told("Pod", "ADDED", of_cluster("node", "n"), children)
    told("Pod", "ADDED", pod(), children)
    assert [each.name for each in children.pods(RUN, "trainer", UID)] == ["first-trainer-1-0", "head", "node"]
    told("Pod", "DELETED", of_cluster("node", "n", **ended(137, reason="OOMKilled")), children)
    told("Pod", "DELETED", pod(), children)
    (gone,) = children.gone(RUN, UID, 1)  # of pods that we make none: nobody replaces them
    assert (gone.name, gone.cluster, gone.index, gone.reason) == ("node", "first-trainer-1", -1, "OOMKilled")
    assert children.gone(RUN, "uid-of-next", 1) == children.gone(RUN, UID, 2) == []
    told("Pod", "DELETED", of_cluster("later", "l", 2), children)
    told("Pod", "DELETED", of_cluster("head", "h", index=0), children)
    assert [each.name for each in children.gone(RUN, UID, 2)] == ["later"]
    assert children.gone(RUN, UID, 1) == []
    children.forget(RUN)
    assert children.gone(RUN, UID, 2) == []


def test_what_is_kept_of_pods_that_went_has_a_bound(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GONE_MAX", 3)
    for number in range(5):
        told("Pod", "DELETED", of_cluster(f"node-{number}", f"n{number}"), children)
    assert [each.name for each in children.gone(RUN, UID, 1)] == ["node-0", "node-1", "node-2"]


def test_of_two_heads_of_an_attempt_the_first_one_has_the_word(children: Children) -> None:
    first = Report(attempt=1, phase="Ended", exit_code=0)
    told(
        "Pod",
        "DELETED",
        of_cluster("head-a", "a", index=0, **ended(0, first.termination_message())),
        children,
    )
    gone = Report(attempt=1, phase="Ended", exit_code=1, reason="PodLost")
    told("Pod", "ADDED", of_cluster("head-b", "b", index=0, **ended(1, gone.termination_message())), children)
    assert children.ended(RUN, UID, 1) == first


# 5. kinds of other operators


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


# The hand


async def test_what_exists_of_the_same_owner_is_taken_as_made(hand: Hand, kube: FakeKube) -> None:
    first = await hand.make(pod())
    assert (await hand.make(pod()))["metadata"]["uid"] == first["metadata"]["uid"]
    assert len(kube.objects) == 1


async def test_what_belongs_to_somebody_else_is_named_and_stays(hand: Hand, kube: FakeKube) -> None:
    other = meta("first-prepare", "x", "prepare", owner="theirs")
    other["ownerReferences"][0]["name"] = "other"
    theirs = kube.put(JOBS, {"metadata": other})
    with pytest.raises(Taken, match="Job first-prepare exists and belongs to somebody else"):
        await hand.make({"kind": "Job", "metadata": meta("first-prepare", "j", "prepare")})
    assert await kube.get(JOBS, "first-prepare", "team") == theirs


@pytest.mark.parametrize("marked", [False, True])
async def test_what_goes_by_itself_is_not_taken_for_somebody_elses(
    hand: Hand, kube: FakeKube, marked: bool
) -> None:
    # Of a run that was deleted and made anew under its name: marked, or not found by the collector yet.
    old = meta("first-prepare", "x", "prepare", owner="uid-of-the-run-before")
    if marked:
        old["ownerReferences"][0]["name"] = "other"
        old["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    kube.put(JOBS, {"metadata": old})
    with pytest.raises(Leaving, match="Job first-prepare of an older owner is still being removed"):
        await hand.make({"kind": "Job", "metadata": meta("first-prepare", "j", "prepare")})


async def test_what_is_not_accepted_is_told_with_its_cause(hand: Hand, kube: FakeKube) -> None:
    kube.refuses["create", "pods"] = KubeError("exceeded quota: gpus", status=403)
    with pytest.raises(Refused, match="Pod first-trainer-1-0 cannot be made: exceeded quota: gpus"):
        await hand.make(pod())
    kube.refuses["create", "pods"] = KubeError("busy", status=500)
    with pytest.raises(KubeError, match="busy"):
        await hand.make(pod())
    kube.refuses.clear()
    await hand.make(pod(), trial=True)
    assert kube.objects == {}


async def test_only_the_object_that_is_meant_is_deleted(hand: Hand, kube: FakeKube) -> None:
    made = await hand.make(pod())
    await hand.remove("Pod", "team", "first-trainer-1-0", "another")
    assert len(kube.objects) == 1
    await hand.remove("Pod", "team", "first-trainer-1-0", made["metadata"]["uid"])
    await hand.remove("Pod", "team", "first-trainer-1-0", made["metadata"]["uid"])
    assert kube.objects == {}


async def test_a_head_is_asked_by_its_annotation_if_it_is_still_that_one(hand: Hand, kube: FakeKube) -> None:
    made = await hand.make(pod())
    await hand.ask_suspend("team", "first-trainer-1-0", "another")
    assert "annotations" not in kube.objects["pods", "team", "first-trainer-1-0"]["metadata"]
    await hand.ask_suspend("team", "first-trainer-1-0", made["metadata"]["uid"])
    live = kube.objects["pods", "team", "first-trainer-1-0"]["metadata"]
    assert live["annotations"] == {"agentfly.dev/suspend": "true"}
    assert pod_of({"metadata": live}).asked
    await hand.ask_suspend("team", "gone", "x")


async def test_a_patch_is_of_the_object_that_is_meant_and_of_one_that_is_gone_none(
    hand: Hand, kube: FakeKube
) -> None:
    made = kube.put(WORKLOADS, {"metadata": {"name": "w", "namespace": "team"}})
    body = {"metadata": {"uid": made["metadata"]["uid"]}, "status": {"admission": None}}
    await hand.merge(WORKLOADS, "team", "w", body, subresource="status")
    assert kube.objects["workloads", "team", "w"]["status"] == {"admission": None}
    await hand.merge(WORKLOADS, "team", "gone", body, subresource="status")
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "status": {}}
    with pytest.raises(Conflict):
        await hand.merge(WORKLOADS, "team", "w", stale, subresource="status")


def test_pods_that_have_not_ended_are_counted_whoever_controls_them(children: Children) -> None:
    theirs = pod("b", "b")
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    for each in (pod("a", "a"), theirs, pod("c", "c", phase="Succeeded")):
        told("Pod", "ADDED", each, children)
    assert (children.alive(RUN, "trainer"), children.alive(RUN, "prepare")) == (2, 0)


async def test_who_does_not_lead_writes_nothing(kube: FakeKube, children: Children) -> None:
    hand = Hand(cast(Kube, kube), children, Metrics(), lambda: False)
    with pytest.raises(NotLeading):
        await hand.make(pod())
    with pytest.raises(NotLeading):
        await hand.remove("Pod", "team", "first-trainer-1-0", "x")
    with pytest.raises(NotLeading):
        await hand.ask_suspend("team", "first-trainer-1-0", "x")
    with pytest.raises(NotLeading):
        await hand.write_status(RESOURCE_POOLS, pod(), {})
    with pytest.raises(NotLeading):
        await hand.merge(WORKLOADS, "team", "w", {"metadata": {}})
    assert kube.calls == []


# What is missing

CLAIM = ("PersistentVolumeClaim", "runs")


async def test_what_is_missing_is_looked_for_soon_and_what_is_there_seldom(
    kube: FakeKube, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_module, "MISSING_S", 0.02)
    absent = Absent(cast(Kube, kube), children)
    pool = ("ResourcePool", "shell")
    assert await absent.of("team", [CLAIM, pool]) == ("PersistentVolumeClaim runs", "ResourcePool shell")
    await absent.of("team", [CLAIM, pool])
    assert kube.calls == [("get", "persistentvolumeclaims", "runs")]
    kube.put(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"name": "runs", "namespace": "team"}})
    told("ResourcePool", "ADDED", {"metadata": meta("shell", "q", "")}, children)
    await asyncio.sleep(0.03)
    assert await absent.of("team", [CLAIM, pool]) == ()
    await asyncio.sleep(0.03)
    kube.objects.clear()
    assert await absent.of("team", [CLAIM, pool]) == ()
    assert len(kube.calls) == 2


@pytest.mark.parametrize("error", [KubeError("no", status=403), KubeError("down", status=0)])
async def test_what_cannot_be_looked_up_counts_as_there(
    kube: FakeKube, children: Children, error: KubeError
) -> None:
    kube.refuses["get", "persistentvolumeclaims"] = error
    assert await Absent(cast(Kube, kube), children).of("team", [CLAIM]) == ()


async def test_what_was_missing_stays_so_while_nobody_answers(
    kube: FakeKube, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_module, "MISSING_S", 0.0)
    absent = Absent(cast(Kube, kube), children)
    kube.refuses["get", "persistentvolumeclaims"] = NotFound("none", status=404)
    assert await absent.of("team", [CLAIM]) == ("PersistentVolumeClaim runs",)
    kube.refuses["get", "persistentvolumeclaims"] = KubeError("down", status=0)
    assert await absent.of("team", [CLAIM]) == ("PersistentVolumeClaim runs",)


def test_every_secret_of_its_pods_is_named_once() -> None:
    def pods(*names: str) -> dict[str, Any]:
        key = [{"secretKeyRef": {"name": name, "key": "k"}} for name in names]
        return {"pod": {"env": [{"name": f"V{n}", "valueFrom": each} for n, each in enumerate(key)]}}

    training = run(trainer=pods("b", "a"), inference=pods("a", "c"))
    works = (training, job(workers=pods("b", "a"), inference=pods("c")))
    for work in works:
        assert [name for kind, name in named(work) if kind == "Secret"] == ["b", "a", "c"]
