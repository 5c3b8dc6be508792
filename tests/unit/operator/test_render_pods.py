"""Manifests of runs and jobs: what each role's pods ask for, see and may do."""

import dataclasses
import json

import pytest

from agentfly.broker.pools import pool_spec
from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import Start
from agentfly.resources.spec import ModelServiceSpec
from agentfly_operator.plan.wanted import read_pool
from agentfly_operator.render.job import workers_job
from agentfly_operator.render.run import attempt_objects, policy_pool
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_pods import (
    PLACED,
    container,
    each_role,
    environment,
    head,
    mounted,
    placed,
    prepare,
    trainers,
    worker,
)
from tests.unit.operator.make_work import job, run

GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


# Every role ----------------------------------------------------------------------------------------------


@each_role
def test_a_pod_is_restricted_and_knows_nothing_of_the_api_server(role: str) -> None:
    spec = placed()[role]["spec"]
    assert container(placed()[role])["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert "serviceAccountName" not in spec
    assert spec["securityContext"]["fsGroup"] == 1000
    assert spec["restartPolicy"] == "Never"
    assert container(placed()[role])["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_policys_servers_run_under_the_same_user() -> None:
    pool = read_pool({**policy_pool(run(), CONFIG)}).pool
    assert pool is not None
    resource = pool_spec(pool, platform="kubernetes").resource
    assert isinstance(resource, ModelServiceSpec)
    (server,) = model_pod(Start("p", "p-0", "team", {}, "n"), resource)["spec"]["containers"]
    mine = container(head(run()))["securityContext"]
    for key in ("runAsUser", "runAsGroup"):
        assert server["securityContext"][key] == mine[key]


@each_role
def test_a_pod_writes_to_tmp_shared_memory_and_its_claim_alone(role: str) -> None:
    found = mounted(placed(sharedMemory="64Gi")[role])
    assert found["/tmp"][0]["emptyDir"] == {}
    assert found["/dev/shm"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert found["/agentfly-cache"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    writable = {path for path, (_, mount) in found.items() if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/agentfly-cache"}
    assert not any("hostPath" in volume for volume, _ in found.values())


@each_role
def test_a_pod_goes_where_it_is_placed(role: str) -> None:
    pod = placed(placement=PLACED)[role]
    assert pod["spec"]["nodeSelector"] == PLACED["nodeSelector"]
    assert pod["spec"]["tolerations"] == PLACED["tolerations"]
    assert pod["spec"]["priorityClassName"] == "research"
    assert pod["spec"]["schedulerName"] == "gangs"
    assert pod["metadata"]["labels"]["example.com/team"] == "rl"
    assert pod["metadata"]["annotations"]["example.com/cost"] == "42"


@each_role
def test_where_nothing_is_said_the_cluster_decides(role: str) -> None:
    said = placed()[role]["spec"].keys()
    assert not said & {"nodeSelector", "tolerations", "priorityClassName", "schedulerName", "hostNetwork"}


@each_role
def test_what_a_user_labels_replaces_nothing_of_ours(role: str) -> None:
    ours = placed()[role]["metadata"]["labels"]
    theirs = {"app.kubernetes.io/part-of": "mine", "example.com/team": "rl"}
    labels = placed(placement={"podLabels": theirs})[role]["metadata"]["labels"]
    assert labels == {**ours, "example.com/team": "rl"}


@each_role
def test_a_pod_is_offline_with_its_hub_on_the_claim(role: str) -> None:
    found = environment(placed()[role])
    assert found["HF_HOME"] == "/agentfly-cache"
    assert (found["HF_HUB_OFFLINE"], found["HOME"], found["USER"]) == ("1", "/tmp", "agentfly")
    fields = {
        each["name"]: each["valueFrom"] for each in container(placed()[role])["env"] if "valueFrom" in each
    }
    assert {name: each["fieldRef"]["fieldPath"] for name, each in fields.items()} == {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        **({"POD_UID": "metadata.uid"} if role == "head" else {}),
    }


@each_role
def test_nothing_of_an_address_is_expanded(role: str) -> None:
    config = dataclasses.replace(CONFIG, broker_url="http://$(HOST):1")
    pods = {
        "head": attempt_objects(run(), 1, config)[3],
        "node": attempt_objects(run(trainer={"nodes": 2}), 1, config)[4],
        "worker": workers_job(job(), 1, config)["spec"]["template"],
    }
    if role in pods:
        assert environment(pods[role])["AGENTFLY_BROKER"] == "http://$$(HOST):1"
    assert all("$" not in word for word in container(placed()[role])["command"])


@pytest.mark.parametrize(
    ("role", "module", "image", "grace"),
    [
        ("head", "head", "agentfly/trainer:dev", 930),
        ("node", "node", "agentfly/trainer:dev", 930),
        ("prepare of a run", "prepare", "agentfly/trainer:dev", 30),
        ("prepare of a job", "prepare", "agentfly/inference:dev", 30),
        ("worker", "shard", "agentfly/inference:dev", 60),
    ],
)
def test_a_pod_runs_its_module_in_its_image(role: str, module: str, image: str, grace: int) -> None:
    found = container(placed()[role])
    assert found["command"] == ["python3", "-m", f"agentfly.launch.{module}"]
    assert (found["image"], found["imagePullPolicy"]) == (image, "IfNotPresent")
    assert container(placed(image="mine@sha256:1")[role])["image"] == "mine@sha256:1"
    assert placed()[role]["spec"]["terminationGracePeriodSeconds"] == grace


@each_role
def test_only_who_leases_has_the_brokers_key_and_the_label_that_members_admit(role: str) -> None:
    pod = placed()[role]
    leases = not role.startswith("prepare")
    assert ("/agentfly/broker" in mounted(pod)) is leases
    assert pod["metadata"]["labels"]["agentfly.dev/component"] == ("worker" if leases else "prepare")
    if not leases:
        return
    volume, mount = mounted(pod)["/agentfly/broker"]
    assert volume["secret"] == {"secretName": "agentfly-broker-client", "defaultMode": 0o440}
    assert mount["readOnly"] is True
    assert environment(pod)["AGENTFLY_BROKER"] == "http://agentfly-broker.team.svc:7080"
    assert environment(pod)["AGENTFLY_BROKER_TOKEN_FILE"] == "/agentfly/broker/client-token"


# Resources -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["head", "node", "worker"])
def test_memory_is_requested_as_it_is_limited_and_cpu_is_not_limited(role: str) -> None:
    found = container(placed(cpu=64, memory="900Gi")[role])["resources"]
    assert found == {"requests": {"cpu": "64", "memory": "900Gi"}, "limits": {"memory": "900Gi"}}
    assert container(placed()[role])["resources"] == {}


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_trainer_pod_asks_for_its_gpus_and_tolerates_their_taint(nodes: int) -> None:
    pods = trainers(run(trainer={"nodes": nodes, "gpusPerNode": 8, "pod": {"placement": PLACED}}))
    assert len(pods) == nodes
    for pod in pods:
        asked = container(pod)["resources"]
        assert asked == {"requests": {"nvidia.com/gpu": "8"}, "limits": {"nvidia.com/gpu": "8"}}
        assert pod["spec"]["tolerations"] == [*PLACED["tolerations"], GPU_TAINT]


def test_gpus_have_the_name_that_nodes_give_them() -> None:
    pod = head(run(trainer={"gpusPerNode": 8, "pod": {"gpuResource": "amd.com/gpu"}}))
    assert container(pod)["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert pod["spec"]["tolerations"] == [{**GPU_TAINT, "key": "amd.com/gpu"}]


def test_a_preparation_may_go_to_gpus_and_takes_none() -> None:
    pod = prepare(run(trainer={"gpusPerNode": 8, "pod": {"cpu": 64, "memory": "900Gi", "placement": PLACED}}))
    assert container(pod)["resources"] == {
        "requests": {"cpu": "64", "memory": "900Gi"},
        "limits": {"memory": "900Gi"},
    }
    assert pod["spec"]["tolerations"] == [*PLACED["tolerations"], GPU_TAINT]


@each_role
def test_a_trainer_is_not_moved_to_save_a_node(role: str) -> None:
    found = placed()[role]["metadata"]["annotations"]
    expected = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"} if role in ("head", "node") else {}
    assert found == expected


def test_rdma_is_asked_for_and_alone_adds_ipc_lock() -> None:
    network = {"rdma": {"resourceName": "rdma/hca", "count": 8}}
    for pod in trainers(run(trainer={"nodes": 2, "gpusPerNode": 4, "network": network})):
        assert container(pod)["resources"]["limits"] == {"nvidia.com/gpu": "4", "rdma/hca": "8"}
        assert container(pod)["resources"]["requests"] == {"nvidia.com/gpu": "4", "rdma/hca": "8"}
        added = container(pod)["securityContext"]["capabilities"]
        assert added == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "IPC_LOCK" not in json.dumps(attempt_objects(run(), 1, CONFIG))


def test_a_trainer_pod_has_the_environment_of_nccl_and_ray() -> None:
    found = environment(head(run()))
    assert found["NCCL_DEBUG"] == "WARN"
    assert found["RAY_memory_monitor_refresh_ms"] == "0"
    assert not found.keys() & {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    named = run(trainer={"nodes": 2, "network": {"socketInterface": "eth1"}})
    for pod in trainers(named):
        assert environment(pod)["NCCL_SOCKET_IFNAME"] == "eth1"
        assert environment(pod)["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_DEBUG" not in environment(worker(job()))


# Where the folder of the manifest is -----------------------------------------------------------------------


@each_role
def test_the_folder_of_a_config_map_is_mounted(role: str) -> None:
    volume, mount = mounted(placed()[role])["/agentfly/source"]
    assert volume["configMap"] == {"name": "quickstart"}
    assert (mount["readOnly"], mount.get("subPath")) == (True, None)


@pytest.mark.parametrize(("path", "sub"), [(None, None), ("a/b", "a/b")])
def test_the_folder_of_a_claim_is_mounted(path: str | None, sub: str | None) -> None:
    source = {"claim": "code", **({"path": path} if path else {})}
    volume, mount = mounted(head(run(source=source)))["/agentfly/source"]
    assert volume["persistentVolumeClaim"] == {"claimName": "code"}
    assert (mount["readOnly"], mount.get("subPath")) == (True, sub)


def test_one_claim_is_one_volume() -> None:
    found = mounted(head(run(source={"claim": "runs", "path": "code"})))
    assert found["/agentfly/source"][0] is found["/agentfly-cache"][0]
    assert found["/agentfly/source"][1] == {
        "name": "storage", "mountPath": "/agentfly/source", "subPath": "code", "readOnly": True,
    }  # fmt: skip


def test_of_the_image_nothing_is_mounted() -> None:
    assert "/agentfly/source" not in mounted(head(run(source={"path": "app"})))
    assert "/agentfly/source" not in mounted(worker(job(source={})))


# What a run says of its pods -----------------------------------------------------------------------------

VARIABLES = [
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    {"name": "HF_HUB_OFFLINE", "value": "0"},
    {"name": "A", "value": "$(B)"},
]


@each_role
def test_variables_of_the_run_win_and_secrets_are_named_and_never_copied(role: str) -> None:
    found = container(placed(env=VARIABLES)[role])["env"]
    assert len(found) == len({each["name"] for each in found})
    assert [each for each in found if each["name"] in ("HF_TOKEN", "HF_HUB_OFFLINE", "A")] == [
        {"name": "HF_HUB_OFFLINE", "value": "0"},
        VARIABLES[0],
        {"name": "A", "value": "$$(B)"},
    ]


@each_role
def test_disk_is_asked_for_and_not_limited(role: str) -> None:
    found = container(placed(ephemeralStorage="100Gi")[role])["resources"]
    assert found == {"requests": {"ephemeral-storage": "100Gi"}}


@each_role
def test_pods_have_the_runtime_class_of_the_run(role: str) -> None:
    assert placed(runtimeClassName="nvidia")[role]["spec"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in placed()[role]["spec"]


def test_the_policys_servers_have_what_their_pods_are_said_to_have() -> None:
    pod = {"ephemeralStorage": "1Gi", "env": VARIABLES, "runtimeClassName": "nvidia"}
    spec = policy_pool(run(inference={"pod": pod}), CONFIG)["spec"]
    assert (spec["modelService"]["ephemeralStorage"], spec["modelService"]["env"]) == ("1Gi", VARIABLES)
    assert spec["security"]["runtimeClassName"] == "nvidia"
