"""Pods of runs and jobs on nodes with GPUs: the API server takes what is rendered, the scheduler binds it.

The nodes are claimed, with eight GPUs and their taint or with neither. What is asked for is rendered from
objects that the API server stored, and made with the operator's own rights in a namespace that enforces the
restricted Pod Security Standard; an unknown field would be refused. Which pod goes where is the real
scheduler's decision.
"""

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentfly.api import ResourcePool, RolloutJob, TrainingRun
from agentfly.broker.pools import pool_spec
from agentfly.resources.names import member_prefix
from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import Start
from agentfly.resources.spec import ModelServiceSpec
from agentfly_operator.config import Config
from agentfly_operator.names import owner_of
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job
from tests.cluster.api import Api, wait
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import MERGE, FakeKubelet

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
CRDS, RIGHTS = str(ROOT / "crds"), str(ROOT / "manifests/base/rights.yaml")
OPERATOR = "system:serviceaccount:agentfly-system:agentfly-operator"
CONFIG = Config("agentfly:1", "sandboxd:1", "IfNotPresent", "agentfly-system", "operator-0")
GPU = "nvidia.com/gpu"
GPUS_PER_NODE = 8
GPU_NODES, CPU_NODES = 6, 2
MODEL = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
BOUND_S = 60.0
PATHS = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ResourcePool": "/apis/agentfly.dev/v1alpha1/namespaces/{}/resourcepools",
    "TrainingRun": "/apis/agentfly.dev/v1alpha1/namespaces/{}/trainingruns",
    "RolloutJob": "/apis/agentfly.dev/v1alpha1/namespaces/{}/rolloutjobs",
}
SPEC: Object = {
    "agent": {"entrypoint": "agent.py:agent"},
    "tasks": {"path": "tasks.jsonl"},
    "model": {"path": "/agentfly-cache/models/m"},
    "source": {"configMap": "quickstart"},
    "storage": {"claim": "runs"},
}
SIZED = {"cpu": 64, "memory": "900Gi", "sharedMemory": "64Gi", "placement": {"nodeSelector": MODEL}}
TRAINER = {"nodes": 1, "gpusPerNode": GPUS_PER_NODE, "pod": SIZED, "network": {"socketInterface": "eth0"}}


class Team:
    """A namespace with a claim: what is made in it, and where the scheduler puts it."""

    def __init__(self, kubeconfig: Path, name: str) -> None:
        self._kubeconfig, self._api = kubeconfig, Api(kubeconfig)
        self.name = name

    def make(self, *objects: Object) -> list[Object]:
        """The objects as they are stored, made by the operator; an unknown field is refused."""
        return [self._make(each, {"Impersonate-User": OPERATOR}) for each in objects]

    def refusal(self, obj: Object, status: int = 403) -> str:
        """What is said of an object that is not taken; by the operator unless it is a root of its own."""
        who = {"Impersonate-User": OPERATOR} if status == 403 else {}
        got, answer = self._post(obj, who)
        assert got == status, answer
        return str(answer["message"])

    def run(self, **spec: Any) -> TrainingRun:
        return TrainingRun.model_validate(self._root("TrainingRun", spec))

    def job(self, **spec: Any) -> RolloutJob:
        return RolloutJob.model_validate(self._root("RolloutJob", spec))

    def _root(self, kind: str, spec: Object) -> Object:
        root = {"apiVersion": "agentfly.dev/v1alpha1", "kind": kind, "metadata": {"name": "first"}}
        return self._make({**root, "spec": {**SPEC, **spec}}, {})

    def _make(self, obj: Object, who: Mapping[str, str]) -> Object:
        status, answer = self._post(obj, who)
        assert status == 201, answer
        found: Object = answer
        return found

    def _post(self, obj: Object, who: Mapping[str, str]) -> tuple[int, Any]:
        api = Api(self._kubeconfig)
        api.headers |= who
        return api.call("POST", f"{PATHS[obj['kind']].format(self.name)}?fieldValidation=Strict", obj)

    def pods(self, role: str) -> dict[str, Object]:
        listed = self._api.get(PATHS["Pod"].format(self.name))["items"]
        return {
            each["metadata"]["name"]: each
            for each in listed
            if role
            in (each["metadata"]["labels"].get(f"agentfly.dev/{key}") for key in ("role", "component"))
        }

    def bound(self, role: str, count: int) -> dict[str, str]:
        """The node of each pod of a role, once all of them run."""
        wait(
            f"{count} {role}",
            lambda: [each["status"].get("phase") for each in self.pods(role).values()] == ["Running"] * count,
            BOUND_S,
        )
        return {name: each["spec"]["nodeName"] for name, each in self.pods(role).items()}

    def why_pending(self, pod: str) -> Object:
        """The scheduler's word on a pod that it has not placed."""
        found: list[Object] = []

        def said() -> bool:
            status = self._api.get(f"{PATHS['Pod'].format(self.name)}/{pod}")["status"]
            found[:] = [each for each in status.get("conditions", ()) if each["type"] == "PodScheduled"]
            return bool(found)

        wait(f"a word on {pod}", said, BOUND_S)
        return found[0]


