"""What must never be among the children of a run or job."""

from typing import Any

import pytest

from tests.kills.book import Book

Obj = dict[str, Any]


def obj(name: str, uid: str = "", *, phase: str = "Running", shard: str = "", **labels: str) -> Obj:
    marks = {f"agentfly.dev/{key.replace('_', '-')}": value for key, value in labels.items()}
    notes = {"batch.kubernetes.io/job-completion-index": shard} if shard else {}
    metadata = {"name": name, "uid": uid or name, "labels": marks, "annotations": notes, "namespace": "n"}
    return {"metadata": metadata, "status": {"phase": phase}}


def trainer(attempt: int, index: int, uid: str = "") -> Obj:
    marks = {"training_run": "r", "role": "trainer", "attempt": str(attempt), "index": str(index)}
    return obj(f"r-trainer-{attempt}-{index}", uid, **marks)


def server(name: str, *, phase: str = "Running", goes: bool = False) -> Obj:
    found = obj(name, phase=phase, component="member", pool="r-policy")
    if goes:
        found["metadata"]["deletionTimestamp"] = "now"
    return found


def worker(name: str, shard: str, phase: str = "Running") -> Obj:
    return obj(name, phase=phase, shard=shard, rollout_job="j", role="worker")


def prepare(name: str, uid: str = "") -> Obj:
    return obj(name, uid, training_run="r", role="prepare")


def policy(uid: str) -> Obj:
    return obj("r-policy", uid, training_run="r", role="policy")


def wrongs(*events: tuple[str, str, Obj]) -> list[str]:
    book = Book({"shell": 2})
    for kind, event, found in events:
        book.see(kind, event, found)
    return book.wrongs


WRONG: dict[str, tuple[list[tuple[str, str, Obj]], str]] = {
    "two attempts": (
        [("Pod", "ADDED", trainer(1, 1)), ("Pod", "ADDED", trainer(2, 0))],
        "run r: pods of two attempts at a time: r-trainer-1-1, r-trainer-2-0",
    ),
    "a pod of an attempt twice": (
        [
            ("Pod", "ADDED", trainer(1, 0, "a")),
            ("Pod", "DELETED", trainer(1, 0, "a")),
            ("Pod", "ADDED", trainer(1, 0, "b")),
        ],
        "trainer pod run r 1 0: made 2 times",
    ),
    "two pools": (
        [("ResourcePool", "ADDED", policy("a")), ("ResourcePool", "ADDED", policy("b"))],
        "pools of the policy run r: 2 at a time: r-policy, r-policy",
    ),
    "two servers": (
        [("Pod", "ADDED", server("s1")), ("Pod", "ADDED", server("s2"))],
        "pool r-policy: 2 members at a time, not 1",
    ),
    "a second preparation": (
        [
            ("Job", "ADDED", prepare("r-prepare", "a")),
            ("Job", "DELETED", prepare("r-prepare", "a")),
            ("Job", "ADDED", prepare("r-prepare", "b")),
        ],
        "preparation run r: made 2 times",
    ),
    "two pods of a preparation": (
        [("Pod", "ADDED", prepare("p1")), ("Pod", "ADDED", prepare("p2"))],
        "pods of the preparation run r: 2 at a time: p1, p2",
    ),
    "two players of a shard": (
        [("Pod", "ADDED", worker("w1", "3")), ("Pod", "ADDED", worker("w2", "3"))],
        "pods of shard job j 3: 2 at a time: w1, w2",
    ),
    "more sandboxes than max": (
        [("Pod", "ADDED", obj(f"m{n}", component="member", pool="shell")) for n in range(3)],
        "pool shell: 3 members at a time, not 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_never_be_is_told_once(name: str) -> None:
    events, told = WRONG[name]
    assert wrongs(*events, (events[-1][0], "MODIFIED", events[-1][2])) == [told]


RIGHT: dict[str, list[tuple[str, str, Obj]]] = {
    "an attempt after another": [
        ("Pod", "ADDED", trainer(1, 0)),
        ("Pod", "ADDED", trainer(1, 1)),
        ("Pod", "DELETED", trainer(1, 0)),
        ("Pod", "DELETED", trainer(1, 1)),
        ("Pod", "ADDED", trainer(2, 0)),
    ],
    "a server after one that failed": [
        ("Pod", "ADDED", server("s1")),
        ("Pod", "MODIFIED", server("s1", phase="Failed")),
        ("Pod", "ADDED", server("s2")),
    ],
    "a server beside one that goes": [
        ("Pod", "MODIFIED", server("s1", goes=True)),
        ("Pod", "ADDED", server("s2")),
    ],
    "a shard played again, and another one": [
        ("Pod", "ADDED", worker("w1", "3")),
        ("Pod", "MODIFIED", worker("w1", "3", "Failed")),
        ("Pod", "ADDED", worker("w2", "3")),
        ("Pod", "ADDED", worker("w3", "4")),
    ],
    "a pool made again": [
        ("ResourcePool", "ADDED", policy("a")),
        ("ResourcePool", "DELETED", policy("a")),
        ("ResourcePool", "ADDED", policy("b")),
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_may_be_is_no_wrong(name: str) -> None:
    assert wrongs(*RIGHT[name]) == []


def run(**status: Any) -> Obj:
    return {"metadata": {"name": "r", "uid": "u", "namespace": "n"}, "status": status}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"attempt": 1}, {"attempt": 3}, "TrainingRun r: attempt 3 after 1"),
        ({"attempt": 1}, {"attempt": 0}, "TrainingRun r: attempt 0 after 1"),
        ({"restarts": 2}, {"restarts": 1}, "TrainingRun r: restarts 1 after 2"),
        ({"failures": 2}, {"failures": 0}, "TrainingRun r: failures 0 after 2"),
        (
            {"checkpoint": {"latestStep": 4}},
            {"checkpoint": {"latestStep": 3}},
            "TrainingRun r: checkpoint.latestStep 3 after 4",
        ),
        ({"phase": "Succeeded"}, {"phase": "Starting"}, "TrainingRun r: Starting after Succeeded"),
    ],
)
def test_a_status_never_goes_back(before: Obj, after: Obj, told: str) -> None:
    events = [("TrainingRun", "MODIFIED", run(**each)) for each in (before, after)]
    assert wrongs(*events) == [told]


def test_a_status_goes_on() -> None:
    first = {"attempt": 1, "restarts": 0, "failures": 0, "phase": "Starting"}
    second = {"attempt": 2, "restarts": 1, "failures": 1, "phase": "Running", "checkpoint": {"latestStep": 1}}
    assert wrongs(*(("TrainingRun", "MODIFIED", run(**each)) for each in (first, second, second))) == []
