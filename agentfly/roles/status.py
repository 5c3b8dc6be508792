"""The status of a TrainingRun or RolloutJob as a function of what is true now.

Guarantees:
1. Equal arguments give an equal status: nothing is added up, nothing is read from a clock.
2. ``Reconciling`` and ``Stalled`` are never both true, and a generic tool (kstatus) reads every phase
   rightly: starting, suspending and restarting are in progress, running, suspended and succeeded are current,
   failed is failed.
3. The time of a condition changes only with its status.
4. A finished run is finished: ``Finished`` is true for both outcomes, so that a script waits for one thing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentfly.api import (
    Condition,
    PoolUse,
    RolloutJob,
    RolloutJobStatus,
    TrainingRun,
    TrainingRunStatus,
    decimal,
)
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import Reason, RolloutJobPhase, TrainingRunPhase
from agentfly.api.rolloutjob import RewardSummary, RolloutCounts
from agentfly.api.trainingrun import CheckpointStatus, Failure, Progress, RoleStatus
from agentfly.roles.worker import WorkerReport

ETA_STEPS = 10  # the rate of the last steps says more than that of the first ones, which warm up
SHOWN_METRICS = ("reward", "reward_std", "tokens_per_s", "step_seconds", "drift_fraction", "prob_diff_max")
Row = tuple[bool, Reason]

# Of each phase: in order of Types below, whether the condition is true and why.
_TYPES = (
    Type.Reconciling,
    Type.Stalled,
    Type.RolesReady,
    Type.Running,
    Type.Suspended,
    Type.Succeeded,
    Type.Failed,
    Type.Finished,
)
_NO = (False, Reason.Working)
_CONDITIONS: Mapping[str, tuple[Row, ...]] = {
    "Pending": (
        (True, Reason.Provisioning),
        _NO,
        (False, Reason.Provisioning),
        (False, Reason.NotStarted),
        _NO,
        _NO,
        _NO,
        _NO,
    ),
    "Starting": (
        (True, Reason.Provisioning),
        _NO,
        (False, Reason.Provisioning),
        (False, Reason.NotStarted),
        _NO,
        _NO,
        _NO,
        _NO,
    ),
    "Running": (_NO, _NO, (True, Reason.AllReady), (True, Reason.Training), _NO, _NO, _NO, _NO),
    "Suspending": (
        (True, Reason.Suspending),
        _NO,
        (True, Reason.AllReady),
        (True, Reason.Training),
        _NO,
        _NO,
        _NO,
        _NO,
    ),
    "Suspended": (
        _NO,
        _NO,
        (False, Reason.SuspendedByUser),
        (False, Reason.SuspendedByUser),
        (True, Reason.SuspendedByUser),
        _NO,
        _NO,
        _NO,
    ),
    "Restarting": (
        (True, Reason.Restarting),
        _NO,
        (False, Reason.Restarting),
        (False, Reason.Restarting),
        _NO,
        _NO,
        _NO,
        _NO,
    ),
    "Succeeded": (
        _NO,
        _NO,
        (False, Reason.Completed),
        (False, Reason.Completed),
        _NO,
        (True, Reason.Completed),
        (False, Reason.Completed),
        (True, Reason.Completed),
    ),
    "Failed": (
        _NO,
        (True, Reason.AttemptFailed),
        (False, Reason.AttemptFailed),
        (False, Reason.AttemptFailed),
        _NO,
        (False, Reason.AttemptFailed),
        (True, Reason.AttemptFailed),
        (True, Reason.AttemptFailed),
    ),
}


@dataclass(frozen=True)
class RunSeen:
    """What is true of a training run now.

    Attributes:
        steps: records of the metrics file, in order of steps.
        failure: how the last failed attempt ended.
        reason: why the run failed for good; of no meaning in another phase.
        message: what the roles wait for, or why the phase is what it is, for people.
    """

    phase: TrainingRunPhase
    attempt: int = 0
    restarts: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    roles: Mapping[str, RoleStatus] = field(default_factory=dict)
    pools: Mapping[str, PoolUse] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    checkpoint: CheckpointStatus | None = None
    failure: Failure | None = None
    reason: Reason = Reason.AttemptFailed
    message: str = ""


def training_status(run: TrainingRun, seen: RunSeen, now: datetime) -> TrainingRunStatus:
    """The status of a run; ``run.status`` is the one before, for the times of its conditions."""
    generation = run.metadata.generation or 1
    saved = seen.checkpoint is not None
    extra = {Type.Checkpointed: (saved, Reason.Saved if saved else Reason.NoneYet)}
    return TrainingRunStatus(
        observed_generation=generation,
        phase=seen.phase,
        start_time=seen.start_time,
        completion_time=seen.completion_time,
        attempt=seen.attempt,
        restarts=seen.restarts,
        roles=dict(seen.roles),
        progress=progress(seen.steps, run.spec.steps),
        checkpoint=seen.checkpoint,
        last_failure=seen.failure,
        pools=dict(seen.pools),
        conditions=_conditions(
            seen.phase, seen.reason, seen.message, run.status.conditions, generation, now, extra
        ),
    )


@dataclass(frozen=True)
class JobSeen:
    """What is true of a rollout job now; ``report`` is its worker's, None before there is one."""

    phase: RolloutJobPhase
    report: WorkerReport | None = None
    pools: Mapping[str, PoolUse] = field(default_factory=dict)
    start_time: datetime | None = None
    completion_time: datetime | None = None
    reason: Reason = Reason.AttemptFailed
    message: str = ""


