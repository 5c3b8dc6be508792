"""The metrics of a run: one line for each step, made of what verl logs and what the rollouts left.

Guarantees:
1. Every step that verl logged is one line of ``metrics.jsonl``, in order, appended whole; the lines of
   earlier attempts stay.
2. A value that verl did not log, or that is no finite number, is left out: never written as null or NaN.
3. An attempt that is killed between the checkpoint of a step and its line owes that line: the attempt that
   goes on from there writes it, with what the rollouts left and what verl had logged.
4. A step above ``max_drift_fraction``, or of which more than ``failure_budget`` failed, ends the
   attempt with an error that names both numbers.
"""

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.roles.steps import read_steps
from agentfly.roles.trainer import TrainerConfig
from agentfly.training import checkpoints
from agentfly.training.outcomes import LineReader, OutcomeReader, StepOutcomes

_NAMES = {  # ours -> verl's
    "step_seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "weights_seconds": "timing_s/update_weights",
    "checkpoint_seconds": "timing_s/save_checkpoint",
    "prob_diff_max": "training/rollout_probs_diff_max",
    "prob_diff_mean": "training/rollout_probs_diff_mean",
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "learning_rate": "actor/lr",
    "response_tokens": "response_length/mean",
    "prompt_tokens": "prompt_length/mean",
    "staleness_mean": "training/off_policy/trajectory_staleness_worst/mean",
    "staleness_max": "training/off_policy/trajectory_staleness_worst/max",
    "importance_mean": "rollout_corr/rollout_is_mean",
    "importance_max": "rollout_corr/rollout_is_max",
}


class LimitExceeded(AgentflyError):
    """A step went over a limit of the run."""

    def __init__(self, reason: Reason, message: str, *, hints: Sequence[str]) -> None:
        super().__init__(message, hints=hints)
        self.reason = reason


def write_owed(config: TrainerConfig, resumed: int | None) -> list[int]:
    """Write the lines that earlier attempts owe, up to the step of the checkpoint that this one goes on from.

    Returns those steps. One of which nothing was left gets no line.
    """
    known = {record["step"] for record in read_steps(config.metrics_file)}
    owed = set(range(1, (resumed or 0) + 1)) - known
    lines: dict[int, dict[str, Any]] = {}
    for attempt in range(config.attempt - 1, 0, -1):
        if not owed - lines.keys():
            break
        earlier = config.model_copy(update={"attempt": attempt})
        outcomes = OutcomeReader(config.outcomes_dir, attempt, ahead=config.ahead > 0)
        outcomes.read()
        logged = {int(entry["step"]): entry["data"] for entry in LineReader(earlier.verl_metrics_file).read()}
        for step in owed.intersection(outcomes.steps) - lines.keys():
            lines[step] = step_line(step, attempt, time.time(), logged.get(step, {}), outcomes.of(step))
    if lines:
        with config.metrics_file.open("a") as handle:
            handle.writelines(json.dumps(lines[step]) + "\n" for step in sorted(lines))
    return sorted(lines)


def step_line(
    step: int, attempt: int, now: float, logged: Mapping[str, Any], outcomes: StepOutcomes
) -> dict[str, Any]:
    """One line. ``now`` is Unix time; ``tokens`` are sampled ones, ``tokens_per_s`` over the whole step."""
    line: dict[str, Any] = {"step": step, "attempt": attempt, "time": round(now, 3)}
    line |= outcomes.metrics()
    for ours, theirs in _NAMES.items():
        value = logged.get(theirs)
        if isinstance(value, int | float) and math.isfinite(value):
            line[ours] = value
    if seconds := line.get("step_seconds"):
        line["tokens_per_s"] = line["tokens"] / seconds
    return line


class MetricsFollower:
    """Turns verl's log into the run's metrics while the run goes on."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._logged = LineReader(config.verl_metrics_file)
        self._outcomes = OutcomeReader(config.outcomes_dir, config.attempt, ahead=config.ahead > 0)
        self._lock = threading.Lock()  # the watchdog's thread and the end of the run both poll

    def poll(self) -> int:
        """Append the steps that ended since the last call; returns how many.

        Raises:
            LimitExceeded: a step has more drift or more failed rollouts than the run allows.
        """
        with self._lock:
            entries = self._logged.read()
            if entries:
                self._outcomes.read()  # after verl's line: all rollouts of that step are on disk by then
            for entry in entries:
                step = int(entry["step"])
                outcomes = self._outcomes.of(step)
                self._outcomes.forget(step)
                line = step_line(step, self._config.attempt, time.time(), entry["data"], outcomes)
                with self._config.metrics_file.open("a") as handle:
                    handle.write(json.dumps(line) + "\n")
                self._check_drift(step, line["drift_fraction"])
                self._check_failures(step, outcomes)
            return len(entries)

    def unfinished(self) -> str:
        """What the rollouts of steps that never ended came to, for the error of a failed attempt."""
        with self._lock:
            self._outcomes.read()
        parts, saved = [], max(checkpoints.steps(self._config.checkpoint_dir), default=0)
        for step in self._outcomes.steps:
            if step <= saved:
                continue
            outcomes = self._outcomes.of(step)
            counts = ", ".join(f"{n} {name}" for name, n in outcomes.counts.items())
            reasons = ", ".join(f"{reason} x {n}" for reason, n in outcomes.reasons.most_common(5))
            parts.append(f"step {step}: {counts}" + (f" ({reasons})" if reasons else ""))
        return "; ".join(parts)

    def _check_drift(self, step: int, fraction: float) -> None:
        limit = self._config.max_drift_fraction
        if limit is not None and fraction > limit:
            raise LimitExceeded(
                Reason.DriftExceeded,
                f"maxDriftFraction: {fraction:.4f} of step {step}'s tokens drifted, the limit is {limit}",
                hints=["use a chat template that writes answers as sampled, or raise maxDriftFraction"],
            )

    def _check_failures(self, step: int, outcomes: StepOutcomes) -> None:
        failed, total, budget = (
            outcomes.counts["failed"],
            outcomes.counts.total(),
            self._config.failure_budget,
        )
        if failed <= budget * total:
            return
        reasons = ", ".join(f"{reason} x {count}" for reason, count in outcomes.reasons.most_common(5))
        raise LimitExceeded(
            Reason.FailureBudgetExceeded,
            f"failureBudget: {failed} of {total} rollouts of step {step} failed ({reasons}), "
            f"the limit is {budget:g} of them",
            hints=["read why in the run's trajectories", "or raise spec.runPolicy.failureBudget"],
        )
