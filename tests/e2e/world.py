"""agentfly installed on the real node: a namespace with pools, and worker pods that do what tests ask for.

    def test_something(installed):
        worker = installed.worker()
        worker.acquire("shell", "me")  # deadline=, key=.. as of Resources.acquire; a LeaseInfo as a dict
        worker.exec("me", "echo hello")["stdout"]
        worker.release("me")

Guarantees:
1. Requests to a worker pod take no part of the API server: they come through when that is down.
2. A module has a namespace of its own, which is deleted after it; the operator stays until the session ends.
"""

import contextlib
import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import images
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster

BASE = str(Path(__file__).parents[2] / "manifests/base")
PROGRAM = Path(__file__).with_name("worker.py")
SYSTEM = "agentfly-system"
OPERATOR = "agentfly-operator"
BROKER = "agentfly-broker"
PORT = 9000
UP_S = 120.0
ASK_S = 150.0
Obj = dict[str, Any]


class Refused(Exception):
    """What a worker was asked for raised there an error of this type."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Worker:
    """A worker pod. An owner has one lease here; see tests/e2e/worker.py for what it can be asked."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self._port = name, port

    def ask(self, do: str, within_s: float = ASK_S, **what: Any) -> Any:
        """What the worker answers.

        Raises:
            Refused: it raised there.
            OSError: the worker does not answer.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=within_s)
        try:
            connection.request("POST", "/", json.dumps({"do": do, **what}))
            answer = json.loads(connection.getresponse().read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.name}: {error!r}") from error
        finally:
            connection.close()
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["is"]

    def acquire(self, pool: str, owner: str, *, deadline: float = 60.0, **more: Any) -> Obj:
        """A LeaseInfo: lease_id, member_id, incarnation, address, token.."""
        found: Obj = self.ask("acquire", pool=pool, owner=owner, deadline=deadline, **more)
        return found

    def exec(self, owner: str, command: str, **more: Any) -> Obj:
        """An ExecResult: exit_code, stdout, stderr.."""
        found: Obj = self.ask("exec", owner=owner, command=command, **more)
        return found

    def release(self, owner: str, *, dirty: bool = False) -> None:
        self.ask("release", owner=owner, dirty=dirty)


class World:
    """The namespace of a module's tests."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.path = f"/api/v1/namespaces/{namespace}"

    def pool(self, name: str = "shell", **spec: Any) -> None:
        """Applies a pool of sandboxes and waits until it has its ``min`` members."""
        container = {"image": images.PYTHON, "cpu": "50m", "memory": "128Mi"} | spec.pop("container", {})
        spec = {"type": "Container", "container": container, "capacity": {"min": 2, "max": 3}} | spec
        obj = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "metadata": {"name": name}}
        self.cluster.kubectl(
            "apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(obj | {"spec": spec})
        )

        def serves() -> bool:
            return int(self.status(name).get("members", {}).get("ready", 0)) >= spec["capacity"].get("min", 0)

        wait(f"pool {name}", serves, UP_S, str(self.status(name)), every_s=0.2)

    def status(self, name: str = "shell") -> Obj:
        """The status of a pool; {} before it has one."""
        path = f"/apis/agentfly.dev/v1alpha1/namespaces/{self.namespace}/resourcepools/{name}"
        return dict(self.cluster.api.get(path).get("status") or {})

    def pods(self, labels: str = "agentfly.dev/component=member") -> dict[str, Obj]:
        """Pods of this namespace by name, those that are being deleted too."""
        found = self.cluster.api.get(f"{self.path}/pods?labelSelector={labels.replace('=', '%3D')}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def broker_pod(self) -> str:
        """The name of the broker's pod."""
        (name,) = (
            name
            for name, pod in self.pods("agentfly.dev/component=broker").items()
            if "deletionTimestamp" not in pod["metadata"]
        )
        return name

    def worker(self, name: str = "worker", **spec: Any) -> Worker:
        """A worker pod, new or the one of this name. The first pool of the namespace must be there.

        Args:
            spec: more fields of its pod's spec.
        """
        pods = f"{self.path}/pods"
        self.cluster.api.create(
            f"{self.path}/configmaps",
            {"metadata": {"name": "worker"}, "data": {"worker.py": PROGRAM.read_text()}},
        )
        self.cluster.api.create(pods, _worker_pod(name, self.namespace, spec))
        wait(f"pod {name}", lambda: is_ready(self.cluster.api.get(f"{pods}/{name}")), UP_S, every_s=0.2)
        address = self.cluster.api.get(f"{pods}/{name}")["status"]["podIP"]
        return Worker(name, self.cluster.open_port(f"{address}:{PORT}", where="node1"))


def is_ready(pod: Obj) -> bool:
    """Whether a pod is ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _worker_pod(name: str, namespace: str, spec: Obj) -> Obj:
    container = {
        "name": "worker",
        "image": "agentfly/agentfly:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "/test/worker.py"],
        "env": [
            {"name": "AGENTFLY_BROKER", "value": f"http://{BROKER}.{namespace}.svc:7080"},
            {"name": "AGENTFLY_BROKER_TOKEN_FILE", "value": "/token/client-token"},
        ],
        "readinessProbe": {"httpGet": {"port": PORT, "path": "/"}, "periodSeconds": 1},
        "volumeMounts": [{"name": "test", "mountPath": "/test"}, {"name": "token", "mountPath": "/token"}],
    }
    volumes = [
        {"name": "test", "configMap": {"name": "worker"}},
        {"name": "token", "secret": {"secretName": "agentfly-broker-client"}},
    ]
    pod_spec = {
        "containers": [container],
        "volumes": volumes,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        **spec,
    }
    return {"metadata": {"name": name, "labels": {"agentfly.dev/component": "worker"}}, "spec": pod_spec}


@contextlib.contextmanager
def install(cluster: Cluster, namespace: str) -> Iterator[World]:
    """agentfly installed, and a namespace for the length of a block."""
    cluster.kubectl("apply", "-k", BASE)
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    try:
        cluster.kubectl(
            *("rollout", "status", f"deployment/{OPERATOR}", "-n", SYSTEM, f"--timeout={UP_S:.0f}s"),
            timeout_s=UP_S + 10,
        )
        account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        wait("service account", lambda: cluster.api.exists(account), UP_S)
        yield World(cluster, namespace)
    finally:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def installed(product_node: Cluster) -> Iterator[World]:
    """agentfly installed, and a namespace that has the pool ``shell`` of 2 to 3 sandboxes."""
    with install(product_node, f"e2e-{secrets.token_hex(3)}") as world:
        world.pool()
        yield world
