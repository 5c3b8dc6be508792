"""Kueue beside an API server in memory: its objects, and what the operator's watch shows of them."""

from typing import Any, cast

from agentfly.kube import LOCAL_QUEUES, RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES, WORKLOADS, Kube, Resource
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.children import Children, _projection
from agentfly_operator.cluster.discovery import Discovery
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.members import Members
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.queues import Queues
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.make import CONFIG

Obj = dict[str, Any]
GPU: Obj = {"key": "team-gpu", "operator": "Exists", "effect": "NoSchedule"}


class Found(Discovery):
    """Kinds that are there when a test says so."""

    def __init__(self, kube: FakeKube, children: Children) -> None:
        super().__init__(cast(Kube, kube), (WORKLOADS,), children, lambda _: None, Metrics())
        self.defined: set[Resource] = set()

    def has(self, resource: Resource) -> bool:
        return resource in self.defined


class Kueue:
    """What a cluster has of Kueue; nothing before `install`."""

    def __init__(self, kube: FakeKube, hand: Hand, children: Children, absent: Absent) -> None:
        self._kube = kube
        self.members = Members(lambda _: None)
        self._children = children
        self._shown: dict[str, Obj] = {}
        self.found = Found(kube, children)
        self.queues = Queues(cast(Kube, kube), hand, children, self.members, self.found, absent, CONFIG)

    def install(self, *queues: str) -> None:
        self.found.defined.add(WORKLOADS)
        for name in queues:
            self._kube.put(LOCAL_QUEUES, {"metadata": {"name": name, "namespace": "team"}})
        spec = {"nodeLabels": {"gpu": "h200"}, "tolerations": [GPU]}
        self._kube.put(RESOURCE_FLAVORS, {"metadata": {"name": "gpus", "namespace": ""}, "spec": spec})
        priority = {"metadata": {"name": "high", "namespace": ""}, "value": 1000}
        self._kube.put(WORKLOAD_PRIORITY_CLASSES, priority)

    def uninstall(self) -> None:
        self.found.defined.remove(WORKLOADS)
        for obj in self._shown.values():
            self._children.heard("DELETED", obj)
        self._shown = {}

    def show(self) -> None:
        """The watch catches up."""
        if not self.found.has(WORKLOADS):
            return
        live = [obj for (plural, _, _), obj in self._kube.objects.items() if plural == WORKLOADS.plural]
        there = {obj["metadata"]["uid"]: _projection("Workload")(obj) for obj in live}
        for uid in self._shown.keys() - there.keys():
            self._children.heard("DELETED", self._shown[uid])
        for obj in there.values():
            self._children.heard("MODIFIED", obj)
        self._shown = there

    def live(self, name: str = "first") -> Obj:
        return self._kube.objects[WORKLOADS.plural, "team", name]

    def admits(self, name: str = "first") -> None:
        live = self.live(name)
        sets = [
            {
                "name": each["name"],
                "count": each["count"],
                "flavors": {"nvidia.com/gpu": "gpus", "cpu": "gpus"},
            }
            for each in live["spec"]["podSets"]
        ]
        live["metadata"]["generation"] = 1
        self.says(name, QuotaReserved="QuotaReserved", Admitted="Admitted")
        live["status"]["admission"] = {"clusterQueue": "cq", "podSetAssignments": sets}

    def says(self, name: str = "first", **true: str) -> None:
        """Conditions become true, each with its reason."""
        conditions = self.live(name).setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [each for each in conditions if each["type"] not in true]
        for kind, reason in true.items():
            time = "2026-11-30T12:00:00Z"
            words = {"type": kind, "status": "True", "reason": reason, "message": f"{reason} it is"}
            conditions.append({**words, "lastTransitionTime": time})
