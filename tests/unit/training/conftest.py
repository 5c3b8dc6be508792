"""A config to vary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.roles.trainer import TrainerConfig

MakeConfig = Callable[..., TrainerConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    def make(**changes: Any) -> TrainerConfig:
        fields: dict[str, Any] = {
            "run_dir": tmp_path / "run",
            "attempt": 1,
            "model_path": tmp_path / "model",
            "agent_entrypoint": "agent.py:agent",
            "base_dir": tmp_path,
            "tasks_path": Path("tasks.jsonl"),
            "steps": 3,
            "tasks_per_step": 4,
            "group_size": 8,
            "algorithm": {"learning_rate": 3e-4},
            "max_turns": 3,
            "max_tokens_per_turn": 48,
            "max_prompt_tokens": 64,
            "max_context_tokens": 512,
            "checkpoint_dir": tmp_path / "run" / "checkpoints",
        }
        return TrainerConfig(**{**fields, **changes})

    return make
