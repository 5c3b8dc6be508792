"""What monitors may know of each TrainingRun and RolloutJob.

Guarantees:
1. The figures are those of the last status that was planned; they go with the run or job.
2. Names follow Prometheus: base units, `_total` for counters, prefixes `agentfly_trainingrun_` and
   `agentfly_rolloutjob_`. Labels are namespace and name, and no others that grow.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentfly.api import RolloutJobStatus, TrainingRunStatus
from agentfly.api.common import WorkStatus

_WHO = ("namespace", "name")

Key = tuple[str, str]
Status = TypeVar("Status", bound=WorkStatus)


class Figures(Collector, Generic[Status]):
    """Those of one kind, read whenever a monitor asks."""

    def __init__(self) -> None:
        self._known: dict[Key, Status] = {}

    def put(self, key: Key, status: Status) -> None:
        """One of them is like this now."""
        self._known[key] = status

    def drop(self, key: Key) -> None:
        """One of them is gone."""
        self._known.pop(key, None)


class RunFigures(Figures[TrainingRunStatus]):
    """The runs of one operator."""

    def collect(self) -> Iterable[Metric]:
        """All figures of all runs."""
        step = _gauge("trainingrun_step", "Steps done.")
        ratio = _gauge("trainingrun_progress_ratio", "Steps done, of all.")
        reward = _gauge("trainingrun_reward", "Mean reward of the newest step.")
        heard = _gauge("trainingrun_last_step_timestamp_seconds", "When the newest step was finished.")
        saved = _gauge("trainingrun_checkpoint_step", "Step of the newest complete checkpoint.")
        restarts = CounterMetricFamily(
            "agentfly_trainingrun_restarts", "Attempts after a failure.", labels=_WHO
        )
        for key, status in self._known.items():
            if status.progress is not None:
                step.add_metric(key, status.progress.step)
                if status.progress.total_steps:
                    ratio.add_metric(key, status.progress.step / status.progress.total_steps)
                if "reward" in status.progress.metrics:
                    reward.add_metric(key, float(status.progress.metrics["reward"]))
            if status.step_time is not None:
                heard.add_metric(key, status.step_time.timestamp())
            if status.checkpoint is not None:
                saved.add_metric(key, status.checkpoint.latest_step)
            restarts.add_metric(key, status.restarts)
        return step, ratio, reward, heard, saved, restarts, *_conditions("trainingrun", self._known)


class JobFigures(Figures[RolloutJobStatus]):
    """The jobs of one operator."""

    def collect(self) -> Iterable[Metric]:
        """All figures of all jobs."""
        planned = _gauge("rolloutjob_planned_rollouts", "Rollouts to do; none while not known.")
        done = _gauge("rolloutjob_rollouts", "Finished rollouts: scored, masked, failed.", "outcome")
        reward = _gauge("rolloutjob_reward", "Mean reward of the scored rollouts.")
        workers = _gauge("rolloutjob_workers", "Worker pods that run.")
        for key, status in self._known.items():
            if status.tasks is not None:
                planned.add_metric(key, status.tasks.total)
                for outcome in ("scored", "masked", "failed"):
                    done.add_metric((*key, outcome), getattr(status.tasks, outcome))
            if status.reward is not None:
                reward.add_metric(key, float(status.reward.mean))
            workers.add_metric(key, status.workers)
        return planned, done, reward, workers, *_conditions("rolloutjob", self._known)


def _conditions(
    kind: str, known: Mapping[Key, TrainingRunStatus] | Mapping[Key, RolloutJobStatus]
) -> Iterator[Metric]:
    found = _gauge(f"{kind}_condition", "1 if the condition is True, else 0.", "type")
    for key, status in known.items():
        for each in status.conditions:
            found.add_metric((*key, each.type), each.status == "True")
    yield found


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"agentfly_{name}", text, labels=(*_WHO, *labels))
