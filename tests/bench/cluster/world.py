"""A namespace with pools on a real API server, for what has no node."""

import asyncio
from typing import Any

from agentfly.kube import NAMESPACES, RESOURCE_POOLS, Kube, Obj
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.integration.operator.world import find

IMAGE = "busybox:1"
ACCOUNT_S = 30.0


async def namespace(cluster: Cluster, kube: Kube, name: str) -> str:
    """A new namespace in which pods can be made; it goes with the cluster."""
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    await asyncio.to_thread(wait, "service account", lambda: cluster.api.exists(account), ACCOUNT_S)
    return name


async def apply_pool(kube: Kube, space: str, name: str, **capacity: Any) -> Obj:
    """A pool of sandboxes."""
    spec = {"type": "Container", "container": {"image": IMAGE}, "capacity": capacity}
    obj = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "metadata": {"name": name}}
    return await kube.apply(RESOURCE_POOLS, obj | {"spec": spec}, space)


__all__ = ["IMAGE", "apply_pool", "find", "namespace"]
