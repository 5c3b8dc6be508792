"""The folder of checkpoints."""

from pathlib import Path

from agentfly.training import checkpoints


def save(folder: Path, step: int, complete: bool = True) -> Path:
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "model.pt").write_text("weights")
    if complete:
        (path / "data.pt").write_text("position")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


def tracker(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


def test_steps_are_those_of_complete_checkpoints_in_order(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        save(tmp_path, step)
    save(tmp_path, 120, complete=False)
    (tmp_path / "global_step_x").mkdir()
    assert checkpoints.steps(tmp_path) == [3, 20, 100]


def test_after_a_crash_within_a_save_the_run_goes_on_from_the_last_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 2)
    broken = save(tmp_path, 4, complete=False)
    assert checkpoints.repair(tmp_path) == 2
    assert not broken.exists()
    assert tracker(tmp_path) == "2"


def test_a_crash_between_the_last_file_and_the_name_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    for text in ("2", ""):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        assert checkpoints.repair(tmp_path) == 4
        assert tracker(tmp_path) == "4"


def test_a_name_without_a_checkpoint_means_from_the_start(tmp_path: Path) -> None:
    save(tmp_path, 2, complete=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert checkpoints.repair(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_anything_means_from_the_start(tmp_path: Path) -> None:
    assert checkpoints.repair(tmp_path) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 10):
        save(tmp_path, step)
    checkpoints.remove_old(tmp_path, 2)
    assert checkpoints.steps(tmp_path) == [6, 10]
    checkpoints.remove_old(tmp_path, 5)
    assert checkpoints.steps(tmp_path) == [6, 10]
