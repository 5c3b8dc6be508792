"""Which pods are those of an attempt: its head and the others, each in a place of its own.

Guarantees:
1. Place 0 is the head's; each pod has one place, and each place one pod at most.
2. A pod that KubeRay has put in the place of another one is no pod of the attempt: that had begun with the
   first one, and is over with it. The head is the pod that the status names, from when it ran.
3. A pod of a RayCluster that has ended keeps its place, with its last words, also when it is gone. That
   KubeRay removes what has ended is nobody's wish to end the attempt.
4. Who takes the place of a head of which nothing is known any more repeats its last words: that is waited
   for, but not for longer than `REPEATS`.
5. Whoever is not in his place has a name, for people.

Plain pods have their places from their labels, and nobody replaces them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from agentfly.api import TrainingRunStatus
from agentfly_operator.names import cluster_name, trainer_pod
from agentfly_operator.plan.run_engine import by_kuberay
from agentfly_operator.plan.run_seen import PodOf, RunObserved

REPEATS = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Members:
    """The pods of an attempt.

    Attributes:
        pods: by place; also those that have ended.
        absent: names for those that should be there, by place.
        headless: the head is gone, and cannot come back.
        repeating: who will say what the head said before it went.
    """

    pods: Mapping[int, PodOf]
    absent: Mapping[int, str] = field(default_factory=dict)
    headless: bool = False
    repeating: PodOf | None = None

    @property
    def complete(self) -> bool:
        """All are there."""
        return not self.absent


def members_of(
    run: str, status: TrainingRunStatus, seen: RunObserved, wanted: int, begun: bool, now: datetime
) -> Members:
    """The pods of the newest attempt of the run of this name.

    Args:
        wanted: how many there should be.
        begun: all of them were there once: who is not there is lost, and not late.
    """
    live = [pod for pod in seen.pods if pod.attempt == status.attempt]
    if not by_kuberay(status):
        pods = {pod.index: pod for pod in live}
        names = {place: trainer_pod(run, status.attempt, place) for place in range(wanted)}
        return Members(pods, {place: name for place, name in names.items() if place not in pods})
    live = [_at_rest(pod) for pod in live]
    gone = [_at_rest(pod) for pod in seen.gone if pod.attempt == status.attempt]
    cluster = cluster_name(run, status.attempt)
    head = _head(status, gone, live, now)
    pods = {0: head.there} if head.there is not None else {}
    absent = {} if head.there is not None else {0: head.name or f"{cluster}-head"}
    left = [pod for pod in gone if pod.index != 0] if begun else []
    others = [*left, *(pod for pod in live if pod.index != 0)]
    for place in range(1, wanted):
        pod = others[place - 1] if place <= len(others) else None
        if pod is not None and (pod.over or pod not in left):
            pods[place] = replace(pod, index=place)
        else:
            absent[place] = pod.name if pod is not None else f"{cluster}-nodes-worker"
    return Members(pods, absent, head.gone, head.repeating)


@dataclass(frozen=True, slots=True)
class _Head:
    there: PodOf | None = None
    gone: bool = False
    name: str = ""
    repeating: PodOf | None = None


def _head(status: TrainingRunStatus, gone: Sequence[PodOf], live: Sequence[PodOf], now: datetime) -> _Head:
    first = status.engine.head if status.engine is not None else None
    left = [pod for pod in gone if pod.index == 0 and ran(pod)]
    there = [pod for pod in live if pod.index == 0]
    for pod in (*left, *there):
        if first is None or pod.uid == first:
            lost = pod in left and not pod.over
            return _Head(gone=True, name=pod.name) if lost else _Head(pod)
    if first is None:
        return _Head()
    for pod in there:
        if pod.over:
            return _Head(pod)
        if pod.created is not None and now < pod.created + REPEATS:
            return _Head(repeating=pod)
    return _Head(gone=True)


def ran(pod: PodOf) -> bool:
    """Whether it may have begun its attempt."""
    return pod.started is not None or pod.over or pod.phase == "Running"


def _at_rest(pod: PodOf) -> PodOf:
    return replace(pod, deleting=False) if pod.over else pod
