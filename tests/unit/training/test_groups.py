"""Which rollouts are trained on."""

from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.groups import silent_groups, split_groups


def test_a_group_of_one_rollout_is_left_out_however_many_rows_it_has() -> None:
    assert split_groups(["a_0_0", "a_1_0", "b_0_0", "b_0_1"], 2) == (["a_0_0", "a_1_0"], ["b_0_0", "b_0_1"])


def test_the_rows_of_a_rollout_stay_together_in_their_order() -> None:
    keys = ["a_1_1", "a_1_0", "a_0_0"]
    assert split_groups(keys, 2) == (keys, [])


def test_a_group_of_one_stays_where_nothing_is_compared() -> None:
    assert split_groups(["a_0_0", "b_0_0", "b_0_1"], 1) == (["a_0_0", "b_0_0", "b_0_1"], [])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 2)), unique=True))
def test_a_kept_group_is_complete_and_has_two_rollouts(rows: list[tuple[str, int, int]]) -> None:
    keys = [f"{group}_{rollout}_{row}" for group, rollout, row in rows]
    kept, dropped = split_groups(keys, 2)
    assert sorted(kept + dropped) == sorted(keys)
    groups_kept, groups_dropped = {key[0] for key in kept}, {key[0] for key in dropped}
    assert not groups_kept & groups_dropped
    for group in groups_kept:
        assert len({key.split("_")[1] for key in kept if key[0] == group}) >= 2


def test_a_group_teaches_nothing_without_two_different_rewards() -> None:
    rewards = {
        **{"equal_0_0": 0.5, "equal_1_0": 0.5, "mixed_0_0": 0.0, "mixed_1_0": 1.0},
        **{"one_0_0": 1.0, "rows_0_0": 1.0, "rows_0_1": 1.0},
    }
    groups = ["mixed", "none", "equal", "rows", "one"]
    assert silent_groups(groups, rewards) == ["none", "equal", "rows", "one"]
