"""A run as Kueue sees it: its Workload, what is written into that one's status, and where its pods may be.

Guarantees:
1. One Workload stands for all pods that a run has at a time: the trainer's and the policy's servers, so that
   either all or none of them get quota. Where the trainer serves the policy there are no servers to count.
   The preparation has no place of its own: it runs before the trainer and asks for no more than one pod of
   it.
2. Its hash is that of what it asks for: queue, priority, and of each set of pods their number, resources,
   nodes and tolerations. Another image is no other request.
3. Quota is returned as Kueue itself returns that of a Job, in one patch that fails if anything has changed.
4. What the quota is of decides where pods may be: labels and tolerations of its flavors are the pods' too,
   whether we make them or KubeRay, of a RayCluster. None of them is in a queue of its own.
5. Who makes the trainer pods changes nothing of what is asked for.

Not here: when any of it is written (`plan.queue_todo`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from agentfly.api import ResourcePool, TrainingRun
from agentfly.broker.pools import pool_spec
from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import Start
from agentfly.resources.spec import ModelServiceSpec
from agentfly.roles.plan import serves_itself
from agentfly_operator.config import Config
from agentfly_operator.names import PAUSED, SHAPE, child_labels, controlled_by, priority_of, queue_of
from agentfly_operator.render.roles import Object
from agentfly_operator.render.run import policy_pool, trainer_pod_of

KUEUE: Final = "kueue.x-k8s.io"
VERSION: Final = "v1beta2"
TRAINER: Final = "trainer"
SERVERS: Final = "inference"
# Of a child, the set of pods whose place it has.
_SETS: Final = {"Pod": TRAINER, "RayCluster": TRAINER, "Job": TRAINER, "ResourcePool": SERVERS}
_REQUEUED: Final = ("Preempted", "NodeFailures")
"""Who was evicted for these reasons is put back into the queue at once; else Kueue says when."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Where the pods of a set may be: labels that a node must have, taints that keep them away from none."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Object, ...] = ()


def workload_name(run: TrainingRun) -> str:
    """The Workload of a run."""
    return run.metadata.name


def workload(run: TrainingRun, priority: int, config: Config) -> Object:
    """The Workload of a run.

    Args:
        priority: the value of the class that its label names; without that it is of no meaning.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    spec: Object = {"queueName": queue_of(run), "podSets": _pod_sets(run, config)}
    if name := priority_of(run):
        reference = {"group": KUEUE, "kind": "WorkloadPriorityClass", "name": name}
        spec |= {"priorityClassRef": reference, "priority": priority}
    metadata = {
        "name": workload_name(run),
        "namespace": run.metadata.namespace,
        "labels": child_labels(run, "trainer"),
        "annotations": {SHAPE: shape(run, config)},
        "ownerReferences": [controlled_by(run)],
    }
    return {"apiVersion": f"{KUEUE}/{VERSION}", "kind": "Workload", "metadata": metadata, "spec": spec}


def shape(run: TrainingRun, config: Config) -> str:
    """What a run asks its queue for, as a hash.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    asked: list[Any] = [queue_of(run), priority_of(run)]
    for each in _pod_sets(run, config):
        pod = each["template"]["spec"]
        resources = [container.get("resources") for container in pod["containers"]]
        nodes = [pod.get("nodeSelector"), pod.get("tolerations")]
        asked.append([each["name"], each["count"], resources, nodes])
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _pod_sets(run: TrainingRun, config: Config) -> list[Object]:
    trainer = trainer_pod_of(run, max(1, run.status.attempt), 0, config)
    trainers = _pod_set(TRAINER, run.spec.trainer.nodes, trainer)
    if serves_itself(run):
        return [trainers]
    pool = ResourcePool.model_validate(policy_pool(run, config))
    server = pool_spec(pool, platform="kubernetes").resource
    assert isinstance(server, ModelServiceSpec)
    start = Start(pool.metadata.name, "server", run.metadata.namespace or "", {}, "")
    return [trainers, _pod_set(SERVERS, run.spec.inference.replicas, model_pod(start, server))]


def _pod_set(name: str, count: int, pod: Object) -> Object:
    template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    return {"name": name, "count": count, "template": template}


def placings(live: Mapping[str, Any], flavors: Mapping[str, Mapping[str, Any]]) -> dict[str, Placing]:
    """Where the pods of an admitted Workload may be, by name of their set.

    Args:
        live: the Workload, as the API server has it.
        flavors: the ResourceFlavors that its quota is of, by name.
    """
    status = live.get("status") or {}
    found: dict[str, Placing] = {}
    for each in (status.get("admission") or {}).get("podSetAssignments") or ():
        names = sorted(set((each.get("flavors") or {}).values()))
        specs = [flavors[name].get("spec") or {} for name in names]
        parts = [(spec.get("nodeLabels"), spec.get("tolerations")) for spec in specs]
        for check in status.get("admissionChecks") or ():
            updates = [one for one in check.get("podSetUpdates") or () if one.get("name") == each["name"]]
            parts += [(one.get("nodeSelector"), one.get("tolerations")) for one in updates]
        found[str(each["name"])] = _merged(parts)
    return found


