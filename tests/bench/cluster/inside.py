"""What is measured on a real node, told as JSON: it runs in the node's network, as workers do.

python -m tests.bench.cluster.inside KUBECONFIG NAMESPACE IMAGE

Guarantees:
1. Everything that is compared alternates in one run; a reset that was not verified ends it.
2. Nothing of it is left in the cluster.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from agentfly.kube import CONFIG_MAPS, PODS, Informer, Kube, project_pod
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.kubernetes import MEMBER_LABELS, KubernetesRunner, PodCluster, Signer
from agentfly.resources.spec import ContainerSpec, PodOptions
from agentfly.sandbox import SandboxClient
from tests.bench import reuse
from tests.cluster.api import Api

ALL_S = 300.0
FILES = (0, 1000)
REPEATS = 5
RESETS = 20  # for each repeat and number of files
EXECS = {"pod": 40, "api": 10}  # for each repeat
AT_ONCE = 8
TASKS, GROUP = 50, 10
FRESH = 16  # rollouts of the side that deletes and creates
WIDTH = 8
LEASE_S = 120.0
# 800 new files and 200 of the image's own, in ten folders.
DIRTY = """
import os, pathlib, sys
count = int(sys.argv[1])
for number in range(count * 4 // 5):
    path = pathlib.Path("/workspace", f"folder-{number % 10}", f"file-{number}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"content of {number}\\n" * 8)
changed = 0
for folder, _, names in os.walk("/usr/lib/python3.11"):
    for name in names:
        if changed >= count // 5:
            break
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "a") as file:
                file.write("# changed\\n")
            changed += 1
print(changed)
"""


async def told(config: str, namespace: str, image: str) -> dict[str, Any]:
    """Everything, in seconds."""
    async with _runner(config, namespace) as runner:
        spec = ContainerSpec(
            runtime="kubernetes",
            image=image,
            memory_mb=256,
            pod=PodOptions(security="baseline", pull_policy="Never"),
        )
        resets = await measure_resets(runner, spec)
        execs = await measure_execs(runner, spec, Api(Path(config)), namespace)
        rollouts = await measure_rollouts(runner, spec.model_copy(update={"cpu_request": 0.1}))
    return {"resets": resets, "execs": execs, "rollouts": rollouts}


@contextlib.asynccontextmanager
async def _runner(config: str, namespace: str) -> AsyncIterator[KubernetesRunner]:
    async with Kube.connect("agentfly-bench/1", kubeconfig=config) as kube:
        found = await kube.get(CONFIG_MAPS, "kube-root-ca.crt", namespace)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "kube-root-ca.crt", "controller": True}
        owner["uid"] = found["metadata"]["uid"]
        informer = Informer(kube, PODS, namespace, MEMBER_LABELS, project=project_pod)
        async with informer:
            await informer.synced()
            cluster = PodCluster(kube, informer, namespace, lambda pool: owner)
            runner = KubernetesRunner(cluster, Signer(b"k" * 32), sandboxd_image="agentfly/sandboxd:dev")
            try:
                yield runner
            finally:
                await runner.close()


async def measure_resets(runner: KubernetesRunner, spec: ContainerSpec) -> dict[str, list[list[float]]]:
    """Resets by number of changed files, pods that are deleted and created, and creations alone."""
    found: dict[str, list[list[float]]] = {str(count): [] for count in FILES}
    found |= {"delete and create": [], "create": []}
    number = 0
    member = await runner.start(spec, _name(number))
    try:
        for _ in range(REPEATS):
            for count in FILES:
                samples = []
                for _ in range(RESETS):
                    member, took = await reset(runner, member, count)
                    samples.append(took)
                found[str(count)].append(samples)
            number += 1
            began = time.perf_counter()
            await runner.stop(member)
            stopped = time.perf_counter()
            member = await runner.start(spec, _name(number))
            ended = time.perf_counter()
            found["delete and create"].append([ended - began])
            found["create"].append([ended - stopped])
    finally:
        await runner.stop(member)
    return found


async def reset(runner: KubernetesRunner, member: Member, files: int) -> tuple[Member, float]:
    """A lease that changes files, and what its reset takes."""
    await runner.lease(member, "bench", 0, "token", LEASE_S)
    async with SandboxClient(member.address, "token") as sandbox:
        done = await sandbox.exec(["python3", "-c", DIRTY, str(files)], timeout=60)
        if done.exit_code or int(done.stdout) != files // 5:
            raise RuntimeError(f"files: could not be changed: {done.stdout}{done.stderr}")
    began = time.perf_counter()
    again = await runner.reset(member)
    took = time.perf_counter() - began
    if again is None or again.handle is not member.handle:
        raise RuntimeError("reset: was not verified in place")
    return again, took


async def measure_execs(
    runner: KubernetesRunner, spec: ContainerSpec, api: Api, namespace: str
) -> dict[str, Any]:
    """Commands by the pod's address and by the API server: seconds of one, and commands per second."""
    found: dict[str, Any] = {name: {"one": [], "rate": []} for name in EXECS}
    member = await runner.start(spec, _name(99))
    try:
        await runner.lease(member, "bench", 0, "token", LEASE_S)
        connector = aiohttp.TCPConnector(ssl=api.ssl, limit=0)
        async with (
            SandboxClient(member.address, "token") as sandbox,
            aiohttp.ClientSession(connector=connector, headers=api.headers) as session,
        ):
            path = f"{api.server}/api/v1/namespaces/{namespace}/pods/{member.id}/exec"

            async def by_pod() -> None:
                done = await sandbox.exec(["/bin/true"], timeout=60)
                assert done.exit_code == 0

            async def by_api() -> None:
                await pods_exec(session, path)

            ways = {"pod": by_pod, "api": by_api}
            for way in ways.values():
                await way()
            for _ in range(REPEATS):
                for name, way in ways.items():
                    samples = []
                    for _ in range(EXECS[name]):
                        began = time.perf_counter()
                        await way()
                        samples.append(time.perf_counter() - began)
                    found[name]["one"].append(samples)
                for name, way in ways.items():
                    began = time.perf_counter()
                    await asyncio.gather(*(_times(way, EXECS[name] // 5) for _ in range(AT_ONCE)))
                    found[name]["rate"].append([AT_ONCE * (EXECS[name] // 5) / (time.perf_counter() - began)])
    finally:
        await runner.stop(member)
    return found


async def _times(way: Any, count: int) -> None:
    for _ in range(count):
        await way()


async def pods_exec(session: aiohttp.ClientSession, path: str) -> None:
    """The same command by `pods/exec`, as a client that keeps nothing of earlier ones but its TLS session.

    Raises:
        RuntimeError: it did not end well.
    """
    query = {"command": "/bin/true", "container": "sandbox", "stdout": "true", "stderr": "true"}
    async with session.ws_connect(
        path, params=query, protocols=("v5.channel.k8s.io",), timeout=_CLOSE
    ) as socket:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.BINARY and message.data[:1] == b"\x03":
                status = json.loads(message.data[1:])
                if status["status"] != "Success":
                    raise RuntimeError(f"pods/exec: {status}")
                return
    raise RuntimeError("pods/exec: ended without a status")


_CLOSE = aiohttp.ClientWSTimeout(ws_close=10.0)


async def measure_rollouts(runner: KubernetesRunner, spec: ContainerSpec) -> dict[str, float]:
    """No-op rollouts per second of both sides."""
    kind = reuse.Kind("pods", runner, spec, reset=TASKS * GROUP, fresh=FRESH, repeats=1, width=WIDTH)
    return {
        "reset": await reuse.rate(kind, kind.reset, None),
        "fresh": await reuse.rate(kind, kind.fresh, 0),
    }


def _name(number: int) -> str:
    return f"bench-0a1b-{number}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(asyncio.wait_for(told(*sys.argv[1:]), ALL_S))) + "\n")
