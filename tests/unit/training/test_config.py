"""The file between the role renderer and the trainer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentfly.roles.trainer import ENV_CONFIG, TrainerConfig, current_config
from tests.unit.training.conftest import MakeConfig


def test_what_is_written_is_what_is_read(make_config: MakeConfig) -> None:
    algorithm = {"name": "dapo", "dapo": {"overlong": {"max_tokens": 9, "buffer_tokens": 2}}}
    config = make_config(overrides=("trainer.x=y",), max_drift_fraction=0.1, algorithm=algorithm)
    assert TrainerConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stepz": 1}, "stepz"),
        ({"steps": 0}, "steps"),
        ({"group_size": 1}, "group_size: 1 is none, which grpo needs"),
        ({"algorithm": {"learning_rate": 0}}, "algorithm.learning_rate"),
        ({"temperature": 0}, "temperature"),
        ({"failure_budget": 1.5}, "failure_budget"),
        ({"algorithm": {"name": "sft"}}, "algorithm.name"),
        ({"tasks_entrypoint": "a:b"}, "tasks_entrypoint, tasks_path: exactly one must be set"),
        ({"tasks_path": None}, "tasks_entrypoint, tasks_path: exactly one must be set"),
        ({"max_prompt_tokens": 512}, "max_prompt_tokens: 512 leaves no room for a response"),
        ({"algorithm": {"clip_high": 0.1}}, "clipHigh is less than clipLow"),
    ],
)
def test_a_field_that_is_wrong_is_named(make_config: MakeConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make_config(**changes)
    assert words in str(caught.value)


def test_an_algorithm_without_groups_may_have_groups_of_one(make_config: MakeConfig) -> None:
    for name in ("ppo", "reinforce_plus_plus"):
        assert make_config(algorithm={"name": name}, group_size=1).group_size == 1


def test_the_paths_of_a_run_stand_below_its_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(attempt=2)
    assert config.suspend_file == tmp_path / "run" / "control" / "suspend"
    assert config.metrics_file == tmp_path / "run" / "metrics.jsonl"
    assert config.verl_metrics_file.name == "verl-2.jsonl"
    assert config.rows == 12
    assert make_config(algorithm={"name": "dapo", "dapo": {"max_batches": 3}}).rows == 36
    assert config.max_response_tokens == 448


def test_code_inside_verl_finds_the_config_by_the_environment(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(make_config().model_dump_json())
    monkeypatch.setenv(ENV_CONFIG, str(path))
    assert current_config() == make_config()


def test_importing_the_config_needs_no_torch_and_no_verl() -> None:
    heavy = ("torch", "verl", "ray", "aiohttp")
    code = f"import sys, agentfly.roles.trainer; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"
