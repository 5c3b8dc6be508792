"""The pod of a model service, as data.

Guarantees:
1. The server is given what every vLLM server is given (``runners.vllm``), and listens for the whole cluster.
2. It counts as ready when it says so itself, and has as long for that as a start may take.
3. A server that died is not started again in place: it would have the weights of its image, not the policy's.
4. GPUs are asked for by the name that nodes have for them, and their taint is tolerated.
5. The key for the hub is named, never copied.

Not here: what every member's pod has (``pod``), and asking the server (``model``).
"""

import math
from typing import Any

from agentfly.kube import Obj
from agentfly.resources.runners.kubernetes.pod import RESTRICTED, Start, member_pod, unexpanded
from agentfly.resources.runners.vllm import CPU_SWITCHES, SWITCHES, serve_arguments
from agentfly.resources.spec import ModelServiceSpec

PORT = 8000
CACHE = "/agentfly-cache"
DRAIN_S = 5
"""A server that is evicted answers what it has before it is told to end."""
GRACE_S = 30
STOP_GRACE_S = 15
"""Of one that its pool has no more use for: somebody may still wait for an answer."""
_PERIOD_S = 5
_LOAD_S = 840
"""For the download and the load of a large model."""
_DEAD_AFTER = 6


def model_pod(start: Start, spec: ModelServiceSpec) -> Obj:
    """The pod of a model service."""
    volumes, mounts = _volumes(spec)
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": _PERIOD_S, "timeoutSeconds": 5}
    words = ["python3", "-m", "vllm.entrypoints.cli.main"]
    words += serve_arguments(spec, host="0.0.0.0", port=PORT, config=None)
    container: dict[str, Any] = {
        "name": "model",
        "image": spec.image,
        "command": [word.replace("$", "$$") for word in words],  # Kubernetes expands $(NAME)
        "env": _environment(spec),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(spec),
        "securityContext": _security_context(spec),
        "startupProbe": {**health, "failureThreshold": _LOAD_S // _PERIOD_S},
        "readinessProbe": {**health, "failureThreshold": 2},
        "livenessProbe": {**health, "timeoutSeconds": 10, "failureThreshold": _DEAD_AFTER},
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_S}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    taint = {"key": spec.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    return member_pod(
        start,
        spec,
        spec.pod,
        {
            "containers": [container],
            "volumes": volumes,
            "tolerations": [taint] if spec.gpus else [],
            "terminationGracePeriodSeconds": GRACE_S,
            # A server's user may write to the cache that others have made.
            "securityContext": {"fsGroup": RESTRICTED["runAsGroup"], "fsGroupChangePolicy": "OnRootMismatch"},
        },
    )


def _environment(spec: ModelServiceSpec) -> list[dict[str, Any]]:
    values = dict(SWITCHES)
    if not spec.gpus:
        values |= CPU_SWITCHES
        if spec.memory_mb is not None:
            values["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, spec.memory_mb // 4096))  # GiB: a quarter
    if spec.cache_claim is not None:
        values |= {"HF_HOME": CACHE, "VLLM_CACHE_ROOT": f"{CACHE}/vllm"}
    if spec.pod.security == "restricted":
        values = {"HOME": "/tmp"} | values
    if spec.model.startswith("/"):
        values["HF_HUB_OFFLINE"] = "1"
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    if spec.hub_token is not None:
        _, name, key = spec.hub_token.split("/")
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    environment += (unexpanded(each) for each in spec.env)
    return list({each["name"]: each for each in environment}.values())  # the spec's own win


def _volumes(spec: ModelServiceSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    size = {} if spec.shm_mb is None else {"sizeLimit": f"{spec.shm_mb}Mi"}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", **size}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if spec.cache_claim is not None:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": spec.cache_claim}})
        mounts.append({"name": "cache", "mountPath": CACHE})
    if spec.pod.security == "restricted":
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})
    return volumes, mounts


def _security_context(spec: ModelServiceSpec) -> dict[str, Any]:
    if spec.pod.security == "restricted":
        return RESTRICTED
    return {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}


def _resources(spec: ModelServiceSpec) -> dict[str, Any]:
    quota = _quota(spec)
    disk = {} if spec.disk_mb is None else {"ephemeral-storage": f"{spec.disk_mb}Mi"}
    found = {"requests": {**quota, **disk}, "limits": quota}
    return {name: amounts for name, amounts in found.items() if amounts}


def _quota(spec: ModelServiceSpec) -> dict[str, str]:
    given = {
        "cpu": None if spec.cpu is None else f"{math.ceil(1000 * spec.cpu)}m",
        "memory": None if spec.memory_mb is None else f"{spec.memory_mb}Mi",
        spec.gpu_resource: str(spec.gpus) if spec.gpus else None,
    }
    return {name: value for name, value in given.items() if value is not None}
