import pytest

from agentfly.observe.curve import first_and_last, running_mean, write_reward_png


def test_first_and_last_take_five_steps_each():
    assert first_and_last([0.0] * 5 + [0.5] + [1.0] * 5) == (0.0, 1.0)


def test_first_and_last_of_a_short_run_use_what_there_is():
    assert first_and_last([0.2, 0.4]) == (pytest.approx(0.3), pytest.approx(0.3))


def test_first_and_last_need_a_step():
    with pytest.raises(ValueError, match="rewards: empty"):
        first_and_last([])


def test_running_mean_looks_back_only():
    assert running_mean([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_the_picture_is_a_png_and_leaves_no_partial_file(tmp_path):
    write_reward_png(
        [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.4}], tmp_path / "reward.png", "demo"
    )
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["reward.png"]
