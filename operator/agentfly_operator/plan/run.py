"""A TrainingRun in a cluster: what it is, what to do for it, and when to look again.

Guarantees:
1. Equal arguments give an equal plan. What is remembered stands in the status and nowhere else.
2. A finished run stays finished, whatever its spec says then: all that is left of it is removed, and nothing
   is made.
3. An attempt is numbered in a stored status before anything of it is made, with the engine that makes it, and
   numbers only grow.
4. No pod of an attempt is made while one of another is there, nor before the pause after it is over. That an
   attempt ended is stored before its pods go: what they said would be lost with them. A RayCluster of which
   pods are left counts as one.
5. A run that is asked to suspend ends its step and writes a checkpoint, and then gives back its pods and the
   policy's servers; before its first step it has nothing to write. A checkpoint that does not come in time
   is not waited for. What is asked while it stops is done when it has stopped.
6. What only a person can mend stands in ``Stalled``, before anything is made, and is looked at again every
   `LOOK_AGAIN`. A run that is in an attempt is not disturbed by it.
7. A run in a queue has nothing before Kueue admits it, and stops as if it were asked to suspend when Kueue
   takes its quota back. It goes on by itself when it is admitted again.
8. Planning again over what a plan says changes nothing; ``wake_at`` lies after ``now``.

Not here: what an attempt is (`plan.run_attempt`), who makes its pods (`plan.run_engine`), how it ended
(`plan.run_ends`), what keeps it from starting (`plan.run_stalls`, `plan.queue`), steps (`plan.run_todo`,
`plan.queue_todo`), events (`plan.run_turns`).
"""

from dataclasses import replace
from datetime import datetime, timedelta

from agentfly.api import TrainingRun, TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import Reason
from agentfly.api.reasons import TrainingRunPhase as Phase
from agentfly.api.trainingrun import EngineStatus, Failure
from agentfly.roles.life import FIRST_PAUSE_S, Ended, after_attempt
from agentfly.roles.plan import serves_itself
from agentfly.roles.status import RunSeen, training_status
from agentfly.roles.trainer import EXIT_INVALID
from agentfly_operator.plan.queue import admission, must_stop, taken, waits_for_queue, why_stop
from agentfly_operator.plan.queue_todo import queue_steps
from agentfly_operator.plan.run_attempt import OVER, SETTLE, TRAINER, Attempt, attempt_of, in_attempt
from agentfly_operator.plan.run_ends import Ending, ending, grace_ends
from agentfly_operator.plan.run_engine import by_kuberay, engine_of
from agentfly_operator.plan.run_members import ran
from agentfly_operator.plan.run_roles import prepare_role, server_roles, trainer_role
from agentfly_operator.plan.run_seen import PodOf, RunObserved
from agentfly_operator.plan.run_stalls import stall
from agentfly_operator.plan.run_steps import RunPlan
from agentfly_operator.plan.run_todo import steps
from agentfly_operator.plan.run_turns import run_turns
from agentfly_operator.plan.said import condition_of, is_true

LOOK_AGAIN = timedelta(seconds=5)
TOO_LONG = timedelta(seconds=90)  # after which a pod that was deleted should be gone
_AT_ONCE = timedelta(seconds=1)
_TURNS = 8  # more than a run can take without anything happening


def plan_run(run: TrainingRun, seen: RunObserved, now: datetime) -> RunPlan:
    """What follows from what is seen; ``now`` in whole seconds, as the API server keeps times."""
    if run.metadata.deletion_timestamp is not None:
        return RunPlan(None)  # its children go with it
    after = run
    for _ in range(_TURNS):
        status = training_status(after, _next(after, seen, now), now)
        if status == after.status:
            break
        after = after.model_copy(update={"status": status})
    return RunPlan(
        status=after.status,
        steps=(*steps(run, after.status, seen), *queue_steps(run, after.status, seen, now)),
        events=run_turns(run.status, after.status),
        wake_at=_wake_at(run, after, seen, now),
    )


def _next(run: TrainingRun, seen: RunObserved, now: datetime) -> RunSeen:
    """One turn of the run."""
    state = replace(_kept(run.status, seen), admission=admission(run, seen))
    if run.status.phase in OVER:
        return replace(_finished(run.status, state), admission=None)
    if in_attempt(run.status):
        return _during(run, attempt_of(run, seen, now), seen, state, now)
    return _between(run, seen, state, now)


def _kept(status: TrainingRunStatus, seen: RunObserved) -> RunSeen:
    return RunSeen(
        phase=status.phase or Phase.Pending,
        attempt=status.attempt,
        restarts=status.restarts,
        failures=status.failures,
        attempt_time=status.attempt_time,
        step_time=status.step_time,
        resumed_step=status.resumed_step,
        restart_time=status.restart_time,
        active_seconds=status.active_seconds,
        start_time=status.start_time,
        completion_time=status.completion_time,
        engine=status.engine,
        pools=seen.pools,
        progress=status.progress,
        checkpoint=status.checkpoint,
        failure=status.last_failure,
    )