@pytest.fixture(scope="module")
def machines(control_plane: Cluster) -> Iterator[Mapping[str, bool]]:
    """Nodes, and whether each has GPUs, in a cluster with our kinds and the operator's rights."""
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-k", CRDS)
    control_plane.kubectl("apply", "-f", RIGHTS)
    control_plane.kubectl(
        "wait", "--for=condition=Established", "crd", "-l", "app.kubernetes.io/part-of=agentfly"
    )
    with FakeKubelet(control_plane.kubeconfig, nodes=GPU_NODES + CPU_NODES) as kubelet:
        kinds = {node: index < GPU_NODES for index, node in enumerate(kubelet.nodes)}
        taint = {"key": GPU, "value": "present", "effect": "NoSchedule"}
        for node in (node for node, has_gpus in kinds.items() if has_gpus):
            path, capacity = f"/api/v1/nodes/{node}", {GPU: str(GPUS_PER_NODE)}
            merge(control_plane.api, f"{path}/status", status={"capacity": capacity, "allocatable": capacity})
            merge(control_plane.api, path, metadata={"labels": MODEL}, spec={"taints": [taint]})
        yield kinds
    control_plane.kubectl("delete", "-f", RIGHTS)


def merge(api: Api, path: str, **change: Any) -> None:
    status, answer = api.call("PATCH", path, change, kind=MERGE["Content-Type"])
    assert status == 200, answer


@pytest.fixture
def team(control_plane: Cluster, machines: Mapping[str, bool]) -> Iterator[Team]:
    """With the claim of its runs, which is bound."""
    api, name = control_plane.api, f"gpus-{secrets.token_hex(4)}"
    marks = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": marks}})
    wait("an account", lambda: api.exists(f"/api/v1/namespaces/{name}/serviceaccounts/default"), BOUND_S)
    claim(api, name)
    try:
        yield Team(control_plane.kubeconfig, name)
    finally:
        api.call("DELETE", f"{PATHS['Job'].format(name)}?propagationPolicy=Background")
        api.call("DELETE", f"{PATHS['Pod'].format(name)}?gracePeriodSeconds=0")
        wait("no pods", lambda: not api.get(PATHS["Pod"].format(name))["items"], BOUND_S)
        api.call("DELETE", f"/api/v1/namespaces/{name}")
        api.call("DELETE", f"/api/v1/persistentvolumes/{name}")


def claim(api: Api, namespace: str) -> None:
    """The claim of SPEC, on a volume of its own that every node may mount."""
    modes, size = ["ReadWriteMany"], {"storage": "1Gi"}
    shared = {"server": "127.0.0.1", "path": "/nothing"}
    volume = {"capacity": size, "accessModes": modes, "storageClassName": "none", "nfs": shared}
    api.create("/api/v1/persistentvolumes", {"metadata": {"name": namespace}, "spec": volume})
    wanted = {"accessModes": modes, "storageClassName": "none", "resources": {"requests": size}}
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    api.create(path, {"metadata": {"name": "runs"}, "spec": {**wanted, "volumeName": namespace}})
    wait("a claim", lambda: api.get(f"{path}/runs")["status"].get("phase") == "Bound", BOUND_S)


def servers(stored: Object) -> list[Object]:
    """The pods that a broker would make for a pool of model servers."""
    pool = ResourcePool.model_validate({**stored, "status": None})
    spec = pool_spec(pool, platform="kubernetes")
    assert isinstance(spec.resource, ModelServiceSpec)
    meta, prefix = stored["metadata"], member_prefix(pool.metadata.name)
    return [
        model_pod(
            Start(meta["name"], f"{prefix}{number}", meta["namespace"], owner_of(stored), "n"), spec.resource
        )
        for number in range(spec.min)
    ]


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 0), (2, 0), (2, 4)])
def test_pods_with_gpus_have_a_node_with_gpus_each(
    team: Team, machines: Mapping[str, bool], nodes: int, replicas: int
) -> None:
    inference = {"replicas": replicas or 1, "gpus": GPUS_PER_NODE, "pod": SIZED}
    run = team.run(trainer={**TRAINER, "nodes": nodes}, inference=inference)
    team.make(*prepare_job(run, CONFIG))
    (pool,) = team.make(policy_pool(run, CONFIG))
    team.make(*attempt_objects(run, 1, CONFIG), *servers(pool)[:replicas])
    used = [*team.bound("trainer", nodes).values(), *team.bound("member", replicas).values()]
    assert len(set(used)) == len(used) == nodes + replicas  # one pod on a node
    assert all(machines[node] for node in used)
    # The preparation has the trainer's selector, and a place beside it: it takes no GPU.
    (prepared,) = team.bound("prepare", 1).values()
    assert machines[prepared]


