"""What tests of runs and jobs ask of the cluster: their manifests, their status, what is left of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import images
from tests.cluster.api import wait
from tests.cluster.cluster import Cluster
from tests.e2e.world import World

Obj = dict[str, Any]
EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = "/apis/agentfly.dev/v1alpha1/namespaces/{}/{}"
OWNED = ("pods", "jobs", "resourcepools", "configmaps", "services", "networkpolicies")
TOLD = 30
"""Lines of a log that is shown when a run did not come to where it should."""


def example(file: str, **spec: Any) -> Obj:
    """A manifest of examples/cluster with fields of spec changed; blocks are merged."""
    (document,) = yaml.safe_load_all((EXAMPLES / "cluster" / file).read_text())
    found: Obj = _merged(document, {"spec": spec})
    return found


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def shell(members: int) -> Obj:
    """The example's pool of sandboxes, on an image that the test cluster has."""
    return example(
        "shell.yaml", container={"image": images.PYTHON}, capacity={"min": members, "max": members}
    )


class Work:
    """A TrainingRun or a RolloutJob in a cluster."""

    def __init__(self, world: World, kind: str, name: str) -> None:
        self._world, self._name = world, name
        self._path = f"{KINDS.format(world.namespace, kind)}/{name}"
        self._label = {"trainingruns": "training-run", "rolloutjobs": "rollout-job"}[kind]

    @property
    def uid(self) -> str:
        """Of this incarnation."""
        return str(self._cluster.api.get(self._path)["metadata"]["uid"])

    @property
    def status(self) -> Obj:
        """{} before there is one."""
        return dict(self._cluster.api.get(self._path).get("status") or {})

    def condition(self, kind: str) -> Obj:
        """{} before it has it."""
        return next((each for each in self.status.get("conditions", ()) if each["type"] == kind), {})

    def patch(self, **spec: Any) -> None:
        """Changes spec, as kubectl patch would."""
        text = json.dumps({"spec": spec})
        status, answer = self._cluster.api.call(
            "PATCH", self._path, json.loads(text), kind="application/merge-patch+json"
        )
        assert status == 200, answer

    def until(self, what: str, done: Callable[[Obj], bool], within_s: float) -> Obj:
        """Waits until a status is so; the status. A run that fails is not waited for any longer.

        Raises:
            AssertionError: it failed, or it is not so in time; with its status and its pods' last words.
        """

        def so() -> bool:
            status = self.status
            assert done(status) or status.get("phase") != "Failed", self.told()
            return done(status)

        try:
            wait(f"{self._name}: {what}", so, within_s, every_s=0.5)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{error}\n{self.told()}") from error
        return self.status

    def phase(self, name: str, within_s: float) -> Obj:
        """Waits for a phase; the status."""
        return self.until(name, lambda status: status.get("phase") == name, within_s)

    def children(self) -> list[str]:
        """Everything of it that is there, as kind/name; what the garbage collector still takes too."""
        selector = f"agentfly.dev/{self._label}={self._name}"
        return self._kubectl("get", ",".join(OWNED), "-l", selector, "-o", "name").split()

    def pods(self, role: str) -> dict[str, Obj]:
        """Its pods of a role by name, those that are being deleted too."""
        return self._world.pods(f"agentfly.dev/{self._label}={self._name},agentfly.dev/role={role}")

    def told(self) -> str:
        """Its status, its pods and their last words, for people."""
        pods = self._kubectl("get", "pods,rpool", "-o", "wide", check=False)
        selector = f"agentfly.dev/{self._label}={self._name}"
        words = self._kubectl("logs", "-l", selector, f"--tail={TOLD}", "--prefix", check=False)
        return f"{yaml.safe_dump(self.status)}\n{pods}\n{words}"

    def _kubectl(self, *words: str, check: bool = True) -> str:
        return self._cluster.kubectl(*words, "-n", self._world.namespace, check=check)

    @property
    def _cluster(self) -> Cluster:
        return self._world.cluster


def lines(file: Path) -> list[Obj]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