def _finished(status: TrainingRunStatus, state: RunSeen) -> RunSeen:
    told = condition_of(status, Type.Finished)
    reason = told.reason if told is not None else ""
    return replace(
        state,
        pools=status.pools,
        reason=Reason(reason) if reason in Reason.__members__ else None,
        message=told.message if told is not None else "",
    )


# Between attempts --------------------------------------------------------------------------------------


def _between(run: TrainingRun, seen: RunObserved, state: RunSeen, now: datetime) -> RunSeen:
    if run.spec.suspend:
        return _suspended(seen, state, now)
    held = stall(run, seen)
    if held is not None:
        reason, message = held
        return replace(state, phase=Phase.Pending, stalled=reason, message=message)
    wait = waits_for_queue(run, seen)
    if wait is not None:
        return replace(state, phase=wait.phase, stalled=wait.stalled, message=wait.message)
    if state.attempt == 0 and not seen.prepare.complete:
        return _preparing(seen, state, now)
    state = replace(state, roles=server_roles(run, seen.policy))
    waits = _waits(run, seen, state, now)
    if waits:
        phase = Phase.Restarting if state.attempt else Phase.Starting
        return replace(state, phase=phase, message=waits)
    return replace(
        state,
        phase=Phase.Starting,
        attempt=state.attempt + 1,
        attempt_time=now,
        step_time=None,
        restart_time=None,
        resumed_step=state.checkpoint.latest_step if state.checkpoint is not None else 0,
        engine=engine_of(run, seen),
        message="its pods are being made",
    )


def _suspended(seen: RunObserved, state: RunSeen, now: datetime) -> RunSeen:
    state = replace(state, pools={})
    if seen.pods or seen.clusters:
        return replace(state, phase=Phase.Suspending, message=_staying(seen, state, now))
    if state.checkpoint is not None:
        message = "on request, with a checkpoint"
    else:
        message = "on request, without a checkpoint: it had no step to save"
    return replace(state, phase=Phase.Suspended, message=message)


def _preparing(seen: RunObserved, state: RunSeen, now: datetime) -> RunSeen:
    prepare = seen.prepare
    if not prepare.failed:
        return replace(
            state,
            phase=Phase.Starting,
            reason=Reason.Preparing,
            roles={"prepare": prepare_role(prepare)},
            message=prepare.message or seen.leaving or "the model is made, tasks and settings are read",
        )
    report = prepare.report
    code = report.exit_code if report is not None else None
    reason = Reason.InvalidSpec if code == EXIT_INVALID else Reason.StartFailed
    if report is not None and report.reason in Reason.__members__:
        reason = Reason(report.reason)
    message = (report.message if report is not None else "") or prepare.message or "no explanation"
    message = f"the preparation failed: {message}"
    failure = Failure(attempt=0, reason=reason.value, message=message[:4096], exit_code=code, time=now)
    return _over(replace(state, failure=failure), Phase.Failed, reason, message, now)


def _waits(run: TrainingRun, seen: RunObserved, state: RunSeen, now: datetime) -> str:
    """What the next attempt waits for; "" if for nothing."""
    if state.restart_time is not None and now < state.restart_time:
        return f"the next attempt begins at {state.restart_time:%H:%M:%S} UTC"
    if seen.pods or seen.clusters:
        return _staying(seen, state, now)
    if state.attempt_time is not None and now < state.attempt_time + SETTLE:
        return "the pods of the last attempt are gone"
    if not serves_itself(run) and (not seen.policy.exists or seen.policy.deleting):
        return seen.leaving or "the pool of the policy's servers is being made"
    return ""


def _staying(seen: RunObserved, state: RunSeen, now: datetime) -> str:
    """What is said of pods that are on their way out; one that takes too long is named."""
    if state.attempt_time is None or now < state.attempt_time + TOO_LONG:
        return "the pods of the last attempt are being removed"
    if not seen.pods:
        return f"RayCluster {seen.clusters[0].name} does not go away; does something hold it?"
    pod = min(seen.pods, key=lambda each: each.name)
    return f"pod {pod.name} on node {pod.node or '(none)'} does not go away; is the node there?"


# In an attempt -----------------------------------------------------------------------------------------


def _during(run: TrainingRun, attempt: Attempt, seen: RunObserved, state: RunSeen, now: datetime) -> RunSeen:
    roles = server_roles(run, seen.policy)
    if attempt.made:
        roles[TRAINER] = trainer_role(attempt)
    report, head = attempt.report, attempt.head
    state = replace(state, roles=roles, step_time=attempt.step_time, engine=_with_head(run.status, head))
    if report is not None:
        state = replace(
            state,
            progress=report.progress or state.progress,
            checkpoint=report.checkpoint or state.checkpoint,
        )
    steps_now = report is not None and report.phase == "Running" and head is not None and not head.over
    if steps_now and attempt.running_since is None:
        return replace(state, phase=Phase.Running, start_time=state.start_time or now)
    ended = ending(run, attempt, seen, now)
    if ended is not None:
        return _after(run, attempt, ended, state, now, stops=must_stop(run, seen))
    if state.phase is Phase.Running and must_stop(run, seen):
        state = replace(state, phase=Phase.Suspending)
    if state.phase is Phase.Suspending:
        return replace(state, message=f"{why_stop(run, seen)}after this step, with a checkpoint")
    if state.phase is Phase.Running:
        return replace(state, message=attempt.unreached)
    return _starts(run, attempt, seen, state)


