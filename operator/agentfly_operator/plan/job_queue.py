"""A job whose workers are in a queue of Kueue: Kueue suspends their Job and lets it go on, nobody else does.

Guarantees:
1. A job is in a queue if its label says so, or if the Job of its workers came into one by itself, as in a
   namespace whose LocalQueue takes in all.
2. Its policy has servers only while Kueue lets the workers run. Their Job is made before that, suspended,
   when the pools are ready that the job names: they hold no quota while they wait for something else.
3. A job that is to be suspended has its Workload switched off: a Job that Kueue admitted would be let go on
   again. The operator switches on what it switched off.

Not here: the same for runs (`plan.queue`).
"""

from collections.abc import Iterator

from agentfly.api import RolloutJob
from agentfly.api.reasons import Reason
from agentfly.roles.status import Admission
from agentfly_operator.names import queue_of
from agentfly_operator.plan.job_seen import JobObserved
from agentfly_operator.plan.queue import no_kueue, standing, switched_off
from agentfly_operator.plan.queue_steps import SwitchWorkload

_UNKNOWN = "Kueue has no Workload for Job {} yet; is its namespace one that Kueue manages?"


def is_queued(job: RolloutJob, seen: JobObserved) -> bool:
    """Whether Kueue decides when the workers run."""
    return bool(queue_of(job)) or (seen.workers is not None and bool(seen.workers.queue))


def is_held(job: RolloutJob, seen: JobObserved) -> bool:
    """Whether Kueue has not let the workers run, or not any more."""
    return is_queued(job, seen) and (seen.workers is None or seen.workers.suspended)


def queue_stall(job: RolloutJob, seen: JobObserved) -> tuple[Reason, str] | None:
    """What only a person can mend of the queue of workers that do not run; None: nothing."""
    queue = seen.queue
    if not is_held(job, seen):
        return None
    if not queue.served:
        return Reason.KueueMissing, no_kueue(job, queue)
    if seen.workers is None:
        return (Reason.MissingObject, f"not there: {', '.join(queue.missing)}") if queue.missing else None
    workload = queue.workload
    if workload is not None and not workload.active and not workload.paused:
        return Reason.Deactivated, switched_off(workload, "job")
    return None


def admission(job: RolloutJob, seen: JobObserved) -> Admission | None:
    """What the status says of the queue; None: there is none."""
    if not is_queued(job, seen):
        return None
    if not is_held(job, seen):
        return Admission(True, Reason.Admitted, "")
    if not seen.queue.served:
        return Admission(False, Reason.KueueMissing, no_kueue(job, seen.queue))
    if seen.workers is None:
        return Admission(False, Reason.Queued, "its workers are not made yet")
    if seen.queue.workload is None:
        return Admission(False, Reason.Queued, _UNKNOWN.format(seen.workers.name))
    return standing(seen.queue.workload)


def switch(seen: JobObserved, *, suspend: bool) -> Iterator[SwitchWorkload]:
    """Have Kueue do what the spec asks."""
    workload = seen.queue.workload
    if workload is None or workload.deleting or workload.finished:
        return
    if suspend and not workload.paused:
        yield SwitchWorkload(workload.name, workload.uid, active=False)
    elif not suspend and workload.paused and not workload.reserved:
        yield SwitchWorkload(workload.name, workload.uid, active=True)
