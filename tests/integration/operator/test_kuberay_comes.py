"""KubeRay is installed, and taken away again, while the operator runs."""

import contextlib
from pathlib import Path

import pytest

from agentfly.kube import TRAINING_RUNS, Kube
from tests.cluster import kuberay
from tests.cluster.cluster import Cluster
from tests.cluster.machine import Unavailable
from tests.integration.operator.run_world import training_run
from tests.integration.operator.test_kuberay import TWO, RayPlayers, players
from tests.integration.operator.world import OperatorProcess, until

__all__ = ["players"]


@pytest.mark.timeout(600)
async def test_a_run_that_waits_for_kuberay_goes_on_when_it_is_installed(
    kube: Kube,
    control_plane: Cluster,
    space: str,
    tmp_path: Path,
    running: OperatorProcess,
    players: RayPlayers,
) -> None:
    await kube.create(TRAINING_RUNS, training_run(space, trainer={**TWO, "engine": "KubeRay"}))
    status = await players.phase("Pending", 90)
    stalled = next(each for each in status["conditions"] if each["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "KubeRayMissing")
    assert "CRD rayclusters.ray.io is not there: install KubeRay" in stalled["message"]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(kuberay.defined(control_plane))
        except Unavailable as error:
            pytest.skip(f"KubeRay: {error.render()}")
        stack.enter_context(kuberay.running(control_plane, tmp_path, [space]))
        await players.prepared()
        await players.head(1)
        assert (await players.steps(1, 1))["engine"]["kind"] == "KubeRay"

    # With its kinds its clusters are gone, and with those their pods: the attempt is over, and the run waits.
    async def waits() -> bool:
        found = (await players.run())["status"]["conditions"]
        return any(each["type"] == "Stalled" and each["reason"] == "KubeRayMissing" for each in found)

    await until(waits, 120)

    async def none() -> bool:
        return not await players.pods()

    await until(none, 60)
    status = (await players.run())["status"]
    assert (
        status["failures"] <= 1
    )  # of the first attempt, if its pods went before it was seen that they had to
    assert status["progress"]["step"] == 1
