"""Children of runs as the watches tell of them; the numbers are the guarantees of `cluster.children`."""

import asyncio
from typing import Any, cast

import pytest

from agentfly.kube import PODS, Kube, KubeError
from agentfly.roles.launch import Report
from agentfly_operator.cluster import children as module
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.plan.children import WorkKey, job_of, pod_of, pool_of
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make_children import RUN, UID, Obj, ended, meta, pod, told


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


def test_pods_that_have_not_ended_are_counted_whoever_controls_them(children: Children) -> None:
    theirs = pod("b", "b")
    theirs["metadata"]["ownerReferences"][0]["uid"] = "another"
    for each in (pod("a", "a"), theirs, pod("c", "c", phase="Succeeded")):
        told("Pod", "ADDED", each, children)
    assert (children.alive(RUN, "trainer"), children.alive(RUN, "prepare")) == (2, 0)


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
