"""Runs and jobs in queues of the real Kueue, with a real API server, scheduler and controllers; pods are
played.
"""

import asyncio
from typing import Any

import pytest

from agentfly.kube import (
    JOBS,
    LOCAL_QUEUES,
    PODS,
    RESOURCE_POOLS,
    ROLLOUT_JOBS,
    TRAINING_RUNS,
    WORKLOADS,
    Kube,
)
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.operator.run_world import RUN, Players, report
from tests.integration.operator.test_rollout_jobs import Workers, rollout_job
from tests.integration.operator.world import OperatorProcess, find, member, until
from tests.integration.queues.queues import (
    CLUSTER_QUEUES,
    NODE,
    QUEUE,
    SECOND,
    TOLERATION,
    add_queue,
    conditions,
    has_quota,
    queue,
    queued_run,
    returned,
    workload,
)

Both = tuple[Players, Players]
Obj = dict[str, Any]
pytestmark = pytest.mark.timeout(300)


def condition(status: Obj, kind: str) -> Obj:
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


async def stalled(player: Players, reason: str) -> str:
    """The message of a run that waits for a person, once it does for this reason."""
    last: Obj = {}

    async def told() -> str:
        nonlocal last
        last = condition((await player.run()).get("status", {}), "Stalled")
        return str(last["message"]) if last.get("status") == "True" and last["reason"] == reason else ""

    text: str = await until(told, 30, lambda: f"not {reason}: {last}")
    return text


async def trains(player: Players, attempt: int = 1, step: int = 3, saved: int = 2) -> Obj:
    """A run that was admitted comes to this step; its head."""
    if attempt == 1:
        await player.prepared()
    head = await player.head(attempt)
    await player.steps(attempt, step, saved)
    return head


async def is_asked(kube: Kube, head: Obj) -> None:
    """Wait until a head is asked for a checkpoint."""
    meta = head["metadata"]

    async def asked() -> bool:
        found = await kube.get(PODS, meta["name"], meta["namespace"])
        return bool(found["metadata"].get("annotations", {}).get("agentfly.dev/suspend") == "true")

    await until(asked, 20)


def stops(player: Players, head: Obj, attempt: int, step: int) -> None:
    """A head that was asked has written its checkpoint."""
    player.ends(head, report(attempt, step, step, phase="Ended", exit_code=85, suspended=True))


async def test_without_kueue_a_run_waits_for_it_and_goes_on_when_it_comes(
    kube: Kube, space: str, running: OperatorProcess, players: Both, request: pytest.FixtureRequest
) -> None:
    first, _ = players
    await kube.create(TRAINING_RUNS, queued_run(space, RUN))
    text = await stalled(first, "KueueMissing")
    assert "asks for the queue team, and Kueue is not there" in text
    assert await first.children() == set()
    await asyncio.to_thread(request.getfixturevalue, "with_kueue")
    text = await stalled(first, "MissingObject")
    assert text == "not there: LocalQueue team, WorkloadPriorityClass low"
    async with queue(kube, space):
        await trains(first)
        assert condition((await first.run())["status"], "Admitted")["status"] == "True"


