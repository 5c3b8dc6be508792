"""How an attempt of a run ended, from its pods and its clock.

Guarantees:
1. The head's exit is the attempt's: what it says comes before what other pods say. It has succeeded only if
   it says so: an exit code of 0 alone may be that of anything that took its place.
2. A pod that is not the head and is gone ends the attempt: at once if nobody knows when it went, or after
   `GRACE`, in which the head may end by itself and say more. A head that is on its way out is waited for, and
   one that will say what the head before it said.
3. An end that somebody else asked for, by deleting a pod, is no failure: with a checkpoint where there were
   steps to save, without one where there were none. An attempt that KubeRay should make, and of which it is
   gone before all pods were there, ends as if it had not begun.
4. A failure names the pod that failed first, its node, its exit code and its last words.
5. An attempt that did not start in time names a pod and what it waits for.
6. Nothing is overdue for a head that had no time to answer yet. One that runs and cannot be reached may well
   train: the trainer itself ends where it hangs, so the deadline of a step, and that of the first, is twice
   as long for it. There is a bound for one that can do nothing any more.

Not here: whether another attempt follows (`agentfly.roles.life`).
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from agentfly.api import TrainingRun
from agentfly.api.reasons import Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.api.trainingrun import Failure, TrainingRunPolicy
from agentfly.roles.life import overdue
from agentfly.roles.trainer import EXIT_INVALID, EXIT_STALLED, EXIT_SUSPENDED
from agentfly_operator.plan.queue import must_stop
from agentfly_operator.plan.run_attempt import Attempt
from agentfly_operator.plan.run_engine import lacks_kuberay
from agentfly_operator.plan.run_seen import PodOf, RunObserved

GRACE = timedelta(seconds=60)
KILLED = -9
_UNHEARD = (Reason.NoProgress, Reason.StartupDeadlineExceeded)  # that a head can refute by what it says
_TAIL = 2000  # characters of last words


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended.

    Attributes:
        exit_code: of the head; ``KILLED`` if there is none.
        suspended: it was asked to end, and counts as no failure.
        failure: None if nothing failed.
        asked: that it was asked is seen, not only said by the head.
        finished: when; None if only now is known.
    """

    exit_code: int
    suspended: bool = False
    failure: Failure | None = None
    asked: bool = True
    finished: datetime | None = None


def ending(run: TrainingRun, attempt: Attempt, seen: RunObserved, now: datetime) -> Ending | None:
    """How the attempt ended, or must be ended; None while it goes on."""
    head = attempt.head
    if head is not None and head.over:
        return _by_head(run, attempt, head, now)
    if not attempt.made and lacks_kuberay(run.status, seen):
        return Ending(EXIT_SUSPENDED, suspended=True)
    if attempt.members.repeating is not None:
        return None
    if head is None and (attempt.made or attempt.members.headless):
        return _by_last_word(attempt, now)
    if attempt.running_since is None and (must_stop(run, seen) or attempt.disturbed):
        return Ending(EXIT_SUSPENDED, suspended=True)
    return _by_other_pod(attempt, now) or (_by_clock(run, attempt, seen.refused, now) if seen.heard else None)


def grace_ends(attempt: Attempt) -> list[datetime]:
    """When pods that are over end the attempt."""
    ended = [pod.finished for pod in attempt.pods.values() if pod.index > 0 and pod.over]
    return [time + GRACE for time in ended if time is not None]


def _by_head(run: TrainingRun, attempt: Attempt, head: PodOf, now: datetime) -> Ending:
    report = attempt.report
    if head.report is None and report is not None and report.phase == "Ended":
        head = replace(head, report=report)
    if head.exit_code is None and head.report is not None:
        head = replace(head, exit_code=head.report.exit_code)
    asked = head.deleting or head.asked or run.status.phase is Phase.Suspending
    return _exit(attempt, head, asked, now)


def _by_last_word(attempt: Attempt, now: datetime) -> Ending:
    """The head is gone; what it said before it went counts."""
    name, report = attempt.members.absent[0], attempt.report
    if report is None or report.phase != "Ended" or report.exit_code is None:
        return _lost(attempt, name, now)
    head = PodOf(name, "", attempt.number, phase="Failed", exit_code=report.exit_code, report=report)
    return _exit(attempt, head, True, now)


def _exit(attempt: Attempt, head: PodOf, asked: bool, now: datetime) -> Ending:
    code, finished = head.exit_code, head.finished
    if code == 0 and head.report is not None and head.report.exit_code == 0:
        return Ending(0, finished=finished)
    if code == EXIT_SUSPENDED or (head.report is not None and head.report.suspended):
        return Ending(EXIT_SUSPENDED, suspended=True, asked=asked, finished=finished)
    failure = _failure(attempt, head if code == EXIT_INVALID else _first(attempt, head), now)
    return Ending(code or KILLED, failure=failure, finished=finished)


