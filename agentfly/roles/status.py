"""The status of a TrainingRun or RolloutJob as a function of what is true now.

Guarantees:
1. Equal arguments give an equal status: nothing is added up, nothing is read from a clock.
2. ``Reconciling`` and ``Stalled`` are never both true, and a generic tool (kstatus) reads every phase
   rightly: starting, suspending and restarting are in progress, queued, running, suspended and succeeded are
   current, failed is failed. What waits for a person, of a run that is not finished, is failed too, until it
   goes on.
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
from agentfly.api.rolloutjob import RewardSummary, RolloutCounts, ShardStatus
from agentfly.api.trainingrun import CheckpointStatus, EngineStatus, Failure, Progress, RoleStatus
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
    "Queued": (Reason.Queued, frozenset()),
    "Starting": (Reason.Provisioning, frozenset({Type.Reconciling})),
    "Running": (Reason.Training, frozenset({Type.RolesReady, Type.Running})),
    "Suspending": (Reason.Suspending, frozenset({Type.Reconciling, Type.RolesReady, Type.Running})),
    "Suspended": (Reason.SuspendedByUser, frozenset({Type.Suspended})),
    "Restarting": (Reason.Restarting, frozenset({Type.Reconciling})),
    "Succeeded": (Reason.Completed, frozenset({Type.Succeeded, Type.Finished})),
    "Failed": (Reason.AttemptFailed, frozenset({Type.Stalled, Type.Failed, Type.Finished})),
}


@dataclass(frozen=True)
class Admission:
    """Whether Kueue lets a run or job have its quota, and why not, for people."""

    granted: bool
    reason: Reason
    message: str


@dataclass(frozen=True)
class RunSeen:
    """What is true of a training run now.

    Attributes:
        steps: records of the metrics file, in order of steps.
        progress: how far it is, where the metrics file is not at hand.
        failure: how the last failed attempt ended.
        reason: why the phase is what it is, where it is not what it always is: of Failed the cause.
        stalled: it waits for a person, who reads why here and in the message.
        message: what the roles wait for, or why the phase is what it is, for people.
        admission: None: it is in no queue.
    """

    phase: TrainingRunPhase
    attempt: int = 0
    restarts: int = 0
    failures: int = 0
    attempt_time: datetime | None = None
    step_time: datetime | None = None
    resumed_step: int = 0
    restart_time: datetime | None = None
    active_seconds: int = 0
    start_time: datetime | None = None
    completion_time: datetime | None = None
    engine: EngineStatus | None = None
    roles: Mapping[str, RoleStatus] = field(default_factory=dict)
    pools: Mapping[str, PoolUse] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    failure: Failure | None = None
    reason: Reason | None = None
    stalled: Reason | None = None
    message: str = ""
    admission: Admission | None = None


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
        failures=seen.failures,
        attempt_time=seen.attempt_time,
        step_time=seen.step_time,
        resumed_step=seen.resumed_step,
        restart_time=seen.restart_time,
        active_seconds=seen.active_seconds,
        engine=seen.engine,
        roles=dict(seen.roles),
        progress=seen.progress or progress(seen.steps, run.spec.steps),
        checkpoint=seen.checkpoint,
        last_failure=seen.failure,
        pools=dict(seen.pools),
        conditions=(
            *_conditions(seen.phase, seen, before, generation, now),
            _condition(Type.Checkpointed, saved, checkpointed, "", before, generation, now),
            *_admitted(seen.admission, before, generation, now),
        ),
    )


@dataclass(frozen=True)
class JobSeen:
    """What is true of a rollout job now.

    Attributes:
        report: its worker's, or of all shards together; None before there is one.
        reason, stalled, message, admission: as of a `RunSeen`.
    """

    phase: RolloutJobPhase
    report: WorkerReport | None = None
    pools: Mapping[str, PoolUse] = field(default_factory=dict)
    start_time: datetime | None = None
    completion_time: datetime | None = None
    shards: ShardStatus | None = None
    workers: int = 0
    selector: str | None = None
    trajectories_per_second: float | None = None
    tokens_per_second: float | None = None
    path: str | None = None
    reason: Reason | None = None
    stalled: Reason | None = None
    message: str = ""
    admission: Admission | None = None


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
        drift_fraction=_decimal(report.drift_fraction if report else None),
        forks=report.forks if report else 0,
        pools=dict(seen.pools),
        shards=seen.shards,
        workers=seen.workers,
        selector=seen.selector,
        trajectories_per_second=_decimal(seen.trajectories_per_second),
        tokens_per_second=_decimal(seen.tokens_per_second),
        path=seen.path,
        conditions=(
            *_conditions(seen.phase, seen, job.status.conditions, generation, now),
            *_admitted(seen.admission, job.status.conditions, generation, now),
        ),
    )


def _decimal(value: float | None) -> str | None:
    return None if value is None else decimal(value)


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
    if last.get("forks"):
        shown["forks"] = decimal(float(last["forks"]))
    return Progress(
        step=int(last["step"]),
        total_steps=total,
        eta_seconds=round(left * sum(recent) / len(recent)) if recent else None,
        metrics=shown,
    )


def _conditions(
    phase: str,
    seen: RunSeen | JobSeen,
    before: Sequence[Condition],
    generation: int,
    now: datetime,
) -> tuple[Condition, ...]:
    reason, true = _PHASES[phase]
    reason, message = seen.stalled or seen.reason or reason, seen.message
    if seen.stalled is not None and Type.Finished not in true:
        true = true - {Type.Reconciling} | {Type.Stalled}
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


def _admitted(
    admission: Admission | None, before: Sequence[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    if admission is None:
        return ()
    granted, reason, message = admission.granted, admission.reason, admission.message
    return (_condition(Type.Admitted, granted, reason, message, before, generation, now),)


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