async def test_a_run_waits_for_another_one_and_is_admitted_when_that_is_done(
    kube: Kube, space: str, with_kueue: Cluster, running: OperatorProcess, players: Both
) -> None:
    first, second = players
    async with queue(kube, space):
        await kube.create(TRAINING_RUNS, queued_run(space, RUN))
        head = await trains(first)
        assert NODE.items() <= head["spec"]["nodeSelector"].items()
        assert TOLERATION in head["spec"]["tolerations"]
        pool = await kube.get(RESOURCE_POOLS, f"{RUN}-policy", space)
        assert pool["spec"]["placement"]["nodeSelector"] == NODE
        job = await kube.get(JOBS, f"{RUN}-prepare", space)
        assert job["spec"]["template"]["spec"]["nodeSelector"] == NODE

        async def told() -> bool:
            return conditions(await workload(kube, space, RUN)).get("PodsReady") == ("True", "Started")

        await until(told)
        await kube.create(TRAINING_RUNS, queued_run(space, SECOND))
        status = await second.phase("Queued")

        async def why() -> str:
            return str(condition((await second.run())["status"], "Admitted").get("message", ""))

        await until(lambda: _contains(why, "insufficient unused quota for cpu"))
        assert condition(status, "Stalled")["status"] == "False"
        assert await second.children() == set()
        first.ends(head, report(1, 10, 10, phase="Ended", exit_code=0))
        await first.phase("Succeeded")
        await first.nothing_left()

        async def over() -> bool:
            return conditions(await workload(kube, space, RUN)).get("Finished") == ("True", "Succeeded")

        await until(over)
        await second.phase("Starting")
        await trains(second)
        status = (await second.run())["status"]
        assert condition(status, "Admitted")["status"] == "True"


async def _contains(text: Any, part: str) -> bool:
    return part in await text()


async def test_a_preempted_run_saves_returns_its_quota_when_all_is_gone_and_goes_on_by_itself(
    kube: Kube,
    space: str,
    with_kueue: Cluster,
    running: OperatorProcess,
    players: Both,
    kubelet: FakeKubelet,
) -> None:
    first, second = players
    async with queue(kube, space):
        await kube.create(TRAINING_RUNS, queued_run(space, RUN, nodes=2))
        head = await trains(first)
        pool = await kube.get(RESOURCE_POOLS, f"{RUN}-policy", space)
        server = await kube.create(PODS, member(pool, 1))
        kubelet.linger(**{"agentfly.dev/role": "trainer"})
        kubelet.linger(**{"agentfly.dev/pool": f"{RUN}-policy"})
        await kube.create(TRAINING_RUNS, queued_run(space, SECOND, "high"))
        status = await first.phase("Suspending")
        assert condition(status, "Admitted")["reason"] == "Evicted"
        assert "Kueue evicts it (Preempted)" in condition(status, "Reconciling")["message"]
        await is_asked(kube, head)
        # It is asked first, and keeps its quota for as long as that takes, and until its pods are gone.
        assert has_quota(await workload(kube, space, RUN))
        await second.phase("Queued")
        stops(first, head, 1, 4)

        async def goes(name: str) -> bool:
            found = await kube.get(PODS, name, space)
            return "deletionTimestamp" in found["metadata"]

        await until(lambda: goes(f"{RUN}-trainer-1-1"), 30)
        await asyncio.sleep(7)  # longer than what was just made may be unseen
        assert has_quota(await workload(kube, space, RUN))
        assert await find(kube, RESOURCE_POOLS, f"{RUN}-policy", space) is not None
        kubelet.clear()
        kubelet.linger(**{"agentfly.dev/pool": f"{RUN}-policy"})
        await until(lambda: goes(server["metadata"]["name"]), 30)
        await asyncio.sleep(1)
        assert has_quota(await workload(kube, space, RUN))
        assert (await second.run())["status"]["phase"] == "Queued"
        kubelet.clear()
        await second.phase("Starting")
        victim = await workload(kube, space, RUN)
        assert not has_quota(victim)
        assert conditions(victim)["Requeued"] == ("True", "Preempted")
        status = await first.phase("Queued")
        assert (status["attempt"], status["restarts"], status["failures"]) == (1, 0, 0)
        assert "lastFailure" not in status
        head = await trains(second)
        second.ends(head, report(1, 10, 10, phase="Ended", exit_code=0))
        await second.phase("Succeeded")
        await trains(first, 2, 5, 4)
        status = (await first.run())["status"]
        assert (status["attempt"], status["resumedStep"], status["restarts"]) == (2, 4, 0)


