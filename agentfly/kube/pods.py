"""What of a pod is worth keeping of ten thousand of them.

Guarantees:
1. The projection has the shape of a pod: code that reads it reads a whole pod as well.
2. It has who the pod is, who owns it, where it runs, and how its containers are; not what was asked for.
3. Texts that are the same in all pods of a pool are one text in memory.
"""

import functools
from typing import Any

from agentfly.kube.answers import Obj

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "deletionTimestamp",
)
_CONTAINER = ("name", "image", "ready", "restartCount", "state", "lastState")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")


def project_pod(pod: Obj) -> Obj:
    """A pod with identity, owners, node and status."""
    meta, status, spec = pod["metadata"], pod.get("status", {}), pod.get("spec", {})
    kept = _part(meta, _META)
    for name in ("labels", "annotations"):
        if name in meta:
            kept[name] = {_one(k): _one(v) for k, v in meta[name].items()}
    if "ownerReferences" in meta:
        kept["ownerReferences"] = [_shared(owner) for owner in meta["ownerReferences"]]
    facts = _part(status, ("phase", "reason", "message", "podIP", "hostIP", "startTime"))
    if "conditions" in status:
        facts["conditions"] = [_part(each, _CONDITION) for each in status["conditions"]]
    for name in ("initContainerStatuses", "containerStatuses"):
        if name in status:
            facts[name] = [_part(each, _CONTAINER) for each in status[name]]
    node = {"nodeName": _one(spec["nodeName"])} if spec.get("nodeName") else {}
    return {"metadata": kept, "spec": node, "status": facts}


def _part(source: Obj, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _shared(source[name]) for name in names if name in source}


def _shared(value: Any) -> Any:
    if isinstance(value, str):
        return _one(value)
    if isinstance(value, dict):
        return {_one(k): _shared(v) for k, v in value.items()}
    return value


@functools.lru_cache(maxsize=4096)
def _one(text: str) -> str:
    """The first of all equal texts. What is the same in all pods stays in the cache, the rest leaves it."""
    return text