def _first(attempt: Attempt, head: PodOf) -> PodOf:
    """The pod that failed first: a head often only says that another one is gone."""
    failed = [pod for pod in attempt.pods.values() if pod.index > 0 and pod.over and pod.exit_code != 0]
    dated = [(pod.finished, pod.index, pod) for pod in (head, *failed) if pod.finished is not None]
    return min(dated)[2] if head.finished is not None else head


def _by_other_pod(attempt: Attempt, now: datetime) -> Ending | None:
    head = attempt.head
    stays = head is not None and not head.deleting and not head.asked
    for index in range(1, attempt.wanted):
        pod = attempt.pods.get(index)
        if pod is None and attempt.made and stays:
            return _lost(attempt, attempt.members.absent[index], now)
        if pod is not None and pod.over and (pod.finished is None or now >= pod.finished + GRACE):
            return Ending(KILLED, failure=_failure(attempt, pod, now))
    return None


def _by_clock(run: TrainingRun, attempt: Attempt, refused: str, now: datetime) -> Ending | None:
    clock, policy = attempt.clock(run.status.active_seconds, now), run.spec.run_policy
    late = overdue(clock, policy)
    if late is None:
        return None
    reason, words = late
    if attempt.silent and reason in _UNHEARD and overdue(clock, _patient(policy)) is None:
        return None
    name, node, waits = "", "", attempt.unreached
    if reason is Reason.StartupDeadlineExceeded and not waits:
        name, node, waits = _waiting(attempt, refused)
    elif waits and attempt.head is not None:
        name, node = attempt.head.name, attempt.head.node
    failure = Failure(
        attempt=attempt.number,
        reason=reason.value,
        message=f"{words}: {waits}" if waits else words,
        pod_name=name or None,
        node_name=node or None,
        time=now,
    )
    return Ending(KILLED, suspended=reason is Reason.SaveFailed, failure=failure)


def _patient(policy: TrainingRunPolicy) -> TrainingRunPolicy:
    """That of a head that cannot be reached."""
    return policy.model_copy(
        update={
            "startup_deadline_seconds": 2 * policy.startup_deadline_seconds,
            "stall_timeout_seconds": 2 * policy.stall_timeout_seconds,
        }
    )


def _waiting(attempt: Attempt, refused: str) -> tuple[str, str, str]:
    """A pod that holds up the start, its node, and what it waits for."""
    for index in range(attempt.wanted):
        pod = attempt.pods.get(index)
        if pod is None:
            name = attempt.members.absent[index]
            return name, "", refused[:_TAIL] or attempt.unmade[:_TAIL] or f"pod {name} could not be made"
        if pod.waiting or not pod.ready:
            return pod.name, pod.node, f"pod {pod.name}: {pod.waiting or f'not ready, {pod.phase}'}"
    head, report = attempt.pods[0], attempt.report
    said = report.message if report is not None and report.message else "all pods are ready"
    return head.name, head.node, f"pod {head.name}: {said[-_TAIL:]}"


def _lost(attempt: Attempt, name: str, now: datetime) -> Ending:
    text = f"pod {name} is gone: somebody deleted it, or its node is gone too"
    reason = Reason.PodLost.value
    failure = Failure(attempt=attempt.number, reason=reason, message=text, pod_name=name, time=now)
    return Ending(KILLED, failure=failure)


def _failure(attempt: Attempt, pod: PodOf, now: datetime) -> Failure:
    report = pod.report
    said = (report.message if report is not None else pod.message) or pod.reason or "without a word"
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else "it did not run to an end"
    return Failure(
        attempt=attempt.number,
        reason=_reason(pod).value,
        message=f"pod {pod.name}: {code}: {said[-_TAIL:]}",
        exit_code=pod.exit_code,
        pod_name=pod.name,
        node_name=pod.node or None,
        time=now,
    )


def _reason(pod: PodOf) -> Reason:
    code = pod.exit_code
    if pod.report is not None and pod.report.reason in Reason.__members__:
        return Reason(pod.report.reason)
    if pod.reason == "OOMKilled":
        return Reason.OutOfMemory
    if code == EXIT_INVALID:
        return Reason.InvalidSpec
    if code == EXIT_STALLED:
        return Reason.NoProgress
    if code is None or code <= 0 or code > 128:
        return Reason.Interrupted
    return Reason.AttemptFailed