def _merged(parts: Iterable[tuple[Mapping[str, str] | None, Sequence[Object] | None]]) -> Placing:
    labels: dict[str, str] = {}
    tolerations: list[Object] = []
    for selector, tolerated in parts:
        labels |= selector or {}
        tolerations += [one for one in tolerated or () if one not in tolerations]
    return Placing(labels, tuple(tolerations))


def placed(manifest: Object, where: Mapping[str, Placing]) -> Object:
    """A child of a run that may be only where the quota of its run is; others are as they were."""
    placing = where.get(_SETS.get(str(manifest["kind"]), ""))
    if placing is None:
        return manifest
    spec = manifest["spec"]
    if manifest["kind"] == "Pod":
        return {**manifest, "spec": _in_place(spec, placing)}
    if manifest["kind"] == "Job":
        return {**manifest, "spec": _group_in_place(spec, placing)}
    if manifest["kind"] == "RayCluster":
        groups = [_group_in_place(each, placing) for each in spec.get("workerGroupSpecs") or ()]
        placed_spec = {**spec, "headGroupSpec": _group_in_place(spec["headGroupSpec"], placing)}
        return {**manifest, "spec": {**placed_spec, **({"workerGroupSpecs": groups} if groups else {})}}
    return {**manifest, "spec": {**spec, "placement": _in_place(spec.get("placement") or {}, placing)}}


def _group_in_place(group: Object, placing: Placing) -> Object:
    """What has a template of pods."""
    template = group["template"]
    return {**group, "template": {**template, "spec": _in_place(template["spec"], placing)}}


def _in_place(spec: Object, placing: Placing) -> Object:
    tolerations = list(spec.get("tolerations") or ())
    tolerations += [one for one in placing.tolerations if one not in tolerations]
    selector = {**(spec.get("nodeSelector") or {}), **placing.node_selector}
    found = {"nodeSelector": selector, "tolerations": tolerations}
    return {**spec, **{name: value for name, value in found.items() if value}}


# Patches ---------------------------------------------------------------------------------------------


def switched(uid: str, *, active: bool) -> Object:
    """Merge patch of a Workload: it may be admitted, or is to give back what it has."""
    mark = None if active else "true"
    return {"metadata": {"uid": uid, "annotations": {PAUSED: mark}}, "spec": {"active": active}}


def given_back(live: Mapping[str, Any], now: datetime) -> Object | None:
    """Merge patch of the status of an evicted Workload: its quota is free. None: it has none to return."""
    status = live.get("status") or {}
    evicted = _find(status, "Evicted")
    if evicted is None or evicted["status"] != "True" or not status.get("admission"):
        return None
    reason, message = evicted["reason"], evicted.get("message", "")
    changes = [
        ("QuotaReserved", "False", "Pending", message),
        ("Admitted", "False", "NoReservation", "The workload has no reservation"),
        ("Requeued", "True" if reason in _REQUEUED else "False", reason, message),
    ]
    if _find(status, "PodsReady") is not None:
        changes.append(("PodsReady", "False", "WaitForStart", "Nothing of it is there"))
    return _status(live, changes, now, admission=None)


def told_ready(live: Mapping[str, Any], ready: bool, now: datetime) -> Object:
    """Merge patch of the status of a Workload: whether all its pods run."""
    before = _find(live.get("status") or {}, "PodsReady") or {}
    again = before.get("reason") in ("WaitForRecovery", "Recovered")
    if ready:
        change = ("PodsReady", "True", "Recovered" if again else "Started", "All pods run")
    else:
        change = ("PodsReady", "False", "WaitForRecovery", "The next attempt waits to begin, or begins")
    return _status(live, [change], now)


def finished(live: Mapping[str, Any], succeeded: bool, now: datetime) -> Object:
    """Merge patch of the status of a Workload: it needs its quota no more."""
    reason = "Succeeded" if succeeded else "Failed"
    return _status(live, [("Finished", "True", reason, f"The run has {reason.lower()}")], now)


def _status(
    live: Mapping[str, Any], changes: Sequence[tuple[str, str, str, str]], now: datetime, **more: Any
) -> Object:
    """The patch, of this very version of the Workload: a list that is merged replaces the one before."""
    meta, before = live["metadata"], (live.get("status") or {}).get("conditions") or []
    conditions = {each["type"]: each for each in before}
    for kind, status, reason, message in changes:
        old = conditions.get(kind)
        stays = old is not None and old["status"] == status
        conditions[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": old["lastTransitionTime"] if old and stays else _time(now),
            "observedGeneration": meta["generation"],
        }
    return {
        "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
        "status": {"conditions": list(conditions.values()), **more},
    }


def _find(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    return next((each for each in status.get("conditions") or () if each["type"] == kind), None)


def _time(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
