"""What pods of members say that their broker cannot know: why they do not start.

Guarantees:
1. Facts are counted over pods that are not being deleted.
2. Texts are the same for as long as their cause is: counters and times in messages of scheduler and kubelet
   are not repeated.
3. Of many pods with one trouble, one is quoted; the order of pods does not matter.
4. The scheduler's words are the only place where it says why; where they are not understood, the reason is
   `NotScheduled` and its words are shown.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfly.api.reasons import Reason

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
_CRASHES = frozenset({"CrashLoopBackOff", "CreateContainerError", "RunContainerError"})
# In this order: who lacks GPUs and CPU is helped by GPUs first.
_SCHEDULER = (
    (re.compile(r"not found"), Reason.MissingObject),
    (re.compile(r"Insufficient \S*gpu", re.IGNORECASE), Reason.InsufficientGpu),
    (re.compile(r"Insufficient memory"), Reason.InsufficientMemory),
    (re.compile(r"Insufficient cpu"), Reason.InsufficientCpu),
    (re.compile(r"untolerated taint|had taint"), Reason.UntoleratedTaint),
    (re.compile(r"node affinity|node selector"), Reason.NoMatchingNode),
)
_QUOTED = 400
_PREEMPTION = re.compile(r"\s*preemption:.*", re.DOTALL)
# Kubelet says the same in two forms in turn; what is left is the cause.
_BACKOFF = re.compile(r'^Back-off pulling image "[^"]*"(: )?(ErrImagePull: )?')

Pod = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodFact:
    """One pod. ``trouble`` is "" or one of unschedulable, image, crash, missing."""

    running: bool = False
    ready: bool = False
    trouble: str = ""
    reason: Reason | None = None
    message: str = ""
    image: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What ails some pods: how many, why, and what scheduler or kubelet say of one of them."""

    count: int
    reason: Reason
    message: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The pods of one pool; ``missing`` is an object that they name and that is not there."""

    total: int = 0
    running: int = 0
    ready: int = 0
    unschedulable: Trouble | None = None
    images: Trouble | None = None
    crashing: Trouble | None = None
    missing: Trouble | None = None


NO_PODS = PodFacts()


@dataclass(slots=True)
class _Heap:
    count: int = 0
    words: Counter[tuple[Reason, str]] = field(default_factory=Counter)
    images: set[str] = field(default_factory=set)

    def trouble(self) -> Trouble:
        # Most said first; who says nothing says it last.
        (reason, message), _ = min(self.words.items(), key=lambda item: (not item[0][1], -item[1], item[0]))
        return Trouble(self.count, reason, message, tuple(sorted(self.images)))


def fact_of(pod: Pod) -> PodFact:
    """What matters of a pod."""
    status = pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    running = status.get("phase") == "Running"
    ready = conditions.get("Ready", {}).get("status") == "True"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return _unscheduled(_short(_PREEMPTION.sub("", str(scheduled.get("message") or ""))))
    for each in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (each.get("state") or {}).get("waiting") or {}
        word, text = waiting.get("reason"), str(waiting.get("message") or "")
        if word in _IMAGE_REASONS:
            text, image = _short(_BACKOFF.sub("", text)), str(each.get("image") or "")
            return PodFact(running, ready, "image", Reason.ImagePullFailed, text, image)
        if word == "CreateContainerConfigError":
            return PodFact(running, ready, "missing", Reason.MissingObject, _short(text))
        if word in _CRASHES:
            return PodFact(running, ready, "crash", Reason.StartFailed, _short(_last_words(each) or text))
    if status.get("phase") == "Failed":
        text = f"{status.get('reason') or 'Failed'}: {status.get('message') or 'no explanation'}"
        return PodFact(running, ready, "crash", Reason.StartFailed, _short(text))
    return PodFact(running, ready)


def _unscheduled(text: str) -> PodFact:
    reason = next((reason for pattern, reason in _SCHEDULER if pattern.search(text)), Reason.NotScheduled)
    trouble = "missing" if reason is Reason.MissingObject else "unschedulable"
    return PodFact(trouble=trouble, reason=reason, message=text)


def gather(facts: Iterable[PodFact]) -> PodFacts:
    """The facts of a pool's pods together."""
    heaps: dict[str, _Heap] = {}
    total = running = ready = 0
    for fact in facts:
        total += 1
        running += fact.running
        ready += fact.ready
        if fact.reason is not None:
            heap = heaps.setdefault(fact.trouble, _Heap())
            heap.count += 1
            heap.words[fact.reason, fact.message] += 1
            if fact.image:
                heap.images.add(fact.image)
    troubles = {name: heap.trouble() for name, heap in heaps.items()}
    names = ("unschedulable", "image", "crash", "missing")
    return PodFacts(total, running, ready, *(troubles.get(name) for name in names))


def _last_words(container: Mapping[str, Any]) -> str:
    """How the container ended last; kubelet's own message only counts its restarts."""
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if not ended:
        return ""
    text = str(ended.get("message") or "").strip()
    what = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode')}"
    return f"{what}: {text}" if text else what


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED else f"{text[: _QUOTED - 1]}…"
