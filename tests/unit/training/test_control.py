"""What becomes of checkpoints at the end of a step; verl is replaced. Numbers are those of control.py."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from agentfly.roles.life import begin_attempt
from agentfly.roles.trainer import ENV_CONFIG, TrainerConfig
from tests.unit.training.conftest import MakeConfig


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class Callback:
        def __init__(self, config: object) -> None:
            self.config = config

    verl = SimpleNamespace(CheckpointCallback=Callback)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.checkpoint_callback", verl)
    monkeypatch.delitem(sys.modules, "agentfly.training.control", raising=False)
    return importlib.import_module("agentfly.training.control")


# 3. An attempt that is over removes no checkpoints and does not go on.


def test_an_attempt_that_is_over_removes_nothing_and_fails(
    control: ModuleType, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config: TrainerConfig = make_config()
    (tmp_path / "run.json").write_text(config.model_dump_json())
    monkeypatch.setenv(ENV_CONFIG, str(tmp_path / "run.json"))
    removed: list[Path] = []
    monkeypatch.setattr(control, "remove_old", lambda folder, keep: removed.append(folder))
    callback = control.Control(SimpleNamespace(trainer=SimpleNamespace(save_freq=5)))
    trainer = SimpleNamespace(global_steps=3, total_training_steps=9)
    begin_attempt(config.run_dir, 1)
    callback.on_save(trainer, 3, str(config.checkpoint_dir / "global_step_3"))
    assert removed == [config.checkpoint_dir]
    begin_attempt(config.run_dir, 2)
    with pytest.raises(RuntimeError, match="attempt 2 has begun"):
        callback.on_save(trainer, 4, str(config.checkpoint_dir / "global_step_4"))
    assert removed == [config.checkpoint_dir]
    assert trainer.total_training_steps == 9
    config.suspend_file.touch()  # ends the thread that waits for it
