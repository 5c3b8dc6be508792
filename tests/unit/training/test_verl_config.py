"""The config in verl's terms."""

import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from pydantic import ValidationError

from agentfly.roles.trainer import ColocatedServers, TrainerConfig
from agentfly.training.verl_config import (
    agent_loop_yaml,
    environment,
    micro_batch,
    overrides,
    shared_variables,
)
from tests.unit.training.conftest import MakeConfig


def given(config: TrainerConfig) -> list[str]:
    return overrides(config, {})


def values(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines)


def test_the_numbers_of_the_run_reach_verl(make_config: MakeConfig) -> None:
    got = values(given(make_config(seed=7, temperature=0.9, checkpoint_every_steps=5)))
    assert got["data.train_batch_size"] == "4"
    assert got["data.seed"] == "7"
    assert got["actor_rollout_ref.rollout.n"] == "8"
    assert got["actor_rollout_ref.rollout.temperature"] == "0.9"
    assert got["trainer.total_training_steps"] == "3"
    assert got["trainer.save_freq"] == "5"
    assert got["trainer.resume_mode"] == "'auto'"


def test_a_step_is_one_update_on_what_its_own_weights_sampled(make_config: MakeConfig) -> None:
    got = values(given(make_config()))
    assert got["actor_rollout_ref.actor.ppo_mini_batch_size"] == got["data.train_batch_size"]
    assert got["trainer.v1.trainer_mode"] == "'agentfly'"  # it is a synchronous one


def test_verl_gets_our_dataset_sampler_loop_backend_and_callback(make_config: MakeConfig) -> None:
    got = values(given(make_config()))
    assert got["data.custom_cls.path"] == "'pkg://agentfly.training.dataset'"
    assert got["trainer.v1.sampler.custom_sampler.name"] == "'GroupSampler'"
    assert got["actor_rollout_ref.rollout.name"] == "'agentfly_vllm'"
    assert got["actor_rollout_ref.rollout.agent.default_agent_loop"] == "'agentfly'"
    assert got["trainer.checkpoint_callback_class"] == "'agentfly.training.control.Control'"
    assert json.loads(agent_loop_yaml()) == [
        {"name": "agentfly", "_target_": "agentfly.training.agent_loop.AgentflyLoop"}
    ]


def test_the_users_overrides_come_last(make_config: MakeConfig) -> None:
    lines = given(make_config(overrides=("trainer.save_freq=99", "+x.y=1")))
    assert lines[-2:] == ["trainer.save_freq=99", "+x.y=1"]
    assert values(lines)["trainer.save_freq"] == "99"


def test_on_a_cpu_ray_gets_a_number_for_a_gpu_and_verl_full_precision(make_config: MakeConfig) -> None:
    got = values(given(make_config()))
    assert got["trainer.device"] == "'cpu'"
    assert got["trainer.n_gpus_per_node"] == "1"
    assert got["+ray_kwargs.ray_init.num_gpus"] == "1"
    assert "param_dtype:'fp32'" in got["+actor_rollout_ref.actor.fsdp_config.mixed_precision"]


def test_on_gpus_nothing_of_the_cpu_is_left(make_config: MakeConfig) -> None:
    config = make_config(gpus=4)
    got = values(given(config))
    assert got["trainer.device"] == "'cuda'"
    assert got["trainer.n_gpus_per_node"] == "4"
    assert not [key for key in got if "num_gpus" in key or "mixed_precision" in key or "torch_compile" in key]
    assert not {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "OMP_NUM_THREADS"} & set(
        environment(config, Path("c"), {})
    )


