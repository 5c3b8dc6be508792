"""A namespace whose sandboxes have attackers in them, and things around it that are there to be reached.

    attacker = field.attack("strict")           # a lease on a sandbox of that shape, with a program in it
    attacker.runs("reach.py", "api=tcp:10.96.0.1:443")
    field.bystander("reach.py", ...)            # the same program in a pod that nothing holds back

Guarantees:
1. Every lease that an attacker holds ends with its block.
2. What an attacker is pointed at is there: addresses of the internet and of metadata services are served too.
"""

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import wait
from tests.cluster.space import CONTROL
from tests.e2e.world import Obj, Worker, World

TENANT = Path(__file__).with_name("tenant")
INTERNET, METADATA = "203.0.113.7", "169.254.169.254"
SHAPES: dict[str, Obj] = {
    "plain": {},
    "online": {"container": {"network": True}},
    "strict": {"security": {"podSecurity": "Restricted"}},
    "deep": {"security": {"podSecurity": "Privileged", "userNamespace": True}},
}
"""Each way in which a sandbox is made in a pod: an overlay beside the pod's network, an overlay with it, no
overlay, an overlay with processes of its own. Each pool has one sandbox, for one holder after the other."""
RUN_S = 60.0


class Attacker:
    """Who holds a lease, and runs what he likes in its sandbox."""

    def __init__(self, world: World, worker: Worker, owner: str, info: Obj) -> None:
        self._world, self._worker, self.owner, self.info = world, worker, owner, info

    @property
    def address(self) -> str:
        """The address of the pod."""
        return str(self.info["address"]).removeprefix("http://").rpartition(":")[0]

    def runs(self, program: str, *arguments: str, seconds: float = RUN_S, **more: Any) -> str:
        """What a program of tests/e2e/tenant prints here."""
        command = ["python3", "-", *arguments]
        return self.sh(command, stdin=(TENANT / program).read_text(), timeout=seconds, **more)

    def sh(self, command: str | Sequence[str], **more: Any) -> str:
        """What a command prints; both streams."""
        result = self._worker.ask("exec", owner=self.owner, command=command, **more)
        return str(result["stdout"] + result["stderr"])

    def asks(self, *requests: Obj) -> list[Any]:
        """The status of the answer to each request that a sandbox sends; see tests/e2e/tenant/ask.py."""
        found: list[Any] = json.loads(self.runs("ask.py", json.dumps(requests)))
        return found

    def release(self) -> None:
        self._worker.release(self.owner)


class Field:
    """The namespace."""

    def __init__(self, world: World, worker: Worker) -> None:
        self.world, self.worker, self.cluster = world, worker, world.cluster
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def attack(self, pool: str, owner: str = "") -> Iterator[Attacker]:
        """A lease on a sandbox of this pool."""
        owner = owner or f"attacker-{next(self._numbers)}"
        info = self.worker.acquire(pool, owner)
        try:
            yield Attacker(self.world, self.worker, owner, info)
        finally:
            with contextlib.suppress(Exception):  # it may have been released, or lost
                self.worker.release(owner)

    def bystander(self, program: str, *arguments: str) -> str:
        """What a program prints in the worker's pod."""
        return self.cluster.kubectl(
            *("exec", "-i", "-n", self.world.namespace, self.worker.name, "--", "python", "-", *arguments),
            stdin=(TENANT / program).read_text(),
            timeout_s=RUN_S,
        )

    def address(self, labels: str, namespace: str = "") -> str:
        """The address of the one pod that has these labels."""
        path = f"/api/v1/namespaces/{namespace or self.world.namespace}/pods?labelSelector={labels}"
        (pod,) = (
            pod
            for pod in self.cluster.api.get(path.replace("=", "%3D").replace("Selector%3D", "Selector="))[
                "items"
            ]
            if "deletionTimestamp" not in pod["metadata"]
        )
        return str(pod["status"]["podIP"])


def made(world: World, shape: str, pool: str = "", at_once: int = 1) -> None:
    """Makes a pool of this shape, by default under its name, and waits for as many sandboxes."""
    spec = SHAPES[shape]
    container = {"cpu": "200m", **spec.get("container", {})}
    world.pool(pool or shape, **spec | {"container": container, "capacity": {"min": at_once, "max": 1}})


@pytest.fixture(scope="module")
def field(installed: World) -> Iterator[Field]:
    """All shapes of sandboxes, a worker, and the world outside."""
    with ThreadPoolExecutor(len(SHAPES) + 1) as side:
        worker = side.submit(installed.worker)
        list(side.map(lambda shape: made(installed, shape), SHAPES))
        with outside(installed):
            yield Field(installed, worker.result())


@contextlib.contextmanager
def outside(world: World) -> Iterator[None]:
    """A server beyond the nodes, at an address of the internet and at that of a cloud's metadata service."""
    cluster = world.cluster
    for address in (INTERNET, METADATA):
        cluster.x("ip", "address", "replace", f"{address}/32", "dev", "lo", where="control")
        cluster.x("ip", "route", "replace", f"{address}/32", "via", CONTROL, where="node1")
    command = [*cluster.enter(), sys.executable, "-m", "http.server", "80", "--bind", "0.0.0.0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=TENANT)
    try:
        look = f"import socket; socket.create_connection(('{INTERNET}', 80), 1).close()"

        def answers() -> bool:
            return not subprocess.run(
                [*cluster.enter("node1"), sys.executable, "-c", look],
                capture_output=True,
                timeout=10,
                check=False,
            ).returncode

        wait("the world outside", answers, 15.0)
        yield
    finally:
        server.kill()
        server.wait(10)
        for address in (INTERNET, METADATA):
            cluster.x("ip", "address", "delete", f"{address}/32", "dev", "lo", where="control")
            cluster.x("ip", "route", "delete", f"{address}/32", where="node1")
