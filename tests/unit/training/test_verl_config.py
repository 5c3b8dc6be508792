"""The config in verl's terms."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfly.training.verl_config import agent_loop_yaml, environment, micro_batch, overrides
from tests.unit.training.conftest import MakeConfig


def values(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines)


def test_the_numbers_of_the_run_reach_verl(make_config: MakeConfig) -> None:
    got = values(overrides(make_config(seed=7, temperature=0.9, checkpoint_every_steps=5)))
    assert got["data.train_batch_size"] == "4"
    assert got["data.seed"] == "7"
    assert got["actor_rollout_ref.rollout.n"] == "8"
    assert got["actor_rollout_ref.rollout.temperature"] == "0.9"
    assert got["actor_rollout_ref.actor.optim.lr"] == "0.0003"
    assert got["actor_rollout_ref.actor.clip_ratio_low"] == "0.2"
    assert got["actor_rollout_ref.actor.clip_ratio_high"] == "0.28"
    assert got["trainer.total_training_steps"] == "3"
    assert got["trainer.save_freq"] == "5"
    assert got["trainer.resume_mode"] == "'auto'"


def test_a_step_is_one_update_on_what_its_own_weights_sampled(make_config: MakeConfig) -> None:
    got = values(overrides(make_config()))
    assert got["actor_rollout_ref.actor.ppo_mini_batch_size"] == got["data.train_batch_size"]
    assert got["trainer.v1.trainer_mode"] == "'sync'"


def test_verl_gets_our_dataset_sampler_loop_backend_and_callback(make_config: MakeConfig) -> None:
    got = values(overrides(make_config()))
    assert got["data.custom_cls.path"] == "'pkg://agentfly.training.dataset'"
    assert got["trainer.v1.sampler.custom_sampler.name"] == "'GroupSampler'"
    assert got["actor_rollout_ref.rollout.name"] == "'agentfly_vllm'"
    assert got["actor_rollout_ref.rollout.agent.default_agent_loop"] == "'agentfly'"
    assert got["trainer.checkpoint_callback_class"] == "'agentfly.training.control.Control'"
    assert json.loads(agent_loop_yaml()) == [
        {"name": "agentfly", "_target_": "agentfly.training.agent_loop.AgentflyLoop"}
    ]


def test_the_users_overrides_come_last(make_config: MakeConfig) -> None:
    lines = overrides(make_config(overrides=("trainer.save_freq=99", "+x.y=1")))
    assert lines[-2:] == ["trainer.save_freq=99", "+x.y=1"]
    assert values(lines)["trainer.save_freq"] == "99"


def test_on_a_cpu_ray_gets_a_number_for_a_gpu_and_verl_full_precision(make_config: MakeConfig) -> None:
    got = values(overrides(make_config()))
    assert got["trainer.device"] == "'cpu'"
    assert got["trainer.n_gpus_per_node"] == "1"
    assert got["+ray_kwargs.ray_init.num_gpus"] == "1"
    assert "param_dtype:'fp32'" in got["+actor_rollout_ref.actor.fsdp_config.mixed_precision"]


def test_on_gpus_nothing_of_the_cpu_is_left(make_config: MakeConfig) -> None:
    config = make_config(gpus=4)
    got = values(overrides(config))
    assert got["trainer.device"] == "'cuda'"
    assert got["trainer.n_gpus_per_node"] == "4"
    assert not [key for key in got if "num_gpus" in key or "mixed_precision" in key or "torch_compile" in key]
    assert not {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS"} & set(
        environment(config, Path("c"), {})
    )


@pytest.mark.parametrize(("limit", "want"), [(8, "8"), (10, "8"), (1000, "32"), (1, "1")])
def test_the_micro_batch_divides_the_rows_of_a_rank(make_config: MakeConfig, limit: int, want: str) -> None:
    got = values(overrides(make_config(micro_batch_size=limit)))
    assert got["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == want
    assert got["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] == want


@given(st.integers(1, 500), st.integers(1, 600))
def test_a_micro_batch_is_the_largest_divisor_within_the_limit(rows: int, limit: int) -> None:
    size = micro_batch(rows, limit)
    assert rows % size == 0
    assert size <= limit
    assert not [bigger for bigger in range(size + 1, min(rows, limit) + 1) if rows % bigger == 0]


def test_a_path_with_quotes_and_commas_stays_one_value(make_config: MakeConfig) -> None:
    got = values(overrides(make_config(model_path=Path("/m/it's, {a} =b"))))
    assert got["actor_rollout_ref.model.path"] == r"'/m/it\'s, {a} =b'"


def test_the_environment_adds_our_plugin_before_the_users(make_config: MakeConfig) -> None:
    added = environment(make_config(), Path("/run.json"), {"VERL_USE_EXTERNAL_MODULES": "mine"})
    assert added["VERL_USE_EXTERNAL_MODULES"] == "agentfly.training.plugin,mine"
    assert added["AGENTFLY_TRAINER_CONFIG"] == "/run.json"
    assert (added["VERL_PLATFORM"], added["VERL_ENGINE_DEVICE"]) == ("cpu", "cuda")
    again = environment(make_config(), Path("/run.json"), added)
    assert again["VERL_USE_EXTERNAL_MODULES"] == added["VERL_USE_EXTERNAL_MODULES"]


def test_rays_authentication_is_the_callers_if_there_is_one(make_config: MakeConfig) -> None:
    assert environment(make_config(), Path("c"), {})["RAY_AUTH_MODE"] == "disabled"
    assert environment(make_config(), Path("c"), {"RAY_AUTH_MODE": "token"})["RAY_AUTH_MODE"] == "token"