@pytest.mark.parametrize(("limit", "want"), [(8, "8"), (10, "8"), (1000, "32"), (1, "1")])
def test_the_micro_batch_divides_the_rows_of_a_rank(make_config: MakeConfig, limit: int, want: str) -> None:
    got = values(given(make_config(micro_batch_size=limit)))
    assert got["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == want
    assert got["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] == want


@hypothesis.given(st.integers(1, 500), st.integers(1, 600))
def test_a_micro_batch_is_the_largest_divisor_within_the_limit(rows: int, limit: int) -> None:
    size = micro_batch(rows, limit)
    assert rows % size == 0
    assert size <= limit
    assert not [bigger for bigger in range(size + 1, min(rows, limit) + 1) if rows % bigger == 0]


def test_a_path_with_quotes_and_commas_stays_one_value(make_config: MakeConfig) -> None:
    got = values(given(make_config(model_path=Path("/m/it's, {a} =b"))))
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


def test_the_micro_batch_divides_the_rows_of_a_rank_of_many_nodes(make_config: MakeConfig) -> None:
    got = values(given(make_config(nodes=2, gpus=2, ray_address="auto", micro_batch_size=1000)))
    assert (got["trainer.nnodes"], got["trainer.n_gpus_per_node"]) == ("2", "2")
    assert got["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == "8"


def test_a_ray_of_others_is_taken_as_it_is(make_config: MakeConfig) -> None:
    config = make_config(nodes=2, ray_address="auto")
    got = values(overrides(config, {"A": "b c"}))
    assert {key: value for key, value in got.items() if "ray_init" in key} == {
        "+ray_kwargs.ray_init.address": "'auto'",
        "+ray_kwargs.ray_init.runtime_env.env_vars": "{A:'b c'}",
    }


def test_processes_on_other_nodes_get_what_the_trainer_has(make_config: MakeConfig) -> None:
    base = {
        "AGENTFLY_BROKER": "http://b",
        "AGENTFLY_INFERENCE_URLS": "http://s",
        "AGENTFLY_JOB": "j",
        "AGENTFLY_RUN_DIR": "/r",
        "AGENTFLY_BROKER_TOKEN_FILE": "/t",
        "PYTHONPATH": "/p",
        "HOSTNAME": "head",
        "RAY_AUTH_MODE": "token",
    }
    config = make_config()
    shared = shared_variables(config, Path("/run.json"), base)
    ours = environment(config, Path("/run.json"), base)
    want = {key: value for key, value in (base | ours).items() if not key.startswith(("RAY_", "HOST"))}
    assert shared == want
    assert (shared["AGENTFLY_TRAINER_CONFIG"], shared["VERL_PLATFORM"]) == ("/run.json", "cpu")


COLOCATED = ColocatedServers(gpus=4, memory_utilization=0.6, max_num_seqs=32, dtype="float16")


def test_a_policy_on_the_trainers_gpus_is_served_by_verls_own_vllm(make_config: MakeConfig) -> None:
    got = values(given(make_config(nodes=2, gpus=8, ray_address="auto", servers=COLOCATED)))
    rollout = {
        key.rpartition(".")[2]: value
        for key, value in got.items()
        if key.startswith("actor_rollout_ref.rollout.")
    }
    assert (rollout["name"], rollout["mode"]) == ("'vllm'", "'async'")
    assert (rollout["tensor_model_parallel_size"], rollout["gpu_memory_utilization"]) == ("4", "0.6")
    assert (rollout["max_num_seqs"], rollout["dtype"], rollout["max_model_len"]) == ("32", "'float16'", "512")
    assert (rollout["free_cache_engine"], rollout["load_format"]) == ("true", "'dummy'")
    assert (rollout["logprobs_mode"], rollout["default_agent_loop"]) == ("'processed_logprobs'", "'agentfly'")


def test_servers_of_their_own_leave_no_setting_of_verls(make_config: MakeConfig) -> None:
    apart, inside = (
        values(given(make_config(gpus=8, servers=servers))).keys() for servers in (None, COLOCATED)
    )
    assert {key.rpartition(".")[2] for key in inside - apart} == {
        "hybrid_engine", "gpu_memory_utilization", "max_num_seqs", "dtype", "logprobs_mode", "backend",
    }  # fmt: skip
    assert not apart - inside


@pytest.mark.parametrize(("gpus", "spans"), [(0, 1), (8, 3), (2, 4)])
def test_gpus_that_servers_cannot_share_are_refused(make_config: MakeConfig, gpus: int, spans: int) -> None:
    with pytest.raises(ValidationError, match=f"gpus: {gpus} cannot be shared out among servers of {spans}"):
        make_config(gpus=gpus, servers=ColocatedServers(gpus=spans))
