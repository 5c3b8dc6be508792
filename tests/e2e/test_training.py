"""TrainingRuns on the real node, with real verl, real vLLM and real sandboxes; the policy is tiny.

One run goes from its manifest to its end. Another one is suspended twice on its way, and each time goes on
with another number of trainer pods. A third one's pods are made by the real KubeRay.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentfly.local import environments
from tests.cluster import kuberay, product
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.demo import image, storage
from tests.cluster.machine import Unavailable
from tests.e2e.objects import apply
from tests.e2e.runs import EXAMPLES, Work, example, lines, shell
from tests.e2e.world import World, install

CLAIM = "runs"
STEPS, MOVED, RAYS = 6, 12, 3
SMALL: dict[str, Any] = {"tasksPerStep": 4, "rollout": {"groupSize": 4}}
PREPARED_S = 400.0  # half a minute of one core makes the model, on a machine that may have other work
STARTED_S = 400.0  # vLLM, Ray and verl
STEP_S = 120.0
GONE_S = 120.0

pytestmark = pytest.mark.timeout(2400)


@dataclass
class Place:
    """A namespace with a pool of sandboxes, a claim and the quickstart's folder."""

    world: World
    claim: Path

    def run(self, name: str, **spec: Any) -> Work:
        """Applies the example's run under a name, with changes."""
        manifest = example("training.yaml", **spec)
        manifest["metadata"]["name"] = name
        apply(self.world, manifest)
        return Work(self.world, "trainingruns", name)

    def folder(self, run: Work, name: str) -> Path:
        """What the pods of a run wrote."""
        return self.claim / "runs" / f"{name}-{run.uid[:8]}"

    def steps(self, run: Work, name: str) -> list[int]:
        """The steps that are done, in the order in which they were."""
        return [each["step"] for each in lines(self.folder(run, name) / "metrics.jsonl")]

    def ray_clusters(self) -> list[str]:
        """The uids of all in the namespace."""
        path = f"/apis/ray.io/v1/namespaces/{self.world.namespace}/rayclusters"
        return [each["metadata"]["uid"] for each in self.world.cluster.api.get(path)["items"]]


