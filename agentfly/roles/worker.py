"""The two files between a rollout worker and whoever runs it: what to do, and how far it is."""

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from agentfly.api import Rollout

EXIT_BUDGET: Final = 3  # more rollouts failed than the budget allows
EXIT_STOPPED: Final = 143  # asked to stop, as a shell says it of SIGTERM: what is finished is kept


class RolloutWorkerConfig(BaseModel):
    """What one rollout worker does. Paths are absolute; the outcome is written below ``run_dir``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    model_path: Path
    agent_entrypoint: str
    base_dir: Path
    tasks_entrypoint: str | None = None
    tasks_path: Path | None = None
    seed: int = Field(0, ge=0)
    limit: int | None = Field(None, ge=1)
    rollout: Rollout
    failure_budget: float = Field(0.1, ge=0, le=1)

    @property
    def trajectories_file(self) -> Path:
        """One line for each time that a rollout was played to an outcome; the newest of a rollout counts."""
        return trajectories_file(self.run_dir)

    @property
    def report_file(self) -> Path:
        """A `WorkerReport`, replaced as a whole."""
        return report_file(self.run_dir)


def trajectories_file(run_dir: Path) -> Path:
    """Where the worker of a run writes them."""
    return run_dir / "trajectories" / "rollouts.jsonl"


def told_file(run_dir: Path) -> Path:
    """Where the worker of a run tells people what became of rollouts without a reward."""
    return run_dir / "outcomes.txt"


def log_file(run_dir: Path) -> Path:
    """The log of a run's worker on one machine."""
    return run_dir / "logs" / "rollout.log"


def report_file(run_dir: Path) -> Path:
    """Where the worker of a run reports."""
    return run_dir / "report.json"


class WorkerReport(BaseModel):
    """Counts of rollouts. ``failed`` is by reason; rewards are None while nothing is scored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    total: int
    scored: int = 0
    masked: int = 0
    failed: dict[str, int] = {}
    reward_mean: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    drift_fraction: float | None = None
    drift_tokens: int = 0  # whose drift is known: the fraction is of these
    forks: int = 0  # rows begun because the chat template rewrote what came before
    sampled_tokens: int = 0
