"""Manifests of runs and jobs: what each role's pods ask for, see and may do."""

import dataclasses
import json
from typing import Any

import pytest

from agentfly.api import ResourcePool, RolloutJob, TrainingRun
from agentfly.broker.pools import pool_spec
from agentfly.errors import AgentflyError
from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import Start
from agentfly.resources.spec import ModelServiceSpec
from agentfly.roles.launch import PrepareLaunch, ShardLaunch, TrainerLaunch
from agentfly.roles.trainer import ColocatedServers
from agentfly_operator.names import CHILD_SELECTOR, role_selector, trainer_host
from agentfly_operator.plan.wanted import read_pool
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.policy import pool_members_policy
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job, roles_policy
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import META, SPEC, Object, children, job, run

PLACED: Object = {
    "nodeSelector": {"nvidia.com/gpu.product": "H100"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}],
    "priorityClassName": "research",
    "schedulerName": "gangs",
    "podLabels": {"example.com/team": "rl"},
    "podAnnotations": {"example.com/cost": "42"},
}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def trainers(found: TrainingRun, attempt: int = 1) -> list[Object]:
    return [each for each in attempt_objects(found, attempt, CONFIG) if each["kind"] == "Pod"]


def head(found: TrainingRun) -> Object:
    return trainers(found)[0]


def prepare(found: TrainingRun | RolloutJob) -> Object:
    made: Object = prepare_job(found, CONFIG)[1]["spec"]["template"]
    return made


def worker(found: RolloutJob) -> Object:
    made: Object = workers_job(found, 4, CONFIG)["spec"]["template"]
    return made


def placed(**pod: Any) -> dict[str, Object]:
    """A pod of each role whose spec says ``pod`` of it."""
    training, rolling = run(trainer={"pod": pod}), job(workers={"pod": pod})
    return {
        "head": head(training),
        "node": trainers(run(trainer={"pod": pod, "nodes": 2}))[1],
        "prepare of a run": prepare(training),
        "prepare of a job": prepare(rolling),
        "worker": worker(rolling),
    }


def container(pod: Object) -> Object:
    (found,) = pod["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(pod: Object) -> dict[str, str | None]:
    return {each["name"]: each.get("value") for each in container(pod)["env"]}


def mounted(pod: Object) -> dict[str, tuple[Object, Object]]:
    """Volume and mount by path."""
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert len(volumes) == len(pod["spec"]["volumes"])
    return {each["mountPath"]: (volumes[each["name"]], each) for each in container(pod)["volumeMounts"]}


ROLES = tuple(placed())
each_role = pytest.mark.parametrize("role", ROLES)


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


# What they are told ----------------------------------------------------------------------------------------


def test_all_pods_of_an_attempt_are_told_the_same() -> None:
    found = run(trainer={"nodes": 2, "gpusPerNode": 8})
    config, _, _, *pods = attempt_objects(found, 3, CONFIG)
    assert (config["kind"], config["metadata"]["name"]) == ("ConfigMap", "first-launch-3")
    assert config["immutable"] is True
    launch = TrainerLaunch.model_validate_json(config["data"]["launch.json"])
    assert launch.pods == ("first-trainer-3-0", "first-trainer-3-1")
    assert launch.head == "first-trainer-3-0.first-trainer.team.svc"
    assert (launch.trainer.attempt, launch.trainer.nodes, launch.trainer.gpus) == (3, 2, 8)
    assert str(launch.trainer.run_dir) == "/agentfly-cache/runs/first-01234567"
    assert launch.broker == "http://agentfly-broker.team.svc:7080"
    assert [pod["metadata"]["name"] for pod in pods] == list(launch.pods)
    for pod in pods:
        volume, mount = mounted(pod)["/agentfly/launch"]
        assert volume["configMap"] == {"name": "first-launch-3"}
        assert mount["readOnly"] is True


def test_a_preparation_is_told_what_to_prepare() -> None:
    config, made = prepare_job(run(), CONFIG)
    assert (config["kind"], made["kind"]) == ("ConfigMap", "Job")
    assert config["metadata"]["name"] == made["metadata"]["name"] == "first-prepare"
    launch = PrepareLaunch.model_validate_json(config["data"]["launch.json"])
    assert str(launch.model) == "/agentfly-cache/models/m"
    assert launch.trainer is not None
    assert mounted(made["spec"]["template"])["/agentfly/launch"][0]["configMap"] == {"name": "first-prepare"}
    of_a_job = PrepareLaunch.model_validate_json(prepare_job(job(), CONFIG)[0]["data"]["launch.json"])
    assert of_a_job.worker is not None


def test_the_workers_of_a_job_are_told_the_same() -> None:
    config = launch_config(job(workers={"tasksPerShard": 7}), CONFIG)
    launch = ShardLaunch.model_validate_json(config["data"]["launch.json"])
    assert (launch.tasks_per_shard, launch.policy) == (7, "first-policy")
    volume, _ = mounted(worker(job()))["/agentfly/launch"]
    assert volume["configMap"] == {"name": config["metadata"]["name"]} == {"name": "first-launch"}


def test_only_the_head_hears_of_its_annotation() -> None:
    first, second = trainers(run(trainer={"nodes": 2}))
    volume, mount = mounted(first)["/agentfly/asked"]
    assert mount["readOnly"] is True
    assert volume["downwardAPI"]["items"] == [
        {
            "path": "suspend",
            "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations['agentfly.dev/suspend']"},
        }
    ]
    assert "/agentfly/asked" not in mounted(second)


