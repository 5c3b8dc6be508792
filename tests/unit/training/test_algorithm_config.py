"""What an algorithm sets in verl."""

from typing import Any

import pytest

from agentfly.api.algorithm import NAMES
from agentfly.training.algorithm_config import algorithm_settings
from tests.unit.training.conftest import MakeConfig

ACTOR = "actor_rollout_ref.actor"


def values(make_config: MakeConfig, name: str, gpus: int = 0, **settings: Any) -> dict[str, object]:
    return algorithm_settings(make_config(algorithm={"name": name, **settings}, gpus=gpus, seed=7), 4)


@pytest.mark.parametrize("name", NAMES)
def test_advantages_are_agentflys_and_there_is_no_divergence_in_the_loss(
    make_config: MakeConfig, name: str
) -> None:
    got = values(make_config, name, learning_rate=0.25)
    assert got["algorithm.adv_estimator"] == got["trainer.v1.trainer_mode"] == "agentfly"
    assert got[f"{ACTOR}.optim.lr"] == 0.25
    assert got[f"{ACTOR}.use_kl_loss"] is False


@pytest.mark.parametrize("name", NAMES)
def test_clips_are_those_of_the_algorithm_unless_they_are_given(make_config: MakeConfig, name: str) -> None:
    known = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
    got = values(make_config, name)
    assert (got[f"{ACTOR}.clip_ratio_low"], got[f"{ACTOR}.clip_ratio_high"]) == known.get(name, (0.2, 0.28))
    got = values(make_config, name, clip_low=0.1, clip_high=0.3)
    assert (got[f"{ACTOR}.clip_ratio_low"], got[f"{ACTOR}.clip_ratio_high"]) == (0.1, 0.3)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_a_mean_over_tokens_but_where_the_algorithm_has_another(
    make_config: MakeConfig, name: str
) -> None:
    got = values(make_config, name)
    others = {"dr_grpo": "seq-mean-token-sum-norm", "gspo": "seq-mean-token-mean"}
    assert got[f"{ACTOR}.loss_agg_mode"] == others.get(name, "token-mean")
    assert got.get(f"{ACTOR}.policy_loss.loss_mode") == ("gspo" if name == "gspo" else None)
    # The longest response there can be, the same in every step.
    assert got.get(f"{ACTOR}.loss_scale_factor") == (448 if name == "dr_grpo" else None)
    assert got.get("algorithm.filter_groups.enable", False) == (name == "dapo")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpus", [0, 2])
def test_only_ppo_has_a_critic(make_config: MakeConfig, name: str, gpus: int) -> None:
    got = values(make_config, name, gpus)
    assert got["critic.enable"] == (name == "ppo")
    critic = {key: value for key, value in got.items() if "critic." in key and key != "critic.enable"}
    if name != "ppo":
        assert critic == {}
        return
    assert critic["critic.optim.lr"] == 1e-5
    assert critic["critic.ppo_micro_batch_size_per_gpu"] == 4
    assert critic["critic.data_loader_seed"] == 7
    assert ("critic.fsdp.use_torch_compile" in critic) == (gpus == 0)


def test_the_critic_has_a_learning_rate_of_its_own(make_config: MakeConfig) -> None:
    got = values(make_config, "ppo", ppo={"critic_learning_rate": 0.5})
    assert (got["critic.optim.lr"], got[f"{ACTOR}.optim.lr"]) == (0.5, 1e-6)


def test_rollouts_that_run_ahead_are_waited_for_and_weighed(make_config: MakeConfig) -> None:
    mode = "trainer.v1.trainer_mode"
    assert algorithm_settings(make_config(), 4)[mode] == "agentfly"
    config = make_config(asynchronous={"max_staleness": 2, "importance_cap": 3.0})
    got = algorithm_settings(config, 4)
    assert got[mode] == "agentfly_ahead"
    sampler = {
        key.rpartition(".")[2]: value for key, value in got.items() if key.startswith("trainer.v1.sampler")
    }
    assert sampler == {
        "name": "AheadSampler",
        "max_off_policy_threshold": 1,
        "max_off_policy_strategy": "wait",
    }
    correction = "algorithm.rollout_correction"
    assert (got[f"{correction}.rollout_is"], got[f"{correction}.rollout_is_threshold"]) == ("token", 3.0)
