"""What is so now: of a run or a job by its status, its pods and its files, of operator and broker by theirs.

Guarantees:
1. Objects are those that watches told of last; nothing is asked of the API server.
2. Files are read on from where they were read to; a line that is being written is read when it is whole.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from agentfly.training import checkpoints
from tests.cluster.api import Api
from tests.e2e.world import OPERATOR, SYSTEM, is_ready
from tests.kills.book import Object
from tests.kills.matrix import Part, Work
from tests.kills.observer import Observer
from tests.kills.verdict import Process, Seen

_KINDS = {Work.RUN: "TrainingRun", Work.CYCLE: "TrainingRun", Work.JOB: "RolloutJob"}
_OWNER = {"TrainingRun": "training-run", "RolloutJob": "rollout-job"}
_SHARD = "batch.kubernetes.io/job-completion-index"
_INDEX = {Part.HEAD: "0", Part.NODE: "1"}


def watched(api: Api, namespace: str, most: Mapping[str, int]) -> Observer:
    """An observer of all that is looked at."""
    agentfly = f"/apis/agentfly.dev/v1alpha1/namespaces/{namespace}"
    paths = {
        ("Pod", namespace): f"/api/v1/namespaces/{namespace}/pods",
        ("Pod", SYSTEM): f"/api/v1/namespaces/{SYSTEM}/pods",
        ("Lease", SYSTEM): f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases",
        ("Job", namespace): f"/apis/batch/v1/namespaces/{namespace}/jobs",
        ("ResourcePool", namespace): f"{agentfly}/resourcepools",
        ("TrainingRun", namespace): f"{agentfly}/trainingruns",
        ("RolloutJob", namespace): f"{agentfly}/rolloutjobs",
    }
    return Observer(api, paths, most)


class Lines:
    """The lines of files that grow, as objects."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, list[Any]]] = {}

    def of(self, path: Path) -> list[Any]:
        """All whole lines of a file; none if it is not there."""
        try:
            with path.open("rb") as file:
                at, found = self._known.get(path, (0, []))
                file.seek(at)
                text, _, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        if text:
            for line in text.splitlines():
                with contextlib.suppress(ValueError):  # of a writer that was killed
                    found.append(json.loads(line))
            self._known[path] = (at + len(text) + 1, found)
        return found


