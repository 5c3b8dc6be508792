"""Whether a run may have what it needs, where a queue of Kueue decides that.

Guarantees:
1. A queue is never got round: what a run in one needs is made only while its Workload may run, and is given
   back when it may no more. Without Kueue, or without the queue, such a run waits.
2. A run that is in an attempt is stopped by its queue as by a person: after a checkpoint, as no failure. It
   is not disturbed while nobody says what its Workload is.
3. Quota is returned when nothing that was made of it is there any more: no pod of the trainer, of the
   preparation or of the policy's servers, and no RayCluster, which could get pods.
4. Who switched a Workload off decides who switches it on: for a run that was suspended the operator does,
   else a person.
5. Texts are Kueue's own where it has one.

Not here: what is done for it (`plan.queue_todo`); jobs, whose Job Kueue itself suspends (`plan.job`).
"""

from dataclasses import dataclass

from agentfly.api import TrainingRun
from agentfly.api.reasons import Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.roles.status import Admission
from agentfly_operator.names import QUEUE, Work, queue_of
from agentfly_operator.plan.queue_seen import QueueSeen, WorkloadOf
from agentfly_operator.plan.run_seen import RunObserved

EXTERNAL = "TrainingRun.v1alpha1.agentfly.dev"


@dataclass(frozen=True, slots=True)
class Wait:
    """Why nothing may be made for a run now; ``stalled`` if only a person can mend that."""

    message: str
    phase: Phase = Phase.Queued
    stalled: Reason | None = None


def must_stop(run: TrainingRun, seen: RunObserved) -> bool:
    """Whether a run that is in an attempt must stop and give back what it has."""
    return bool(run.spec.suspend) or bool(_revoked(run, seen.queue))


def why_stop(run: TrainingRun, seen: RunObserved) -> str:
    """The beginning of a sentence that says who stops it; "" for a person."""
    why = "" if run.spec.suspend else _revoked(run, seen.queue)
    return f"{why}: " if why else ""


def may_start(run: TrainingRun, seen: RunObserved) -> bool:
    """Whether the pods of an attempt may be made."""
    queue = seen.queue
    if not is_bound(run, seen):
        return True
    return queue.served and queue.workload is not None and queue.workload.may_run


def may_have(run: TrainingRun, seen: RunObserved) -> bool:
    """Whether something may be made for a run, or be kept for it, between its attempts."""
    return may_start(run, seen) and not seen.queue.outdated


def is_bound(run: TrainingRun, seen: RunObserved) -> bool:
    """Whether a queue decides: the run names one, or did when its Workload was made."""
    return bool(queue_of(run)) or seen.queue.workload is not None


def waits_for_queue(run: TrainingRun, seen: RunObserved) -> Wait | None:
    """What a run between its attempts waits for; None if for nothing that Kueue has."""
    queue, workload = seen.queue, seen.queue.workload
    if not is_bound(run, seen):
        return None
    if not queue.served:
        return Wait(no_kueue(run, queue), Phase.Pending, Reason.KueueMissing)
    if workload is not None and _is_released(queue, workload):
        text = f"{_told(workload) or 'its place in the queue is given up'}: what it has is being removed"
        return Wait(text, Phase.Suspending if seen.pods or seen.clusters else Phase.Queued)
    if workload is None or not workload.may_run:
        return _unnamed(queue) or _waits_for_quota(workload)
    return _unread(queue) or taken(queue)


def _unnamed(queue: QueueSeen) -> Wait | None:
    """That of a run whose labels name what nobody has made, or what cannot be read."""
    if queue.missing:
        return Wait(f"not there: {', '.join(queue.missing)}", Phase.Pending, Reason.MissingObject)
    return _unread(queue)


def _unread(queue: QueueSeen) -> Wait | None:
    return Wait(queue.refused, Phase.Pending, Reason.StartFailed) if queue.refused else None


def no_kueue(work: Work, queue: QueueSeen) -> str:
    """What is told of a run or job in a cluster without Kueue."""
    return (
        f"label {QUEUE} asks for the queue {queue_of(work)}, and Kueue is not there: {queue.absent}; it goes "
        "on when Kueue 0.15 or newer is installed, or without the label"
    )


def taken(queue: QueueSeen) -> Wait | None:
    """That of a run whose children Kueue has put into a queue of their own; None: it has not."""
    if not queue.taken:
        return None
    text = (
        f"Kueue holds {', '.join(queue.taken)} for quota of its own, beside that of the whole run: a "
        f"LocalQueue named default takes in what has no queue. Set integrations.externalFrameworks: "
        f"[{EXTERNAL}] in Kueue's configuration and delete what it holds, or rename that LocalQueue"
    )
    return Wait(text, Phase.Pending, Reason.QuotaModeConflict)


def is_released(seen: RunObserved) -> bool:
    """Whether nothing is left of what needs quota."""
    trainers = seen.pods or seen.clusters  # KubeRay may be about to make pods of a cluster
    return not (trainers or seen.policy.exists or seen.queue.servers or seen.queue.preparing)


def admission(run: TrainingRun, seen: RunObserved) -> Admission | None:
    """What the status says of the queue; None: there is none to say something of."""
    queue, workload = seen.queue, seen.queue.workload
    if not is_bound(run, seen):
        return None
    if not queue.served:
        return Admission(False, Reason.KueueMissing, no_kueue(run, queue))
    if workload is None:
        return Admission(False, Reason.Queued, "")
    return standing(workload)


def standing(workload: WorkloadOf) -> Admission:
    """What the status says of a Workload."""
    if workload.may_run:
        return Admission(True, Reason.Admitted, "")
    if workload.reserved and workload.evicted:
        return Admission(False, Reason.Evicted, _told(workload))
    if workload.paused:
        return Admission(False, Reason.SuspendedByUser, "")
    if not workload.active:
        return Admission(False, Reason.Deactivated, _told(workload))
    return Admission(False, Reason.Queued, workload.pending)


def _waits_for_quota(workload: WorkloadOf | None) -> Wait:
    if workload is None:
        return Wait("its Workload is being made")
    if workload.active:
        return Wait(workload.pending or "Kueue has not looked at it yet")
    if workload.paused:
        return Wait("it is being put back into its queue")
    return Wait(switched_off(workload, "run"), Phase.Pending, Reason.Deactivated)


def switched_off(workload: WorkloadOf, word: str) -> str:
    """What is told of a Workload that the operator did not switch off; ``word`` is run or job."""
    return (
        f"Workload {workload.name} was switched off: {_told(workload) or 'nobody says why'}; set its "
        f"spec.active to true, or suspend the {word} and let it go on"
    )


def _is_released(queue: QueueSeen, workload: WorkloadOf) -> bool:
    """Whether its Workload must first be rid of what it has, or go."""
    return workload.deleting or queue.outdated or (workload.reserved and bool(workload.evicted))


def _revoked(run: TrainingRun, queue: QueueSeen) -> str:
    """Why a run has no right any more to what its attempt has; "" if it has, or if nobody says."""
    workload = queue.workload
    if not queue.served or (workload is None and not queue_of(run)):
        return ""
    if workload is None:
        return "its Workload is gone"
    if workload.may_run:
        return ""
    return _told(workload) or "its Workload is not admitted"


def _told(workload: WorkloadOf) -> str:
    """Why it was evicted, for people."""
    return f"Kueue evicts it ({workload.evicted}): {workload.why}" if workload.evicted else ""
