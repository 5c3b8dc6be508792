"""The demo on a cluster that is up: what a user of his own cluster types, and what is counted meanwhile.

Guarantees:
1. The manifests are those of `examples/cluster` and `manifests/base`, and the agent is the quickstart's, with
   nothing changed but what `Play` names.
2. Everything that is waited for has a deadline; what failed is told with the words of the pod that failed.
3. Figures are read when nothing moves any more: all sandboxes free again.
"""

import base64
import functools
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentfly.broker.access import HEADER
from agentfly.broker.config import SERVICE
from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.demo import storage
from tests.cluster.demo.figures import (
    Event,
    Figures,
    broker_writes,
    metric,
    pods_created,
    summary,
    tool_requests,
)
from tests.cluster.demo.scene import AGENT, EXAMPLES, Say, Scene, short
from tests.cluster.machine import ClusterError

GROUP = 4
"""Rollouts of each task, as the quickstart's rollout.yaml has it."""
POOL = "shell"
CONCURRENCY = "--set=rollout.concurrency="
MODEL_S = 900.0  # a minute of one core, on a machine that may have other work
READY_S = 900.0
ROLLOUTS_S = 1200.0
QUIET_S = 60.0
ANSWER_S = 10.0


@dataclass(frozen=True)
class Play:
    """What differs from the examples.

    Attributes:
        namespace: where it is played; made, and deleted with the cluster.
        rollouts: a multiple of ``GROUP``.
        sandboxes: members of the pool, all kept warm.
        makes_model: whether the Job that makes the policy runs; else it is on the claim already.
    """

    namespace: str = "agents"
    rollouts: int = 200
    sandboxes: int = 8
    makes_model: bool = True


@dataclass(frozen=True)
class Seen:
    """What came of it: figures, and the requests to the API server that were made while rollouts ran."""

    figures: Figures
    requests: list[dict[str, Any]]
    workers: tuple[str, ...]


