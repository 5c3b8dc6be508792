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
from typing import Any, Literal

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
SHOWN_ROLLOUTS = ("masked", "failed")  # of the last step, where there are any
_TYPES = (
    *(Type.Reconciling, Type.Stalled, Type.RolesReady, Type.Running),
    *(Type.Suspended, Type.Succeeded, Type.Failed, Type.Finished),
)
# Of each phase: why it is what it is, and which of the conditions above are true; the others are false.
_PHASES: Mapping[str, tuple[Reason, frozenset[Type]]] = {
    "Pending": (Reason.NotStarted, frozenset({Type.Reconciling})),
    "Starting": (Reason.Provisioning, frozenset({Type.Reconciling})),
    "Running": (Reason.Training, frozenset({Type.RolesReady, Type.Running})),
    "Suspending": (Reason.Suspending, frozenset({Type.Reconciling, Type.RolesReady, Type.Running})),
    "Suspended": (Reason.SuspendedByUser, frozenset({Type.Suspended})),
    "Restarting": (Reason.Restarting, frozenset({Type.Reconciling})),
    "Succeeded": (Reason.Completed, frozenset({Type.Succeeded, Type.Finished})),
    "Failed": (Reason.AttemptFailed, frozenset({Type.Stalled, Type.Failed, Type.Finished})),
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
    before, saved = run.status.conditions, seen.checkpoint is not None
    checkpointed = Reason.Saved if saved else Reason.NoneYet
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
        conditions=(
            *_conditions(seen.phase, seen.reason, seen.message, before, generation, now),
            _condition(Type.Checkpointed, saved, checkpointed, "", before, generation, now),
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
        conditions=_conditions(seen.phase, seen.reason, seen.message, job.status.conditions, generation, now),
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
    rollouts = last.get("rollouts", {})
    shown |= {name: decimal(float(rollouts[name])) for name in SHOWN_ROLLOUTS if rollouts.get(name)}
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
) -> tuple[Condition, ...]:
    reason, true = _PHASES[phase]
    if reason is Reason.AttemptFailed:
        reason = failed_because
    return tuple(
        _condition(
            kind,
            kind in true,
            Reason.AllReady if kind is Type.RolesReady and kind in true else reason,
            message if kind in true or kind is Type.RolesReady else "",
            before,
            generation,
            now,
        )
        for kind in _TYPES
    )


def _condition(
    kind: Type,
    true: bool,
    reason: Reason,
    message: str,
    before: Sequence[Condition],
    generation: int,
    now: datetime,
) -> Condition:
    status: Literal["True", "False"] = "True" if true else "False"
    old = next((condition for condition in before if condition.type == kind), None)
    return Condition(
        type=kind.value,
        status=status,
        observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == status else now,
        reason=reason.value,
        message=message,
    )
