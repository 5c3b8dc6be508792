"""TrainingRuns whose pods the real KubeRay makes, on a real API server; what runs in the pods is played."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.kube import PODS, RAY_CLUSTERS, TRAINING_RUNS, Kube
from tests.cluster import kuberay
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.machine import Unavailable
from tests.integration.operator.run_world import RUN, Players, report, storage, training_run
from tests.integration.operator.world import FakeBroker, OperatorProcess, find, until

pytestmark = pytest.mark.timeout(300)
TRAINERS = "agentfly.dev/role=trainer"
TWO = {"nodes": 2}
Obj = dict[str, Any]


@pytest.fixture(scope="module")
def rays(control_plane: Cluster) -> Iterator[None]:
    """KubeRay's kinds; gone afterwards, so that runs of other modules do not find them."""
    try:
        with kuberay.defined(control_plane):
            yield
    except Unavailable as error:
        pytest.skip(f"KubeRay: {error.render()}")


@pytest.fixture
def ray(control_plane: Cluster, rays: None, tmp_path: Path, space: str) -> Iterator[Path]:
    with kuberay.running(control_plane, tmp_path, [space]) as log:
        yield log


class RayPlayers(Players):
    """The pods of one run are made by KubeRay."""

    def __init__(self, kube: Kube, kubelet: FakeKubelet, space: str) -> None:
        super().__init__(kube, kubelet, space)
        self.kube = kube
        self.space = space

    async def pods(self, attempt: int | None = None) -> list[Obj]:
        labels = TRAINERS if attempt is None else f"{TRAINERS},agentfly.dev/attempt={attempt}"
        return await self.kube.list(PODS, self.space, labels=labels)

    async def head(self, attempt: int, *, answers: bool = True) -> Obj:
        """The head of an attempt, once all its pods run."""

        async def both() -> Obj | None:
            found = await self.pods(attempt)
            runs = [each for each in found if each.get("status", {}).get("phase") == "Running"]
            heads = [each for each in runs if each["metadata"]["labels"].get("agentfly.dev/index") == "0"]
            return heads[0] if len(runs) == 2 and heads else None

        found: Obj = await until(both, 60, lambda: "not both pods run")
        if answers:
            await self._answer(found["status"]["podIP"])
        return found

    async def nothing_left(self, within_s: float = 90.0) -> None:
        """The garbage collector hears late of new kinds."""

        async def none() -> bool:
            clusters = await self.kube.list(RAY_CLUSTERS, self.space)
            return not clusters and not await self.children()

        await until(none, within_s)


@pytest.fixture
async def players(
    kube: Kube, space: str, broker: FakeBroker, fake_kubelet: FakeKubelet, running: OperatorProcess
) -> AsyncIterator[RayPlayers]:
    broker.serves(f"{RUN}-policy", ready=1, leased=0, min=1, max=1)
    made = RayPlayers(kube, fake_kubelet, space)
    async with storage(kube, space):
        await running.leads(120.0)
        yield made
        await made.close()


async def test_a_run_by_kuberay_from_apply_to_its_end(
    kube: Kube, space: str, ray: Path, running: OperatorProcess, players: RayPlayers
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer=TWO))
    await players.prepared()
    head = await players.head(1)
    cluster = await kube.get(RAY_CLUSTERS, f"{RUN}-trainer-1", space)
    assert head["metadata"]["ownerReferences"][0]["uid"] == cluster["metadata"]["uid"]
    status = await players.steps(1, 1)
    assert status["engine"]["kind"] == "KubeRay"
    assert status["engine"]["head"] == head["metadata"]["uid"]
    assert status["roles"]["trainer"] == {"desired": 2, "ready": 2}
    # What KubeRay made of our templates is what we would have made.
    (other,) = [each for each in await players.pods() if each["metadata"]["uid"] != head["metadata"]["uid"]]
    for pod, module in ((head, "head"), (other, "node")):
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["python3", "-m", f"agentfly.launch.{module}"]
        assert container.get("args") in (None, [])
        assert container["livenessProbe"]["exec"]["command"] == ["true"]
        assert container["readinessProbe"]["exec"]["command"] == ["true"]
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 930
        assert [mount["mountPath"] for mount in container["volumeMounts"]].count("/dev/shm") == 1
    assert head["spec"]["hostname"] == f"{RUN}-trainer-1-0"
    assert "initContainers" not in head["spec"]
    # KubeRay's own wait would get no answer: it is a script of bash, which reads our file first.
    (waits,) = other["spec"]["initContainers"]
    assert waits["command"][0] == "/bin/bash"
    assert "ray health-check" in waits["args"][0]
    assert {"name": "BASH_ENV", "value": "/agentfly/launch/kuberay.sh"} in waits["env"]
    assert "/agentfly/launch" in [mount["mountPath"] for mount in waits["volumeMounts"]]
    assert waits["securityContext"] == other["spec"]["containers"][0]["securityContext"]
    assert await running.figure('agentfly_operator_optional_api_available{api="rayclusters.ray.io"}') == 1

    players.ends(head, report(1, 10, 10, phase="Ended", exit_code=0))
    status = await players.phase("Succeeded")
    assert (status["progress"]["step"], status["restarts"], status["attempt"]) == (10, 0, 1)
    await players.nothing_left()


