"""From the ResourcePool that people write to the pool that the engine keeps.

Guarantees:
1. Every field of a ResourcePool's spec has its place in the pool; none is dropped.
"""

from agentfly.api import ResourcePool
from agentfly.api.pooltypes import Container, Credential, ExternalAPI, InProcess, ModelService
from agentfly.api.quantity import cores, mebibytes
from agentfly.api.resourcepool import ResourcePoolSpec
from agentfly.resources.spec import (
    Budget,
    CircuitBreaker,
    ContainerSpec,
    ExternalAPISpec,
    InProcessSpec,
    ModelServiceSpec,
    OneSpec,
    PoolSpec,
    ResetSpec,
)

_RUNTIMES = {"Bubblewrap": "bubblewrap", "ContainerCLI": "container-cli", "Enroot": "enroot"}


def pool_spec(pool: ResourcePool) -> PoolSpec:
    """The engine's pool of a ResourcePool."""
    spec = pool.spec
    memory = spec.reuse.max_memory
    return PoolSpec(
        name=pool.metadata.name,
        resource=_resource(spec),
        min=spec.capacity.min,
        max=spec.capacity.max,
        buffer=spec.capacity.buffer,
        max_starting=spec.capacity.max_starting,
        starts_per_s=spec.capacity.starts_per_second,
        shared=spec.scope == "Global",
        # A server that batches all it may is the moment to start another.
        slots=spec.model_service.max_num_seqs if spec.model_service is not None else None,
        max_pending=spec.queue.max_pending,
        weights=spec.queue.weights,
        reserved=spec.queue.reserved,
        per_image=spec.images.policy == "PerAcquire",
        lease_ttl_s=spec.lease.ttl_seconds,
        max_reuses=spec.reuse.max_reuses,
        max_lifetime_s=spec.reuse.max_lifetime_seconds,
        max_memory_mb=None if memory is None else mebibytes(memory),
        quarantine=spec.reuse.quarantine,
    )


def _resource(spec: ResourcePoolSpec) -> OneSpec:
    # A rule of the model: exactly the block that type names is set.
    if spec.container is not None:
        return _container(spec.container)
    if spec.model_service is not None:
        return _model_service(spec.model_service)
    if spec.external_api is not None:
        return _external_api(spec.external_api)
    assert spec.in_process is not None
    return _in_process(spec.in_process)


def _container(container: Container) -> ContainerSpec:
    reset = container.reset
    return ContainerSpec.model_validate(
        {
            "runtime": _RUNTIMES[container.runtime],
            "image": container.image,
            "cpu": cores(container.cpu),
            "memory_mb": mebibytes(container.memory),
            "disk_mb": None if container.disk is None else mebibytes(container.disk),
            "pids": container.pids,
            "env": dict(container.env),
            "network": container.network,
            "workdir": container.workdir,
            "reset": ResetSpec.model_validate(
                {
                    "method": reset.method.lower(),
                    "paths": reset.paths,
                    "git": reset.git,
                    "command": reset.command,
                    "timeout_s": reset.timeout_seconds,
                }
            ),
        }
    )


def _model_service(service: ModelService) -> ModelServiceSpec:
    return ModelServiceSpec(
        model=service.model,
        max_model_len=service.max_model_len,
        max_num_seqs=service.max_num_seqs,
        dtype=service.dtype,
        tensor_parallel=service.tensor_parallel,
        pipeline_parallel=service.pipeline_parallel,
        gpus=service.gpus,
        args=service.args,
    )


def _external_api(api: ExternalAPI) -> ExternalAPISpec:
    return ExternalAPISpec(
        base_url=api.base_url,
        model=api.model,
        credentials=tuple(_reference(each) for each in api.credentials),
        concurrency=api.concurrency,
        requests_per_second=api.requests_per_second,
        tokens_per_second=api.tokens_per_second,
        timeout_s=api.timeout_seconds,
        max_retries=api.max_retries,
        budget=Budget(
            calls=api.budget.calls,
            usd=api.budget.usd,
            usd_per_million_input=api.budget.usd_per_million_input,
            usd_per_million_output=api.budget.usd_per_million_output,
        ),
        circuit_breaker=CircuitBreaker(
            failures=api.circuit_breaker.failures,
            window_s=api.circuit_breaker.window_seconds,
            open_s=api.circuit_breaker.open_seconds,
        ),
    )


def _reference(credential: Credential) -> str:
    return f"env:{credential.env}" if credential.env is not None else f"file:{credential.file}"


def _in_process(made: InProcess) -> InProcessSpec:
    return InProcessSpec(
        entrypoint=made.entrypoint,
        kwargs=made.kwargs,
        isolated=made.isolated,
        call_timeout_s=made.call_timeout_seconds,
        start_timeout_s=made.start_timeout_seconds,
    )
