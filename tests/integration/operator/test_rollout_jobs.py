"""RolloutJobs against a real API server, scheduler and controllers; their pods are played."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentfly.kube import JOBS, PODS, RESOURCE_POOLS, ROLLOUT_JOBS, Kube
from agentfly.roles.launch import Report
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.roles.worker import WorkerReport
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.operator.run_world import CHILDREN, storage
from tests.integration.operator.world import FakeBroker, OperatorProcess, find, until

JOB = "first"
Obj = dict[str, Any]


def rollout_job(space: str, **spec: Any) -> Obj:
    whole = {
        "agent": {"entrypoint": "agent.py:agent"},
        "tasks": {"path": "tasks.jsonl"},
        "model": {"path": "/agentfly-cache/models/m"},
        "source": {"configMap": "quickstart"},
        "storage": {"claim": "runs"},
        "workers": {"count": 2, "tasksPerShard": 2},
        "rollout": {"groupSize": 2},
        **spec,
    }
    meta = {"name": JOB, "namespace": space}
    return {"apiVersion": "agentfly.dev/v1alpha1", "kind": "RolloutJob", "metadata": meta, "spec": whole}


class Workers:
    """The pods of one job: the fake kubelet starts them, this ends them."""

    def __init__(self, kube: Kube, kubelet: FakeKubelet, space: str) -> None:
        self._kube = kube
        self._kubelet = kubelet
        self._space = space

    async def status(self) -> Obj:
        return (await self._kube.get(ROLLOUT_JOBS, JOB, self._space)).get("status", {})

    async def has(self, **wanted: Any) -> Obj:
        """The status, once these fields of it, shards and tasks together, are so."""
        last: Obj = {}

        async def holds() -> bool:
            nonlocal last
            last = await self.status()
            flat = {**last, **last.get("tasks", {}), **last.get("shards", {})}
            return all(flat.get(name) == value for name, value in wanted.items())

        await until(holds, 60, lambda: f"not {wanted}: {last}")
        return last

    async def pods(self, role: str) -> list[Obj]:
        found = await self._kube.list(PODS, self._space, labels=f"agentfly.dev/role={role}")
        return [each for each in found if each.get("status", {}).get("phase") == "Running"]

    async def pod(self, role: str, index: int | None = None) -> Obj:
        """A running pod of a role."""

        async def it() -> Obj | None:
            for each in await self.pods(role):
                label = each["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index")
                if index is None or label == str(index):
                    return each
            return None

        found: Obj = await until(it, 60)
        return found

    def ends(self, pod: Obj, last: Report) -> None:
        terminated = {
            "exitCode": last.exit_code,
            "reason": "Completed",
            "message": last.termination_message(),
            "startedAt": "2026-11-30T12:00:00Z",
            "finishedAt": "2026-11-30T12:00:00Z",
        }
        container = {**pod["status"]["containerStatuses"][0], "ready": False, "started": False}
        container["state"] = {"terminated": terminated}
        status = {"phase": "Failed" if last.exit_code else "Succeeded", "containerStatuses": [container]}
        self._kubelet.set_status(self._space, pod["metadata"]["name"], status)

    async def prepared(self) -> None:
        self.ends(await self.pod("prepare"), Report(phase="Ended", exit_code=0, tasks=5))

    async def played(self, index: int, scored: int) -> None:
        shard = WorkerReport(total=4, scored=scored, reward_mean=0.5, reward_min=0.0, reward_max=1.0)
        self.ends(await self.pod("worker", index), Report(phase="Ended", exit_code=0, shard=shard))

    async def nothing_left(self) -> None:
        left: list[tuple[str, str]] = []

        async def none() -> bool:
            left[:] = [
                (resource.plural, obj["metadata"]["name"])
                for resource in CHILDREN
                for obj in await self._kube.list(
                    resource, self._space, labels=f"agentfly.dev/rollout-job={JOB}"
                )
            ]
            return not left

        await until(none, 60, lambda: f"left: {left}")


@pytest.fixture
async def workers(
    kube: Kube, space: str, broker: FakeBroker, fake_kubelet: FakeKubelet
) -> AsyncIterator[Workers]:
    broker.serves(f"{JOB}-policy", ready=1, leased=0, min=1, max=1)
    async with storage(kube, space):
        yield Workers(kube, fake_kubelet, space)


async def test_a_job_from_apply_to_its_end(
    kube: Kube, space: str, running: OperatorProcess, workers: Workers
) -> None:
    await kube.create(ROLLOUT_JOBS, rollout_job(space))
    await workers.prepared()
    for index, scored in enumerate((4, 4, 2)):
        await workers.played(index, scored)
    status = await workers.has(phase="Succeeded", counted="0-2", scored=10)
    assert status["reward"]["mean"] == "0.5"
    await workers.nothing_left()


async def test_suspended_job_has_neither_workers_nor_servers_and_goes_on(
    kube: Kube, space: str, running: OperatorProcess, workers: Workers
) -> None:
    await kube.create(ROLLOUT_JOBS, rollout_job(space))
    await workers.prepared()
    await workers.played(0, 4)
    await workers.has(phase="Running", counted="0")
    await kube.patch(ROLLOUT_JOBS, JOB, {"spec": {"suspend": True}}, space)
    await workers.has(phase="Suspended")
    assert await find(kube, RESOURCE_POOLS, f"{JOB}-policy", space) is None
    await kube.patch(ROLLOUT_JOBS, JOB, {"spec": {"suspend": False, "workers": {"count": 1}}}, space)
    await workers.played(1, 4)
    job = await kube.get(JOBS, f"{JOB}-workers", space)
    assert job["spec"]["parallelism"] == 1
    await workers.played(2, 2)
    await workers.has(phase="Succeeded", counted="0-2", scored=10)


async def test_shard_that_fails_for_good_fails_the_job_after_the_others(
    kube: Kube, space: str, running: OperatorProcess, workers: Workers
) -> None:
    await kube.create(ROLLOUT_JOBS, rollout_job(space))
    await workers.prepared()
    said = Report(phase="Ended", exit_code=EXIT_INVALID, reason="InvalidSpec", message="no such agent")
    workers.ends(await workers.pod("worker", 0), said)
    await workers.played(1, 4)
    await workers.played(2, 2)
    status = await workers.has(phase="Failed", counted="1-2", scored=6)
    failed = next(each for each in status["conditions"] if each["type"] == "Failed")
    assert (failed["reason"], failed["message"]) == ("InvalidSpec", "shard 0: no such agent")
    await workers.nothing_left()
