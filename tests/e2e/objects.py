"""What tests of pools ask of the cluster, in a namespace of `world`."""

import json
from collections.abc import Callable
from typing import Any

import yaml

from tests.cluster import images
from tests.cluster.api import wait
from tests.e2e.world import BROKER, UP_S, World, is_ready

Obj = dict[str, Any]
POOLS = "/apis/agentfly.dev/v1alpha1/namespaces/{}/resourcepools"


def pool_of(name: str, **spec: Any) -> Obj:
    """A ResourcePool as people write it."""
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name},
        "spec": {"type": "Container", **spec},
    }


def apply(world: World, *objects: Obj, more: tuple[str, ...] = ()) -> str:
    """What kubectl says."""
    text = yaml.safe_dump_all(objects)
    return world.cluster.kubectl("apply", "-n", world.namespace, *more, "-f", "-", stdin=text)


def get(world: World, name: str) -> Obj:
    """The ResourcePool."""
    found: Obj = world.cluster.api.get(f"{POOLS.format(world.namespace)}/{name}")
    return found


def condition(world: World, name: str, kind: str) -> Obj:
    """One condition of a pool; {} before it has it."""
    conditions = world.status(name).get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {})


def is_so(world: World, name: str, kind: str, within_s: float = UP_S) -> Obj:
    """Waits until a condition is true; the condition."""
    so: Callable[[], bool] = lambda: condition(world, name, kind).get("status") == "True"  # noqa: E731
    wait(f"{kind} of {name}", so, within_s, every_s=0.2)
    return condition(world, name, kind)


def members(world: World, name: str) -> dict[str, Obj]:
    """The pods of a pool's members that are to stay."""
    return {
        pod_name: pod
        for pod_name, pod in world.pods(f"agentfly.dev/pool={name}").items()
        if "deletionTimestamp" not in pod["metadata"]
    }


def delete(world: World, *names: str) -> None:
    """Deletes pools, and waits until their pods are gone."""
    world.cluster.kubectl("delete", "rpool", "-n", world.namespace, *names, "--ignore-not-found")
    mine = f"agentfly.dev/pool in ({','.join(names)})".replace(" ", "%20")
    wait(f"pods of {names}", lambda: not world.pods(mine), UP_S, every_s=0.2)


def served_by(world: World, name: str, program: str, *arguments: str) -> str:
    """A pod that runs a Python program as a server of port 8080; its address."""
    pods = f"{world.path}/pods"
    world.cluster.api.create(
        f"{world.path}/configmaps", {"metadata": {"name": name}, "data": {"main.py": program}}
    )
    container = {
        "name": "main",
        "image": images.PYTHON,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-u", "/program/main.py", *arguments],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "program", "mountPath": "/program"}],
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "program", "configMap": {"name": name}}],
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
    }
    world.cluster.api.create(pods, {"metadata": {"name": name, "labels": {"app": name}}, "spec": spec})
    wait(f"pod {name}", lambda: is_ready(world.cluster.api.get(f"{pods}/{name}")), UP_S, every_s=0.2)
    return str(world.cluster.api.get(f"{pods}/{name}")["status"]["podIP"])


def broker_serves(world: World, within_s: float = UP_S) -> None:
    """Waits until the one broker there is answers acquires."""

    def ready() -> bool:
        found = world.pods("agentfly.dev/component=broker").values()
        return len(found) == 1 and all(is_ready(pod) for pod in found)

    wait(f"{BROKER} of {world.namespace}", ready, within_s, every_s=0.2)


def in_pod(world: World, pod: str, *command: str, timeout_s: float = 60.0) -> str:
    """What a command prints in a pod."""
    return world.cluster.kubectl("exec", "-n", world.namespace, pod, "--", *command, timeout_s=timeout_s)


def as_json(text: str) -> Any:
    """The last line of a text."""
    return json.loads(text.strip().splitlines()[-1])