@pytest.fixture(scope="module")
def place(product_node: Cluster) -> Iterator[Place]:
    missing = [name for name in ("inference", "trainer") if environments.find(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} environment: is not built: make setup")
    namespace = f"train-{secrets.token_hex(3)}"
    try:
        homes = {role: storage.environment(role) for role in ("inference", "trainer")}
        base = product.agentfly_image()
        product_node.import_image(*(image.role_image(role, base) for role in homes))
    except Unavailable as error:
        pytest.skip(error.render())
    with install(product_node, namespace) as world:
        claim = storage.provide(product_node, namespace, CLAIM, homes)
        here = ("-n", namespace)
        try:
            product_node.kubectl("apply", "-k", str(EXAMPLES / "quickstart"), *here)
            product_node.kubectl("apply", "-f", str(EXAMPLES / "cluster/runs.yaml"), *here)
            apply(world, shell(members=4))
            yield Place(world, claim)
        finally:
            storage.withdraw(product_node, namespace, CLAIM)


@pytest.fixture(scope="module")
def trained(place: Place) -> Work:
    """The run `whole`, at its end."""
    run = place.run("whole", steps=STEPS, checkpoint={"everySteps": 4}, **SMALL)
    run.until("prepared", lambda status: status.get("attempt", 0) == 1, PREPARED_S)
    run.phase("Running", STARTED_S)
    run.phase("Succeeded", STEPS * STEP_S)
    return run


def test_a_run_comes_from_its_manifest_to_its_end(place: Place, trained: Work) -> None:
    status = trained.status
    assert place.steps(trained, "whole") == [1, 2, 3, 4, 5, 6]
    assert (status["progress"]["step"], status["progress"]["totalSteps"]) == (STEPS, STEPS)
    assert float(status["progress"]["metrics"]["reward"]) >= 0
    assert (status["attempt"], status["restarts"], status["failures"]) == (1, 0, 0)
    assert status["checkpoint"]["latestStep"] == STEPS
    assert "lastFailure" not in status
    true = {each["type"] for each in status["conditions"] if each["status"] == "True"}
    assert true == {"Succeeded", "Finished", "Checkpointed"}
    assert status["observedGeneration"] == 1


def test_at_its_end_nothing_of_it_is_left_but_what_it_wrote(place: Place, trained: Work) -> None:
    wait("children of the run", lambda: not trained.children(), GONE_S, every_s=0.5)
    assert place.world.cluster.kubectl("get", "pvc", CLAIM, "-o", "name", "-n", place.world.namespace)
    folder = place.folder(trained, "whole")
    assert list(folder.glob("checkpoints/global_step_6/actor/*rank_0*"))
    rollouts = [row for file in folder.glob("trajectories/*.jsonl") for row in lines(file)]
    assert len(rollouts) >= STEPS * SMALL["tasksPerStep"] * SMALL["rollout"]["groupSize"]


def test_the_sandboxes_are_free_again(place: Place, trained: Work) -> None:
    def free() -> bool:
        members = place.world.status("shell").get("members", {})
        return (members.get("free"), members.get("leased", 0)) == (4, 0)

    wait("all sandboxes free", free, GONE_S, every_s=0.5)


def test_a_run_is_suspended_and_goes_on_with_other_numbers_of_pods(place: Place, trained: Work) -> None:
    model = f"/agentfly-cache/runs/whole-{trained.uid[:8]}/model"
    run = place.run("moved", steps=MOVED, model={"path": model}, checkpoint={"everySteps": 20}, **SMALL)

    def suspended(before: int) -> int:
        """Suspends it after a step; the step of its checkpoint."""
        reached = run.until(
            f"a step after {before}", lambda now: now.get("progress", {}).get("step", 0) > before, STARTED_S
        )["progress"]["step"]
        run.patch(suspend=True)
        status = run.phase("Suspended", 2 * STEP_S)
        assert run.condition("Suspended")["status"] == run.condition("Checkpointed")["status"] == "True"
        wait("its pods", lambda: not (run.pods("trainer") or policy()), GONE_S, every_s=0.5)
        saved = int(status["checkpoint"]["latestStep"])
        assert saved >= reached
        assert (status["failures"], status["restarts"]) == (0, 0)
        return saved

    def policy() -> dict[str, Any]:
        return place.world.pods("agentfly.dev/pool=moved-policy")

    first = suspended(0)
    run.patch(suspend=False, trainer={"nodes": 2})
    run.until("two pods", lambda _: len(run.pods("trainer")) == 2, STARTED_S)
    second = suspended(first)
    assert run.status["checkpoint"]["ranks"] == 2
    run.patch(suspend=False, trainer={"nodes": 1})
    status = run.phase("Succeeded", STARTED_S + MOVED * STEP_S)
    assert first < second < MOVED
    assert place.steps(run, "moved") == list(range(1, MOVED + 1))
    assert (status["attempt"], status["restarts"], status["progress"]["step"]) == (3, 0, MOVED)


@pytest.fixture
def ray(place: Place, tmp_path: Path) -> Iterator[None]:
    """KubeRay for the place's namespace."""
    try:
        with (
            kuberay.defined(place.world.cluster),
            kuberay.running(place.world.cluster, tmp_path, [place.world.namespace]),
        ):
            yield
    except Unavailable as error:
        pytest.skip(f"KubeRay: {error.render()}")


def test_a_run_whose_pods_kuberay_makes_comes_to_its_end(place: Place, trained: Work, ray: None) -> None:
    model = f"/agentfly-cache/runs/whole-{trained.uid[:8]}/model"
    trainer = {"engine": "KubeRay", "nodes": 2}
    run = place.run("rays", steps=RAYS, model={"path": model}, trainer=trainer, **SMALL)
    run.phase("Running", STARTED_S)
    (cluster,) = place.ray_clusters()
    owners = [pod["metadata"]["ownerReferences"][0]["uid"] for pod in run.pods("trainer").values()]
    assert owners == [cluster, cluster]
    status = run.phase("Succeeded", RAYS * STEP_S)
    assert status["engine"]["kind"] == "KubeRay"
    assert place.steps(run, "rays") == [1, 2, 3]
    assert (status["attempt"], status["restarts"], status["failures"]) == (1, 0, 0)
    wait("its RayCluster and pods", lambda: not (place.ray_clusters() or run.children()), GONE_S, every_s=0.5)
