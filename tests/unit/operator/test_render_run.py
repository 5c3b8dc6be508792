"""Manifests of runs and jobs: what there is of each, whose it is, who reaches it, what its pods are told."""

from typing import Any

import pytest

from agentfly.api import ResourcePool, RolloutJob, TrainingRun
from agentfly.errors import AgentflyError
from agentfly.roles.launch import PrepareLaunch, ShardLaunch, TrainerLaunch
from agentfly.roles.trainer import ColocatedServers
from agentfly_operator.names import CHILD_SELECTOR, role_selector, trainer_host
from agentfly_operator.plan.wanted import read_pool
from agentfly_operator.render.job import launch_config, workers_job
from agentfly_operator.render.policy import pool_members_policy
from agentfly_operator.render.run import attempt_objects, policy_pool, prepare_job, roles_policy
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_pods import PLACED, container, matches, mounted, prepare, trainers, worker
from tests.unit.operator.make_work import META, SPEC, Object, children, job, run

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
