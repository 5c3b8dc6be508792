"""The trainer pods as a RayCluster: what differs from pods that we make, and nothing else. Numbers are those
of render/cluster.py."""

import copy
import subprocess
from pathlib import Path

import pytest

from agentfly.roles.launch import TrainerLaunch
from agentfly_operator.names import CHILD_SELECTOR
from agentfly_operator.plan.children import belongs_to, pod_of, work_of
from agentfly_operator.render.run import attempt_objects
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_pods import matches
from tests.unit.operator.make_work import META, Object, run

GPUS = {"gpusPerNode": 8, "pod": {"memory": "64Gi", "placement": {"podLabels": {"example.com/team": "rl"}}}}
PROBE = {"exec": {"command": ["true"]}, "periodSeconds": 3600, "timeoutSeconds": 30}


def objects(nodes: int, attempt: int = 3) -> list[Object]:
    return list(attempt_objects(run(trainer={"nodes": nodes, **GPUS}), attempt, CONFIG, kuberay=True))


def cluster(nodes: int, attempt: int = 3) -> Object:
    return objects(nodes, attempt)[-1]


def templates(nodes: int) -> list[Object]:
    spec = cluster(nodes)["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def plain(nodes: int) -> list[Object]:
    """The pods as we make them."""
    return list(attempt_objects(run(trainer={"nodes": nodes, **GPUS}), 3, CONFIG))[3:]


def made_of(template: Object, owner: Object) -> Object:
    """What KubeRay makes of a template, as far as the operator reads it."""
    pod = copy.deepcopy(template)
    reference = {
        "kind": "RayCluster",
        "name": owner["metadata"]["name"],
        "uid": "cluster",
        "controller": True,
    }
    pod["metadata"] |= {"name": "x", "namespace": "team", "uid": "pod", "ownerReferences": [reference]}
    return pod


def test_an_attempt_is_one_cluster_of_as_many_pods() -> None:
    assert [each["kind"] for each in objects(4)] == ["ConfigMap", "Service", "NetworkPolicy", "RayCluster"]
    found = cluster(4)
    assert (found["apiVersion"], found["metadata"]["name"]) == ("ray.io/v1", "first-trainer-3")
    (group,) = found["spec"]["workerGroupSpecs"]
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {3}
    assert group["groupName"] != "head"  # queues call the head so
    assert "workerGroupSpecs" not in cluster(1)["spec"]
    assert matches(CHILD_SELECTOR, found["metadata"]["labels"])
    assert found["metadata"]["labels"]["agentfly.dev/attempt"] == "3"
    (owner,) = found["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("TrainingRun", META["uid"], True)
    assert not [label for label in found["metadata"]["labels"] if "kueue" in label]


# 1. and 2. The pods are those that we would make, with what keeps KubeRay from changing them.


@pytest.mark.parametrize("index", [0, 1])
def test_a_template_is_the_pod_that_we_would_make(index: int) -> None:
    template, pod = templates(2)[index], plain(2)[index]
    found, ours = template["spec"], copy.deepcopy(pod["spec"])
    container = ours["containers"][0]
    container |= {"livenessProbe": PROBE, "readinessProbe": PROBE}
    if index == 1:
        container["env"].append({"name": "BASH_ENV", "value": "/agentfly/launch/kuberay.sh"})
        del ours["hostname"], ours["subdomain"]  # all pods of a group are alike
    assert found == ours
    labels = {**pod["metadata"]["labels"], "agentfly.dev/training-run-uid": META["uid"]}
    if index == 1:
        del labels["agentfly.dev/index"]
    assert template["metadata"]["labels"] == labels
    assert template["metadata"]["annotations"] == pod["metadata"]["annotations"]


def test_kuberay_leaves_the_commands_alone() -> None:
    assert cluster(2)["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    modules = [template["spec"]["containers"][0]["command"][-1] for template in templates(2)]
    assert modules == ["agentfly.launch.head", "agentfly.launch.node"]
    assert all(template["spec"]["restartPolicy"] == "Never" for template in templates(2))


def test_the_wait_that_kuberay_adds_ends_at_once_and_nothing_else_is_changed(tmp_path: Path) -> None:
    config = objects(2)[0]
    file = tmp_path / "kuberay.sh"
    file.write_text(config["data"]["kuberay.sh"])
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "ray $*"; exit 7\n')
    ray.chmod(0o755)
    # As KubeRay 1.5 has it, and with its ENABLE_LOGIN_SHELL.
    waits = (
        "while true; do if ray health-check --address a:6379 > /dev/null 2>&1; then break; fi; sleep 5; done"
    )
    for options in ("-c", "-cl"):
        command = ["/bin/bash", options, "--", f"{waits}; ray status x"]
        env = {"BASH_ENV": str(file), "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        if options == "-c":  # a login shell sets its own PATH
            assert (done.stdout, done.returncode) == ("ray status x\n", 7)
    assert "kuberay.sh" not in attempt_objects(run(), 1, CONFIG)[0]["data"]


# 3. and 4. Whose a pod is, which one is the head, and what it is called.


def test_a_pod_says_whose_it_is_and_which_is_the_head() -> None:
    owner = cluster(2)
    head, other = (made_of(template, owner) for template in templates(2))
    for pod in (head, other):
        assert work_of(pod) == ("TrainingRun", "team", "first")
        assert belongs_to(pod) == META["uid"]
        assert (pod_of(pod).attempt, pod_of(pod).cluster) == (3, "first-trainer-3")
    assert (pod_of(head).index, pod_of(other).index) == (0, -1)
    assert belongs_to(owner) == META["uid"]
    stranger = copy.deepcopy(head)
    del stranger["metadata"]["labels"]["agentfly.dev/training-run-uid"]
    assert belongs_to(stranger) == ""


def test_the_head_has_the_name_by_which_the_others_look_for_it() -> None:
    config, service, *_ = objects(2)
    launch = TrainerLaunch.model_validate_json(config["data"]["launch.json"])
    assert (launch.pods, launch.trainer.nodes) == ((), 2)
    spec = templates(2)[0]["spec"]
    assert launch.head == f"{spec['hostname']}.{spec['subdomain']}.team.svc"
    selected = service["spec"]["selector"].items()
    assert all(selected <= template["metadata"]["labels"].items() for template in templates(2))