@pytest.mark.parametrize("render", [
    lambda each: prepare_job(each, CONFIG),
    lambda each: policy_pool(each, CONFIG),
    lambda each: attempt_objects(each, 1, CONFIG),
])  # fmt: skip
def test_without_a_claim_nothing_is_rendered(render: Any) -> None:
    with pytest.raises(AgentflyError, match=r"spec\.storage"):
        render(run(storage=None))


# What there is, and whose -----------------------------------------------------------------------------------


def matches(selector: str, labels: dict[str, str]) -> bool:
    terms = [term.partition("=") for term in selector.split(",")]
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in terms)


@pytest.mark.parametrize("obj", children(), ids=lambda obj: f"{obj['kind']} {obj['metadata']['name']}")
def test_everything_belongs_to_its_run_or_job_and_is_found(obj: Object) -> None:
    metadata = obj["metadata"]
    (owner,) = metadata["ownerReferences"]
    label = {"TrainingRun": "training-run", "RolloutJob": "rollout-job"}[owner["kind"]]
    assert owner == {
        "apiVersion": "agentfly.dev/v1alpha1", "kind": owner["kind"], "name": "first",
        "uid": "0123456789abcdef", "controller": True,
    }  # fmt: skip
    assert metadata["namespace"] == "team"
    assert metadata["name"].startswith("first-")
    assert metadata["labels"][f"agentfly.dev/{label}"] == "first"
    assert matches(CHILD_SELECTOR, metadata["labels"])
    if obj["kind"] == "Job":
        assert obj["spec"]["template"]["metadata"]["labels"] == metadata["labels"]


def test_a_trainer_pod_has_its_attempt_its_index_and_its_name_in_dns() -> None:
    found = run(trainer={"nodes": 4})
    for index, pod in enumerate(trainers(found, attempt=2)):
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        assert (labels["agentfly.dev/role"], labels["agentfly.dev/attempt"]) == ("trainer", "2")
        assert labels["agentfly.dev/index"] == str(index)
        assert spec["hostname"] == pod["metadata"]["name"] == f"first-trainer-2-{index}"
        assert f"{spec['hostname']}.{spec['subdomain']}.team.svc" == trainer_host("first", "team", 2, index)


def test_names_of_the_longest_run_fit() -> None:
    longest = TrainingRun.model_validate(
        {"metadata": {**META, "name": "a" * 40}, "spec": {**SPEC, "trainer": {"nodes": 64}}}
    )
    objects = attempt_objects(longest, 123456, CONFIG)
    assert max(len(each["metadata"]["name"]) for each in objects) <= 63
    assert len(policy_pool(longest, CONFIG)["metadata"]["name"]) <= 40