async def test_a_head_that_is_lost_is_followed_by_another_attempt_and_by_no_other_head(
    kube: Kube, space: str, ray: Path, running: OperatorProcess, players: RayPlayers
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer=TWO))
    await players.prepared()
    head = await players.head(1)
    await players.steps(1, 3, 2)
    await kube.delete(PODS, head["metadata"]["name"], space, grace_s=0)
    status = await players.phase("Restarting")
    assert (status["lastFailure"]["reason"], status["lastFailure"]["attempt"]) == ("PodLost", 1)
    assert status["lastFailure"]["podName"] == head["metadata"]["name"]
    began = time.monotonic()
    second = await players.head(2)
    assert time.monotonic() - began >= 8
    assert [each for each in await players.pods(1)] == []
    assert second["metadata"]["labels"]["ray.io/cluster"] == f"{RUN}-trainer-2"
    status = await players.steps(2, 4, 2)
    assert (status["attempt"], status["restarts"], status["resumedStep"]) == (2, 1, 2)
    assert status["engine"]["head"] == second["metadata"]["uid"]
    assert await find(kube, RAY_CLUSTERS, f"{RUN}-trainer-1", space) is None


async def test_last_words_are_kept_though_kuberay_removes_who_said_them(
    kube: Kube, space: str, ray: Path, running: OperatorProcess, players: RayPlayers
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer=TWO))
    await players.prepared()
    head = await players.head(1)
    await players.steps(1, 1)
    players.ends(head, None, code=137, reason="OOMKilled")
    status = await players.phase("Restarting")
    assert status["lastFailure"]["reason"] == "OutOfMemory"
    assert status["lastFailure"]["podName"] == head["metadata"]["name"]


async def test_a_run_by_kuberay_is_suspended_with_a_checkpoint(
    kube: Kube, space: str, ray: Path, running: OperatorProcess, players: RayPlayers
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer=TWO))
    await players.prepared()
    head = await players.head(1)
    await players.steps(1, 3)
    await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": True}}, space)

    async def asked() -> bool:
        found = await kube.get(PODS, head["metadata"]["name"], space)
        return bool(found["metadata"].get("annotations", {}).get("agentfly.dev/suspend") == "true")

    await until(asked, 15)
    await players.phase("Suspending")
    assert await find(kube, RAY_CLUSTERS, f"{RUN}-trainer-1", space) is not None
    players.ends(head, report(1, 4, 4, phase="Ended", exit_code=85, suspended=True))
    status = await players.phase("Suspended", 90)
    assert (status["checkpoint"]["latestStep"], status["restarts"]) == (4, 0)
    assert await players.pods() == []
    assert await kube.list(RAY_CLUSTERS, space) == []
    await kube.patch(TRAINING_RUNS, RUN, {"spec": {"suspend": False}}, space)
    await players.head(2)
    assert (await players.steps(2, 5, 4))["attempt"] == 2


async def test_a_run_that_is_deleted_takes_its_cluster_with_it(
    kube: Kube, space: str, ray: Path, running: OperatorProcess, players: RayPlayers
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer=TWO))
    await players.prepared()
    await players.head(1)
    await players.steps(1, 1)
    await kube.delete(TRAINING_RUNS, RUN, space, propagation="Background")
    await players.nothing_left()
