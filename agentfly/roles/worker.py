"""The file between whoever starts a rollout worker and the worker."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agentfly.api import Rollout


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
