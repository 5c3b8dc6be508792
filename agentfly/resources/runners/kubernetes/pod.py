"""The pod of a sandbox, as data.

Guarantees:
1. The pod keeps to the Pod Security Standard that its spec names, whatever else the spec says.
2. It gets no service account token and no list of services; its limits are its requests, so that no load of
   others takes what it was promised, unless its spec asks for less.
3. The daemon comes into any image by an init container, lies on a mount of its own, and is given its
   configuration in one variable, in which there is no secret.
4. A pod runs once: what a daemon that died has left is never taken for a fresh sandbox.
5. What the spec says of labels and annotations never replaces what marks a member.
6. Nothing that a spec holds is expanded by Kubernetes: a ``$(NAME)`` in it arrives as it is.
7. Where commands use the pod's network, there is no daemon before the network policies that shut it were seen
   to be in force, or ``SHUT_S`` seconds were over.

Not here: which node it may go to (``placement``), and creating it (``lives``).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from agentfly.kube import Obj
from agentfly.resources.runners.kubernetes.identity import annotations, labels
from agentfly.resources.runners.kubernetes.placement import affinity
from agentfly.resources.runners.sandboxd.cgroups import DAEMON_TASKS
from agentfly.resources.runners.sandboxd.runner import declares, reset_config
from agentfly.resources.spec import ContainerSpec, PodOptions, ResourceSpec

PORT = 7070
TOOLS = "/agentfly"
"""Where the daemon lies in the tenant's container."""
TOOLS_MB = 64
GRACE_S = 1
"""Seconds from SIGTERM to SIGKILL: a sandbox that is stopped has nothing to bring to an end."""
SHUT_S = 5
"""A plug-in learns of a pod when it has started, and needs most of a second then."""
UNPRIVILEGED = 1000
"""User and group of a restricted sandbox."""
_OVERLAYS = ("auto", "overlay", "overlay-shared-pid")
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": UNPRIVILEGED,
    "runAsGroup": UNPRIVILEGED,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a member. ``owner`` is an ownerReference, ``nonce`` is drawn for this start alone.

    ``incarnation`` is the member's first in this pod, ``excluded`` are nodes that it must not go to.
    """

    pool: str
    member_id: str
    namespace: str
    owner: dict[str, Any]
    nonce: str
    incarnation: int = 1
    excluded: frozenset[str] = frozenset()


def sandbox_pod(start: Start, spec: ContainerSpec, *, admin_key: str, sandboxd_image: str) -> Obj:
    """The pod of a sandbox.

    Args:
        admin_key: the public half of the broker's key, in base64.
        sandboxd_image: the image with the daemon.
    """
    resources = _resources(spec)
    mounts = writable_mounts(spec)
    told = daemon_config(start, spec, admin_key)
    config = json.dumps(told, separators=(",", ":"))
    container: dict[str, Any] = {
        "name": "sandbox",
        "image": spec.image,
        "command": [f"{TOOLS}/sandboxd", "--pod"],
        # Kubernetes expands $(NAME) in values; JSON has another way to write a dollar.
        "env": [{"name": "AGENTFLY_SANDBOXD", "value": config.replace("$", "\\u0024")}],
        "ports": [{"name": "sandboxd", "containerPort": PORT}],
        "resources": resources,
        "securityContext": security_context(spec),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "agentfly", "mountPath": TOOLS, "readOnly": True},
            *({"name": f"scratch-{n}", "mountPath": path} for n, path in enumerate(mounts)),
        ],
    }
    install = {
        "name": "agentfly-install",
        "image": sandboxd_image,
        "command": ["/sandboxd", "install", TOOLS, *([] if told["ownNetwork"] else [f"{SHUT_S}s"])],
        "resources": resources,
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "agentfly", "mountPath": TOOLS}],
    }
    size = {} if spec.disk_mb is None else {"sizeLimit": f"{spec.disk_mb}Mi"}
    return member_pod(
        start,
        spec,
        spec.pod,
        {
            "initContainers": [install],
            "containers": [container],
            "volumes": [
                {"name": "agentfly", "emptyDir": {"sizeLimit": f"{TOOLS_MB}Mi"}},
                *({"name": f"scratch-{n}", "emptyDir": size} for n, _ in enumerate(mounts)),
            ],
            "terminationGracePeriodSeconds": GRACE_S,
            "securityContext": {"fsGroup": UNPRIVILEGED},
        },
    )


def unexpanded(variable: Mapping[str, Any]) -> dict[str, Any]:
    """A variable in which Kubernetes finds nothing to expand."""
    value = variable.get("value")
    return {**variable, **({"value": value.replace("$", "$$")} if isinstance(value, str) else {})}


def member_pod(start: Start, spec: ResourceSpec, options: PodOptions, pod_spec: dict[str, Any]) -> Obj:
    """A member's pod of these containers: with what marks it, where it may run, and how it is pulled."""
    pod_spec = {
        **pod_spec,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": options.node_selector,
        "tolerations": [*(dict(each) for each in options.tolerations), *pod_spec.get("tolerations", [])],
        "priorityClassName": options.priority_class,
        "schedulerName": options.scheduler,
        "runtimeClassName": options.runtime_class,
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
        "affinity": affinity(start.excluded),
        "hostUsers": False if options.user_namespace else None,
    }
    for container in (*pod_spec.get("initContainers", []), *pod_spec["containers"]):
        if options.pull_policy is not None:
            container["imagePullPolicy"] = options.pull_policy
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": start.member_id,
            "namespace": start.namespace,
            "labels": {**options.labels, **labels(start.pool, spec)},
            "annotations": {**options.annotations, **annotations(spec, start.nonce)},
            "ownerReferences": [start.owner],
        },
        "spec": {name: value for name, value in pod_spec.items() if value not in (None, {}, [])},
    }


