"""A RolloutJob in a cluster: what it is, what to do for it, and when to look again.

Guarantees:
1. Equal arguments give an equal plan. What is remembered stands in the status and nowhere else.
2. A finished job stays finished, whatever its spec says then: all that is left of it is removed, and nothing
   is made.
3. Every shard that is seen finished is counted, once; that stands in the status before the pods that said so
   are removed. A shard whose counts nobody can read any more is told of, and costs nothing but its counts.
4. Workers start when the job is prepared, the policy serves, and the pools that spec names are ready; what is
   missing then is waited for. Workers that run are not disturbed by any of this.
5. A suspended job has no worker and no server of the policy, in this order; what is finished stays.
6. A job fails as on one machine, when so many rollouts failed or drifted that the rest cannot make up for it,
   and when its time is over, which a suspension starts anew. A shard that failed for good fails the job when
   the others have ended.
7. What only a person can mend stands in ``Stalled``, before there are workers.
8. Workers in a queue of Kueue run when and as long as Kueue lets them.
9. Planning again over what a plan says changes nothing; ``wake_at`` lies after ``now``.

Not here: sums over shards (`plan.job_counts`), queues (`plan.job_queue`), steps (`plan.job_todo`), events
(`plan.job_turns`).
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.api.rolloutjob import ShardStatus
from agentfly.roles.launch import STORAGE
from agentfly.roles.plan import cluster_places
from agentfly.roles.status import JobSeen, rollout_status
from agentfly.roles.trainer import EXIT_INVALID
from agentfly.roles.worker import EXIT_BUDGET, WorkerReport
from agentfly_operator.names import role_selector
from agentfly_operator.plan.job_counts import count, indexes, outcomes, ranges, summed
from agentfly_operator.plan.job_queue import admission, is_held, queue_stall
from agentfly_operator.plan.job_seen import JobObserved, JobPlan
from agentfly_operator.plan.job_todo import OVER, live, steps, waits
from agentfly_operator.plan.job_turns import job_turns
from agentfly_operator.plan.run_seen import PodOf
from agentfly_operator.plan.run_stalls import held
from agentfly_operator.plan.said import condition_of, is_true

LOOK_AGAIN = timedelta(seconds=5)
UNREAD = timedelta(seconds=20)  # a watch of pods may be so far behind one of Jobs, and no further
DRIFT_TOKENS = 10_000  # the share of a few tokens is chance: as agentfly.rollout.many has it
_AT_ONCE = timedelta(seconds=1)
_TURNS = 5  # more than a job can take without anything happening


def plan_job(job: RolloutJob, seen: JobObserved, now: datetime) -> JobPlan:
    """What follows from what is seen; ``now`` in whole seconds, as the API server keeps times."""
    if job.metadata.deletion_timestamp is not None:
        return JobPlan(None)  # its children go with it
    after = job
    for _ in range(_TURNS):
        status = rollout_status(after, _next(after, seen, now), now)
        if status == after.status:
            break
        after = after.model_copy(update={"status": status})
    return JobPlan(
        status=status,
        steps=steps(job, status, seen),
        events=job_turns(job.status, status),
        wake_at=_wake_at(job, status, seen, now),
    )


def unread(job: RolloutJob, seen: JobObserved) -> frozenset[int]:
    """The finished shards that are not counted, and that no pod tells of."""
    shards = job.status.shards or ShardStatus()
    return _completed(seen) - indexes(shards.counted) - _finished(seen.pods).keys()


def _next(job: RolloutJob, seen: JobObserved, now: datetime) -> JobSeen:
    if job.status.phase in OVER:
        return _over_before(job, seen)
    state, sums, counted = _counted(job, seen, now)
    verdict = _verdict(job, seen, sums, counted, now) if state.shards is not None else None
    if verdict is not None:
        return _over(state, *verdict, now)
    if job.spec.suspend:
        return _suspended(seen, state)
    return _wanted(job, seen, state, now)


def _wanted(job: RolloutJob, seen: JobObserved, state: JobSeen, now: datetime) -> JobSeen:
    """A job that is to run."""
    stall = held(job, seen.missing, seen.conflicts, seen.refused) if seen.workers is None else None
    stall = stall or queue_stall(job, seen)
    if stall is not None:
        reason, message = stall
        return replace(state, phase=Phase.Pending, stalled=reason, message=message)
    if state.shards is None:
        return _preparing(job, seen, state, now)
    if seen.workers is not None and is_held(job, seen):
        told = state.admission.message if state.admission is not None else ""
        return replace(state, phase=Phase.Queued, message=told or "Kueue has not looked at it yet")
    if seen.workers is None or seen.workers.suspended:
        message = waits(job, seen) or seen.leaving or "the worker pods are being made"
        return replace(state, phase=Phase.Starting, message=message)
    return replace(
        state, phase=Phase.Running, start_time=state.start_time or now, message=_troubles(job, seen, now)
    )


def _counted(
    job: RolloutJob, seen: JobObserved, now: datetime
) -> tuple[JobSeen, WorkerReport, frozenset[int]]:
    """The job as it was, with what shards have brought since then."""
    status, shards = job.status, job.status.shards or ShardStatus()
    sums, counted = count(status, _finished(seen.pods))
    per_second, tokens_per_second = _float(status.trajectories_per_second), _float(status.tokens_per_second)
    elapsed = (now - status.start_time).total_seconds() if status.start_time is not None else 0.0
    if counted != indexes(shards.counted) and elapsed > 0:
        per_second, tokens_per_second = outcomes(sums) / elapsed, sums.sampled_tokens / elapsed
    state = JobSeen(
        phase=status.phase or Phase.Pending,
        report=sums if shards.total else None,
        pools={name: pool.use for name, pool in seen.pools.items()},
        start_time=status.start_time,
        shards=_shards(shards.total, _completed(seen) | counted, counted, sums) if shards.total else None,
        workers=len(live(seen)),
        admission=admission(job, seen),
        selector=role_selector(job, "worker"),
        trajectories_per_second=per_second,
        tokens_per_second=tokens_per_second,
        path=_path(job),
    )
    return state, sums, counted


def _shards(total: int, done: frozenset[int], counted: frozenset[int], sums: WorkerReport) -> ShardStatus:
    return ShardStatus(
        total=total,
        done=len(done),
        counted=ranges(counted),
        sampled_tokens=sums.sampled_tokens,
        drift_tokens=sums.drift_tokens,
    )


def _over_before(job: RolloutJob, seen: JobObserved) -> JobSeen:
    status = job.status
    told = condition_of(status, Type.Finished)
    reason = told.reason if told is not None else ""
    return JobSeen(
        phase=status.phase or Phase.Failed,
        report=summed(status) if status.tasks is not None else None,
        pools=status.pools,
        start_time=status.start_time,
        completion_time=status.completion_time,
        shards=status.shards,
        workers=len(live(seen)),
        selector=status.selector,
        trajectories_per_second=_float(status.trajectories_per_second),
        tokens_per_second=_float(status.tokens_per_second),
        path=status.path,
        reason=Reason(reason) if reason in Reason.__members__ else None,
        message=told.message if told is not None else "",
    )


# How it ends -------------------------------------------------------------------------------------------


def _over(state: JobSeen, phase: Phase, reason: Reason | None, message: str, now: datetime) -> JobSeen:
    return replace(
        state, phase=phase, reason=reason, message=message, completion_time=now, pools={}, admission=None
    )


def _verdict(
    job: RolloutJob, seen: JobObserved, sums: WorkerReport, counted: frozenset[int], now: datetime
) -> tuple[Phase, Reason | None, str] | None:
    """Whether the job is over, and how; None while it is not."""
    total, lost = (job.status.shards or ShardStatus()).total, unread(job, seen)
    settled = not lost or _is_lost(seen, now)
    ended = settled and len(_completed(seen) | counted) >= total
    limit = _limit(job, seen, sums, ended)
    if limit is not None:
        return Phase.Failed, *limit
    if ended:
        return Phase.Succeeded, None, f"every rollout has an outcome{_told(lost)}"
    if settled and seen.workers is not None and seen.workers.failed:
        return Phase.Failed, *_shard_failure(seen)
    deadline = _deadline(job)
    if deadline is not None and now >= deadline:
        seconds = job.spec.run_policy.active_deadline_seconds
        message = f"spec.runPolicy.activeDeadlineSeconds ({seconds}) is over"
        return Phase.Failed, Reason.DeadlineExceeded, message
    return None


def _is_lost(seen: JobObserved, now: datetime) -> bool:
    """Whether what nobody can read now is not only late."""
    return seen.unread_since is not None and now >= seen.unread_since + UNREAD


def _limit(job: RolloutJob, seen: JobObserved, sums: WorkerReport, ended: bool) -> tuple[Reason, str] | None:
    """What the job may not exceed and does, whatever its other shards bring."""
    budget, failed = job.spec.run_policy.failure_budget, sum(sums.failed.values())
    if failed > budget * sums.total:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(sums.failed.items()))
        return Reason.FailureBudgetExceeded, (
            f"{failed} of {sums.total} rollouts failed ({reasons}), "
            f"over spec.runPolicy.failureBudget ({budget:g})"
        )
    for pod in seen.pods:
        if pod.exit_code == EXIT_BUDGET and pod.report is not None:
            return Reason.FailureBudgetExceeded, f"shard {pod.index}: {pod.report.message}"
    most, drift = job.spec.rollout.max_drift_fraction, sums.drift_fraction
    judged = ended or sums.drift_tokens >= DRIFT_TOKENS
    if most is not None and drift is not None and drift > most and judged:
        return Reason.DriftExceeded, (
            f"{drift:.4f} of {sums.drift_tokens} tokens drifted, "
            f"over spec.rollout.maxDriftFraction ({most:g})"
        )
    return None


def _shard_failure(seen: JobObserved) -> tuple[Reason, str]:
    """Why the Job of the workers failed, from the pod that says most."""
    failed = _failed(seen)
    pods = [pod for pod in seen.pods if pod.index in failed and pod.over and pod.exit_code != 0]
    last = max(
        pods, key=lambda pod: (pod.report is not None, pod.finished is not None, pod.name), default=None
    )
    workers = seen.workers
    if last is None:
        words = workers.message if workers is not None else ""
        return Reason.AttemptFailed, f"shards {ranges(failed)} failed: {words or 'their pods are gone'}"
    more = f" (shards {ranges(failed)} failed)" if len(failed) > 1 else ""
    return _reason(last), f"shard {last.index}: {_words(last)}{more}"


def _reason(pod: PodOf) -> Reason:
    told = pod.report.reason if pod.report is not None else ""
    if told in Reason.__members__ and told != Reason.Interrupted:
        return Reason(told)
    return Reason.OutOfMemory if pod.reason == "OOMKilled" else Reason.AttemptFailed


def _words(pod: PodOf) -> str:
    said = pod.report.message if pod.report is not None else pod.message
    lines = [line for line in said.splitlines() if line.strip()]
    how = pod.reason or (f"exit code {pod.exit_code}" if pod.exit_code is not None else "failed")
    return (lines[0] if pod.report is not None else lines[-1])[:500] if lines else how


def _deadline(job: RolloutJob) -> datetime | None:
    seconds = job.spec.run_policy.active_deadline_seconds
    running = condition_of(job.status, Type.Running)
    if seconds is None or running is None or running.status != "True":
        return None
    return running.last_transition_time + timedelta(seconds=seconds)


# What it waits for -------------------------------------------------------------------------------------


def _preparing(job: RolloutJob, seen: JobObserved, state: JobSeen, now: datetime) -> JobSeen:
    prepare = seen.prepare
    report = prepare.report
    if prepare.complete and report is not None and report.tasks:
        size = job.spec.workers.tasks_per_shard
        return replace(
            state,
            phase=Phase.Starting,
            report=WorkerReport(total=report.tasks * job.spec.rollout.group_size),
            shards=ShardStatus(total=-(-report.tasks // size)),
            message="the policy's servers are being started",
        )
    if not prepare.failed:
        message = prepare.message or seen.leaving or "the model is made, and the tasks are read"
        return replace(state, phase=Phase.Starting, reason=Reason.Preparing, message=message)
    invalid = report is not None and report.exit_code == EXIT_INVALID
    reason = Reason.InvalidSpec if invalid else Reason.StartFailed
    if report is not None and report.reason in Reason.__members__:
        reason = Reason(report.reason)
    said = (report.message if report is not None else "") or prepare.message or "no explanation"
    return _over(state, Phase.Failed, reason, f"the preparation failed: {said}", now)


def _suspended(seen: JobObserved, state: JobSeen) -> JobSeen:
    workers = seen.workers
    if live(seen) or (workers is not None and not workers.suspended):
        phase = Phase.Starting if state.phase is Phase.Suspended else state.phase
        return replace(state, phase=phase, message="the worker pods are ending, on request")
    shards = state.shards
    done = f", {shards.done} of {shards.total} shards are done" if shards is not None else ""
    return replace(state, phase=Phase.Suspended, message=f"on request{done}", pools={})


def _troubles(job: RolloutJob, seen: JobObserved, now: datetime) -> str:
    """What is not as it should be while workers run; "" if all is."""
    failed = _failed(seen)
    waiting = next((pod.waiting for pod in seen.pods if pod.waiting and not pod.over), "")
    policy = "" if seen.policy.ready else f"the policy's servers: {seen.policy.message or 'are being made'}"
    parts = [
        f"shards {ranges(failed)} failed, the others go on" if failed else "",
        policy,
        waiting,
        _told(unread(job, seen))[2:] if _is_lost(seen, now) else "",
        *seen.conflicts,
        seen.refused,
    ]
    return "; ".join(part for part in parts if part)


def _told(lost: frozenset[int]) -> str:
    return f"; shards {ranges(lost)}: their results are on the claim, and not counted here" if lost else ""


def _completed(seen: JobObserved) -> frozenset[int]:
    return indexes(seen.workers.completed_indexes) if seen.workers is not None else frozenset()


def _failed(seen: JobObserved) -> frozenset[int]:
    return indexes(seen.workers.failed_indexes) if seen.workers is not None else frozenset()


def _finished(pods: Iterable[PodOf]) -> dict[int, WorkerReport]:
    """The counts of the shards that pods have published, by index."""
    return {
        pod.index: pod.report.shard
        for pod in pods
        if pod.report is not None and pod.report.shard is not None and pod.report.exit_code == 0
    }


def _path(job: RolloutJob) -> str | None:
    if job.spec.storage is None or not job.metadata.uid:
        return None
    run_dir = cluster_places(job, job.metadata.uid, "").run_dir
    return str((run_dir / "results").relative_to(STORAGE))


def _float(text: str | None) -> float | None:
    return None if text is None else float(text)


def _wake_at(job: RolloutJob, after: RolloutJobStatus, seen: JobObserved, now: datetime) -> datetime | None:
    if after != job.status:
        return now + _AT_ONCE
    if after.phase in OVER:
        return None
    times = [time for time in (_deadline(job),) if time is not None]
    if unread(job, seen):
        times.append((seen.unread_since or now) + UNREAD)
    if is_true(after, Type.Stalled):
        times.append(now + LOOK_AGAIN)
    return min((time for time in times if time > now), default=None)
