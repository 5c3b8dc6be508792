"""What the operator's tests share: an installed cluster, a broker that says what it is told to, operators as
processes of their own with the rights that the manifests give."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml
from aiohttp import web

from agentfly.api import crd
from agentfly.kube import (
    DEPLOYMENTS,
    NAMESPACES,
    NETWORK_POLICIES,
    POD_DISRUPTION_BUDGETS,
    RESOURCE_POOLS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kube,
    NotFound,
    Resource,
)
from tests.cluster.cluster import Cluster

ROOT = Path(__file__).parents[3]
AGENT = "agentfly-operator"
SYSTEM = "agentfly-system"
POLL_S = 0.05
# As `python -m agentfly_operator` in a container: its user has no name.
NAMELESS = """
import pwd, runpy
def nameless(uid): raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nameless
runpy.run_module("agentfly_operator", run_name="__main__")
"""
Obj = dict[str, Any]

OURS: dict[str, tuple[Resource, tuple[str, ...]]] = {
    "Deployment": (DEPLOYMENTS, ("agentfly-broker",)),
    "NetworkPolicy": (NETWORK_POLICIES, ("agentfly-broker", "agentfly-members", "agentfly-pool-shell")),
    "PodDisruptionBudget": (POD_DISRUPTION_BUDGETS, ("agentfly-broker",)),
    "Role": (ROLES, ("agentfly-broker",)),
    "RoleBinding": (ROLE_BINDINGS, ("agentfly-broker",)),
    "Secret": (SECRETS, ("agentfly-broker", "agentfly-broker-client")),
    "Service": (SERVICES, ("agentfly-broker",)),
    "ServiceAccount": (SERVICE_ACCOUNTS, ("agentfly-broker",)),
}


def install(cluster: Cluster) -> Path:
    """Definitions and rights as the manifests have them; the kubeconfig of the operator's service account."""
    for kind in crd.KINDS:
        cluster.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(crd.crd(kind))
        )
    names = [kind.plural + ".agentfly.dev" for kind in crd.KINDS]
    cluster.kubectl("wait", "--for=condition=Established", "crd", *names)
    files = ("base/namespace", "operator/service_account", "operator/leader", "base/rights", "queues/rights")
    for file in files:
        cluster.kubectl("apply", "-f", str(ROOT / "manifests" / f"{file}.yaml"))
    token = cluster.kubectl("create", "token", "agentfly-operator", "-n", SYSTEM, "--duration=2h").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = cluster.folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class FakeBroker:
    """Answers /pools with `pools`; `token` is what came with the last question."""

    def __init__(self) -> None:
        self.pools: Obj = {}
        self.token = ""
        self.questions = 0
        self.url = ""
        self.silent = False

    def serves(self, name: str, **counts: Any) -> None:
        """What it says of a pool."""
        zeros = (
            "ready",
            "leased",
            "starting",
            "resetting",
            "stopping",
            "queued",
            "starts",
            "resets",
            "failures",
        )
        status = {
            "kind": "container",
            "max": 8,
            "min": 0,
            "quarantined": {},
            "reason": "Ready",
            "problems": [],
        }
        self.pools[name] = {**status, **dict.fromkeys(zeros, 0), **counts}

    async def answer(self, request: web.Request) -> web.Response:
        self.token = request.headers.get("X-Agentfly-Token", "")
        self.questions += 1
        if self.silent:
            return web.Response(status=503)
        return web.json_response(self.pools)


