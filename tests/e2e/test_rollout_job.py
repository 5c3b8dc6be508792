"""A RolloutJob on the real node: workers are lost and scaled while it runs, and no rollout with them.

Its policy is scripted and knows its task; operator, broker, sandboxes and workers are the product's.
"""

import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentfly.local import environments
from tests.cluster import product
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.cluster.demo import image, scripted, storage
from tests.cluster.machine import Unavailable
from tests.e2e.objects import apply
from tests.e2e.runs import EXAMPLES, Work, example, lines, shell
from tests.e2e.test_demo import TOKENIZER, TOKENIZER_S
from tests.e2e.world import World, install

NAMESPACE, CLAIM, NAME = "rollouts", "runs", "look"
TASKS, GROUP = 500, 1
SHARD = 20
STARTED_S = 300.0
MOVED_S = 120.0
DONE_S = 900.0
GONE_S = 120.0

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Played:
    """A job at its end, and its results on the claim."""

    world: World
    job: Work
    folder: Path
    seen: Counter[str]


@pytest.fixture(scope="module")
def world(product_node: Cluster) -> Iterator[World]:
    """A namespace with sandboxes, a claim with a policy on it, and the agent."""
    if environments.find("inference") is None:
        pytest.skip("inference environment: is not built: make setup")
    try:
        home = storage.environment("inference")
        archive = image.role_image("inference", product.agentfly_image(), scripted.files(image.SITE))
        product_node.import_image(archive)
    except Unavailable as error:
        pytest.skip(error.render())
    with install(product_node, NAMESPACE) as world:
        top = storage.provide(product_node, NAMESPACE, CLAIM, {"inference": home})
        (top / "policy").mkdir()
        python = str(home / "bin" / "python")
        subprocess.run([python, "-c", TOKENIZER, str(top / "policy")], check=True, timeout=TOKENIZER_S)
        try:
            product_node.kubectl("apply", "-k", str(EXAMPLES / "quickstart"), "-n", NAMESPACE)
            product_node.kubectl("apply", "-f", str(EXAMPLES / "cluster/runs.yaml"), "-n", NAMESPACE)
            apply(world, shell(members=6))
            yield world
        finally:
            storage.withdraw(product_node, NAMESPACE, CLAIM)


@pytest.fixture(scope="module")
def played(world: World) -> Played:
    """The job, two of whose workers were deleted, and which was scaled from 3 to 1 to 4, at its end."""
    apply(
        world,
        example(
            "rolloutjob.yaml",
            model={"path": "/agentfly-cache/policy"},
            limit=TASKS,
            rollout={"groupSize": GROUP},
            workers={"count": 3, "tasksPerShard": SHARD},
        ),
    )
    job, seen = Work(world, "rolloutjobs", NAME), Counter[str]()

    def at_work() -> dict[str, Any]:
        pods = job.pods("worker").items()
        return {
            name: pod
            for name, pod in pods
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def workers(number: int) -> None:
        wait(f"{number} workers", lambda: len(at_work()) == number, MOVED_S, every_s=0.3)
        seen[str(number)] += 1

    def lose() -> None:
        wait("a worker", lambda: bool(at_work()), MOVED_S, every_s=0.1)
        there = at_work()
        name = max(there, key=lambda each: str(there[each]["status"]["startTime"]))
        world.cluster.kubectl("delete", "pod", name, "-n", NAMESPACE, "--wait=false")
        seen["lost"] += 1

    def scale(number: int) -> None:
        world.cluster.kubectl("scale", f"rjob/{NAME}", f"--replicas={number}", "-n", NAMESPACE)

    def shards(number: int) -> None:
        done = lambda status: status.get("shards", {}).get("done", 0) >= number  # noqa: E731
        job.until(f"{number} shards", done, DONE_S)

    job.phase("Running", STARTED_S)
    workers(3)
    lose()
    shards(1)
    scale(1)
    workers(1)
    lose()
    shards(3)
    scale(4)
    workers(4)
    job.phase("Succeeded", DONE_S)
    folder = storage.folder(world.cluster, NAMESPACE, CLAIM) / "runs" / f"{NAME}-{job.uid[:8]}"
    return Played(world, job, folder, seen)


def test_every_rollout_is_in_the_results_exactly_once(played: Played) -> None:
    rows = [row for file in played.folder.glob("results/*.jsonl") for row in lines(file)]
    ids = Counter(row["rollout_id"] for row in rows)
    assert len(ids) == TASKS * GROUP
    assert set(ids.values()) == {1}
    assert {row["outcome"]["type"] for row in rows} == {"scored"}
    assert played.seen == {"3": 1, "1": 1, "4": 1, "lost": 2}


def test_the_status_counts_them(played: Played) -> None:
    status = played.job.status
    assert status["tasks"] == {"total": TASKS * GROUP, "scored": TASKS * GROUP, "masked": 0, "failed": 0}
    assert float(status["reward"]["mean"]) == 1.0
    assert status["shards"]["done"] == status["shards"]["total"] == TASKS // SHARD
    assert status["path"] == f"runs/{played.folder.name}/results"
    assert status.get("workers", 0) == 0


def test_at_its_end_nothing_of_it_is_left_but_its_results(played: Played) -> None:
    wait("children of the job", lambda: not played.job.children(), GONE_S, every_s=0.5)
    assert played.world.cluster.kubectl("get", "pvc", CLAIM, "-o", "name", "-n", NAMESPACE)


def test_the_sandboxes_are_free_again(played: Played) -> None:
    def free() -> bool:
        members = played.world.status("shell").get("members", {})
        return (members.get("free"), members.get("leased", 0)) == (6, 0)

    wait("all sandboxes free", free, GONE_S, every_s=0.5)
