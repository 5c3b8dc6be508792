"""The kinds of objects that agentfly reads or writes, and the paths at which the API server has them.

Guarantees:
1. A path is that of the group, version and namespace given; names in it are quoted.
"""

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object. The core group is ""."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """What objects of this kind have as ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """The path of an object, or without ``name`` that of the collection.

        Args:
            namespace: None is that of a cluster-scoped kind, or of a collection over all namespaces.
        """
        root = "/apis" if self.group else "/api"
        parts = [root, self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts += [self.plural, quote(name, safe=""), subresource]
        return "/".join(part for part in parts if part)


PODS = Resource("", "v1", "pods")
SERVICES = Resource("", "v1", "services")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
PERSISTENT_VOLUME_CLAIMS = Resource("", "v1", "persistentvolumeclaims")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts")
EVENTS = Resource("events.k8s.io", "v1", "events")
NAMESPACES = Resource("", "v1", "namespaces", namespaced=False)
NODES = Resource("", "v1", "nodes", namespaced=False)
DEPLOYMENTS = Resource("apps", "v1", "deployments")
JOBS = Resource("batch", "v1", "jobs")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies")
POD_DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
RESOURCE_POOLS = Resource("agentfly.dev", "v1alpha1", "resourcepools")
TRAINING_RUNS = Resource("agentfly.dev", "v1alpha1", "trainingruns")
ROLLOUT_JOBS = Resource("agentfly.dev", "v1alpha1", "rolloutjobs")
RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters")
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues")
RESOURCE_FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", namespaced=False)
WORKLOAD_PRIORITY_CLASSES = Resource("kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", namespaced=False)
