"""Sections have the numbers of the guarantees in agentfly.broker.pools."""

import pytest

from agentfly.api import ResourcePool
from agentfly.api.pooltypes import VLLM_IMAGE
from agentfly.broker.pools import UnsuitablePool, pool_spec
from agentfly.resources.spec import (
    Budget,
    CircuitBreaker,
    ContainerSpec,
    ExternalAPISpec,
    InProcessSpec,
    ModelServiceSpec,
    PodOptions,
    PoolSpec,
    ResetSpec,
)
from tests.unit.api.worlds import SCHEMAS, walk


def made(platform="local", **spec) -> PoolSpec:
    pool = ResourcePool.model_validate({"metadata": {"name": "p"}, "spec": spec})
    return pool_spec(pool, platform=platform)


SECURITY = {
    "podSecurity": "Privileged",
    "userNamespace": True,
    "runtimeClassName": "gvisor",
    "egress": [{"cidr": "10.0.0.0/8", "ports": [443]}],
    "dns": False,
}
PLACEMENT = {
    "nodeSelector": {"pool": "rollouts"},
    "tolerations": [
        {"key": "rl", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        {"key": "team", "value": "rl"},
    ],
    "priorityClassName": "batch",
    "schedulerName": "bins",
    "podLabels": {"team": "rl"},
    "podAnnotations": {"example.com/cost": "1"},
}
POD = PodOptions(
    security="privileged",
    user_namespace=True,
    runtime_class="gvisor",
    pull_policy="Never",
    pull_secrets=("registry",),
    node_selector={"pool": "rollouts"},
    tolerations=(
        {"key": "rl", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        {"key": "team", "value": "rl"},
    ),
    priority_class="batch",
    scheduler="bins",
    labels={"team": "rl"},
    annotations={"example.com/cost": "1"},
)


# 1. Every field has its place.

BOX_POOL = {
    "type": "Container",
    "container": {
        "image": "/images/task",
        "cpu": "500m",
        "memory": "1.5Gi",
        "requests": {"cpu": "500m", "memory": "1Gi"},
        "pids": 99,
        "env": {"A": "b"},
        "network": True,
        "workdir": "/testbed",
        "runtime": "ContainerCLI",
        "disk": "2Gi",
        "reset": {
            "method": "Git",
            "paths": ["/data"],
            "git": "/testbed",
            "command": ["/reset"],
            "timeoutSeconds": 9,
        },
    },
    "images": {"policy": "PerAcquire", "maxResident": 4, "pullPolicy": "Never", "pullSecrets": ["registry"]},
    "capacity": {
        "min": 2,
        "max": 9,
        "buffer": 1,
        "maxStarting": 3,
        "startsPerSecond": 0.5,
        "perNode": 3,
        "quota": {"cpu": 4, "memory": "1Ti"},
    },
    "queue": {
        "maxPending": 5,
        "acquireTimeoutSeconds": 60,
        "weights": {"train": 4.0},
        "reserved": {"verifier": 2},
    },
    "lease": {"ttlSeconds": 7},
    "reuse": {"maxReuses": 3, "maxLifetimeSeconds": 60, "maxMemory": "1Gi", "quarantine": 1},
    "security": SECURITY,
    "placement": PLACEMENT,
}

API_POOL = {
    "type": "ExternalAPI",
    "scope": "Global",
    "externalAPI": {
        "baseUrl": "https://judge/v1",
        "model": "judge-1",
        "credentials": [{"env": "KEY"}, {"file": "/keys/two"}],
        "concurrency": 4,
        "requestsPerSecond": 2.5,
        "tokensPerSecond": 1000,
        "timeoutSeconds": 7,
        "maxRetries": 1,
        "budget": {"calls": 9, "usd": 1.5, "usdPerMillionInput": 0.1, "usdPerMillionOutput": 0.4},
        "circuitBreaker": {"failures": 2, "windowSeconds": 3, "openSeconds": 4},
    },
    "capacity": {"max": 1},
}

OBJECT_POOL = {
    "type": "InProcess",
    "inProcess": {
        "entrypoint": "games.chess:make",
        "kwargs": {"depth": 3, "book": ["e4"]},
        "isolated": True,
        "callTimeoutSeconds": 5,
        "startTimeoutSeconds": 6,
    },
    "capacity": {"max": 2},
}

SERVER_POOL = {
    "type": "ModelService",
    "modelService": {
        "model": "org/m",
        "maxModelLen": 64,
        "maxNumSeqs": 8,
        "dtype": "float32",
        "tensorParallel": 2,
        "pipelineParallel": 2,
        "gpus": 4,
        "args": ["--x"],
        "image": "registry/vllm:1",
        "cpu": "2.5",
        "memory": "8Gi",
        "sharedMemory": "1Gi",
        "ephemeralStorage": "100Gi",
        "env": [
            {"name": "A", "value": "b"},
            {"name": "K", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ],
        "gpuResource": "amd.com/gpu",
        "cacheClaim": "models",
        "hubToken": {"secretKeyRef": {"name": "hub", "key": "token"}},
    },
    "images": {"pullPolicy": "Never", "pullSecrets": ["registry"]},
    "capacity": {"max": 1},
    "security": SECURITY,
    "placement": PLACEMENT,
}


def test_every_field_of_a_container_pool_has_its_place():
    spec = made(**BOX_POOL)
    assert spec == PoolSpec(
        name="p",
        resource=ContainerSpec(
            image="/images/task",
            cpu=0.5,
            memory_mb=1536,
            pids=99,
            env={"A": "b"},
            network=True,
            workdir="/testbed",
            runtime="container-cli",
            disk_mb=2048,
            reset=ResetSpec(method="git", paths=("/data",), git="/testbed", command=("/reset",), timeout_s=9),
        ),
        min=2,
        max=8,
        buffer=1,
        max_starting=3,
        starts_per_s=0.5,
        max_pending=5,
        acquire_timeout_s=60,
        max_resident_images=4,
        weights={"train": 4.0},
        reserved={"verifier": 2},
        per_image=True,
        lease_ttl_s=7,
        max_reuses=3,
        max_lifetime_s=60,
        max_memory_mb=1024,
        quarantine=1,
    )


def test_every_field_of_pods_has_its_place_in_a_cluster():
    fields = {
        "type": "Container",
        "container": {
            "image": "python:3.12",
            "requests": {"cpu": "100m", "memory": "64Mi"},
            "network": True,
            "reset": {"method": "OverlaySharedPID"},
        },
        "images": {"pullPolicy": "Never", "pullSecrets": ["registry"]},
        "capacity": {"max": 9, "perNode": 3},
        "security": SECURITY,
        "placement": PLACEMENT,
    }
    spec = made("kubernetes", **fields)
    assert spec.per_node == 3
    assert spec.resource == ContainerSpec(
        runtime="kubernetes",
        image="python:3.12",
        cpu_request=0.1,
        memory_request_mb=64,
        network=True,
        reset=ResetSpec(method="overlay-shared-pid"),
        pod=POD,
    )


def test_blocks_that_are_absent_mean_their_defaults_in_a_cluster():
    spec = made("kubernetes", type="Container", container={"image": "python:3.12"}, capacity={"max": 1})
    assert spec.resource == ContainerSpec(runtime="kubernetes", image="python:3.12", pod=PodOptions())
    empty = made(
        "kubernetes",
        type="Container",
        container={"image": "python:3.12"},
        capacity={"max": 1},
        security={},
        placement={},
    )
    assert empty == spec


def test_every_field_of_a_model_service_has_its_place_in_a_cluster():
    spec = made("kubernetes", **SERVER_POOL)
    assert spec.resource == ModelServiceSpec(
        model="org/m",
        max_model_len=64,
        max_num_seqs=8,
        dtype="float32",
        gpus=4,
        tensor_parallel=2,
        pipeline_parallel=2,
        args=("--x",),
        runtime="kubernetes",
        image="registry/vllm:1",
        cpu=2.5,
        memory_mb=8192,
        shm_mb=1024,
        disk_mb=102400,
        env=tuple(SERVER_POOL["modelService"]["env"]),
        gpu_resource="amd.com/gpu",
        cache_claim="models",
        hub_token="secret/hub/token",
        pod=POD,
    )
    plain = made("kubernetes", type="ModelService", modelService={"model": "m", "maxModelLen": 64},
                 capacity={"max": 1})  # fmt: skip
    assert plain.resource == ModelServiceSpec(
        model="m", max_model_len=64, runtime="kubernetes", image=VLLM_IMAGE, shm_mb=2048
    )


def test_every_runtime_and_reset_method_has_its_word():
    for written, meant in (("Bubblewrap", "bubblewrap"), ("Enroot", "enroot")):
        assert made(type="Container", container={"runtime": written}, capacity={"max": 1}).resource == (
            ContainerSpec(runtime=meant)
        )
    for method in ("Auto", "Overlay", "Recreate"):
        spec = made(type="Container", container={"reset": {"method": method}}, capacity={"max": 1})
        assert spec.resource == ContainerSpec(reset=ResetSpec(method=method.lower()))


def test_every_field_of_an_external_api_has_its_place():
    spec = made(**API_POOL)
    assert spec.shared
    assert spec.resource == ExternalAPISpec(
        base_url="https://judge/v1",
        model="judge-1",
        credentials=("env:KEY", "file:/keys/two"),
        concurrency=4,
        requests_per_second=2.5,
        tokens_per_second=1000,
        timeout_s=7,
        max_retries=1,
        budget=Budget(calls=9, usd=1.5, usd_per_million_input=0.1, usd_per_million_output=0.4),
        circuit_breaker=CircuitBreaker(failures=2, window_s=3, open_s=4),
    )


def test_every_field_of_an_in_process_pool_has_its_place():
    spec = made(**OBJECT_POOL)
    assert not spec.shared
    assert spec.resource == InProcessSpec(
        entrypoint="games.chess:make",
        kwargs={"depth": 3, "book": ["e4"]},
        isolated=True,
        call_timeout_s=5,
        start_timeout_s=6,
    )


def test_a_model_service_is_shared_only_if_its_scope_says_so():
    service = {"model": "m", "maxModelLen": 64, "maxNumSeqs": 8}
    own = made(type="ModelService", modelService=service, capacity={"max": 1})
    judge = made(type="ModelService", modelService=service, capacity={"max": 1}, scope="Global")
    assert (own.shared, judge.shared) == (False, True)
    assert own.resource == ModelServiceSpec(model="m", max_model_len=64, max_num_seqs=8)
    assert judge.slots == 8


KEY = {"secretKeyRef": {"name": "judge", "key": "token"}}


def leaves(value, at=""):
    """Paths of all fields that have no fields below them."""
    if isinstance(value, dict) and at not in MAPS:
        for name, child in value.items():
            yield from leaves(child, f"{at}.{name}" if at else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for item in value:
            yield from leaves(item, f"{at}[]")
    else:
        yield at


MAPS = {path for path, node in walk(SCHEMAS["ResourcePool"]["properties"]["spec"])
        if node.get("type") == "object" and "properties" not in node}  # fmt: skip


def test_every_field_of_the_schema_was_seen_to_have_its_place():
    """A new field needs its place in `pool_spec`, and one in the pools above."""
    spec = SCHEMAS["ResourcePool"]["properties"]["spec"]
    fields = {
        path
        for path, node in walk(spec)
        if path and not path.endswith("[]") and not ({"properties"} & {*node, *node.get("items", ())})
    }
    assert len(fields) > 80
    written = [BOX_POOL, SERVER_POOL, API_POOL, OBJECT_POOL, {"externalAPI": {"credentials": [KEY]}}]
    assert fields - {path for pool in written for path in leaves(pool)} == set()


# 2. What a platform does not have.

BOX = {"type": "Container", "capacity": {"max": 1}}
JUDGE = {"type": "ExternalAPI", "scope": "Global", "capacity": {"max": 1}}
LOCAL_IMAGES = (
    "host",
    "/images/task",
    "./task",
    "tar:t.tar",
    "oci:t",
    "docker-archive:t",
    "packages:bookworm/git",
)


def refusal(platform, **spec) -> UnsuitablePool:
    with pytest.raises(UnsuitablePool) as refused:
        made(platform, **spec)
    return refused.value


@pytest.mark.parametrize("image", LOCAL_IMAGES)
def test_images_of_one_machine_are_none_of_a_cluster(image):
    error = refusal("kubernetes", **BOX, container={"image": image})
    assert error.message == (
        f"ResourcePool p: spec.container.image: {image} is of one machine, and nodes of a cluster pull from "
        "a registry"
    )
    assert error.hints == ("name an image such as python:3.12",)
    assert made("local", **BOX, container={"image": image}).resource.image == image


@pytest.mark.parametrize("image", ["python:3.12", "org/task", "registry.local:5000/org/task@sha256:0a"])
def test_images_of_registries_are_those_of_a_cluster(image):
    assert made("kubernetes", **BOX, container={"image": image}).resource.image == image


def test_an_image_that_no_member_has_is_not_looked_at():
    images = {"policy": "PerAcquire"}
    assert made("kubernetes", **BOX, container={}, images=images).per_image
    for kept in ("min", "buffer"):
        fields = {"type": "Container", "container": {}, "images": images, "capacity": {"max": 1, kept: 1}}
        assert "spec.container.image: host is of one machine" in refusal("kubernetes", **fields).message


def test_objects_come_from_the_brokers_image_in_a_cluster():
    game = {"type": "InProcess", "capacity": {"max": 1}, "inProcess": {"entrypoint": "games.py:make"}}
    assert refusal("kubernetes", **game).message == (
        "ResourcePool p: spec.inProcess.entrypoint: games.py:make is beside the manifest, where the broker "
        "does not look"
    )
    for entrypoint in ("games.chess:make", "/opt/games.py:make"):
        made("kubernetes", **game | {"inProcess": {"entrypoint": entrypoint}})


def test_secrets_are_read_in_a_cluster_only():
    api = {"baseUrl": "https://judge/v1", "credentials": [{"env": "KEY"}, KEY]}
    error = refusal("local", **JUDGE, externalAPI=api)
    assert error.message == (
        "ResourcePool p: spec.externalAPI.credentials[1].secretKeyRef: Secret judge is in a cluster, "
        "and this is one machine"
    )
    resource = made("kubernetes", **JUDGE, externalAPI=api | {"credentials": [KEY]}).resource
    assert resource.credentials == ("secret:judge/token",)


def test_nothing_of_the_broker_leaves_a_cluster_by_a_pool():
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    own = {"secretKeyRef": {"name": "agentfly-broker-client", "key": "client-token"}}
    api = {"baseUrl": "https://mine/v1", "credentials": [{"env": "HOME"}, {"file": token}, own]}
    assert refusal("kubernetes", **JUDGE, externalAPI=api).message == (
        "ResourcePool p: spec.externalAPI.credentials[0].env: HOME is the broker's own in a cluster; "
        f"spec.externalAPI.credentials[1].file: {token} is the broker's own in a cluster; "
        "spec.externalAPI.credentials[2].secretKeyRef: Secret agentfly-broker-client is the broker's own"
    )
    key = {"secretKeyRef": {"name": "agentfly-broker", "key": "signing-key"}}
    service = {"model": "tiny", "maxModelLen": 512, "hubToken": key}
    model = {"type": "ModelService", "scope": "Global", "capacity": {"max": 1}, "modelService": service}
    error = refusal("kubernetes", **model)
    assert error.message.endswith(
        "modelService.hubToken.secretKeyRef: Secret agentfly-broker is the broker's own"
    )


def test_a_method_for_clusters_is_none_of_one_machine():
    error = refusal("local", **BOX, container={"reset": {"method": "OverlaySharedPID"}})
    assert error.message.startswith(
        "ResourcePool p: spec.container.reset.method: OverlaySharedPID is for a cluster"
    )
    assert error.hints == ("write Overlay, or Auto",)


# 3. Quota.


@pytest.mark.parametrize(
    ("quota", "most"),
    [
        ({"cpu": 100}, 64),
        ({"cpu": "2.1"}, 21),
        ({"cpu": "2.099"}, 20),
        ({"memory": "1Gi"}, 4),
        ({"cpu": "300m", "memory": "1Gi"}, 3),
        ({"cpu": 100, "memory": "300Mi"}, 1),
    ],
)
def test_max_is_lowered_to_the_members_that_fit(quota, most):
    container = {"cpu": "0.1", "memory": "256Mi"}
    assert made(type="Container", container=container, capacity={"max": 64, "quota": quota}).max == most


def test_a_quota_counts_what_members_ask_for():
    container = {"cpu": 1, "memory": "1Gi", "requests": {"cpu": "0.1"}}
    for quota, most in (({"cpu": 1}, 10), ({"cpu": 100, "memory": "4Gi"}, 4)):
        assert made(type="Container", container=container, capacity={"max": 64, "quota": quota}).max == most


def test_a_quota_that_the_queue_or_the_quarantine_fills_is_refused():
    error = refusal(
        "kubernetes",
        type="Container",
        container={"image": "python:3.12"},
        capacity={"max": 8, "quota": {"cpu": 2}},
        queue={"reserved": {"verifier": 2}},
        reuse={"quarantine": 2},
    )
    assert error.message == (
        "ResourcePool p: spec.capacity.quota: allows 2 of capacity.max 8 members, and queue.reserved takes "
        "2; "
        "spec.capacity.quota: allows 2 of capacity.max 8 members, and reuse.quarantine could fill all of them"
    )
    assert len(error.hints) == 2
