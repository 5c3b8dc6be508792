"""From the ResourcePool that people write to the pool that the engine keeps.

Guarantees:
1. Every field of a ResourcePool's spec has its place in the pool; none is dropped.
"""

from agentfly.api import ResourcePool
from agentfly.api.quantity import cores, mebibytes
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec, PoolSpec


def pool_spec(pool: ResourcePool) -> PoolSpec:
    """The engine's pool of a ResourcePool."""
    spec = pool.spec
    return PoolSpec(
        name=pool.metadata.name,
        resource=_container(pool) if spec.type == "Container" else _model_service(pool),
        min=spec.capacity.min,
        max=spec.capacity.max,
        shared=spec.scope == "Global",
        max_pending=spec.queue.max_pending,
        lease_ttl_s=spec.lease.ttl_seconds,
        max_reuses=spec.reuse.max_reuses,
        max_lifetime_s=spec.reuse.max_lifetime_seconds,
    )


def _container(pool: ResourcePool) -> ContainerSpec:
    container = pool.spec.container
    assert container is not None  # a rule of the model: the arm that type names is set
    return ContainerSpec(
        image=container.image,
        cpu=cores(container.cpu),
        memory_mb=mebibytes(container.memory),
        pids=container.pids,
        env=dict(container.env),
        network=container.network,
        workdir=container.workdir,
    )


def _model_service(pool: ResourcePool) -> ModelServiceSpec:
    service = pool.spec.model_service
    assert service is not None  # a rule of the model: the arm that type names is set
    return ModelServiceSpec(
        model=service.model,
        max_model_len=service.max_model_len,
        max_num_seqs=service.max_num_seqs,
        dtype=service.dtype,
        tensor_parallel=service.tensor_parallel,
        gpus=service.gpus,
        args=service.args,
    )
