"""What a pod's status means for the member that it is to become, or is.

Guarantees:
1. A pod is ready, on its way, or has failed. Waiting for a node is on its way: only the scheduler knows when
   there will be room, and a new pod would wait longer.
2. What failed is said in one line that begins with the word that Kubernetes has for it.
3. The first end of a container before the pod was ready is a failure, with its last words: its next start
   would find the same image and the same command.

Not here: whether what runs in it answers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentfly.kube import Obj

_HOPELESS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)
_OF_IMAGES = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"})
_WORDS = 300  # characters of what somebody said
_POD_SECURITY = re.compile(r'violates PodSecurity "(?P<level>[a-z]+)[^"]*": (?P<violations>.*)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ready:
    """All containers run; ``address`` is the pod's."""

    address: str


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """It may still become ready; ``why`` it is not yet."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """It will not become ready, or is no more."""

    why: str


def look(pod: Obj | None) -> Ready | OnItsWay | Failed:
    """What a pod is now; None is one that was deleted."""
    if pod is None:
        return Failed("Deleted: the pod is gone")
    meta, status = pod["metadata"], pod.get("status", {})
    if status.get("phase") in ("Failed", "Succeeded"):
        return Failed(_end(status))
    if meta.get("deletionTimestamp"):
        return Failed(f"Deleted: {status.get('reason') or 'somebody deletes the pod'}")
    for container in _containers(status):
        if (failure := _failure(container)) is not None:
            return Failed(failure)
    if _is_true(status, "Ready") and status.get("podIP"):
        return Ready(str(status["podIP"]))
    return OnItsWay(_waits_for(status))


def _containers(status: Obj) -> Iterator[dict[str, Any]]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())


def _failure(container: dict[str, Any]) -> str | None:
    state, last = container.get("state", {}), container.get("lastState", {})
    waiting = state.get("waiting") or {}
    reason = waiting.get("reason", "")
    for each in (state.get("terminated"), last.get("terminated")):
        if each and each.get("exitCode") != 0:
            return _died(container, each, reason)
    if reason in _HOPELESS:
        of = f"image {container.get('image')}" if reason in _OF_IMAGES else f"container {container['name']}"
        return f"{reason}: {of}: {_line(waiting.get('message')) or 'no reason was given'}"
    return None


def _died(container: dict[str, Any], terminated: dict[str, Any], reason: str) -> str:
    killed = terminated.get("reason") == "OOMKilled"
    word = "OOMKilled" if killed else reason if reason in _HOPELESS else "CrashLoop"
    said = _line(terminated.get("message"))
    return f"{word}: container {container['name']} ended with {terminated.get('exitCode')}" + (
        f": {said}" if said else ""
    )


def _end(status: Obj) -> str:
    """Why the pod as a whole has ended."""
    reason, message = status.get("reason"), _line(status.get("message"))
    if reason:  # Evicted, NodeLost, Preempted: what became of its containers follows from it
        return f"{reason}: {message or 'the pod was ended'}"
    for container in _containers(status):
        if (failure := _failure(container)) is not None:
            return failure
    return f"{status['phase']}: {message or 'the pod has ended'}"


def _waits_for(status: Obj) -> str:
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason') or 'Unschedulable'}: {_line(condition.get('message'))}"
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            reason = waiting.get("reason") or "Waiting"
            return f"{reason}: container {container['name']} of image {container.get('image')}"
    return f"{status.get('phase', 'Pending')}: the pod is not ready"


def _is_true(status: Obj, kind: str) -> bool:
    return any(each["type"] == kind and each["status"] == "True" for each in status.get("conditions", ()))


def refusal(reason: str, message: str) -> str:
    """Why the API server did not take a pod, in one line with the remedy where it is known."""
    if (found := _POD_SECURITY.search(message)) is None:
        return f"{reason}: {message}"
    level = found["level"]
    remedy = f"set security.podSecurity: {level.capitalize()}"
    return f"PodSecurity: the namespace enforces {level}: {remedy} ({_shortened(found['violations'])})"


def _line(text: object) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in str(text or "").splitlines() if line.strip()]
    return _shortened(lines[-1]) if lines else ""


def _shortened(line: str) -> str:
    """Both ends: the cause is at the end, what it is about at the start."""
    if len(line) <= _WORDS:
        return line
    return f"{line[: _WORDS // 3]} ... {line[-2 * _WORDS // 3 :]}"