class Stage(Scene):
    """A demo in one namespace of a cluster, which has the images. ``say`` is told every line for people."""

    def __init__(self, cluster: Cluster, play: Play, say: Say) -> None:
        super().__init__(cluster, play.namespace, "rpool", say)
        self._play = play

    def run(self, environment: Path) -> Seen:
        """Plays it to the end.

        Args:
            environment: the inference environment of this machine.

        Raises:
            ClusterError: a part does not come up, or fails.
        """
        with self._cluster.audit() as everything:
            storage.provide(self._cluster, self._play.namespace, "models", {"inference": environment})
            self._install()
            self._type("create", "configmap", "quickstart", f"--from-file={short(AGENT)}", *self._here)
            self._operator()
            self._pools()
            with self._cluster.audit() as rollouts:
                self._rollouts()
                self._quiet()
        workers = self._workers()
        return Seen(self._figures(everything.events, rollouts.events, workers), rollouts.events, workers)

    def _pools(self) -> None:
        self._apply("shell.yaml", self._pool)
        self._apply("model.yaml", _without(() if self._play.makes_model else ("Job",)))
        if self._play.makes_model:
            self._job("quickstart-model", MODEL_S)
        self._apply("policy.yaml", self._pool)
        self._say("$ kubectl wait --for=condition=Ready rpool --all" + self._where)
        self._until("pools", self._ready, READY_S)
        self._show()

    def _rollouts(self) -> None:
        self._apply("rollouts.yaml", self._job_of)
        self._job("quickstart", ROLLOUTS_S)

    def _quiet(self) -> None:
        """Until the last sandbox is reset."""

        def free() -> bool:
            members = functools.partial(metric, self._metrics(), "agentfly_pool_members", pool=POOL)
            return members(state="leased") == 0 and members(state="ready") == self._play.sandboxes

        self._until("sandboxes that are all free again", free, QUIET_S)

    def _figures(
        self, everything: Sequence[Event], rollouts: Sequence[Event], workers: tuple[str, ...]
    ) -> Figures:
        namespace, text = self._play.namespace, self._metrics()
        log = self._cluster.kubectl("logs", "job/quickstart", *self._here)
        total, scored, reward = summary(log)
        verified = metric(text, "agentfly_reset_seconds_count", pool=POOL)
        return Figures(
            rollouts=total,
            scored=scored,
            reward=reward,
            pods=pods_created(everything, POOL, namespace),
            acquires=metric(text, "agentfly_acquire_seconds_count", pool=POOL),
            warm=metric(text, "agentfly_acquire_seconds_count", pool=POOL, warm="true"),
            resets=verified + metric(text, "agentfly_resets_failed_total", pool=POOL),
            verified=verified,
            tool_requests=len(tool_requests(rollouts, namespace, workers)),
            writes=len(broker_writes(rollouts, namespace)),
        )

    def _pool(self, document: dict[str, Any]) -> dict[str, Any]:
        if document["metadata"]["name"] == POOL:
            document["spec"]["container"]["image"] = images.PYTHON
            document["spec"]["capacity"] = {"min": self._play.sandboxes, "max": self._play.sandboxes}
        return document

    def _job_of(self, document: dict[str, Any]) -> dict[str, Any]:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        words = [word for word in container["command"] if not word.startswith(("--set=limit=", CONCURRENCY))]
        tasks = f"--set=limit={self._play.rollouts // GROUP}"
        container["command"] = [*words, tasks, f"{CONCURRENCY}{self._play.sandboxes // 2}"]
        return document

    def _ready(self) -> bool:
        found = self._get("resourcepools")
        states = [
            {each["type"]: each["status"] for each in pool.get("status", {}).get("conditions", ())}
            for pool in found
        ]
        full = [pool for pool in found if pool["metadata"]["name"] == POOL]
        members = full[0].get("status", {}).get("members", {}) if full else {}
        return all(state.get("Ready") == "True" for state in states) and (
            members.get("free") == self._play.sandboxes
        )

    def _job(self, name: str, within_s: float) -> None:
        """Until a Job is complete.

        Raises:
            ClusterError: it failed.
        """

        def done() -> bool:
            (job,) = (each for each in self._get("jobs") if each["metadata"]["name"] == name)
            states = {each["type"]: each["status"] for each in job.get("status", {}).get("conditions", ())}
            if states.get("Failed") == "True":
                raise ClusterError(f"job {name}: failed: {self._last_words(name)}")
            return states.get("Complete") == "True"

        self._say(f"$ kubectl wait --for=condition=Complete job/{name}{self._where}")
        self._until(f"job {name}", done, within_s)

    def _metrics(self) -> str:
        """The broker's, as its monitoring reads them: by its pod, with the clients' token."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/metrics", headers={HEADER: self._token}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    @functools.cached_property
    def _port(self) -> int:
        (broker,) = self._get("pods", "-l", "agentfly.dev/component=broker")
        return self._cluster.open_port(f"{broker['status']['podIP']}:7080", broker["spec"]["nodeName"])

    @functools.cached_property
    def _token(self) -> str:
        (secret,) = (each for each in self._get("secrets") if each["metadata"]["name"] == f"{SERVICE}-client")
        return base64.b64decode(secret["data"]["client-token"]).decode()

    def _workers(self) -> tuple[str, ...]:
        pods = self._get("pods", "-l", "agentfly.dev/component=worker")
        addresses = tuple(pod["status"]["podIP"] for pod in pods if "podIP" in pod["status"])
        if not addresses:
            raise ClusterError("worker: its pod has no address, by which its requests would be counted")
        return addresses

    def _last_words(self, job: str) -> str:
        return self._cluster.kubectl("logs", f"job/{job}", "--tail=20", *self._here, check=False).strip()

    def _apply(self, file: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        documents = [change(each) for each in yaml.safe_load_all((EXAMPLES / file).read_text())]
        self._put(f"-f {short(EXAMPLES / file)}", [each for each in documents if each is not None])


def _without(kinds: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return lambda document: None if document["kind"] in kinds else document
