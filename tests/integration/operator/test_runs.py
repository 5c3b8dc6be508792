"""TrainingRuns against a real API server, scheduler and controllers; their pods are played."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentfly.kube import LEASES, PERSISTENT_VOLUME_CLAIMS, PODS, TRAINING_RUNS, Kube
from agentfly.kube.client import Propagation
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.operator.run_world import RUN, Players, claim, report, storage, training_run
from tests.integration.operator.world import (
    AGENT,
    SYSTEM,
    FakeBroker,
    OperatorProcess,
    find,
    operator,
    until,
)

PROPAGATIONS: tuple[Propagation, ...] = ("Background", "Foreground", "Orphan")


@pytest.fixture
async def players(
    kube: Kube, space: str, broker: FakeBroker, fake_kubelet: FakeKubelet
) -> AsyncIterator[Players]:
    broker.serves(f"{RUN}-policy", ready=1, leased=0, min=1, max=1)
    made = Players(kube, fake_kubelet, space)
    async with storage(kube, space):
        yield made
        await made.close()


async def test_a_run_from_apply_to_its_end(
    kube: Kube, space: str, running: OperatorProcess, players: Players
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space))
    await players.phase("Starting")
    await players.prepared()
    head = await players.head(1)
    assert {
        ("pods", f"{RUN}-trainer-1-0"),
        ("configmaps", f"{RUN}-launch-1"),
        ("services", f"{RUN}-trainer"),
        ("networkpolicies", f"{RUN}-trainer"),
        ("networkpolicies", f"{RUN}-roles"),
        ("resourcepools", f"{RUN}-policy"),
        ("jobs", f"{RUN}-prepare"),
    } <= await players.children()
    status = await players.steps(1, 1)
    assert status["attempt"] == 1
    assert (
        await running.figure(
            f'agentfly_trainingrun_condition{{name="{RUN}",namespace="{space}",type="Running"}}'
        )
        == 1
    )
    players.ends(head, report(1, 10, 10, phase="Ended", exit_code=0))
    status = await players.phase("Succeeded")
    assert status["progress"]["step"] == 10
    assert status["checkpoint"]["latestStep"] == 10
    assert status["restarts"] == 0
    await players.nothing_left()
    assert await find(kube, PERSISTENT_VOLUME_CLAIMS, "runs", space) is not None
    # For good, whatever its spec says then.
    await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": True}}, space)
    await asyncio.sleep(2)
    assert (await players.phase("Succeeded"))["attempt"] == 1
    assert await players.children() == set()
    await kube.delete(TRAINING_RUNS, RUN, space)
    series = f'agentfly_trainingrun_step{{name="{RUN}",namespace="{space}"}}'
    await until(lambda: _absent(running, series), 10)


async def _absent(process: OperatorProcess, series: str) -> bool:
    return (await process.figure(series)) != await process.figure(series)  # NaN: there is none


async def test_a_run_is_suspended_with_a_checkpoint_and_goes_on_from_it(
    kube: Kube, space: str, running: OperatorProcess, players: Players
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space))
    await players.prepared()
    head = await players.head(1)
    await players.steps(1, 3)
    await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": True}}, space)

    async def asked() -> bool:
        found = await kube.get(PODS, head["metadata"]["name"], space)
        return bool(found["metadata"].get("annotations", {}).get("agentfly.dev/suspend") == "true")

    await until(asked, 15)
    await players.phase("Suspending")
    players.ends(head, report(1, 4, 4, phase="Ended", exit_code=85, suspended=True))
    status = await players.phase("Suspended")
    assert (status["checkpoint"]["latestStep"], status["restarts"]) == (4, 0)

    async def given_back() -> bool:
        held = {("resourcepools", f"{RUN}-policy"), ("pods", f"{RUN}-trainer-1-0")}
        return not held & await players.children()

    await until(given_back, 20)
    await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": False}}, space)
    await players.head(2)
    status = await players.steps(2, 5, 4)
    assert (status["attempt"], status["resumedStep"], status["restarts"]) == (2, 4, 0)


async def test_a_lost_pod_is_a_failed_attempt_and_the_next_one_begins_after_a_pause(
    kube: Kube, space: str, running: OperatorProcess, players: Players
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space))
    await players.prepared()
    await players.head(1)
    await players.steps(1, 1)
    await kube.delete(PODS, f"{RUN}-trainer-1-0", space, grace_s=0)
    began = time.monotonic()
    status = await players.phase("Restarting")
    assert (status["lastFailure"]["reason"], status["lastFailure"]["attempt"]) == ("PodLost", 1)
    assert status["lastFailure"]["podName"] == f"{RUN}-trainer-1-0"
    await players.head(2)
    assert time.monotonic() - began >= 8  # 10 s, of which the API server keeps whole ones
    status = await players.steps(2, 1)
    assert (status["attempt"], status["restarts"], status["failures"]) == (2, 1, 1)


@pytest.mark.timeout(240)
async def test_an_operator_that_is_killed_at_any_time_is_followed_by_one_that_goes_on(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker, players: Players
) -> None:
    stack = contextlib.ExitStack()
    process = stack.enter_context(operator(installed, tmp_path, broker.url, namespaces=(space,)))

    async def another() -> None:
        nonlocal process
        process.kill()
        await kube.delete(LEASES, "agentfly-operator", SYSTEM)  # who was killed does not give it back
        process = stack.enter_context(operator(installed, tmp_path, broker.url, namespaces=(space,)))
        await process.leads()

    with stack:
        await process.leads()
        await kube.create(TRAINING_RUNS, training_run(space))
        await players.phase("Starting")
        await another()  # while it is prepared
        await players.prepared()
        await until(lambda: _has(players, "resourcepools"), 30)
        await another()  # while its servers are started, or its pods
        head = await players.head(1)
        await another()  # before its first step
        status = await players.steps(1, 2)
        assert status["attempt"] == 1
        await another()  # while it trains
        assert (await players.steps(1, 3))["attempt"] == 1
        await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": True}}, space)
        await players.phase("Suspending")
        await another()  # while a checkpoint is written
        assert (await players.phase("Suspending"))["attempt"] == 1
        players.ends(head, report(1, 4, 4, phase="Ended", exit_code=85, suspended=True))
        await players.phase("Suspended")
        await another()  # while it is suspended
        await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": False}}, space)
        head = await players.head(2)
        players.says = report(2)
        status = (await players.run())["status"]
        assert (status["attempt"], status["restarts"], status.get("lastFailure")) == (2, 0, None)
        pods = {name for kind, name in await players.children() if kind == "pods" and "trainer" in name}
        assert pods == {f"{RUN}-trainer-2-0"}
        await players.steps(2, 5, 4)
        process.kill()
        players.ends(head, report(2, 10, 10, phase="Ended", exit_code=0))  # while nobody looks
        await kube.delete(LEASES, "agentfly-operator", SYSTEM)
        process = stack.enter_context(operator(installed, tmp_path, broker.url, namespaces=(space,)))
        await players.phase("Succeeded")
        await another()  # while it is cleared away
        await players.nothing_left()
        assert (await players.run())["status"]["attempt"] == 2


async def _has(players: Players, kind: str) -> bool:
    return any(found == kind for found, _ in await players.children())


@pytest.mark.parametrize("propagation", PROPAGATIONS)
async def test_a_deleted_run_leaves_nothing_and_gets_nothing(
    kube: Kube,
    control_plane: Cluster,
    space: str,
    running: OperatorProcess,
    players: Players,
    propagation: Propagation,
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space))
    await players.prepared()
    await players.head(1)
    await players.steps(1, 1)
    with control_plane.audit() as audit:
        await kube.delete(TRAINING_RUNS, RUN, space, propagation=propagation)
        await until(lambda: _gone(kube, space), 45)
        if propagation == "Orphan":
            await asyncio.sleep(3)
            # That is what was asked for: they stay, and are nobody's.
            assert ("pods", f"{RUN}-trainer-1-0") in await players.children()
        else:
            await players.nothing_left(45)
    made = {what: count for what, count in audit.writes(agent=AGENT).items() if what[0] == "create"}
    assert not [what for what in made if what[1] != "events"]
    assert await find(kube, PERSISTENT_VOLUME_CLAIMS, "runs", space) is not None
    if propagation == "Orphan":
        # A run of this name does not take what is not its own.
        await kube.create(TRAINING_RUNS, training_run(space))

        async def told() -> bool:
            conditions = (await players.run()).get("status", {}).get("conditions", ())
            stalled = [each for each in conditions if each["type"] == "Stalled" and each["status"] == "True"]
            return any("belongs to somebody else" in each["message"] for each in stalled)

        await until(told, 20)


async def _gone(kube: Kube, space: str) -> bool:
    return await find(kube, TRAINING_RUNS, RUN, space) is None


async def test_ten_re_applies_by_another_manager_change_nothing(
    kube: Kube, control_plane: Cluster, space: str, running: OperatorProcess, players: Players
) -> None:
    manifest = json.dumps(training_run(space))
    control_plane.kubectl("apply", "--server-side", "--field-manager=git", "-f", "-", stdin=manifest)
    await players.prepared()
    await players.head(1)
    await players.steps(1, 1)
    await asyncio.sleep(7)  # the status of the pools it uses has settled by then
    before = await players.run()
    with control_plane.audit() as audit:
        for _ in range(10):
            control_plane.kubectl("apply", "--server-side", "--field-manager=git", "-f", "-", stdin=manifest)
        await asyncio.sleep(3)
    after = await players.run()
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], 1)
    writes = {what: count for what, count in audit.writes(agent=AGENT).items() if "leases" not in what[1]}
    assert writes == {}


async def test_a_claim_that_is_missing_is_named_until_it_is_there(
    kube: Kube, space: str, running: OperatorProcess, fake_kubelet: FakeKubelet
) -> None:
    players = Players(kube, fake_kubelet, space)
    async with storage(kube, space, claimed=False):
        await kube.create(TRAINING_RUNS, training_run(space))

        async def stalled() -> str:
            conditions = (await players.run()).get("status", {}).get("conditions", ())
            found = [each for each in conditions if each["type"] == "Stalled" and each["status"] == "True"]
            return f"{found[0]['reason']}: {found[0]['message']}" if found else ""

        text = await until(stalled)
        assert text.startswith("MissingObject: ")
        assert "PersistentVolumeClaim runs" in text
        assert await players.children() == set()
        await kube.create(PERSISTENT_VOLUME_CLAIMS, claim(space))
        await players.phase("Starting", 15)
        assert await stalled() == ""
        await until(lambda: _has(players, "jobs"), 10)


async def test_a_status_is_written_at_most_once_a_second(
    kube: Kube,
    control_plane: Cluster,
    space: str,
    running: OperatorProcess,
    players: Players,
    fake_kubelet: FakeKubelet,
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space))
    await players.prepared()
    await players.head(1)
    await players.steps(1, 1)
    name = f"{RUN}-trainer-1-0"
    with control_plane.audit() as audit:
        began = time.monotonic()
        for number in range(40):
            players.says = report(1, 2 + number % 8)
            ready = {"type": "Ready", "status": "False" if number % 2 else "True"}
            fake_kubelet.set_status(space, name, {"conditions": [ready]})
            await asyncio.sleep(0.2)
        took = time.monotonic() - began
    writes = audit.writes(agent=AGENT).get(("patch", "trainingruns/status"), 0)
    assert writes <= took + 1
    with control_plane.audit() as quiet:
        for number in range(12):
            players.says = report(1, 2 + number % 8)
            await asyncio.sleep(0.5)
    # Progress alone: every 30 s.
    assert quiet.writes(agent=AGENT).get(("patch", "trainingruns/status"), 0) <= 2
