"""A broker as a process of its own, on a real API server, over pods that only run as far as the API shows.

Its members' daemons are those of ``tests.unit...daemons``: one server in this process, which answers at the
address of every pod of the fake kubelet.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agentfly.broker import wire
from agentfly.broker.client import BrokerClient
from agentfly.kube import CRDS, NAMESPACES, PODS, RESOURCE_POOLS, Informer, Kube, NotFound
from agentfly.resources.runners.kubernetes import MEMBER_LABELS
from tests.unit.resources.runners.kubernetes.daemons import Daemons

REPOSITORY = Path(__file__).parents[2]
CRD = REPOSITORY / "crds" / "agentfly.dev_resourcepools.yaml"
START_S, END_S = 30.0, 15.0
TOKEN = "client-token-of-this-test"
PROGRAM = """
import sys
import agentfly.resources.runners.kubernetes.runner as runner
runner.PORT = int(sys.argv[1])
from agentfly.cli import main
sys.exit(main(["broker", "--kubeconfig", sys.argv[2], "-n", sys.argv[3]]))
"""


def pool(name: str = "shell", **spec: Any) -> dict[str, Any]:
    """A ResourcePool of sandboxes."""
    container = {"image": "docker.io/library/busybox:1"} | spec.pop("container", {})
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name},
        "spec": {"type": "Container", "container": container, "capacity": {"max": 4}} | spec,
    }


class Rig:
    """A namespace with a broker."""

    def __init__(self, cluster: Any, kube: Kube, namespace: str, daemons: Daemons, folder: Path) -> None:
        self.cluster, self.kube, self.namespace, self.daemons = cluster, kube, namespace, daemons
        self.folder = folder
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            self.port, gateway = first.getsockname()[1], second.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        (folder / "key").write_bytes(b"k" * 32)
        (folder / "token").write_text(TOKEN)
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "AGENTFLY_LISTEN": f"127.0.0.1:{self.port}",
            "AGENTFLY_GATEWAY_LISTEN": f"127.0.0.1:{gateway}",
            "AGENTFLY_GATEWAY_URL": f"http://127.0.0.1:{gateway}",
            "AGENTFLY_SIGNING_KEY_FILE": str(folder / "key"),
            "AGENTFLY_CLIENT_TOKEN_FILE": str(folder / "token"),
            "AGENTFLY_LOG_FORMAT": "json",
        }
        self.process: asyncio.subprocess.Process | None = None
        self.log = folder / "broker.log"

    def client(self, share: str = "") -> BrokerClient:
        """A holder at the broker."""
        return BrokerClient(self.address, share, token=TOKEN)

    async def start(self, *, ready: bool = True) -> None:
        """Start the broker, and wait until it is ready."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-c", PROGRAM, str(self.daemons.port), str(self.cluster.kubeconfig), self.namespace),
                env=self.env,
                stdout=log,
                stderr=log,
                stdin=asyncio.subprocess.DEVNULL,
            )
        if ready:
            await self.until("the broker is ready", self.ready, START_S)

    async def ready(self) -> bool:
        """Whether the broker says that it is."""
        if self.process is not None and self.process.returncode is not None:
            raise AssertionError(f"the broker ended: {self.log.read_text()[-2000:]}")
        return (await self.get(wire.HEALTH + "?ready"))[0] == 200

    async def get(self, path: str, token: str = TOKEN) -> tuple[int, Any]:
        """What the broker answers; status 0 if it does not."""
        headers = {"X-Agentfly-Token": token} if token else {}
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self.address + path, headers=headers) as answer,
            ):
                return answer.status, await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError):
            return 0, None

    async def end(self, number: int = signal.SIGTERM) -> float:
        """Signal the broker and wait for its end; the seconds it took."""
        assert self.process is not None
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(END_S):
            await self.process.wait()
        return loop.time() - began

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        """Apply a ResourcePool."""
        return await self.kube.apply(RESOURCE_POOLS, obj, self.namespace)

    async def pods(self, **labels: str) -> dict[str, dict[str, Any]]:
        """The pods of members, by name."""
        found = await self.kube.list(PODS, self.namespace, labels=MEMBER_LABELS)
        return {pod["metadata"]["name"]: pod for pod in found}

    async def pool(self, name: str = "shell") -> dict[str, Any]:
        """What the broker says of a pool; {} if nothing."""
        _, pools = await self.get(wire.POOLS)
        return (pools or {}).get(name, {})

    async def until(self, what: str, true: Callable[[], Any], seconds: float = 15.0) -> None:
        """Wait until it holds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not await true():
            if loop.time() > end:
                log = self.log.read_text()[-3000:] if self.log.exists() else ""
                raise AssertionError(f"not in {seconds:g} s: {what}; {await self.pool()}\n{log}")
            await asyncio.sleep(0.05)

    async def counts(self, name: str = "shell", **wanted: int) -> None:
        """Wait until the pool has these counts."""

        async def true() -> bool:
            found = await self.pool(name)
            return all(found.get(key) == value for key, value in wanted.items())

        await self.until(f"{name}: {wanted}", true, 40.0)


@contextlib.asynccontextmanager
async def rig(cluster: Any, folder: Path, *pools: dict[str, Any]) -> AsyncIterator[Rig]:
    """A namespace with these pools and a broker that is not started yet."""
    namespace = f"broker-{secrets.token_hex(3)}"
    daemons = Daemons()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(daemons.serving())
        kube = await stack.enter_async_context(Kube.connect("test-of-brokers", kubeconfig=cluster.kubeconfig))
        await kube.apply(CRDS, without_rules(yaml.safe_load(CRD.read_text())))
        cluster.kubectl("wait", "--for=condition=Established", "crd/resourcepools.agentfly.dev")
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await kube.create(NAMESPACES, space)
        await asyncio.to_thread(
            cluster.kubectl, "-n", namespace, "wait", "--for=create", "serviceaccount/default"
        )
        pods = Informer(kube, PODS, namespace, MEMBER_LABELS)

        def changed(kind: str, pod: dict[str, Any]) -> None:
            address = pod.get("status", {}).get("podIP")
            if address and kind != "DELETED" and address not in daemons.living:
                daemons.begin(address, pod)
            if address and kind == "DELETED":
                daemons.end(address)

        pods.subscribe(changed)
        await stack.enter_async_context(pods)
        made = Rig(cluster, kube, namespace, daemons, folder)
        for obj in pools:
            await made.apply(obj)
        try:
            yield made
        finally:
            if made.process is not None and made.process.returncode is None:
                await made.end(signal.SIGKILL)
            with contextlib.suppress(NotFound):
                for obj in await kube.list(RESOURCE_POOLS, namespace):
                    await kube.delete(RESOURCE_POOLS, obj["metadata"]["name"], namespace)
                await kube.delete(NAMESPACES, namespace)


def without_rules(schema: Any) -> Any:
    """A CRD without its rules between fields: a broker must cope with pools that an older one let in."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key != "x-kubernetes-validations"}
        return {key: without_rules(value) for key, value in kept.items()}
    return [without_rules(each) for each in schema] if isinstance(schema, list) else schema


def events_in(log: Path) -> list[dict[str, Any]]:
    """The lines of a JSON log."""
    return [json.loads(line) for line in log.read_text().splitlines()]