def rollout_status(job: RolloutJob, seen: JobSeen, now: datetime) -> RolloutJobStatus:
    """The status of a job; ``job.status`` is the one before, for the times of its conditions."""
    generation = job.metadata.generation or 1
    report = seen.report
    return RolloutJobStatus(
        observed_generation=generation,
        phase=seen.phase,
        start_time=seen.start_time,
        completion_time=seen.completion_time,
        tasks=_counts(report),
        failures=dict(report.failed) if report else {},
        reward=_rewards(report),
        drift_fraction=decimal(report.drift_fraction)
        if report and report.drift_fraction is not None
        else None,
        pools=dict(seen.pools),
        conditions=_conditions(
            seen.phase, seen.reason, seen.message, job.status.conditions, generation, now, {}
        ),
    )


def _counts(report: WorkerReport | None) -> RolloutCounts | None:
    if report is None:
        return None
    return RolloutCounts(
        total=report.total, scored=report.scored, masked=report.masked, failed=sum(report.failed.values())
    )


def _rewards(report: WorkerReport | None) -> RewardSummary | None:
    if report is None or report.reward_mean is None or report.reward_min is None or report.reward_max is None:
        return None
    return RewardSummary(
        mean=decimal(report.reward_mean), min=decimal(report.reward_min), max=decimal(report.reward_max)
    )


def progress(steps: Sequence[Mapping[str, Any]], total: int) -> Progress | None:
    """How far a run is, from its metrics; None before the first step."""
    if not steps:
        return None
    last = steps[-1]
    recent = [float(record["step_seconds"]) for record in steps[-ETA_STEPS:] if "step_seconds" in record]
    left = max(0, total - int(last["step"]))
    shown = {name: decimal(float(last[name])) for name in SHOWN_METRICS if last.get(name) is not None}
    return Progress(
        step=int(last["step"]),
        total_steps=total,
        eta_seconds=round(left * sum(recent) / len(recent)) if recent else None,
        metrics=shown,
    )


def _conditions(
    phase: str,
    failed_because: Reason,
    message: str,
    before: Sequence[Condition],
    generation: int,
    now: datetime,
    extra: Mapping[Type, Row],
) -> tuple[Condition, ...]:
    known = {condition.type: condition for condition in before}
    made = []
    for kind, (true, reason) in [*zip(_TYPES, _CONDITIONS[phase], strict=True), *extra.items()]:
        value = "True" if true else "False"
        old = known.get(kind.value)
        why = failed_because if reason is Reason.AttemptFailed else reason
        made.append(
            Condition(
                type=kind.value,
                status="True" if true else "False",
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old and old.status == value else now,
                reason=why.value,
                message=message if kind in _TYPES and (true or kind is Type.RolesReady) else "",
            )
        )
    return tuple(made)
