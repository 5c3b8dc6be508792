from agentfly.api import ResourcePool
from agentfly.broker.pools import pool_spec
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec


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
        },
        capacity={"min": 2, "max": 9},
        queue={"maxPending": 5},
        lease={"ttlSeconds": 7},
        reuse={"maxReuses": 3, "maxLifetimeSeconds": 60},
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
        ),
        min=2,
        max=9,
        max_pending=5,
        lease_ttl_s=7,
        max_reuses=3,
        max_lifetime_s=60,
    )


def test_a_model_service_is_shared_only_if_its_scope_says_so():
    service = {"model": "m", "maxModelLen": 64, "gpus": 2, "tensorParallel": 2, "args": ["--x"]}
    own = made(type="ModelService", modelService=service, capacity={"max": 1})
    judge = made(type="ModelService", modelService=service, capacity={"max": 1}, scope="Global")
    assert (own.shared, judge.shared) == (False, True)
    assert own.resource == ModelServiceSpec(
        model="m", max_model_len=64, gpus=2, tensor_parallel=2, args=("--x",)
    )