def security_context(spec: ContainerSpec) -> dict[str, Any]:
    """That of the tenant's container: as narrow as the way in which it is reset allows."""
    if spec.pod.security == "restricted":
        return {**RESTRICTED, "readOnlyRootFilesystem": not declares(spec.reset)}
    context: dict[str, Any] = {
        "allowPrivilegeEscalation": False,
        # Of a user namespace's maker, and to end what others started in the pod.
        "capabilities": {"drop": ["ALL"], "add": ["SETUID", "SETGID", "SETFCAP", "KILL", *_owners(spec)]},
        "runAsUser": 0,
        "readOnlyRootFilesystem": uses_overlay(spec) and not declares(spec.reset),
    }
    if spec.pod.security == "privileged":
        context["seccompProfile"] = {"type": "Unconfined"}  # unset may be the kubelet's default profile
        if spec.pod.user_namespace:
            context["procMount"] = "Unmasked"
    return context


def _owners(spec: ContainerSpec) -> tuple[str, ...]:
    """Where it may come to the image's own folders, the daemon reads and puts back what others own."""
    return ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID") if declares(spec.reset) else ()


def uses_overlay(spec: ContainerSpec) -> bool:
    """Whether the daemon may drop at a reset what was written: then commands write nothing to the image."""
    return spec.pod.security != "restricted" and spec.reset.method in _OVERLAYS


def writable_mounts(spec: ContainerSpec) -> tuple[str, ...]:
    """Folders that get an empty volume, because no overlay makes them writable.

    A folder that is declared, or has something to do with one that is, stays the image's own.
    """
    if uses_overlay(spec):
        return ()
    declared = [*spec.reset.paths, *([spec.reset.git] if spec.reset.git else [])]
    wanted = dict.fromkeys(("/tmp", spec.workdir))
    return tuple(
        path for path in wanted if not any(_within(path, each) or _within(each, path) for each in declared)
    )


def daemon_config(start: Start, spec: ContainerSpec, admin_key: str) -> dict[str, Any]:
    """What the daemon is told: by whom it lets itself be led, and what of the sandbox."""
    home = {"HOME": spec.workdir} if spec.pod.security == "restricted" else {}
    config: dict[str, Any] = {
        "adminKey": admin_key,
        "member": start.member_id,
        "incarnation": start.incarnation,
        "workdir": spec.workdir,
        "env": {"PYTHONDONTWRITEBYTECODE": "1"} | home | spec.env,
        "ownNetwork": uses_overlay(spec) and not spec.network,
        "scratch": list(writable_mounts(spec)),
        "reset": reset_config(spec.reset),
    }
    # The kernel counts by user, of the whole node: without a user namespace other pods would use it up.
    if spec.pod.user_namespace:
        config["limits"] = {"processes": spec.pids + DAEMON_TASKS}
    # Beyond three quarters of the memory, what is written would take the memory of what runs.
    if spec.disk_mb is not None and 4 * spec.disk_mb < 3 * spec.memory_mb:
        config["upperBytes"] = spec.disk_mb << 20
    return config


def _resources(spec: ContainerSpec) -> dict[str, dict[str, str]]:
    disk = {} if spec.disk_mb is None else {"ephemeral-storage": f"{spec.disk_mb + TOOLS_MB}Mi"}
    asked = (spec.cpu_request or spec.cpu, spec.memory_request_mb or spec.memory_mb)
    requests, limits = (
        {"cpu": f"{math.ceil(1000 * cpu)}m", "memory": f"{memory_mb}Mi", **disk}
        for cpu, memory_mb in (asked, (spec.cpu, spec.memory_mb))
    )
    return {"requests": requests, "limits": limits}


def _within(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