def test_the_service_names_trainer_pods_before_they_are_ready() -> None:
    _, service, _, *pods = attempt_objects(run(trainer={"nodes": 2}), 1, CONFIG)
    assert service["metadata"]["name"] == "first-trainer"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    selected = service["spec"]["selector"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in pods)
    assert not selected <= prepare(run())["metadata"]["labels"].items()


def test_trainer_pods_are_open_to_each_other_and_one_port_of_them_to_the_operator() -> None:
    _, service, policy, *_ = attempt_objects(run(), 1, CONFIG)
    same = {"matchLabels": service["spec"]["selector"]}
    assert policy["spec"]["podSelector"] == same
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    among, outside = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": same}]}
    assert outside["ports"] == [{"port": 7090, "protocol": "TCP"}]
    (operator,) = outside["from"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "agentfly-system"}
    assert operator["podSelector"]["matchLabels"] == {"agentfly.dev/component": "operator"}


@pytest.mark.parametrize(
    "policy",
    [attempt_objects(run(), 1, CONFIG)[2], roles_policy(run()), roles_policy(job())],
    ids=["trainer", "roles of a run", "roles of a job"],
)
def test_pods_of_all_roles_reach_all_but_the_credentials_of_their_node(policy: Object) -> None:
    (rule,) = policy["spec"]["egress"]
    assert rule.keys() == {"to"}
    pods, *blocks = rule["to"]
    assert pods == {"namespaceSelector": {}}
    assert [block["ipBlock"] for block in blocks] == [
        {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]},
        {"cidr": "::/0", "except": ["fd00:ec2::254/128"]},
    ]


def test_one_policy_is_of_the_pods_of_all_roles_and_closes_no_way_in() -> None:
    for mine, pods in (
        (run(), [prepare(run()), *trainers(run(trainer={"nodes": 2}))]),
        (job(), [prepare(job()), worker(job())]),
    ):
        other = mine.model_copy(update={"metadata": mine.metadata.model_copy(update={"name": "second"})})
        spec = roles_policy(mine)["spec"]
        assert spec["policyTypes"] == ["Egress"]
        for pod in pods:
            assert selects(spec["podSelector"], pod["metadata"]["labels"])
            assert not selects(roles_policy(other)["spec"]["podSelector"], pod["metadata"]["labels"])
        assert not selects(spec["podSelector"], {"agentfly.dev/component": "member"})


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    (expression,) = selector["matchExpressions"]
    assert expression["operator"] == "Exists"
    return selector["matchLabels"].items() <= labels.items() and expression["key"] in labels


def test_a_policys_servers_answer_their_own_run_or_job_alone() -> None:
    for mine, pods in ((run(), trainers(run(trainer={"nodes": 2}))), (job(), [worker(job())])):
        other = mine.model_copy(update={"metadata": mine.metadata.model_copy(update={"name": "second"})})
        policy, foreign = (
            pool_members_policy("team", ResourcePool.model_validate(policy_pool(each, CONFIG)), CONFIG)
            for each in (mine, other)
        )
        assert policy is not None
        assert foreign is not None
        for pod in pods:
            assert admits(policy, pod["metadata"]["labels"])
            assert not admits(foreign, pod["metadata"]["labels"])
        assert admits(policy, {"agentfly.dev/component": "broker"})
        assert not admits(policy, {"agentfly.dev/component": "worker"})


