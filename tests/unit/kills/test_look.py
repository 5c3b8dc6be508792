"""What is read of objects and files."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kills.look import Eyes, Lines
from tests.kills.matrix import Part, Work

Obj = dict[str, Any]


class Known:
    """An observer that knows these objects."""

    def __init__(self, **objects: list[Obj]) -> None:
        self._objects = objects

    def of(self, kind: str) -> list[Obj]:
        return self._objects.get(kind, [])


def made(
    name: str, labels: dict[str, str] | None = None, *, namespace: str = "n", made: str = "1", **more: Any
) -> Obj:
    marks = {f"agentfly.dev/{key}": value for key, value in (labels or {}).items()}
    metadata = {"name": name, "uid": f"uid-{name}", "namespace": namespace, "creationTimestamp": made}
    return {"metadata": {**metadata, "labels": marks}, "status": {"phase": "Running"}} | more


def ready(pod: Obj, restarts: int = 0) -> Obj:
    conditions = [{"type": "Ready", "status": "True"}]
    return pod | {
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": [{"restartCount": restarts}],
        }
    }


def trainer(attempt: int, index: int) -> Obj:
    labels = {"training-run": "run-1", "role": "trainer", "attempt": str(attempt), "index": str(index)}
    return made(f"run-1-trainer-{attempt}-{index}", labels)


STATUS = {
    "phase": "Running",
    "attempt": 2,
    "restarts": 1,
    "failures": 1,
    "resumedStep": 4,
    "checkpoint": {"latestStep": 6},
}


def eyes(claim: Path, **objects: list[Obj]) -> Eyes:
    known: Any = Known(**objects)
    return Eyes(known, "n", claim)


def of_a_run(claim: Path) -> Eyes:
    lease = made("agentfly-operator", spec={"holderIdentity": "o", "renewTime": "2026-12-01T00:00:01.5Z"})
    pods = [
        trainer(1, 1),
        trainer(2, 0),
        trainer(2, 1),
        ready(made("s", {"component": "member", "pool": "run-1-policy"})),
        ready(made("old", {"component": "operator"}, namespace="agentfly-system", made="1"), 3),
        ready(made("new", {"component": "operator"}, namespace="agentfly-system", made="2"), 1),
        ready(made("b", {"component": "broker"})),
    ]
    return eyes(
        claim,
        TrainingRun=[made("run-1", status=STATUS)],
        Pod=pods,
        Lease=[lease],
        ResourcePool=[made("run-1-policy")],
    )


def test_a_run_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "runs/run-1-uid-run-"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "attempt": 1}\n{"step": 7, "attempt": 2}\n{"st')
    found = of_a_run(tmp_path).seen(Work.RUN, "run-1")
    assert (found.phase, found.attempt, found.restarts, found.failures) == ("Running", 2, 1, 1)
    assert (found.checkpoint, found.resumed, found.step) == (6, 4, 7)
    assert found.server == "uid-s"
    assert found.pool
    assert len(found.trainers) == 3
    assert (found.operator.uid, found.operator.restarts, found.operator.ready) == ("uid-new", 1, True)
    assert found.operator.renewed == 1796083201.5
    assert found.broker.uid == "uid-b"


@pytest.mark.parametrize(
    ("part", "pod"),
    [
        (Part.HEAD, ("n", "run-1-trainer-2-0", None)),
        (Part.NODE, ("n", "run-1-trainer-2-1", None)),
        (Part.ENGINE, ("n", "s", None)),
        (Part.OPERATOR, ("agentfly-system", "new", None)),
        (Part.BROKER, ("n", "b", None)),
    ],
)
def test_the_pod_of_a_part_is_that_of_the_newest_attempt(tmp_path: Path, part: Part, pod: Any) -> None:
    assert of_a_run(tmp_path).victim(Work.RUN, "run-1", part) == pod


def test_a_job_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "runs/job-1-uid-job-"
    for path, ids in (
        ("results/00000.jsonl", "ab"),
        ("shards/00001/w1.jsonl", "c"),
        ("shards/00001/w2.jsonl", "c"),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"rollout_id": name, "outcome": {"type": "scored"}} for name in ids]
        (folder / path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "shards/00001/w2.jsonl").open("a") as file:
        file.write('{"rollout_id": "d", "outcome": {"type": "failed"}}\n')
    worker = made("w", {"rollout-job": "job-1", "role": "worker"})
    worker["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": "1"}
    status = {"phase": "Running", "shards": {"total": 4, "done": 1}, "tasks": {"failed": 2}}
    look = eyes(tmp_path, RolloutJob=[made("job-1", status=status)], Pod=[worker])
    found = look.seen(Work.JOB, "job-1")
    assert (found.shards, found.done, found.failed_rollouts) == (4, 1, 2)
    assert found.finished == {"a", "b", "c"}
    assert found.workers == {1: "uid-w"}
    assert look.victim(Work.JOB, "job-1", Part.WORKER) == ("n", "w", 1)
    assert sorted(look.results("job-1")) == ["a", "b"]
    assert look.left(Work.JOB, "job-1") == ["Pod w"]


def test_what_goes_is_no_victim_and_serves_nobody(tmp_path: Path) -> None:
    server = ready(made("s", {"pool": "run-1-policy"}))
    server["metadata"]["deletionTimestamp"] = "now"
    look = eyes(tmp_path, Pod=[server])
    assert look.victim(Work.RUN, "run-1", Part.SERVER) is None
    assert look.seen(Work.RUN, "run-1").server == ""


def test_lines_are_read_when_they_are_whole(tmp_path: Path) -> None:
    file, lines = tmp_path / "f", Lines()
    assert lines.of(file) == []
    file.write_text('{"a": 1}\n{"a"')
    assert lines.of(file) == [{"a": 1}]
    with file.open("a") as out:
        out.write(': 2}\n{"to{"a": 3}\n{"a": 4}\n')
    assert lines.of(file) == [{"a": 1}, {"a": 2}, {"a": 4}]
