"""What the tests of TrainingRuns share: a run that a cluster can serve, and who plays its pods."""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.kube import (
    CONFIG_MAPS,
    JOBS,
    NETWORK_POLICIES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RESOURCE_POOLS,
    SERVICES,
    TRAINING_RUNS,
    Kube,
    Resource,
)
from agentfly.roles.launch import STATE_PORT, Report
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.operator.world import find, until

VOLUMES = Resource("", "v1", "persistentvolumes", namespaced=False)
CHILDREN: tuple[Resource, ...] = (PODS, JOBS, CONFIG_MAPS, SERVICES, NETWORK_POLICIES, RESOURCE_POOLS)
RUN = "first"
Obj = dict[str, Any]


def training_run(space: str, name: str = RUN, labels: Mapping[str, str] | None = None, **spec: Any) -> Obj:
    whole = {
        "agent": {"entrypoint": "agent.py:agent"},
        "tasks": {"path": "tasks.jsonl"},
        "model": {"path": "/agentfly-cache/models/m"},
        "source": {"configMap": "quickstart"},
        "storage": {"claim": "runs"},
        "steps": 10,
        **spec,
    }
    return {
        "apiVersion": "agentfly.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name, "namespace": space, "labels": dict(labels or {})},
        "spec": whole,
    }


def claim(space: str) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "runs", "namespace": space},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


@contextlib.asynccontextmanager
async def storage(kube: Kube, space: str, *, claimed: bool = True) -> AsyncIterator[None]:
    """The folder of the manifest, and a volume for the claim of the run."""
    source = {"metadata": {"name": "quickstart", "namespace": space}, "data": {"agent.py": ""}}
    await kube.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap", **source})
    reference = {"kind": "PersistentVolumeClaim", "namespace": space, "name": "runs"}
    volume = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": "/nonexistent"},
        "claimRef": {"apiVersion": "v1", **reference},
    }
    body = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": space}, "spec": volume}
    await kube.create(VOLUMES, body)
    if claimed:
        await kube.create(PERSISTENT_VOLUME_CLAIMS, claim(space))
    try:
        yield
    finally:
        await kube.delete(VOLUMES, space)


def report(attempt: int, step: int = 0, saved: int = 0, **said: Any) -> Report:
    """What a head says after so many steps, the newest saved one included."""
    checkpoint = {"latestStep": saved, "path": f"/x/{saved}", "time": "2026-11-30T12:00:00Z", "ranks": 1}
    return Report(
        attempt=attempt,
        phase=said.pop("phase", "Running" if step else "Starting"),
        progress=Progress(step=step, total_steps=10) if step else None,
        step_time=time.time() if step else None,
        checkpoint=CheckpointStatus.model_validate(checkpoint) if saved else None,
        **said,
    )


class Players:
    """The pods of one run: the fake kubelet starts them, this ends them and answers for heads."""

    def __init__(self, kube: Kube, kubelet: FakeKubelet, space: str, name: str = RUN) -> None:
        self._kube = kube
        self._kubelet = kubelet
        self._space = space
        self._name = name
        self._runners: list[web.AppRunner] = []
        self.says = Report()

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def run(self) -> Obj:
        """The run as it is."""
        return await self._kube.get(TRAINING_RUNS, self._name, self._space)

    async def phase(self, want: str, within_s: float = 30.0) -> Obj:
        """Its status, once it has this phase."""
        last: Obj = {}

        async def holds() -> bool:
            nonlocal last
            last = (await self.run()).get("status", {})
            return last.get("phase") == want

        await until(holds, within_s, lambda: f"not {want}: {last}")
        return last

    async def prepared(self) -> None:
        """Its preparation ends well."""

        async def pod() -> Obj | None:
            labels = f"agentfly.dev/role=prepare,agentfly.dev/training-run={self._name}"
            found = await self._kube.list(PODS, self._space, labels=labels)
            return next((each for each in found if each.get("status", {}).get("phase") == "Running"), None)

        self.ends(await until(pod, 30), report(0, phase="Ended", exit_code=0))

    async def head(self, attempt: int, *, answers: bool = True) -> Obj:
        """The head of an attempt, once it runs; from then on it answers ``says``."""

        async def pod() -> Obj | None:
            found = await find(self._kube, PODS, f"{self._name}-trainer-{attempt}-0", self._space)
            return found if found and found.get("status", {}).get("phase") == "Running" else None

        found: Obj = await until(pod, 40)
        if answers:
            await self._answer(found["status"]["podIP"])
        return found

    async def steps(self, attempt: int, step: int, saved: int = 0) -> Obj:
        """The head has made so many steps; the status that tells of Running."""
        self.says = report(attempt, step, saved)
        return await self.phase("Running")

    def ends(self, pod: Obj, last: Report | None, code: int | None = None, reason: str = "Completed") -> None:
        """A pod ends, with these last words."""
        exit_code = code if last is None else last.exit_code
        terminated = {
            "exitCode": exit_code,
            "reason": reason,
            "message": "" if last is None else last.termination_message(),
            "startedAt": "2026-11-30T12:00:00Z",
            "finishedAt": "2026-11-30T12:00:00Z",
        }
        container = {**pod["status"]["containerStatuses"][0], "ready": False, "started": False}
        container["state"] = {"terminated": terminated}
        status = {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": [container]}
        self._kubelet.set_status(self._space, pod["metadata"]["name"], status)

    async def children(self) -> set[tuple[str, str]]:
        """All that there is of the run, by kind and name."""
        found = set()
        for resource in CHILDREN:
            for obj in await self._kube.list(resource, self._space, labels="agentfly.dev/role"):
                if obj["metadata"].get("labels", {}).get("agentfly.dev/training-run") == self._name:
                    found.add((resource.plural, obj["metadata"]["name"]))
        return found

    async def nothing_left(self, within_s: float = 30.0) -> None:
        """Wait until nothing of the run is there but what people made."""
        left: set[tuple[str, str]] = set()

        async def none() -> bool:
            nonlocal left
            left = await self.children()
            return not left

        await until(none, within_s, lambda: f"left: {left}")

    async def _answer(self, address: str) -> None:
        async def state(_: web.Request) -> web.Response:
            return web.Response(text=self.says.model_dump_json())

        app = web.Application()
        app.router.add_get("/state", state)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, address, STATE_PORT).start()
        self._runners.append(runner)
