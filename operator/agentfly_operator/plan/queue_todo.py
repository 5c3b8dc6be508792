"""The steps for the Workload by which a run stands in a queue.

Guarantees:
1. A Workload is made for a run that names a queue and is to run, and for no other.
2. Whatever is told to Kueue is told once: nothing follows from what its Workload says already.
3. Quota is returned, and a Workload removed, only when nothing that needs it is there, nor can have been made
   so short a while ago that it is not seen.
4. A run that is suspended is switched off at once, so that its quota is asked back; one that goes on is
   switched on when that quota was returned.
"""

from collections.abc import Iterator
from datetime import datetime

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly_operator.names import queue_of
from agentfly_operator.plan.queue import is_released
from agentfly_operator.plan.queue_steps import (
    FinishWorkload,
    GiveBack,
    MakeWorkload,
    QueueStep,
    SwitchWorkload,
    TellReady,
)
from agentfly_operator.plan.run_attempt import OVER, SETTLE, TRAINER, in_attempt
from agentfly_operator.plan.run_seen import RunObserved
from agentfly_operator.plan.run_steps import Remove
from agentfly_operator.plan.said import is_true


def queue_steps(
    run: TrainingRun, after: TrainingRunStatus, seen: RunObserved, now: datetime
) -> Iterator[QueueStep | Remove]:
    """What to do; ``run.status`` is the stored status."""
    before, queue, workload = run.status, seen.queue, seen.queue.workload
    if not queue.served:
        return
    idle = not in_attempt(before) and not in_attempt(after)
    if workload is None:
        wanted = queue_of(run) and not (run.spec.suspend or queue.missing or is_true(after, Type.Stalled))
        if wanted and idle and after.phase not in OVER:
            yield MakeWorkload()
        return
    if workload.deleting:
        return
    if before.phase in OVER:
        if is_released(seen) and not workload.finished:
            yield FinishWorkload(workload.name, workload.uid, before.phase is Phase.Succeeded)
        return
    if run.spec.suspend and not workload.paused:
        yield SwitchWorkload(workload.name, workload.uid, active=False)
    elif not run.spec.suspend and workload.paused and not workload.reserved:
        yield SwitchWorkload(workload.name, workload.uid, active=True)
    ready = not idle and _all_ready(after)
    if workload.may_run and workload.pods_ready != ready:
        yield TellReady(workload.name, workload.uid, ready)
    if not idle or not is_released(seen) or _unsettled(after, now):
        return
    if queue.outdated:
        yield Remove("Workload", workload.name, workload.uid)
    elif workload.reserved and workload.evicted:
        yield GiveBack(workload.name, workload.uid)


def _unsettled(status: TrainingRunStatus, now: datetime) -> bool:
    """Whether pods of the last attempt may be there that were not seen yet."""
    return status.attempt_time is not None and now < status.attempt_time + SETTLE


def _all_ready(status: TrainingRunStatus) -> bool:
    return TRAINER in status.roles and all(role.ready >= role.desired for role in status.roles.values())
