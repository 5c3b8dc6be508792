"""The folder of checkpoints."""

import zipfile
from pathlib import Path

import pytest

from agentfly.training import checkpoints


def save(folder: Path, step: int, complete: bool = True) -> Path:
    path = folder / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "model.pt").write_text("weights")
    if complete:
        with zipfile.ZipFile(path / "data.pt", "w") as file:
            file.writestr("position", "position")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


def tracker(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


def test_steps_are_those_of_complete_checkpoints_in_order(tmp_path: Path) -> None:
    for step in (3, 20, 100):
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


def test_what_has_its_last_file_but_no_name_yet_is_not_resumed_from(tmp_path: Path) -> None:
    save(tmp_path, 2)
    newer = save(tmp_path, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert checkpoints.repair(tmp_path) == 2
    assert not newer.exists()


@pytest.mark.parametrize("text", [None, ""])
def test_a_crash_while_the_name_is_written_loses_nothing(text: str | None, tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    if text is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert checkpoints.repair(tmp_path) == 4
    assert tracker(tmp_path) == "4"


def test_half_of_the_last_file_of_the_first_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    path = save(tmp_path, 2) / "data.pt"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    path.write_bytes(path.read_bytes()[:-10])
    assert checkpoints.repair(tmp_path) is None
    assert not path.exists()


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


def test_the_newest_checkpoint_is_the_one_that_the_trainer_would_go_on_from(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    for step in (2, 4):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / "data.pt").write_text("position")
    assert checkpoints.newest(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert (newest.latest_step, newest.path) == (2, str(tmp_path / "global_step_2"))
    written = (tmp_path / "global_step_2" / "data.pt").stat().st_mtime
    assert abs(newest.time.timestamp() - written) < 1.0
    assert checkpoints.repair(tmp_path) == newest.latest_step


def test_a_named_checkpoint_without_its_last_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert checkpoints.newest(tmp_path) is None


# 3. for how many ranks


def ranks_of(folder: Path, step: int, size: int, missing: str = "", part: str = "actor") -> None:
    actor = checkpoints.path_of(folder, step) / part
    actor.mkdir(parents=True, exist_ok=True)
    for kind in ("model", "optim", "extra_state"):
        for rank in range(size):
            path = actor / f"{kind}_world_size_{size}_rank_{rank}.pt"
            if path.name != missing:
                path.write_text("tensors")


@pytest.mark.parametrize("size", [1, 2, 12])
def test_a_checkpoint_is_for_as_many_ranks_as_wrote_it(tmp_path: Path, size: int) -> None:
    ranks_of(tmp_path, 3, size)
    assert checkpoints.ranks(tmp_path, 3) == size


@pytest.mark.parametrize(
    "missing",
    [
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "optim_world_size_2_rank_1.pt",
        "extra_state_world_size_2_rank_0.pt",
    ],
)
def test_files_of_a_half_written_size_count_for_nothing(tmp_path: Path, missing: str) -> None:
    ranks_of(tmp_path, 3, 2, missing)
    assert checkpoints.ranks(tmp_path, 3) is None
    ranks_of(tmp_path, 3, 1)
    assert checkpoints.ranks(tmp_path, 3) == 1


def test_actor_and_critic_must_both_be_whole(tmp_path: Path) -> None:
    ranks_of(tmp_path, 3, 1)
    ranks_of(tmp_path, 3, 2)
    ranks_of(tmp_path, 3, 1, part="critic")
    assert checkpoints.ranks(tmp_path, 3) == 1
    ranks_of(tmp_path, 3, 2, "optim_world_size_2_rank_1.pt", part="critic")
    assert checkpoints.ranks(tmp_path, 3) == 1
    ranks_of(tmp_path, 3, 2, part="critic")
    assert checkpoints.ranks(tmp_path, 3) == 2


def test_the_newest_checkpoint_tells_its_ranks(tmp_path: Path) -> None:
    save(tmp_path, 4)
    ranks_of(tmp_path, 4, 2)
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert newest.ranks == 2
