"""Children of a training run as a watch shows them."""

from typing import Any

from agentfly_operator.cluster.children import Children, _projection
from agentfly_operator.plan.children import WorkKey

RUN: WorkKey = ("TrainingRun", "team", "first")
UID = "uid-of-run"
Obj = dict[str, Any]


def meta(name: str, uid: str, role: str, owner: str = UID, **marks: str) -> Obj:
    labels = {"agentfly.dev/training-run": "first", "agentfly.dev/role": role, **marks}
    return {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": "1",
        "labels": labels,
        "ownerReferences": [{"kind": "TrainingRun", "name": "first", "uid": owner, "controller": True}],
    }


def pod(
    name: str = "first-trainer-1-0", uid: str = "p", *, attempt: int = 1, index: int = 0, **status: Any
) -> Obj:
    marks = {"agentfly.dev/attempt": str(attempt), "agentfly.dev/index": str(index)}
    return {
        "kind": "Pod",
        "metadata": meta(name, uid, "trainer", **marks),
        "status": {"phase": "Running", **status},
    }


def ended(code: int, message: str = "", reason: str = "Error") -> Obj:
    terminated = {
        "exitCode": code,
        "reason": reason,
        "message": message,
        "finishedAt": "2026-11-30T12:00:00Z",
    }
    return {"containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}]}


def told(kind: str, change: str, obj: Obj, children: Children) -> None:
    children.heard(change, _projection(kind)(obj))