@dataclass
class Eyes:
    """Looks at one work after the other.

    Args:
        claim: the folder of the claim on which they are kept.
    """

    observer: Observer
    namespace: str
    claim: Path
    lines: Lines = field(default_factory=Lines)

    def seen(self, work: Work, name: str) -> Seen:
        """The work of this name, and what it depends on."""
        obj = self.object(work, name)
        status: Mapping[str, Any] = (obj or {}).get("status") or {}
        server = next((pod for pod in self._servers(name) if is_ready(dict(pod)) and not _goes(pod)), None)
        common = {
            "at": time.monotonic(),
            "phase": status.get("phase", ""),
            "server": "" if server is None else _uid(server),
            "pool": any(_name(pool) == f"{name}-policy" for pool in self.observer.of("ResourcePool")),
            "operator": self._process(Part.OPERATOR),
            "broker": self._process(Part.BROKER),
        }
        if work is Work.JOB:
            shards = status.get("shards") or {}
            return Seen(
                **common,
                failed_rollouts=(status.get("tasks") or {}).get("failed", 0),
                workers={shard: _uid(pod) for shard, pod in self._workers(name).items()},
                shards=shards.get("total", 0),
                done=shards.get("done", 0),
                finished=frozenset(self.rollouts(name)),
            )
        steps = self.steps(work, name)
        return Seen(
            **common,
            attempt=status.get("attempt", 0),
            restarts=status.get("restarts", 0),
            failures=status.get("failures", 0),
            checkpoint=(status.get("checkpoint") or {}).get("latestStep", 0),
            on_disk=self._on_disk(obj),
            resumed=status.get("resumedStep", 0),
            step=steps[-1]["step"] if steps else 0,
            trainers=frozenset(_uid(pod) for pod in self._pods(work, name, "trainer")),
        )

    def victim(self, work: Work, name: str, part: Part) -> tuple[str, str, int | None] | None:
        """Namespace and name of the pod of a part that runs, and the shard that it plays; None: none runs."""
        if part in (Part.OPERATOR, Part.BROKER):
            pods = self._control(part)
            namespace = SYSTEM if part is Part.OPERATOR else self.namespace
        elif part in _INDEX:
            attempt = str(self.seen(work, name).attempt)
            wanted = {"agentfly.dev/attempt": attempt, "agentfly.dev/index": _INDEX[part]}.items()
            pods = [pod for pod in self._pods(work, name, "trainer") if wanted <= _labels(pod).items()]
            namespace = self.namespace
        elif part is Part.WORKER:
            pods, namespace = list(self._workers(name).values()), self.namespace
        else:
            pods, namespace = self._servers(name), self.namespace
        running = [pod for pod in pods if pod["status"].get("phase") == "Running" and not _goes(pod)]
        if not running:
            return None
        newest = max(running, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        shard = (newest["metadata"].get("annotations") or {}).get(_SHARD)
        return namespace, _name(newest), None if shard is None else int(shard)

    def object(self, work: Work, name: str) -> Object | None:
        """The run or job itself."""
        found = (obj for obj in self.observer.of(_KINDS[work]) if _name(obj) == name)
        return next(found, None)

    def steps(self, work: Work, name: str) -> list[Any]:
        """What a run wrote down of its steps."""
        obj = self.object(work, name)
        return [] if obj is None else self.lines.of(self._folder(obj) / "metrics.jsonl")

    def rollouts(self, name: str) -> Iterator[str]:
        """Ids of the rollouts of a job that have an outcome which stays."""
        obj = self.object(Work.JOB, name)
        if obj is None:
            return
        folder = self._folder(obj)
        # In this order: a shard's folder goes after its results have come.
        for path in (*folder.glob("shards/*/*.jsonl"), *folder.glob("results/*.jsonl")):
            for row in self.lines.of(path):
                if row["outcome"]["type"] != "failed":
                    yield str(row["rollout_id"])

    def results(self, name: str) -> list[str]:
        """Ids of the rollouts that a job has published, as often as they stand there."""
        obj = self.object(Work.JOB, name)
        folder = self._folder(obj) / "results" if obj is not None else Path()
        return [row["rollout_id"] for path in folder.glob("*.jsonl") for row in self.lines.of(path)]

    def left(self, work: Work, name: str) -> list[str]:
        """What is there of a run or job that is gone."""
        label = f"agentfly.dev/{_OWNER[_KINDS[work]]}"
        return [
            f"{kind} {_name(obj)}"
            for kind in ("Pod", "Job", "ResourcePool")
            for obj in self.observer.of(kind)
            if _labels(obj).get(label) == name
        ]

    def _on_disk(self, obj: Object | None) -> int:
        if obj is None:
            return 0
        newest = checkpoints.newest(self._folder(obj) / "checkpoints")
        return 0 if newest is None else newest.latest_step

    def _folder(self, obj: Object) -> Path:
        return self.claim / "runs" / f"{_name(obj)}-{_uid(obj)[:8]}"

    def _pods(self, work: Work, name: str, role: str) -> list[Object]:
        wanted = {f"agentfly.dev/{_OWNER[_KINDS[work]]}": name, "agentfly.dev/role": role}.items()
        return [pod for pod in self.observer.of("Pod") if wanted <= _labels(pod).items()]

    def _servers(self, name: str) -> list[Object]:
        return [
            pod
            for pod in self.observer.of("Pod")
            if _labels(pod).get("agentfly.dev/pool") == f"{name}-policy"
        ]

    def _workers(self, name: str) -> dict[int, Object]:
        return {
            int(pod["metadata"]["annotations"][_SHARD]): pod
            for pod in self._pods(Work.JOB, name, "worker")
            if pod["status"].get("phase") == "Running" and not _goes(pod)
        }

    def _control(self, part: Part) -> list[Object]:
        where = SYSTEM if part is Part.OPERATOR else self.namespace
        return [
            pod
            for pod in self.observer.of("Pod")
            if _labels(pod).get("agentfly.dev/component") == part and pod["metadata"]["namespace"] == where
        ]

    def _process(self, part: Part) -> Process:
        pods = [pod for pod in self._control(part) if not _goes(pod)]
        if not pods:
            return Process()
        pod = max(pods, key=lambda each: str(each["metadata"]["creationTimestamp"]))
        restarts = sum(each["restartCount"] for each in pod["status"].get("containerStatuses", ()))
        renewed = self._renewed() if part is Part.OPERATOR else 0.0
        return Process(_uid(pod), restarts, is_ready(dict(pod)), renewed)

    def _renewed(self) -> float:
        leases = [lease for lease in self.observer.of("Lease") if _name(lease) == OPERATOR]
        if not leases or not leases[0]["spec"].get("holderIdentity"):
            return 0.0
        return datetime.fromisoformat(leases[0]["spec"]["renewTime"]).timestamp()


def _labels(obj: Object) -> dict[str, str]:
    return dict(obj["metadata"].get("labels") or {})


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _uid(obj: Object) -> str:
    return str(obj["metadata"]["uid"])


def _goes(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]
