"""From the ResourcePool that people write to the pool that the engine keeps.

Guarantees:
1. Every field of a ResourcePool's spec has its place in the pool, but for two: `security.egress` and
   `security.dns` are a NetworkPolicy's. Fields that a platform does not read are left out there.
2. What a platform cannot give is refused with the field and the remedy, all of it together.
3. `quota` is never exceeded: it lowers `max` to the members that fit.
4. In a cluster, whoever writes a pool gets nothing by it that is the broker's: no file, no variable, and
   neither its key nor the token of its clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from agentfly.api import ResourcePool
from agentfly.api.pods import BROKER_SECRETS, Placement, Security
from agentfly.api.pooltypes import Container, Credential, ExternalAPI, InProcess, ModelService
from agentfly.api.quantity import cores, mebibytes, parse
from agentfly.api.resourcepool import ResourcePoolSpec
from agentfly.errors import AgentflyError
from agentfly.resources.spec import (
    Budget,
    CircuitBreaker,
    ContainerSpec,
    ExternalAPISpec,
    InProcessSpec,
    ModelServiceSpec,
    OneSpec,
    PodOptions,
    PoolSpec,
    ResetSpec,
)

Platform = Literal["local", "kubernetes"]

_RUNTIMES = {"Bubblewrap": "bubblewrap", "ContainerCLI": "container-cli", "Enroot": "enroot"}
_METHODS = {"OverlaySharedPID": "overlay-shared-pid"}
_FORMS = ("dir:", "tar:", "oci:", "oci-archive:", "docker-archive:", "packages:", "/", ".")


class UnsuitablePool(AgentflyError):
    """No member of the pool can be made on this platform."""


@dataclass(frozen=True)
class _Complaint:
    field: str
    problem: str
    hint: str


def pool_spec(pool: ResourcePool, *, platform: Platform = "local") -> PoolSpec:
    """The engine's pool of a ResourcePool, on one machine or in a cluster.

    Raises:
        UnsuitablePool: it asks for what the platform does not have, or its quota for what its queue forbids.
    """
    spec = pool.spec
    most = _most(spec)
    complaints = [*_complaints(spec, platform), *_squeezed(spec, most)]
    if complaints:
        text = "; ".join(f"spec.{each.field}: {each.problem}" for each in complaints)
        hints = [each.hint for each in complaints]
        raise UnsuitablePool(f"ResourcePool {pool.metadata.name}: {text}", hints=hints)
    memory = spec.reuse.max_memory
    return PoolSpec(
        name=pool.metadata.name,
        resource=_resource(spec, platform),
        min=spec.capacity.min,
        max=most,
        buffer=spec.capacity.buffer,
        max_starting=spec.capacity.max_starting,
        starts_per_s=spec.capacity.starts_per_second,
        per_node=spec.capacity.per_node if platform == "kubernetes" else None,
        shared=spec.scope == "Global",
        # A server that batches all it may is the moment to start another.
        slots=spec.model_service.max_num_seqs if spec.model_service is not None else None,
        max_pending=spec.queue.max_pending,
        weights=spec.queue.weights,
        reserved=spec.queue.reserved,
        acquire_timeout_s=spec.queue.acquire_timeout_seconds,
        per_image=spec.images.policy == "PerAcquire",
        max_resident_images=spec.images.max_resident,
        lease_ttl_s=spec.lease.ttl_seconds,
        max_reuses=spec.reuse.max_reuses,
        max_lifetime_s=spec.reuse.max_lifetime_seconds,
        max_memory_mb=None if memory is None else mebibytes(memory),
        quarantine=spec.reuse.quarantine,
    )


def _most(spec: ResourcePoolSpec) -> int:
    """Members that `max` and the quota allow; the model's rules see to it that there is one."""
    capacity, container = spec.capacity, spec.container
    if capacity.quota is None or container is None:
        return capacity.max
    shares = (
        (capacity.quota.cpu, container.counted("cpu")),
        (capacity.quota.memory, container.counted("memory")),
    )
    fit = [int(parse(str(all_)) // parse(str(each))) for all_, each in shares if all_ is not None]
    return min(capacity.max, *fit)


def _squeezed(spec: ResourcePoolSpec, most: int) -> Iterator[_Complaint]:
    if most == spec.capacity.max:
        return
    allows = f"allows {most} of capacity.max {spec.capacity.max} members"
    reserved = sum(spec.queue.reserved.values())
    if reserved >= most:
        hint = f"raise capacity.quota to more than {reserved} members, or lower queue.reserved"
        yield _Complaint("capacity.quota", f"{allows}, and queue.reserved takes {reserved}", hint)
    if spec.reuse.quarantine >= most:
        problem = f"{allows}, and reuse.quarantine could fill all of them"
        yield _Complaint("capacity.quota", problem, "raise capacity.quota, or lower reuse.quarantine")


def _complaints(spec: ResourcePoolSpec, platform: Platform) -> Iterator[_Complaint]:
    """What the platform does not have."""
    if platform == "local":
        yield from _cluster_only(spec)
        return
    container, made = spec.container, spec.in_process
    if container is not None and _starts_own_image(spec) and _is_local(container.image):
        problem = f"{container.image} is of one machine, and nodes of a cluster pull from a registry"
        yield _Complaint("container.image", problem, "name an image such as python:3.12")
    if made is not None and _is_beside_manifest(made.entrypoint):
        problem = f"{made.entrypoint} is beside the manifest, where the broker does not look"
        hint = "put it into the broker's image and write package.module:name"
        yield _Complaint("inProcess.entrypoint", problem, hint)
    yield from _of_the_broker(spec)


def _of_the_broker(spec: ResourcePoolSpec) -> Iterator[_Complaint]:
    """What would send something of the broker to an address, or into an image, of the pool's author."""
    secrets = []
    for index, credential in enumerate(spec.external_api.credentials if spec.external_api else ()):
        field = f"externalAPI.credentials[{index}]"
        if credential.secret_key_ref is None:
            kind, value = ("env", credential.env) if credential.env is not None else ("file", credential.file)
            problem = f"{value} is the broker's own in a cluster"
            hint = "make a Secret of the key, and write secretKeyRef: {name: judge, key: token}"
            yield _Complaint(f"{field}.{kind}", problem, hint)
        else:
            secrets.append((field, credential.secret_key_ref.name))
    if spec.model_service is not None and spec.model_service.hub_token is not None:
        secrets.append(("modelService.hubToken", spec.model_service.hub_token.secret_key_ref.name))
    for field, name in secrets:
        if name in BROKER_SECRETS:
            hint = "make another Secret for what the pool needs"
            yield _Complaint(f"{field}.secretKeyRef", f"Secret {name} is the broker's own", hint)


def _cluster_only(spec: ResourcePoolSpec) -> Iterator[_Complaint]:
    if spec.container is not None and spec.container.reset.method == "OverlaySharedPID":
        problem = "OverlaySharedPID is for a cluster: here every container has its own processes"
        yield _Complaint("container.reset.method", problem, "write Overlay, or Auto")
    credentials = spec.external_api.credentials if spec.external_api is not None else ()
    for index, credential in enumerate(credentials):
        if credential.secret_key_ref is not None:
            field = f"externalAPI.credentials[{index}].secretKeyRef"
            problem = f"Secret {credential.secret_key_ref.name} is in a cluster, and this is one machine"
            yield _Complaint(field, problem, "write env or file")


def _starts_own_image(spec: ResourcePoolSpec) -> bool:
    return spec.images.policy == "Fixed" or spec.capacity.min > 0 or spec.capacity.buffer > 0


def _is_local(image: str) -> bool:
    return image == "host" or image.startswith(_FORMS)


def _is_beside_manifest(entrypoint: str) -> bool:
    module = entrypoint.rpartition(":")[0]
    return module.endswith(".py") and not PurePosixPath(module).is_absolute()


def _pod(spec: ResourcePoolSpec) -> PodOptions:
    security, placement = spec.security or Security(), spec.placement or Placement()
    tolerations = [each.to_json() for each in placement.tolerations]
    return PodOptions.model_validate(
        {
            "security": security.pod_security.lower(),
            "user_namespace": security.user_namespace,
            "runtime_class": security.runtime_class_name,
            "pull_policy": spec.images.pull_policy,
            "pull_secrets": spec.images.pull_secrets,
            "node_selector": placement.node_selector,
            "tolerations": tolerations,
            "priority_class": placement.priority_class_name,
            "scheduler": placement.scheduler_name,
            "labels": placement.pod_labels,
            "annotations": placement.pod_annotations,
        }
    )


def _resource(spec: ResourcePoolSpec, platform: Platform) -> OneSpec:
    pod = _pod(spec) if platform == "kubernetes" else None
    # A rule of the model: exactly the block that type names is set.
    if spec.container is not None:
        return _container(spec.container, pod)
    if spec.model_service is not None:
        return _model_service(spec.model_service, pod)
    if spec.external_api is not None:
        return _external_api(spec.external_api)
    assert spec.in_process is not None
    return _in_process(spec.in_process)


def _container(container: Container, pod: PodOptions | None) -> ContainerSpec:
    reset, asked = container.reset, container.requests if pod is not None else None
    return ContainerSpec.model_validate(
        {
            "runtime": _RUNTIMES[container.runtime] if pod is None else "kubernetes",
            "pod": pod or PodOptions(),
            "image": container.image,
            "cpu": cores(container.cpu),
            "memory_mb": mebibytes(container.memory),
            "cpu_request": None if asked is None or asked.cpu is None else cores(asked.cpu),
            "memory_request_mb": None if asked is None or asked.memory is None else mebibytes(asked.memory),
            "disk_mb": None if container.disk is None else mebibytes(container.disk),
            "pids": container.pids,
            "env": dict(container.env),
            "network": container.network,
            "workdir": container.workdir,
            "reset": ResetSpec.model_validate(
                {
                    "method": _METHODS.get(reset.method, reset.method.lower()),
                    "paths": reset.paths,
                    "git": reset.git,
                    "command": reset.command,
                    "timeout_s": reset.timeout_seconds,
                }
            ),
        }
    )


def _model_service(service: ModelService, pod: PodOptions | None) -> ModelServiceSpec:
    return ModelServiceSpec(
        **_server_pod(service, pod) if pod is not None else {},
        model=service.model,
        max_model_len=service.max_model_len,
        max_num_seqs=service.max_num_seqs,
        dtype=service.dtype,
        tensor_parallel=service.tensor_parallel,
        pipeline_parallel=service.pipeline_parallel,
        gpus=service.gpus,
        args=service.args,
    )


def _server_pod(service: ModelService, pod: PodOptions) -> dict[str, Any]:
    token = None if service.hub_token is None else service.hub_token.secret_key_ref
    return {
        "runtime": "kubernetes",
        "image": service.image,
        "cpu": None if service.cpu is None else cores(service.cpu),
        "memory_mb": None if service.memory is None else mebibytes(service.memory),
        "shm_mb": mebibytes(service.shared_memory),
        "disk_mb": None if service.ephemeral_storage is None else mebibytes(service.ephemeral_storage),
        "env": tuple(each.to_json() for each in service.env),
        "gpu_resource": service.gpu_resource,
        "cache_claim": service.cache_claim,
        "hub_token": None if token is None else f"secret/{token.name}/{token.key}",
        "pod": pod,
    }


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
    if credential.secret_key_ref is not None:
        return f"secret:{credential.secret_key_ref.name}/{credential.secret_key_ref.key}"
    return f"env:{credential.env}" if credential.env is not None else f"file:{credential.file}"


def _in_process(made: InProcess) -> InProcessSpec:
    return InProcessSpec(
        entrypoint=made.entrypoint,
        kwargs=made.kwargs,
        isolated=made.isolated,
        call_timeout_s=made.call_timeout_seconds,
        start_timeout_s=made.start_timeout_seconds,
    )
