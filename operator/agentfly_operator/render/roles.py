"""What the pods of all roles of runs and jobs share.

Guarantees:
1. They keep to the restricted Pod Security Standard, unless RDMA asks for IPC_LOCK; without the API server's
   token, on a read-only root with an empty /tmp.
2. All run under the user of the policy's servers: weight files are readable for their owner alone.
3. Memory is requested as it is limited, GPUs too, and a pod with GPUs tolerates their taint.
4. They see the run's claim, their launch file, and the folder of the manifest where a volume has it. The key
   to the broker is a file of a Secret that is named and never copied.
5. What a spec says of labels and annotations never replaces ours; Kubernetes expands nothing that is in it.
6. All objects belong to their run or job, and go with it.

Not here: what each role runs for how long and how often (`render.run`, `render.job`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from agentfly.api.common import RolePod, Source
from agentfly.api.trainingrun import Rdma
from agentfly.broker.access import TOKEN_FILE
from agentfly.resources.runners.kubernetes.pod import RESTRICTED, unexpanded
from agentfly.roles.launch import LAUNCH_FILE, SOURCE, STORAGE
from agentfly.roles.plan import Places, cluster_places
from agentfly.roles.trainer import ENV_BROKER
from agentfly_operator.config import Config
from agentfly_operator.names import CLIENT_SECRET, CLIENT_TOKEN, Role, Work, child_labels, controlled_by

Object = dict[str, Any]

_BROKER_FOLDER: Final = "/agentfly/broker"
_READ_BY_GROUP: Final = 0o440
_SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_STORAGE: Final = "storage"
_ITSELF: Final = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
_EVERYWHERE: Final = {
    "HOME": "/tmp",
    "USER": "agentfly",  # torch asks for a name, and no image has to know this user
    "HF_HOME": str(STORAGE),  # as the policy's servers have it
    "HF_HUB_OFFLINE": "1",  # hundreds of pods that ask the hub at once are turned away
}


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What differs between the pods of roles.

    Attributes:
        module: of `agentfly.launch`, which is what they run.
        launch: name of the ConfigMap with the launch file.
        pod: what the run's or job's spec says of them.
        gpus: that each asks for.
        near_gpus: whether they may be where GPUs are, without asking for one.
        leases: whether they lease from the broker.
        grace_s: seconds from SIGTERM to SIGKILL.
        marks: further labels.
        environment: further variables.
    """

    role: Role
    module: str
    launch: str
    image: str
    pod: RolePod
    gpus: int = 0
    near_gpus: bool = False
    rdma: Rdma | None = None
    leases: bool = True
    grace_s: int = 30
    marks: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def places_of(work: Work, config: Config) -> Places:
    """Where a run or job lives, in the pods of its namespace.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    metadata = work.metadata
    return cluster_places(work, metadata.uid or "", config.broker_of(metadata.namespace or ""))


def child(
    work: Work,
    role: Role,
    api_version: str,
    kind: str,
    name: str,
    marks: Mapping[str, str] = {},
    **content: Any,
) -> Object:
    """An object that belongs to a run or job."""
    metadata = {
        "name": name,
        "namespace": work.metadata.namespace,
        "labels": child_labels(work, role, **marks),
        "ownerReferences": [controlled_by(work)],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def launch_map(work: Work, role: Role, name: str, launch: BaseModel, marks: Mapping[str, str] = {}) -> Object:
    """The ConfigMap with a launch file. Immutable: all its pods read the same, and no kubelet watches it."""
    data = {LAUNCH_FILE.name: launch.model_dump_json(by_alias=True)}
    return child(work, role, "v1", "ConfigMap", name, marks, immutable=True, data=data)


def pod_template(work: Work, spec: RoleSpec, config: Config) -> Object:
    """Metadata and spec of a role's pods."""
    placement = spec.pod.placement
    volumes, mounts = _volumes(work, spec)
    container = {
        "name": spec.role,
        "image": spec.image,
        "imagePullPolicy": config.pull_policy,
        "command": ["python3", "-m", f"agentfly.launch.{spec.module}"],
        "env": _environment(work, spec, config),
        "resources": _resources(spec),
        "securityContext": _security_context(spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    pod: Object = {
        "containers": [container],
        "volumes": volumes,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # What others wrote to the claim, its user may write; millions of files are not walked again.
        "securityContext": {"fsGroup": RESTRICTED["runAsGroup"], "fsGroupChangePolicy": "OnRootMismatch"},
        "nodeSelector": placement.node_selector,
        "tolerations": _tolerations(spec),
        "priorityClassName": placement.priority_class_name,
        "schedulerName": placement.scheduler_name,
        "runtimeClassName": spec.pod.runtime_class_name,
    }
    # To move a trainer costs an attempt, and all the others of its run wait for it.
    stays = {_SAFE_TO_EVICT: "false"} if spec.role == "trainer" else {}
    return {
        "metadata": {
            "labels": {**placement.pod_labels, **child_labels(work, spec.role, **spec.marks)},
            "annotations": {**placement.pod_annotations, **stays},
        },
        "spec": {name: value for name, value in pod.items() if value not in (None, {}, [])},
    }


def _environment(work: Work, spec: RoleSpec, config: Config) -> list[Object]:
    values = {**_EVERYWHERE, **spec.environment}
    if spec.leases:
        values |= {
            ENV_BROKER: config.broker_of(work.metadata.namespace or ""),
            TOKEN_FILE: f"{_BROKER_FOLDER}/{CLIENT_TOKEN}",
        }
    found = [
        *({"name": name, "valueFrom": field_of(path)} for name, path in _ITSELF.items()),
        *(unexpanded({"name": name, "value": value}) for name, value in values.items()),
        *(unexpanded(each.to_json()) for each in spec.pod.env),
    ]
    return list({each["name"]: each for each in found}.values())  # the run's own win


def field_of(path: str) -> Object:
    """A field of the pod itself."""
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}


def _resources(spec: RoleSpec) -> Object:
    bounded = {
        "memory": spec.pod.memory,
        spec.pod.gpu_resource: str(spec.gpus) if spec.gpus else None,
    }
    if spec.rdma is not None:
        bounded[spec.rdma.resource_name] = str(spec.rdma.count)
    limits = {name: str(value) for name, value in bounded.items() if value is not None}
    # No limit of CPU: a trainer that is throttled lets all its ranks wait. None of disk: one that is evicted
    # costs an attempt.
    asked = {"cpu": spec.pod.cpu, "ephemeral-storage": spec.pod.ephemeral_storage}
    requests = {name: str(value) for name, value in asked.items() if value is not None}
    found = {"requests": {**requests, **limits}, "limits": limits}
    return {name: amounts for name, amounts in found.items() if amounts}


def _security_context(spec: RoleSpec) -> Object:
    context = {**RESTRICTED, "readOnlyRootFilesystem": True}
    if spec.rdma is not None:  # memory that a network card writes to is never swapped
        context["capabilities"] = {**RESTRICTED["capabilities"], "add": ["IPC_LOCK"]}
    return context


def _tolerations(spec: RoleSpec) -> list[Object]:
    named = [each.to_json() for each in spec.pod.placement.tolerations]
    taint = {"key": spec.pod.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    return [*named, taint] if spec.gpus or spec.near_gpus else named


def _volumes(work: Work, spec: RoleSpec) -> tuple[list[Object], list[Object]]:
    storage, source = work.spec.storage, work.spec.source
    claim = None if storage is None else storage.claim
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(spec.pod.shared_memory)}},
        {"name": _STORAGE, "persistentVolumeClaim": {"claimName": claim}},
        {"name": "launch", "configMap": {"name": spec.launch}},
    ]
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": _STORAGE, "mountPath": str(STORAGE)},
        {"name": "launch", "mountPath": str(LAUNCH_FILE.parent), "readOnly": True},
    ]
    if spec.leases:
        secret = {"secretName": CLIENT_SECRET, "defaultMode": _READ_BY_GROUP}
        volumes.append({"name": "broker", "secret": secret})
        mounts.append({"name": "broker", "mountPath": _BROKER_FOLDER, "readOnly": True})
    if source.config_map is not None or source.claim is not None:
        volume, mount = _source(source, claim)
        volumes += volume
        mounts.append(mount)
    return volumes, mounts


def _source(source: Source, storage: str | None) -> tuple[list[Object], Object]:
    """The folder of the manifest. On the run's own claim it is no second volume: kubelets mount one once."""
    mount: Object = {"name": "source", "mountPath": str(SOURCE), "readOnly": True}
    if source.config_map is not None:
        return [{"name": "source", "configMap": {"name": source.config_map}}], mount
    if source.path is not None:
        mount["subPath"] = source.path
    if source.claim == storage:
        return [], {**mount, "name": _STORAGE}
    return [{"name": "source", "persistentVolumeClaim": {"claimName": source.claim}}], mount
