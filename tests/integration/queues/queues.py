"""What the tests with Kueue share: a queue with room for one run at a time, and what its Workloads say."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from agentfly.kube import LOCAL_QUEUES, RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES, WORKLOADS, Kube, Resource
from tests.integration.operator.run_world import training_run
from tests.integration.operator.world import find, until

SECOND = "second"
QUEUE = "team"
NODE = {"agentfly-test/quota": "here"}
"""The label of the nodes that the quota is of."""
TOLERATION = {"key": "agentfly-test/quota", "operator": "Exists", "effect": "NoSchedule"}
CLUSTER_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "clusterqueues", namespaced=False)
CPU = "3"
POD = {"cpu": "1"}
Obj = dict[str, Any]


def queued_run(space: str, name: str, priority: str = "low", nodes: int = 1) -> Obj:
    """A run beside which there is no quota for another: a core for each trainer pod, one for its server."""
    labels = {"kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": priority}
    whole = {"trainer": {"pod": POD, "nodes": nodes}, "inference": {"pod": POD}}
    return training_run(space, name, labels, **whole)


@contextlib.asynccontextmanager
async def queue(kube: Kube, space: str, *names: str) -> AsyncIterator[None]:
    """LocalQueues of a namespace, with quota of their own."""
    flavor = {"nodeLabels": NODE, "tolerations": [TOLERATION]}
    resources = [{"name": "cpu", "nominalQuota": CPU}]
    quota = {"coveredResources": ["cpu"], "flavors": [{"name": space, "resources": resources}]}
    cluster_queue = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [quota],
    }
    for name, value in (("low", 10), ("high", 1000)):
        await _there(kube, WORKLOAD_PRIORITY_CLASSES, "WorkloadPriorityClass", name, value=value)
    await _there(kube, RESOURCE_FLAVORS, "ResourceFlavor", space, spec=flavor)
    await _there(kube, CLUSTER_QUEUES, "ClusterQueue", space, spec=cluster_queue)
    for name in names or (QUEUE,):
        await add_queue(kube, space, name)
    try:
        yield
    finally:
        await kube.delete(CLUSTER_QUEUES, space)
        await kube.delete(RESOURCE_FLAVORS, space)


async def add_queue(kube: Kube, space: str, name: str) -> None:
    """One more LocalQueue of the same quota."""
    body = {"kind": "LocalQueue", "metadata": {"name": name, "namespace": space}}
    await kube.create(
        LOCAL_QUEUES, {"apiVersion": LOCAL_QUEUES.api_version, **body, "spec": {"clusterQueue": space}}
    )


async def _there(kube: Kube, resource: Resource, kind: str, name: str, **content: Any) -> None:
    body = {"apiVersion": resource.api_version, "kind": kind, "metadata": {"name": name}, **content}
    await kube.apply(resource, body)


async def workload(kube: Kube, space: str, name: str) -> Obj:
    """A Workload, once it is there."""

    async def there() -> Obj | None:
        return await find(kube, WORKLOADS, name, space)

    found: Obj = await until(there)
    return found


def conditions(obj: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    found = (obj.get("status") or {}).get("conditions") or ()
    return {each["type"]: (each["status"], each["reason"]) for each in found}


def has_quota(obj: Mapping[str, Any]) -> bool:
    """Whether quota is kept for a Workload."""
    return bool((obj.get("status") or {}).get("admission"))


async def returned(kube: Kube, space: str, name: str, within_s: float = 30.0) -> Obj:
    """A Workload, once its quota is free."""
    last: Obj = {}

    async def free() -> bool:
        nonlocal last
        last = await workload(kube, space, name)
        return not has_quota(last)

    await until(free, within_s, lambda: f"still has quota: {last}")
    return last
