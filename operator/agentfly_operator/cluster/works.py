"""What passes over TrainingRuns and over RolloutJobs have in common.

Guarantees:
1. A status is written only if it differs from the one before; at most once in `STATUS_S` seconds, and where
   nothing but progress differs, once in `PROGRESS_S`.
2. Events come after the status that they tell of, so that a failed write does not tell twice.
3. What the API server refuses to make is tried, and not made, every `MISSING_S` seconds until it would be
   accepted; a spec that was changed meanwhile may need something else, and the refusal is forgotten.
4. What has the name of a child and another owner is no child.

Not here: what is made when (`plan`), and how it is written (`cluster.hand`).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agentfly.api import RolloutJob, TrainingRun
from agentfly.kube import Kube, NotFound, Resource
from agentfly_operator.cluster.absent import MISSING_S, Ref
from agentfly_operator.cluster.children import Children
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import RESOURCES, Hand, Leaving, Refused, Taken
from agentfly_operator.cluster.pools import differs
from agentfly_operator.plan.children import WorkKey, controller_of
from agentfly_operator.plan.run_seen import Child, PodOf, PolicyOf, PrepareOf
from agentfly_operator.plan.turns import Event

RESYNC_S = 20.0
QUIET_S = 300.0  # what is finished, and of which nothing is left
AGAIN_S = 0.2
STATUS_S = 1.0
PROGRESS_S = 30.0
SETTLED_S = 300.0
OTHERS_S = 60.0  # after so long an object is noticed that somebody else deleted

Object = dict[str, Any]


@dataclass
class Written:
    """The status that this process wrote last; losing it costs a write."""

    status: Object | None = None
    at: float = float("-inf")


class Statuses:
    """Writes those of one kind.

    Args:
        progress: fields that move all the time.
    """

    def __init__(self, hand: Hand, events: Events, resource: Resource, progress: Collection[str]) -> None:
        self._hand = hand
        self._events = events
        self._resource = resource
        self._progress = frozenset(progress)

    async def show(
        self, obj: Mapping[str, Any], status: Object, events: Sequence[Event], written: Written
    ) -> float:
        """Write a status if it says something new; seconds until the next look, 0 if it was written.

        Raises:
            Conflict: the object was changed since it was read.
            KubeError.
        """
        live, status = obj.get("status") or {}, _said(status)
        if not differs(live, status, written.status):
            written.status = status
            return SETTLED_S
        before = None if written.status is None else self._steady(written.status)
        steady = not differs(self._steady(live), self._steady(status), before)
        now = asyncio.get_running_loop().time()
        if (wait := written.at + (PROGRESS_S if steady else STATUS_S) - now) > 0:
            return wait
        await self._hand.write_status(self._resource, obj, status)
        written.status, written.at = status, now
        for event in events:
            await self._events.post(obj, event)
        return 0.0

    def _steady(self, status: Mapping[str, Any]) -> Object:
        return {key: value for key, value in status.items() if key not in self._progress}


@dataclass(frozen=True, slots=True)
class Told:
    """What cannot be made: names that others have, what is refused, what is still on its way out."""

    conflicts: tuple[str, ...] = ()
    refused: str = ""
    leaving: str = ""


class Refusals:
    """What one object is not given; made anew with it."""

    def __init__(self) -> None:
        self._refused: Refused | None = None
        self._generation = 0
        self._until = float("-inf")

    def put(self, error: Refused, generation: int) -> bool:
        """This cannot be made for a spec of this generation; whether that is news."""
        news = self._refused is None or self._refused.message != error.message
        self._refused, self._generation = error, generation
        self._until = asyncio.get_running_loop().time() + MISSING_S
        return news

    def forget(self) -> None:
        """Nothing is to be made any more."""
        self._refused = None

    async def told(self, hand: Hand, generation: int) -> Told:
        """What a spec of this generation is not given, in sentences, as long as that is so.

        Raises:
            KubeError: nobody says whether it still is.
        """
        now = asyncio.get_running_loop().time()
        if generation != self._generation:
            self._refused = None
        if self._refused is not None and now >= self._until:
            manifest, self._until = self._refused.manifest, now + MISSING_S
            try:
                await hand.make(manifest, trial=True)
                self._refused = None
            except Refused as error:
                self._refused = error
        if self._refused is None:
            return Told()
        text = "; ".join((self._refused.message, *self._refused.hints))
        if isinstance(self._refused, Leaving):
            return Told(leaving=text)
        return Told(conflicts=(text,)) if isinstance(self._refused, Taken) else Told(refused=text)


class Unwatched:
    """Objects of one run or job that no watch shows; made anew with it.

    They are looked for when they may be there for the first time, and every `OTHERS_S` seconds: of what is
    made and removed here it is known.
    """

    def __init__(self) -> None:
        self._known: dict[Ref, Child | None] = {}
        self._until = float("-inf")

    async def seen(
        self, kube: Kube, namespace: str, refs: Collection[Ref], owner: str, *, over: bool
    ) -> tuple[Child, ...]:
        """Those of these names that are there.

        Args:
            over: nothing is made any more: what is gone needs no further look.

        Raises:
            KubeError.
        """
        now = asyncio.get_running_loop().time()
        late = now >= self._until and not (over and not any(self._known.values()))
        asked = [ref for ref in refs if late or ref not in self._known]
        found = await asyncio.gather(*(child(kube, namespace, ref, owner) for ref in asked))
        self._known = {ref: each for ref, each in self._known.items() if ref in refs}
        self._known |= dict(zip(asked, found, strict=True))
        if late:
            self._until = now + OTHERS_S
        return tuple(each for each in self._known.values() if each is not None)

    def made(self, kind: str, obj: Mapping[str, Any]) -> None:
        """This was made, or was there already."""
        ref = kind, str(obj["metadata"]["name"])
        if ref in self._known:
            self._known[ref] = child_of(kind, obj)

    def removed(self, kind: str, name: str) -> None:
        """This is on its way out."""
        self._known.pop((kind, name), None)


def named(work: TrainingRun | RolloutJob) -> list[Ref]:
    """The objects that a spec names."""
    spec, refs = work.spec, list[Ref]()
    claims = [spec.storage.claim] if spec.storage is not None else []
    claims += [spec.source.claim] if spec.source.claim is not None else []
    refs += [("PersistentVolumeClaim", claim) for claim in dict.fromkeys(claims)]
    if spec.source.config_map is not None:
        refs.append(("ConfigMap", spec.source.config_map))
    own = work.spec.trainer.pod if isinstance(work, TrainingRun) else work.spec.workers.pod
    variables = (*own.env, *spec.inference.pod.env)
    secrets = [each.secret for each in variables if each.secret is not None]
    refs += [("Secret", name) for name in dict.fromkeys(secrets)]
    return [*refs, *(("ResourcePool", name) for name in spec.pools)]


def prepare_of(children: Children, work: WorkKey, uid: str) -> PrepareOf:
    """The preparation of a run or job with this uid."""
    jobs = children.jobs(work, "prepare", uid)
    if not jobs:
        return PrepareOf()
    job = min(jobs, key=lambda each: each.deleting)
    pods = children.pods(work, "prepare", job.uid)
    last = max((pod for pod in pods if pod.over), key=_finished, default=None)
    waiting = next((pod.waiting for pod in pods if pod.waiting), "")
    said = (last.report.message if last.report else last.message) if last else ""
    return PrepareOf(
        exists=True,
        complete=job.complete,
        failed=job.failed,
        deleting=job.deleting,
        name=job.name,
        uid=job.uid,
        report=last.report if last else None,
        message=waiting or said or job.message,
    )


def policy_of(children: Children, namespace: str, name: str, uid: str) -> PolicyOf:
    """The pool of this name, if it is that of the run or job with this uid."""
    pool = children.pool(namespace, name)
    if pool is None or pool.owner != uid:
        return PolicyOf()
    return PolicyOf(
        exists=True,
        name=pool.name,
        uid=pool.uid,
        deleting=pool.deleting,
        ready=pool.ready,
        reason=pool.reason,
        message=pool.message,
        use=pool.use,
    )


async def child(kube: Kube, namespace: str, ref: Ref, owner: str) -> Child | None:
    """An object that no watch shows, if it is there and this uid controls it.

    Raises:
        KubeError.
    """
    try:
        obj = await kube.get(RESOURCES[ref[0]], ref[1], namespace)
    except NotFound:
        return None
    return child_of(ref[0], obj) if controller_of(obj) == owner else None


def child_of(kind: str, obj: Mapping[str, Any]) -> Child:
    """The words for an object that no watch shows."""
    return Child(kind, str(obj["metadata"]["name"]), str(obj["metadata"]["uid"]))


def _said(status: Mapping[str, Any]) -> Object:
    """The status without maps that are empty: one that an apply empties becomes null, which is no map."""
    said: Object = {}
    for key, value in status.items():
        if isinstance(value, Mapping):
            value = _said(value)  # noqa: PLW2901
            if not value:
                continue
        said[key] = value
    return said


def _finished(pod: PodOf) -> float:
    return pod.finished.timestamp() if pod.finished is not None else 0.0


def look_again(*, over: bool, left: bool, waits: bool, wake_at: datetime | None) -> float:
    """Seconds until the next look if nothing is heard before.

    Args:
        over: it is finished for good.
        left: something that was made for it is still there.
        waits: for something that no watch tells of.
        wake_at: when its plan changes by time alone.
    """
    pause = QUIET_S if over and not left else RESYNC_S
    if waits:
        pause = MISSING_S
    if wake_at is not None:
        pause = min(pause, max(AGAIN_S, (wake_at - datetime.now(UTC)).total_seconds()))
    return pause