def admits(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    (rule,) = policy["spec"]["ingress"]
    return any(each["podSelector"]["matchLabels"].items() <= labels.items() for each in rule["from"])


def test_service_and_policy_are_those_of_all_attempts() -> None:
    found = run()
    assert attempt_objects(found, 1, CONFIG)[1:3] == attempt_objects(found, 2, CONFIG)[1:3]


# Jobs and pools ---------------------------------------------------------------------------------------------

DISRUPTED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize("found", [run(), job()], ids=["run", "job"])
def test_a_preparation_is_tried_again_unless_it_cannot_succeed(found: TrainingRun | RolloutJob) -> None:
    spec = prepare_job(found, CONFIG)[1]["spec"]
    assert spec.keys() == {"backoffLimit", "podFailurePolicy", "template"}
    assert spec["backoffLimit"] == 3
    invalid = {"containerName": "prepare", "operator": "In", "values": [87]}
    assert spec["podFailurePolicy"]["rules"] == [DISRUPTED, {"action": "FailJob", "onExitCodes": invalid}]
    assert container(spec["template"])["name"] == "prepare"


@pytest.mark.parametrize("count", [0, 5])
def test_the_shards_of_a_job_are_the_indexes_of_one(count: int) -> None:
    spec = workers_job(job(workers={"count": count}), 12, CONFIG)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 12, count)
    assert spec["backoffLimitPerIndex"] == 3
    stopped = {"containerName": "worker", "operator": "In", "values": [143]}
    alike = {"containerName": "worker", "operator": "In", "values": [3, 87]}
    assert spec["podFailurePolicy"]["rules"] == [
        DISRUPTED,
        {"action": "Ignore", "onExitCodes": stopped},
        {"action": "FailIndex", "onExitCodes": alike},
    ]
    assert container(spec["template"])["name"] == "worker"
    assert not spec.keys() & {"maxFailedIndexes", "suspend", "ttlSecondsAfterFinished"}


def test_so_many_shards_that_kubernetes_bounds_those_that_fail() -> None:
    assert "maxFailedIndexes" not in workers_job(job(), 100_000, CONFIG)["spec"]
    assert workers_job(job(), 100_001, CONFIG)["spec"]["maxFailedIndexes"] == 10_000


def test_workers_are_suspended_when_their_job_is() -> None:
    assert workers_job(job(suspend=True), 1, CONFIG)["spec"]["suspend"] is True
    assert "suspend" not in workers_job(job(suspend=False), 1, CONFIG)["spec"]


def test_worker_pods_are_found_for_the_scale_subresource() -> None:
    assert matches(role_selector(job(), "worker"), worker(job())["metadata"]["labels"])
    assert not matches(role_selector(job(), "worker"), prepare(job())["metadata"]["labels"])
    assert not matches(role_selector(run(), "worker"), worker(job())["metadata"]["labels"])


def test_the_policys_pool_is_one_like_any_other() -> None:
    pod = {"cpu": 16, "memory": "200Gi", "sharedMemory": "16Gi", "placement": PLACED}
    found = policy_pool(run(inference={"replicas": 4, "gpus": 8, "pod": pod}), CONFIG)
    assert (found["kind"], found["metadata"]["name"]) == ("ResourcePool", "first-policy")
    assert "status" not in found
    read = read_pool({**found, "metadata": {**found["metadata"], "uid": "u", "generation": 1}}).pool
    assert read is not None
    service = read.spec.model_service
    assert service is not None
    assert (service.image, service.cache_claim) == ("agentfly/inference:dev", "runs")
    assert (service.gpus, service.shared_memory, service.memory) == (8, "16Gi", "200Gi")
    assert (read.spec.capacity.min, read.spec.capacity.max) == (4, 4)
    assert read.spec.placement is not None
    assert read.spec.placement.to_json()["nodeSelector"] == PLACED["nodeSelector"]
    mine = policy_pool(run(inference={"pod": {"image": "mine"}}), CONFIG)
    assert mine["spec"]["modelService"]["image"] == "mine"


# A trainer that serves the policy ------------------------------------------------------------------------


def test_a_trainer_that_serves_the_policy_has_vllm_in_its_image_and_leases_no_server() -> None:
    inference = {"mode": "Colocated", "gpus": 4, "gpuMemoryUtilization": 0.7, "maxNumSeqs": 9}
    trainer = {"nodes": 2, "gpusPerNode": 8}
    given = run(trainer=trainer, inference=inference)
    for pod in (*trainers(given), prepare_job(given, CONFIG)[1]["spec"]["template"]):
        assert container(pod)["image"] == "agentfly/colocated:dev"
    mine = run(trainer={**trainer, "pod": {"image": "mine"}}, inference=inference)
    assert container(trainers(mine)[0])["image"] == "mine"
    launch = TrainerLaunch.model_validate_json(attempt_objects(given, 1, CONFIG)[0]["data"]["launch.json"])
    assert launch.servers == 0
    assert launch.trainer.servers == ColocatedServers(gpus=4, memory_utilization=0.7, max_num_seqs=9)


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