def _starts(run: TrainingRun, attempt: Attempt, seen: RunObserved, state: RunSeen) -> RunSeen:
    """An attempt that has not made a step yet."""
    wait = taken(seen.queue)
    if wait is not None:
        return replace(state, stalled=wait.stalled, message=wait.message)
    if seen.conflicts and not attempt.made:
        return replace(state, stalled=Reason.NameTaken, message="; ".join(seen.conflicts))
    return replace(state, message=_starting(attempt, seen))


def _with_head(status: TrainingRunStatus, head: PodOf | None) -> EngineStatus | None:
    """The engine, with the head of the attempt as soon as that has run: KubeRay would replace it."""
    engine = status.engine
    if engine is None or engine.head is not None or not by_kuberay(status) or head is None or not ran(head):
        return engine
    return engine.model_copy(update={"head": head.uid})


def _starting(attempt: Attempt, seen: RunObserved) -> str:
    if not attempt.made:
        return seen.refused or seen.leaving or attempt.unmade or "its pods are being made"
    waits = trainer_role(attempt).reason
    if waits is not None:
        return waits
    return (attempt.report.message if attempt.report is not None else "") or "its trainer starts"


def _after(
    run: TrainingRun, attempt: Attempt, ended: Ending, state: RunSeen, now: datetime, *, stops: bool
) -> RunSeen:
    """What follows an attempt that ended; it ``stops`` if it must give back what it has."""
    step = state.checkpoint.latest_step if state.checkpoint is not None else 0
    progressed = step > state.resumed_step
    verdict = after_attempt(
        Ended(ended.exit_code, ended.suspended, progressed), state.failures, run.spec.run_policy.backoff_limit
    )
    finished = min(ended.finished or now, now)
    ran = (finished - attempt.running_since).total_seconds() if attempt.running_since is not None else 0.0
    failure = ended.failure
    state = replace(
        state,
        roles={},
        failures=verdict.failures,
        failure=failure or state.failure,
        attempt_time=now,
        active_seconds=state.active_seconds + max(0, round(ran)),
        start_time=state.start_time or attempt.step_time,
    )
    if verdict.phase == "Succeeded":
        return _over(state, Phase.Succeeded, None, f"all {run.spec.steps} steps are done", now)
    if failure is not None and failure.reason == Reason.DeadlineExceeded:
        return _over(state, Phase.Failed, Reason.DeadlineExceeded, failure.message, now)
    if failure is not None and verdict.phase == "Failed":
        final = ended.exit_code == EXIT_INVALID
        reason = Reason(failure.reason) if final else Reason.BackoffLimitExceeded
        return _over(state, Phase.Failed, reason, failure.message, now)
    pause = verdict.pause_s
    if verdict.phase == "Restarting":
        state = replace(state, restarts=state.restarts + 1)
    elif not ended.asked and not progressed:
        pause = FIRST_PAUSE_S  # a head that says it was asked, again and again, and by nobody we know of
    state = replace(state, restart_time=now + timedelta(seconds=pause))
    if stops:
        return replace(state, phase=Phase.Suspending, message="its pods are being removed")
    return replace(state, phase=Phase.Restarting, message="the attempt has ended")


def _over(state: RunSeen, phase: Phase, reason: Reason | None, message: str, now: datetime) -> RunSeen:
    return replace(
        state,
        phase=phase,
        reason=reason,
        message=message,
        roles={},
        pools={},
        restart_time=None,
        completion_time=now,
    )


def _moved(before: TrainingRunStatus, after: TrainingRunStatus) -> bool:
    """Whether steps may follow from the new status that did not from the old one: progress alone has none."""
    old, new = (
        (status.phase, status.attempt, status.restart_time, TRAINER in status.roles, status.conditions)
        for status in (before, after)
    )
    return old != new


def _wake_at(run: TrainingRun, after: TrainingRun, seen: RunObserved, now: datetime) -> datetime | None:
    status, workload = after.status, seen.queue.workload
    if _moved(run.status, status):
        return now + _AT_ONCE
    if status.phase in OVER:
        return None
    times: list[datetime] = []
    if in_attempt(status):
        attempt = attempt_of(after, seen, now)
        times += [*attempt.deadlines(after), *grace_ends(attempt)]
        if not seen.heard or seen.silent:
            times.append(now + LOOK_AGAIN)
    elif status.phase is not Phase.Suspended or (workload is not None and workload.reserved):
        times += [time for time in (status.restart_time,) if time is not None]
        times += [status.attempt_time + SETTLE] if status.attempt_time is not None else []
        if is_true(status, Type.Stalled):
            times.append(now + LOOK_AGAIN)
    return min((time for time in times if time > now), default=None)
