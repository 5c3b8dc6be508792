"""What is written for runs and jobs: what the hand makes, removes and patches, and what it refuses."""

from typing import cast

import pytest

from agentfly.kube import JOBS, RESOURCE_POOLS, WORKLOADS, Conflict, Kube, KubeError
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.hand import Hand, Leaving, Refused, Taken
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.pools import NotLeading
from agentfly_operator.plan.children import pod_of
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make_children import meta, pod


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def children(kube: FakeKube) -> Children:
    return Children(cast(Kube, kube), (), lambda _: None)


@pytest.fixture
def hand(kube: FakeKube, children: Children) -> Hand:
    return Hand(cast(Kube, kube), children, Metrics(), lambda: True)


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