@contextlib.asynccontextmanager
async def fake_broker() -> AsyncIterator[FakeBroker]:
    broker = FakeBroker()
    app = web.Application()
    app.router.add_get("/pools", broker.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    broker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield broker
    finally:
        await runner.cleanup()


class Cuttable:
    """A way to the API server that tests cut; `kubeconfig` takes it."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        server = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._target = server.hostname, server.port
        self._config = config
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_cut = False
        self.kubeconfig = folder / "cuttable.kubeconfig"

    async def __aenter__(self) -> "Cuttable":
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        cluster = self._config["clusters"][0]["cluster"]
        cluster["server"] = f"https://127.0.0.1:{port}"
        self.kubeconfig.write_text(yaml.safe_dump(self._config))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)

    def cut(self) -> None:
        """Reset every connection, and each new one until `mend`."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self.is_cut = False

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.is_cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        ways = (reader, far_writer), (far_reader, writer)
        await asyncio.gather(*(_copy(*way) for way in ways), return_exceptions=True)
        self._writers -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.transport.abort()


class OperatorProcess:
    """One operator."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    async def page(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session:
            try:
                async with session.get(f"http://127.0.0.1:{self.port}{path}") as response:
                    return response.status, await response.text()
            except aiohttp.ClientError as error:
                return 0, str(error)

    async def figure(self, name: str) -> float:
        """One line of /metrics."""
        _, text = await self.page("/metrics")
        figures = (float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))
        return next(figures, float("nan"))

    async def ready(self, within_s: float = 30.0) -> None:
        await until(self._is_ready, within_s, lambda: self.log.read_text()[-3000:])

    async def leads(self, within_s: float = 40.0) -> None:
        """Wait until it acts; an operator that was killed keeps the Lease for 15 s."""

        async def it_does() -> bool:
            return await self.figure("agentfly_operator_leader") == 1

        await self.ready()
        await until(it_does, within_s)

    async def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return (await self.page("/readyz"))[0] == 200

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mb(self) -> float:
        """The most memory that it has had."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise AssertionError("no VmHWM")


@contextlib.contextmanager
def operator(
    kubeconfig: Path,
    folder: Path,
    broker: str = "",
    *,
    namespaces: tuple[str, ...] = (),
    name: str = "op-0",
    env: Mapping[str, str] | None = None,
) -> Iterator[OperatorProcess]:
    """Runs an operator for the length of a block."""
    port, log = free_port(), folder / f"{name}-{time.monotonic_ns()}.log"
    where = [part for each in namespaces for part in ("--namespace", each)] or ["--all-namespaces"]
    command = [sys.executable, "-c", NAMELESS, *where, "--listen", f"127.0.0.1:{port}"]
    environment = {
        **{key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG")},
        **{"KUBECONFIG": str(kubeconfig), "POD_NAME": name, "AGENTFLY_BROKER_URL": broker},
        **(env or {}),
    }
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=folder)
    try:
        yield OperatorProcess(process, port, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


async def until(
    holds: Callable[[], Awaitable[Any]], within_s: float = 20.0, says: Callable[[], object] = lambda: ""
) -> Any:
    """Wait until something is so; what it gave then."""
    end = time.monotonic() + within_s
    while True:
        if found := await holds():
            return found
        assert time.monotonic() < end, f"not so within {within_s:g} s: {says()}"
        await asyncio.sleep(POLL_S)


def pool(namespace: str, name: str = "shell", **spec: Any) -> Obj:
    whole = {"type": "Container", "container": {"image": "busybox:1"}, "capacity": {"max": 8}, **spec}
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "ResourcePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": whole,
    }


def member(pool_obj: Obj, number: int, **spec: Any) -> Obj:
    """A member pod as a broker makes it."""
    meta = pool_obj["metadata"]
    owner = {"apiVersion": "agentfly.dev/v1alpha1", "kind": "ResourcePool", "controller": True}
    labels = {
        "agentfly.dev/pool": meta["name"],
        "agentfly.dev/component": "member",
        "app.kubernetes.io/managed-by": "agentfly",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-0000-{number}",
            "namespace": meta["namespace"],
            "labels": labels,
            "ownerReferences": [{**owner, "name": meta["name"], "uid": meta["uid"]}],
        },
        "spec": {
            "containers": [{"name": "sandbox", "image": "busybox:1"}],
            "terminationGracePeriodSeconds": 1,
            **spec,
        },
    }


@contextlib.asynccontextmanager
async def namespace(kube: Kube, name: str) -> AsyncIterator[str]:
    """A namespace for one test; it is deleted afterwards, and its end is not waited for."""
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    try:
        yield name
    finally:
        for each in await kube.list(RESOURCE_POOLS, name):
            await kube.delete(RESOURCE_POOLS, each["metadata"]["name"], name)
        await kube.delete(NAMESPACES, name)


async def find(kube: Kube, resource: Resource, name: str, space: str | None = None) -> Obj | None:
    try:
        return await kube.get(resource, name, space)
    except NotFound:
        return None


async def condition(kube: Kube, space: str, kind: str, name: str = "shell") -> str:
    """Status and reason of a condition of a pool; "" where there is none."""
    obj = await find(kube, RESOURCE_POOLS, name, space)
    for each in (obj or {}).get("status", {}).get("conditions", ()):
        if each["type"] == kind:
            return f"{each['status']} {each['reason']}"
    return ""


async def made(kube: Kube, space: str) -> dict[tuple[str, str], Obj]:
    """What of ours is in a namespace."""
    found = {}
    for kind, (resource, names) in OURS.items():
        for name in names:
            if (obj := await find(kube, resource, name, space)) is not None:
                found[kind, name] = obj
    return found


async def complete(kube: Kube, space: str, within_s: float = 20.0) -> dict[tuple[str, str], Obj]:
    """All of it, once it is there."""
    count = sum(len(names) for _, names in OURS.values())

    async def all_made() -> dict[tuple[str, str], Obj] | None:
        found = await made(kube, space)
        return found if len(found) == count else None

    found: dict[tuple[str, str], Obj] = await until(all_made, within_s)
    return found


async def becomes(kube: Kube, space: str, kind: str, want: str, within_s: float = 20.0) -> None:
    """Wait for a condition of the pool."""
    last = ""

    async def holds() -> bool:
        nonlocal last
        last = await condition(kube, space, kind)
        return last == want

    await until(holds, within_s, lambda: f"{kind} is {last!r} and not {want!r}")


async def gone(kube: Kube, space: str, within_s: float = 45.0) -> None:
    """Wait until nothing of ours is left; the garbage collector hears late of new kinds."""

    async def none_left() -> bool:
        return not await made(kube, space)

    await until(none_left, within_s)
