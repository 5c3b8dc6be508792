from agentfly.api import ResourcePool
from agentfly.broker.pools import pool_spec
from agentfly.resources.spec import (
    Budget,
    CircuitBreaker,
    ContainerSpec,
    ExternalAPISpec,
    InProcessSpec,
    ModelServiceSpec,
    PoolSpec,
    ResetSpec,
)


def made(**spec) -> PoolSpec:
    return pool_spec(ResourcePool.model_validate({"metadata": {"name": "p"}, "spec": spec}))


def test_every_field_of_a_container_pool_has_its_place():
    spec = made(
        type="Container",
        container={
            "image": "/images/task",
            "cpu": "500m",
            "memory": "1.5Gi",
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
        images={"policy": "PerAcquire"},
        capacity={"min": 2, "max": 9, "buffer": 1, "maxStarting": 3, "startsPerSecond": 0.5},
        queue={"maxPending": 5, "weights": {"train": 4.0}, "reserved": {"verifier": 2}},
        lease={"ttlSeconds": 7},
        reuse={"maxReuses": 3, "maxLifetimeSeconds": 60, "maxMemory": "1Gi", "quarantine": 1},
    )
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
        max=9,
        buffer=1,
        max_starting=3,
        starts_per_s=0.5,
        max_pending=5,
        weights={"train": 4.0},
        reserved={"verifier": 2},
        per_image=True,
        lease_ttl_s=7,
        max_reuses=3,
        max_lifetime_s=60,
        max_memory_mb=1024,
        quarantine=1,
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
    spec = made(
        type="ExternalAPI",
        scope="Global",
        externalAPI={
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
        capacity={"max": 1},
    )
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
    spec = made(
        type="InProcess",
        inProcess={
            "entrypoint": "games.chess:make",
            "kwargs": {"depth": 3, "book": ["e4"]},
            "isolated": True,
            "callTimeoutSeconds": 5,
            "startTimeoutSeconds": 6,
        },
        capacity={"max": 2},
    )
    assert not spec.shared
    assert spec.resource == InProcessSpec(
        entrypoint="games.chess:make",
        kwargs={"depth": 3, "book": ["e4"]},
        isolated=True,
        call_timeout_s=5,
        start_timeout_s=6,
    )


def test_a_model_service_is_shared_only_if_its_scope_says_so():
    service = {"model": "m", "maxModelLen": 64, "gpus": 4, "tensorParallel": 2, "args": ["--x"]}
    service |= {"pipelineParallel": 2, "maxNumSeqs": 8}
    own = made(type="ModelService", modelService=service, capacity={"max": 1})
    judge = made(type="ModelService", modelService=service, capacity={"max": 1}, scope="Global")
    assert (own.shared, judge.shared) == (False, True)
    assert own.resource == ModelServiceSpec(
        model="m",
        max_model_len=64,
        max_num_seqs=8,
        gpus=4,
        tensor_parallel=2,
        pipeline_parallel=2,
        args=("--x",),
    )
    assert judge.slots == 8
