"""`make e2e`: the quickstart's TrainingRun on a cluster made for it, from `kubectl apply` to Succeeded.

Guarantees:
1. The manifests are those of `manifests/base` and `examples/cluster`, with nothing changed but the image of
   the sandboxes, since there is no registry, and how many steps the run has if that is asked for.
2. It succeeds if the run does, and its policy has learned: the mean reward of the last five steps is higher
   than that of the first five by ``LEARNED``.
3. It tells how long the run took to its first step; if it is suspended on its way, also how long that took,
   until nothing of it was left, and to its next step.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from agentfly.api import TrainingRunStatus
from agentfly.local.view import training_summary
from agentfly.observe.curve import first_and_last
from agentfly.roles.plan import policy_name
from tests.cluster import images, product
from tests.cluster.cluster import Cluster
from tests.cluster.demo import command, image, storage
from tests.cluster.demo.scene import EXAMPLES, Say, Scene, short
from tests.cluster.demo.times import Times, until_true
from tests.cluster.machine import ClusterError, cache

NAMESPACE, CLAIM, RUN = "agents", "runs", "quickstart"
LEARNED = 0.2
FINISHED_S = 3600.0
FIRST_S = 1200.0  # a model is made, vLLM, Ray and verl start
SUSPENDED_S = 600.0  # the step that is being made, and a checkpoint
OWN = f"agentfly.dev/training-run={RUN}"
TRAINERS = f"{OWN},agentfly.dev/role=trainer"
SERVERS = f"agentfly.dev/pool={policy_name(RUN)}"


class Training(Scene):
    """The run in a cluster that has the images. ``say`` is told every line for people."""

    def __init__(self, cluster: Cluster, say: Say) -> None:
        super().__init__(cluster, NAMESPACE, "trun", say)
        self.times = Times()

    def run(
        self, homes: Mapping[image.Role, Path], steps: int | None, pause_after: int | None = None
    ) -> tuple[TrainingRunStatus, list[Any]]:
        """Its last status, and the records of its steps.

        Args:
            steps: instead of the manifest's.
            pause_after: so many steps it is suspended, and goes on once nothing of it is left.

        Raises:
            ClusterError: it does not come to an end in time.
        """
        claim = storage.provide(self._cluster, NAMESPACE, CLAIM, homes)
        self._install()
        self._operator()
        made = yaml.safe_load_all(self._cluster.kubectl("kustomize", str(EXAMPLES)))
        self._put(f"-k {short(EXAMPLES)}", [self._changed(each, steps) for each in made])
        self._begin()
        if pause_after is not None:
            self._pause(pause_after)
        self._until(f"trainingrun {RUN}", self._finished, FINISHED_S)
        self._show()
        self._say(f"it took: {self.times}")
        if not self._is("Succeeded"):
            raise ClusterError(f"trainingrun {RUN}: did not succeed: {self._found()['status']}")
        folder = claim / "runs" / f"{RUN}-{self._found()['metadata']['uid'][:8]}"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return TrainingRunStatus.model_validate(self._found()["status"]), [json.loads(each) for each in lines]

    def _begin(self) -> None:
        """Until the first step."""
        self._until("the first step", lambda: self._is("Running") or self._finished(), FIRST_S)
        found = self._found()
        self.times = Times(until_true(found, "RolesReady"), until_true(found, "Running"))

    def _pause(self, after: int) -> None:
        """Suspend it after so many steps, and let it go on once nothing of it is left."""
        self._until(f"step {after}", lambda: self._step() >= after or self._finished(), FINISHED_S)
        if self._finished():
            return
        asked = self._suspend(True)
        self._until("suspended", lambda: self._is("Suspended"), SUSPENDED_S)
        self.times = replace(self.times, suspended=until_true(self._found(), "Suspended", asked))
        self._until("nothing is left", self._nothing_left, SUSPENDED_S)
        self.times = replace(self.times, released=(_now() - asked).total_seconds())
        asked = self._suspend(False)
        self._until("the next step", lambda: self._is("Running") or self._finished(), FIRST_S)
        self.times = replace(self.times, next_step=until_true(self._found(), "Running", asked))

    def _suspend(self, suspend: bool) -> datetime:
        """Change its spec; when that was done."""
        patch = json.dumps({"spec": {"suspend": suspend}})
        self._type("patch", "trainingrun", RUN, "--type=merge", "-p", patch, *self._here)
        return _now()

    def _nothing_left(self) -> bool:
        pools = self._get("resourcepools", "-l", OWN)
        return not (pools or self._get("pods", "-l", TRAINERS) or self._get("pods", "-l", SERVERS))

    def _step(self) -> int:
        return int(self._found().get("status", {}).get("progress", {}).get("step", 0))

    def _changed(self, document: dict[str, Any], steps: int | None) -> dict[str, Any]:
        if document["kind"] == "ResourcePool":
            document["spec"]["container"]["image"] = images.PYTHON
        if document["kind"] == "TrainingRun" and steps is not None:
            document["spec"]["steps"] = steps
        return document

    def _finished(self) -> bool:
        return self._is("Finished")

    def _is(self, condition: str) -> bool:
        conditions = self._found().get("status", {}).get("conditions", ())
        return any(each["type"] == condition and each["status"] == "True" for each in conditions)

    def _found(self) -> dict[str, Any]:
        (found,) = self._get("trainingruns")
        return found


def _now() -> datetime:
    return datetime.now(UTC)


def archives(homes: Mapping[image.Role, Path]) -> list[Path]:
    """The images that the run needs: operator, broker, sandboxes, vLLM and verl.

    Raises:
        Unavailable, ClusterError: one cannot be made here.
    """
    agentfly = product.agentfly_image()
    roles = [image.role_image(role, agentfly) for role in homes]
    return [images.python(), agentfly, product.sandboxd_image(), *roles]


def environments() -> dict[image.Role, Path]:
    """The environments of this machine that its pods use.

    Raises:
        Unavailable: there is none that fits.
    """
    return {role: storage.environment(role) for role in ("inference", "trainer")}


def main(arguments: list[str]) -> int:
    """Plays it and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.demo.training", description=__doc__)
    command.flags(parser, cache() / "training-run")
    parser.add_argument("--steps", type=int, help="of the run, instead of the manifest's")
    parser.add_argument("--pause-after", type=int, help="so many steps it is suspended, and goes on then")
    options = parser.parse_args(arguments)
    return command.status_of(
        lambda: _train(options.dir, options.steps, options.pause_after, keep=options.keep)
    )


def _train(folder: Path, steps: int | None, pause_after: int | None, *, keep: bool) -> int:
    cluster, say, homes = Cluster(folder), command.Teller(), environments()
    say("the images of operator, broker, sandboxes, vLLM and verl")
    with command.a_cluster(cluster, archives(homes), keep, say):
        status, records = Training(cluster, say).run(homes, steps, pause_after)
    first, last = first_and_last([float(record["reward"]) for record in records])
    sys.stdout.write(f"{training_summary('e2e', status, records)}\n")
    if last - first < LEARNED:
        sys.stderr.write(f"e2e: the reward rose by {last - first:.3f}, less than {LEARNED}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
