"""Sections follow the guarantees of `agentfly.local.keeper`."""

from pathlib import Path

from agentfly.local.keeper import newest_checkpoint
from agentfly.training import checkpoints

# 2. what is on disk counts


def test_the_newest_checkpoint_is_the_one_that_the_trainer_would_go_on_from(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (2, 4):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / "data.pt").write_text("position")
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert (newest.latest_step, newest.path) == (2, str(tmp_path / "global_step_2"))
    written = (tmp_path / "global_step_2" / "data.pt").stat().st_mtime
    assert abs(newest.time.timestamp() - written) < 1.0
    assert checkpoints.repair(tmp_path) == newest.latest_step


def test_a_named_checkpoint_without_its_last_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert newest_checkpoint(tmp_path) is None
