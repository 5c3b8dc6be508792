import pytest

from agentfly.resources.runners.kubernetes.model_pod import model_pod
from agentfly.resources.runners.kubernetes.pod import RESTRICTED, Start
from agentfly.resources.spec import ModelServiceSpec, PodOptions

OWNER = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "name": "p", "uid": "u"}
START = Start("p", "p-0a1b-0", "ns", OWNER, "nonce", excluded=frozenset({"full"}))


def spec(**fields):
    given = {"model": "org/model", "max_model_len": 2048, "runtime": "kubernetes", "image": "vllm:1"}
    return ModelServiceSpec(**(given | fields))


def rendered(**fields):
    return model_pod(START, spec(**fields))["spec"]


def container(**fields):
    [found] = rendered(**fields)["containers"]
    return found


def environment(**fields):
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(**fields)["env"]}


def test_serves_the_whole_cluster_with_the_arguments_of_every_server():
    found = container(args=("--seed", "1"))
    assert found["image"] == "vllm:1"
    assert found["command"][:5] == ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    flags = dict(zip(found["command"], found["command"][1:], strict=False))
    assert (flags["--host"], flags["--port"]) == ("0.0.0.0", "8000")
    assert (flags["--served-model-name"], flags["--max-model-len"]) == ("policy", "2048")
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert found["command"][-2:] == ["--seed", "1"]
    assert found["ports"] == [{"name": "http", "containerPort": 8000}]


def test_nothing_of_the_arguments_is_expanded_by_kubernetes():
    assert container(args=("$(HOME)",))["command"][-1] == "$$(HOME)"


def test_is_ready_when_it_says_so_and_has_the_time_to_load():
    found = container()
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[name]["httpGet"] == {"path": "/health", "port": "http"}
    assert found["startupProbe"]["periodSeconds"] * found["startupProbe"]["failureThreshold"] == 840
    assert found["livenessProbe"]["failureThreshold"] * found["livenessProbe"]["periodSeconds"] >= 30


def test_dead_server_is_not_started_again_in_place_and_drains_when_it_is_evicted():
    pod = rendered()
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 30
    assert container()["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_gpus_are_asked_for_and_their_taint_is_tolerated():
    mine = {"key": "team", "operator": "Exists"}
    pod = rendered(gpus=2, tensor_parallel=2, cpu=4, memory_mb=65536, pod=PodOptions(tolerations=(mine,)))
    quota = {"cpu": "4000m", "memory": "65536Mi", "nvidia.com/gpu": "2"}
    assert pod["containers"][0]["resources"] == {"requests": quota, "limits": quota}
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [mine, taint]
    other = rendered(gpus=1, gpu_resource="amd.com/gpu")
    assert other["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert other["tolerations"][0]["key"] == "amd.com/gpu"


def test_on_the_cpu_nothing_asks_for_a_gpu_and_the_cache_is_bounded():
    pod = rendered(memory_mb=8192)
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "8192Mi"}
    assert "tolerations" not in pod
    assert "--enforce-eager" in container()["command"]
    assert environment(memory_mb=8192)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment(memory_mb=1024)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment()
    assert environment()["TORCHDYNAMO_DISABLE"] == "1"
    assert not {"TORCHDYNAMO_DISABLE", "VLLM_CPU_KVCACHE_SPACE"} & set(environment(gpus=1, memory_mb=8192))


def test_server_has_the_endpoints_that_change_weights_and_tells_nobody():
    found = environment()
    assert (found["VLLM_SERVER_DEV_MODE"], found["VLLM_NO_USAGE_STATS"]) == ("1", "1")


def test_model_that_is_a_directory_of_the_image_needs_no_hub():
    assert environment(model="/models/m")["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment()


def test_shared_memory_is_a_volume_of_memory():
    assert rendered()["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert rendered(shm_mb=512)["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}
    assert container()["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


def test_downloads_are_kept_where_the_claim_is():
    pod = rendered(cache_claim="models")
    assert pod["volumes"][1] == {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}
    assert pod["containers"][0]["volumeMounts"][1] == {"name": "cache", "mountPath": "/agentfly-cache"}
    assert environment(cache_claim="models")["HF_HOME"] == "/agentfly-cache"


def test_key_for_the_hub_is_named_and_never_copied():
    assert environment(hub_token="secret/hub/token")["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hub", "key": "token"}
    }
    assert "HF_TOKEN" not in environment()


@pytest.mark.parametrize("security", ["restricted", "baseline", "privileged"])
def test_keeps_to_its_security_standard(security):
    found = container(pod=PodOptions(security=security))["securityContext"]
    assert found["allowPrivilegeEscalation"] is False
    assert found["seccompProfile"] == {"type": "RuntimeDefault"}
    if security == "restricted":
        assert found == RESTRICTED
        mounts = container(pod=PodOptions(security=security))["volumeMounts"]
        assert {"name": "tmp", "mountPath": "/tmp"} in mounts
        assert environment(pod=PodOptions(security=security))["HOME"] == "/tmp"


def test_has_what_every_member_has():
    pod = model_pod(START, spec(pod=PodOptions(pull_policy="Never", runtime_class="nvidia")))
    assert pod["metadata"]["labels"]["agentfly.dev/component"] == "member"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert pod["spec"]["containers"][0]["imagePullPolicy"] == "Never"
    assert "full" in str(pod["spec"]["affinity"])


def test_disk_is_asked_for_and_not_limited():
    assert container(disk_mb=2048)["resources"] == {"requests": {"ephemeral-storage": "2048Mi"}}


def test_variables_of_the_spec_win_and_nothing_in_them_is_expanded():
    key = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env = (
        {"name": "HF_HUB_OFFLINE", "value": "0"},
        {"name": "A", "value": "$(B)"},
        {"name": "HF_TOKEN", "valueFrom": key},
    )
    names = [each["name"] for each in container(model="/m", hub_token="secret/x/y", env=env)["env"]]
    assert len(names) == len(set(names))
    found = environment(model="/m", hub_token="secret/x/y", env=env)
    assert (found["HF_HUB_OFFLINE"], found["A"], found["HF_TOKEN"]) == ("0", "$$(B)", key)
