"""A run as Kueue sees it; the numbers are those of the guarantees of `render.workload`."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from agentfly.api import TrainingRun
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job
from agentfly_operator.render.workload import (
    Placing,
    finished,
    given_back,
    placed,
    placings,
    shape,
    switched,
    told_ready,
    workload,
)
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import run

Obj = dict[str, Any]
LATER = datetime(2026, 12, 1, 8, 30, tzinfo=UTC)
EARLIER = "2026-11-30T12:00:00Z"
GPUS: Obj = {
    "trainer": {"nodes": 2, "gpusPerNode": 4, "pod": {"cpu": "8", "memory": "64Gi"}},
    "inference": {"replicas": 3, "gpus": 1, "pod": {"cpu": "2", "memory": "16Gi"}},
}


def queued(labels: Obj | None = None, **spec: Any) -> TrainingRun:
    labels = labels or {"kueue.x-k8s.io/queue-name": "team-a"}
    made = run(**spec)
    return made.model_copy(update={"metadata": made.metadata.model_copy(update={"labels": labels})})


def condition(kind: str, status: str = "True", reason: str = "R", message: str = "m") -> Obj:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": EARLIER,
    }


def live(*conditions: Obj, **status: Any) -> Obj:
    meta = {"uid": "w-1", "resourceVersion": "41", "generation": 3}
    return {"metadata": meta, "status": {"conditions": list(conditions), **status}}


def told(patch: Obj) -> dict[str, tuple[str, str, str]]:
    return {
        each["type"]: (each["status"], each["reason"], each["lastTransitionTime"])
        for each in patch["status"]["conditions"]
    }


# 1. one Workload for all pods


def test_one_workload_stands_for_trainer_and_servers() -> None:
    made = workload(queued(**GPUS), 0, CONFIG)
    assert (made["apiVersion"], made["kind"]) == ("kueue.x-k8s.io/v1beta2", "Workload")
    meta = made["metadata"]
    assert (meta["name"], meta["namespace"]) == ("first", "team")
    assert meta["ownerReferences"][0]["uid"] == "0123456789abcdef"
    assert made["spec"]["queueName"] == "team-a"
    assert "priorityClassRef" not in made["spec"]
    asked = {
        each["name"]: (each["count"], each["template"]["spec"]["containers"][0]["resources"]["requests"])
        for each in made["spec"]["podSets"]
    }
    assert asked == {
        "trainer": (2, {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}),
        "inference": (3, {"cpu": "2000m", "memory": "16384Mi", "nvidia.com/gpu": "1"}),
    }
    for each in made["spec"]["podSets"]:
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in (
            each["template"]["spec"]["tolerations"]
        )


def test_the_priority_is_a_class_with_its_value() -> None:
    labels = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}
    spec = workload(queued(labels), 1000, CONFIG)["spec"]
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert (spec["priorityClassRef"], spec["priority"]) == (reference, 1000)


def test_where_the_trainer_serves_the_policy_there_are_no_servers_to_count() -> None:
    own = {"trainer": {"nodes": 2, "gpusPerNode": 4}, "inference": {"mode": "Colocated", "gpus": 2}}
    (trainer,) = workload(queued(**own), 0, CONFIG)["spec"]["podSets"]
    assert (trainer["name"], trainer["count"]) == ("trainer", 2)
    assert shape(queued(**own), CONFIG) != shape(queued(trainer=own["trainer"]), CONFIG)


# 2. the hash


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"steps": 7}, True),
        ({"trainer": {**GPUS["trainer"], "pod": {**GPUS["trainer"]["pod"], "image": "other"}}}, True),
        ({"trainer": {**GPUS["trainer"], "nodes": 4}}, False),
        ({"trainer": {**GPUS["trainer"], "gpusPerNode": 8}}, False),
        ({"trainer": {**GPUS["trainer"], "pod": {"cpu": "9", "memory": "64Gi"}}}, False),
        ({"inference": {**GPUS["inference"], "replicas": 4}}, False),
        ({"inference": {**GPUS["inference"], "pod": {"placement": {"nodeSelector": {"a": "b"}}}}}, False),
        ({"labels": {"kueue.x-k8s.io/queue-name": "team-b"}}, False),
        ({"labels": {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "x"}}, False),
    ],
)
def test_the_hash_is_that_of_what_is_asked_for(change: Obj, same: bool) -> None:
    before = shape(queued(**GPUS), CONFIG)
    after = queued(**{**GPUS, **change})
    assert (shape(after, CONFIG) == before) is same
    assert workload(after, 0, CONFIG)["metadata"]["annotations"] == {
        "agentfly.dev/shape": shape(after, CONFIG)
    }


def test_a_later_attempt_asks_for_the_same() -> None:
    made = queued(**GPUS)
    later = made.model_copy(update={"status": made.status.model_copy(update={"attempt": 4})})
    assert shape(later, CONFIG) == shape(made, CONFIG)


# 3. patches


@pytest.mark.parametrize(
    ("reason", "requeued"),
    [
        ("Preempted", "True"),
        ("NodeFailures", "True"),
        ("PodsReadyTimeout", "False"),
        ("Deactivated", "False"),
    ],
)
def test_quota_is_returned_in_one_patch_of_the_version_that_was_seen(reason: str, requeued: str) -> None:
    seen = live(
        condition("QuotaReserved"),
        condition("Admitted"),
        condition("Evicted", reason=reason, message="why"),
        condition("PodsReady", reason="Started"),
        condition("Preempted"),
        admission={"clusterQueue": "cq"},
    )
    patch = given_back(seen, LATER)
    assert patch is not None
    assert patch["metadata"] == {"uid": "w-1", "resourceVersion": "41"}
    assert patch["status"]["admission"] is None
    now = "2026-12-01T08:30:00Z"
    assert told(patch) == {
        "QuotaReserved": ("False", "Pending", now),
        "Admitted": ("False", "NoReservation", now),
        "Evicted": ("True", reason, EARLIER),
        "PodsReady": ("False", "WaitForStart", now),
        "Preempted": ("True", "R", EARLIER),
        "Requeued": (requeued, reason, now),
    }
    messages = {each["type"]: each["message"] for each in patch["status"]["conditions"]}
    assert messages["QuotaReserved"] == messages["Requeued"] == "why"


def test_who_was_not_evicted_or_has_nothing_returns_nothing() -> None:
    assert given_back(live(condition("Admitted"), admission={"a": 1}), LATER) is None
    assert given_back(live(condition("Evicted", "False"), admission={"a": 1}), LATER) is None
    assert given_back(live(condition("Evicted")), LATER) is None
    assert given_back({"metadata": {}}, LATER) is None


def test_what_kueue_hears_of_pods_and_of_the_end() -> None:
    first = told_ready(live(condition("Admitted")), True, LATER)
    assert told(first)["PodsReady"] == ("True", "Started", "2026-12-01T08:30:00Z")
    assert "admission" not in first["status"]
    lost = told_ready(live(condition("PodsReady", reason="Started")), False, LATER)
    assert told(lost)["PodsReady"][:2] == ("False", "WaitForRecovery")
    again = told_ready(live(condition("PodsReady", "False", "WaitForRecovery")), True, LATER)
    assert told(again)["PodsReady"][:2] == ("True", "Recovered")
    for succeeded, reason in ((True, "Succeeded"), (False, "Failed")):
        assert told(finished(live(), succeeded, LATER))["Finished"][:2] == ("True", reason)


def test_who_switches_a_workload_off_leaves_a_mark() -> None:
    off, on = switched("w-1", active=False), switched("w-1", active=True)
    assert off == {
        "metadata": {"uid": "w-1", "annotations": {"agentfly.dev/paused": "true"}},
        "spec": {"active": False},
    }
    assert on["metadata"]["annotations"] == {"agentfly.dev/paused": None}
    assert on["spec"] == {"active": True}


# 4. where pods may be

TOLERATION = {"key": "team-gpu", "operator": "Exists", "effect": "NoSchedule"}
FLAVORS: Obj = {
    "gpus": {"spec": {"nodeLabels": {"gpu": "h200"}, "tolerations": [TOLERATION]}},
    "cpus": {"spec": {"nodeLabels": {"pool": "cpu"}, "tolerations": [TOLERATION]}},
    "plain": {"spec": {}},
}


def test_pods_may_be_where_the_quota_of_their_set_is() -> None:
    sets = [
        {"name": "trainer", "flavors": {"nvidia.com/gpu": "gpus", "cpu": "cpus"}},
        {"name": "inference", "flavors": {"cpu": "plain"}},
    ]
    update = {"name": "inference", "nodeSelector": {"group": "7"}, "tolerations": [TOLERATION]}
    seen = live(
        admission={"podSetAssignments": sets}, admissionChecks=[{"name": "c", "podSetUpdates": [update]}]
    )
    where = placings(seen, FLAVORS)
    assert where == {
        "trainer": Placing({"pool": "cpu", "gpu": "h200"}, (TOLERATION,)),
        "inference": Placing({"group": "7"}, (TOLERATION,)),
    }
    made = queued(trainer={"pod": {"placement": {"nodeSelector": {"zone": "a"}}}})
    pod = placed(attempt_objects(made, 1, CONFIG)[-1], where)
    assert pod["spec"]["nodeSelector"] == {"zone": "a", "pool": "cpu", "gpu": "h200"}
    assert pod["spec"]["tolerations"] == [TOLERATION]
    job = placed(prepare_job(made, CONFIG)[1], where)
    assert job["spec"]["template"]["spec"]["nodeSelector"] == pod["spec"]["nodeSelector"]
    pool = placed(policy_pool(made, CONFIG), where)
    assert pool["spec"]["placement"]["nodeSelector"] == {"group": "7"}
    assert pool["spec"]["placement"]["tolerations"] == [TOLERATION]
    config_map = attempt_objects(made, 1, CONFIG)[0]
    assert placed(config_map, where) == config_map


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_of_a_ray_cluster_may_be_where_ours_may_and_are_in_no_queue(nodes: int) -> None:
    where = {"trainer": Placing({"gpu": "h200"}, (TOLERATION,)), "inference": Placing({"group": "7"})}
    made = queued(trainer={"nodes": nodes, "pod": {"placement": {"nodeSelector": {"zone": "a"}}}})
    whole = attempt_objects(made, 1, CONFIG, kuberay=True)[-1]
    cluster, before = placed(whole, where), copy.deepcopy(whole)
    ours = placed(attempt_objects(made, 1, CONFIG)[-1], where)["spec"]
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"].get("workerGroupSpecs", ())]
    assert len(groups) == nodes
    for group in groups:
        spec = group["template"]["spec"]
        assert spec["nodeSelector"] == ours["nodeSelector"] == {"zone": "a", "gpu": "h200"}
        assert spec["tolerations"] == ours["tolerations"] == [TOLERATION]
        assert not any("kueue" in label for label in group["template"]["metadata"]["labels"])
    assert not any("kueue" in label for label in cluster["metadata"]["labels"])
    assert whole == before
    assert placed(whole, {"trainer": Placing()}) == whole


# 5. who makes the pods


@pytest.mark.parametrize("engine", ["Auto", "Native", "KubeRay"])
def test_every_engine_asks_for_the_same(engine: str) -> None:
    made = {**GPUS, "trainer": {**GPUS["trainer"], "engine": engine}}
    assert shape(queued(**made), CONFIG) == shape(queued(**GPUS), CONFIG)


def test_a_flavor_without_labels_changes_nothing() -> None:
    pod = attempt_objects(queued(), 1, CONFIG)[-1]
    assert placed(pod, {"trainer": Placing()}) == pod
    assert placed(pod, {}) == pod