def test_variables_and_disk_of_a_run_are_taken(team: Team) -> None:
    key = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env = [{"name": "HF_TOKEN", "valueFrom": key}, {"name": "HF_HUB_OFFLINE", "value": "0"}]
    pod = {"env": env, "ephemeralStorage": "100Gi"}
    run = team.run(trainer={"pod": pod}, inference={"pod": pod})
    (pool,) = team.make(policy_pool(run, CONFIG))
    *_, trainer = team.make(*attempt_objects(run, 1, CONFIG))
    (server,) = team.make(*servers(pool))
    for made in (trainer, server):
        (container,) = made["spec"]["containers"]
        found = {each["name"]: each for each in container["env"]}
        assert [found[each["name"]] for each in env] == env
        assert container["resources"]["requests"]["ephemeral-storage"] == "100Gi"


def test_trainers_that_serve_the_policy_have_a_node_each_and_no_servers_beside_them(
    team: Team, machines: Mapping[str, bool]
) -> None:
    colocated = {"mode": "Colocated", "gpus": 4, "gpuMemoryUtilization": 0.6}
    run = team.run(trainer={**TRAINER, "nodes": 2}, inference=colocated)
    team.make(*prepare_job(run, CONFIG), *attempt_objects(run, 1, CONFIG))
    nodes = team.bound("trainer", 2)
    assert len(set(nodes.values())) == 2
    assert all(machines[node] for node in nodes.values())
    assert {pod["spec"]["containers"][0]["image"] for pod in team.pods("trainer").values()} == {
        "agentfly/colocated:dev"
    }


def test_a_colocated_policy_that_leaves_gpus_over_is_refused(team: Team) -> None:
    inference = {"mode": "Colocated", "gpus": 3}
    root = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "TrainingRun", "metadata": {"name": "first"}}
    run = {**root, "spec": {**SPEC, "trainer": TRAINER, "inference": inference}}
    assert "set inference.gpus to a divisor of trainer.gpusPerNode" in team.refusal(run, status=422)


def test_a_run_without_gpus_stays_off_nodes_with_gpus(team: Team, machines: Mapping[str, bool]) -> None:
    run = team.run(trainer={"nodes": 2})
    team.make(*attempt_objects(run, 1, CONFIG))
    assert not any(machines[node] for node in team.bound("trainer", 2).values())


def test_one_gpu_too_few_is_named_by_the_scheduler(team: Team) -> None:
    run = team.run(trainer={**TRAINER, "gpusPerNode": 16})
    team.make(*attempt_objects(run, 1, CONFIG))
    said = team.why_pending("first-trainer-1-0")
    assert (said["status"], said["reason"]) == ("False", "Unschedulable")
    assert f"{GPU_NODES} Insufficient {GPU}" in said["message"]


def test_a_selector_that_matches_nothing_leaves_the_pods_pending(team: Team) -> None:
    nowhere = {**SIZED, "placement": {"nodeSelector": {"nvidia.com/gpu.product": "none"}}}
    run = team.run(trainer={**TRAINER, "nodes": 2, "pod": nowhere})
    team.make(*attempt_objects(run, 1, CONFIG))
    for pod in ("first-trainer-1-0", "first-trainer-1-1"):
        said = team.why_pending(pod)
        assert (said["status"], said["reason"]) == ("False", "Unschedulable")
        assert "didn't match Pod's node affinity/selector" in said["message"]
    assert {each["status"]["phase"] for each in team.pods("trainer").values()} == {"Pending"}


def test_the_shards_of_a_job_run_as_many_at_a_time_as_it_has_workers(
    team: Team, machines: Mapping[str, bool]
) -> None:
    job = team.job(workers={"count": 3, "pod": {"cpu": "500m", "memory": "1Gi"}})
    team.make(*prepare_job(job, CONFIG), policy_pool(job, CONFIG), launch_config(job, CONFIG))
    team.make(workers_job(job, 5, CONFIG))
    nodes = team.bound("worker", 3)
    assert not any(machines[node] for node in nodes.values())
    indexes = {
        each["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        for each in team.pods("worker").values()
    }
    assert indexes == {"0", "1", "2"}


def test_a_job_may_have_no_workers_for_now(team: Team) -> None:
    job = team.job(workers={"count": 0}, suspend=True)
    (stored,) = team.make(workers_job(job, 5, CONFIG))
    assert (stored["spec"]["parallelism"], stored["spec"]["suspend"]) == (0, True)
    assert stored["spec"]["podReplacementPolicy"] == "Failed"  # a shard is never played twice at a time


def test_cards_for_rdma_are_asked_for_with_the_right_to_lock_memory(team: Team) -> None:
    rdma = {"rdma": {"resourceName": "rdma/hca", "count": 8}}
    run = team.run(trainer={**TRAINER, "network": rdma})
    *objects, pod = attempt_objects(run, 1, CONFIG)
    team.make(*objects)
    # More than the restricted standard has: the namespace must permit it.
    assert "IPC_LOCK" in team.refusal(pod)