async def test_a_suspended_run_returns_its_quota_and_is_queued_when_it_goes_on(
    kube: Kube, space: str, with_kueue: Cluster, running: OperatorProcess, players: Both
) -> None:
    first, second = players
    async with queue(kube, space):
        await kube.create(TRAINING_RUNS, queued_run(space, RUN))
        head = await trains(first)
        await kube.create(TRAINING_RUNS, queued_run(space, SECOND))
        await second.phase("Queued")
        await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": True}}, space)
        await is_asked(kube, head)
        assert has_quota(await workload(kube, space, RUN))
        stops(first, head, 1, 4)
        await first.phase("Suspended")
        found = await returned(kube, space, RUN)
        assert found["spec"]["active"] is False
        head = await trains(second)
        await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": False}}, space)
        await first.phase("Queued")
        second.ends(head, report(1, 10, 10, phase="Ended", exit_code=0))
        await second.phase("Succeeded")
        await trains(first, 2, 5, 4)
        assert (await workload(kube, space, RUN))["spec"]["active"] is True


async def test_a_child_that_kueue_wants_more_quota_for_is_told_with_its_cure(
    kube: Kube, space: str, with_kueue: Cluster, running: OperatorProcess, players: Both
) -> None:
    first, _ = players
    async with queue(kube, space):
        await add_queue(kube, space, "default")
        await kube.create(TRAINING_RUNS, queued_run(space, RUN, nodes=2))  # it leaves no quota for more
        text = await stalled(first, "QuotaModeConflict")
        assert f"Job {RUN}-prepare" in text
        assert "externalFrameworks: [TrainingRun.v1alpha1.agentfly.dev]" in text
        await kube.delete(LOCAL_QUEUES, "default", space)
        await kube.delete(JOBS, f"{RUN}-prepare", space, propagation="Background")
        await trains(first)


async def test_workers_of_a_job_wait_in_the_queue_and_run_when_they_are_admitted(
    kube: Kube,
    space: str,
    with_kueue: Cluster,
    running: OperatorProcess,
    players: Both,
    kubelet: FakeKubelet,
) -> None:
    workers = Workers(kube, kubelet, space)
    async with queue(kube, space):
        await kube.patch(CLUSTER_QUEUES, space, {"spec": {"stopPolicy": "Hold"}})
        job = rollout_job(space, workers={"count": 2, "tasksPerShard": 2, "pod": POD_OF_A_WORKER})
        job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": QUEUE}
        await kube.create(ROLLOUT_JOBS, job)
        await workers.prepared()
        await workers.has(phase="Queued")
        made = await kube.get(JOBS, f"{RUN}-workers", space)
        assert made["spec"]["suspend"] is True
        assert await find(kube, RESOURCE_POOLS, f"{RUN}-policy", space) is None
        await kube.patch(CLUSTER_QUEUES, space, {"spec": {"stopPolicy": "None"}})
        await until(lambda: find(kube, RESOURCE_POOLS, f"{RUN}-policy", space))
        await workers.played(0, 4)
        await workers.has(phase="Running", counted="0")
        await kube.patch(ROLLOUT_JOBS, RUN, {"spec": {"suspend": True}}, space)
        await workers.has(phase="Suspended")
        assert (await kube.get(JOBS, f"{RUN}-workers", space))["spec"]["suspend"] is True
        (found,) = await kube.list(WORKLOADS, space)
        await returned(kube, space, found["metadata"]["name"])
        await asyncio.sleep(3)  # time for Kueue to let it go on, which it must not
        assert (await kube.get(JOBS, f"{RUN}-workers", space))["spec"]["suspend"] is True
        await kube.patch(ROLLOUT_JOBS, RUN, {"spec": {"suspend": False}}, space)
        await workers.played(1, 4)
        await workers.played(2, 2)
        await workers.has(phase="Succeeded", counted="0-2", scored=10)
        await workers.nothing_left()


POD_OF_A_WORKER = {"cpu": "500m"}
