"""Sections follow the guarantees of `agentfly.roles.plan`."""

import json
from pathlib import Path

import pytest

from agentfly.api import RolloutJob, TrainingRun
from agentfly.roles.plan import (
    Places,
    inference_pool,
    model_path,
    model_role,
    rollout_role,
    trainer_config,
    trainer_role,
)
from agentfly.roles.trainer import TrainerConfig
from agentfly.roles.worker import RolloutWorkerConfig

PLACES = Places(Path("/runs/r"), Path("/src"), "unix:///run/broker")
SPEC = {
    "agent": {"entrypoint": "agent.py:agent"},
    "tasks": {"path": "data/tasks.jsonl"},
    "pools": ["shell"],
    "model": {"path": "models/m"},
}


def run(**spec) -> TrainingRun:
    return TrainingRun.model_validate({"metadata": {"name": "r"}, "spec": {**SPEC, **spec}})


def job(**spec) -> RolloutJob:
    return RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": {**SPEC, **spec}})


# 1. equal arguments give equal plans


def test_the_same_run_gives_the_same_roles():
    assert trainer_role(run(), PLACES, 2, ["http://a"]) == trainer_role(run(), PLACES, 2, ["http://a"])
    assert inference_pool(run(), PLACES) == inference_pool(run(), PLACES)


# 2. the policy's servers are a pool


def test_the_pool_of_the_policy_has_its_replicas_for_the_whole_run():
    inference = {"replicas": 3, "gpus": 2, "maxNumSeqs": 32, "dtype": "bfloat16", "args": ["--seed=1"]}
    pool = inference_pool(run(inference=inference, rollout={"maxContextTokens": 9000}), PLACES)
    assert pool.metadata.name == "r-policy"
    assert (pool.spec.capacity.min, pool.spec.capacity.max) == (3, 3)
    assert pool.spec.model_service.model_dump() == {
        "model": "/src/models/m",
        "max_model_len": 9000,
        "max_num_seqs": 32,
        "dtype": "bfloat16",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "gpus": 2,
        "args": ("--seed=1",),
    }


def test_a_server_on_the_cpu_is_one_device():
    service = inference_pool(job(), PLACES).spec.model_service
    assert (service.gpus, service.tensor_parallel) == (0, 1)


def test_the_name_of_the_pool_is_a_name_for_every_run():
    named = TrainingRun.model_validate({"metadata": {"name": "a" * 33 + "-bcdef"}, "spec": SPEC})
    assert inference_pool(named, PLACES).metadata.name == "a" * 33 + "-policy"
    longest = TrainingRun.model_validate({"metadata": {"name": "a" * 40}, "spec": SPEC})
    assert inference_pool(longest, PLACES).metadata.name == "a" * 33 + "-policy"


# 3. a role is complete


def test_the_trainer_gets_its_config_as_a_file_and_the_data_plane_by_variables():
    role = trainer_role(run(), PLACES, 2, ["http://a", "http://b"])
    (path, text), *others = role.files.items()
    assert not others
    assert role.arguments == ("-m", "agentfly.training.main", "--config", str(path))
    assert TrainerConfig.model_validate_json(text) == trainer_config(run(), PLACES, 2)
    assert dict(role.variables) == {
        "AGENTFLY_JOB": "r",
        "AGENTFLY_BROKER": "unix:///run/broker",
        "AGENTFLY_INFERENCE_URLS": "http://a,http://b",
        "AGENTFLY_RUN_DIR": "/runs/r",
    }
    assert role.environment == "trainer"


def test_every_field_of_a_run_reaches_the_trainer():
    spec = {
        "seed": 7,
        "steps": 5,
        "tasksPerStep": 6,
        "algorithm": {"learningRate": 0.5, "clipLow": 0.1, "clipHigh": 0.4},
        "rollout": {
            "groupSize": 4,
            "concurrency": 3,
            "maxTurns": 9,
            "maxTokensPerTurn": 11,
            "maxContextTokens": 500,
            "maxPromptTokens": 100,
            "temperature": 0.7,
            "timeouts": {"callSeconds": 1, "turnSeconds": 2, "rolloutSeconds": 3},
            "maxInfraRetries": 2,
            "maxDriftFraction": 0.25,
        },
        "trainer": {"gpusPerNode": 2, "microBatchSize": 5},
        "checkpoint": {"everySteps": 3, "keepLast": 4},
        "runPolicy": {"stallTimeoutSeconds": 77, "failureBudget": 0.25},
        "overrides": ["a.b=c"],
    }
    assert json.loads(trainer_config(run(**spec), PLACES, 3).model_dump_json()) == {
        "run_dir": "/runs/r",
        "attempt": 3,
        "model_path": "/src/models/m",
        "agent_entrypoint": "agent.py:agent",
        "base_dir": "/src",
        "tasks_entrypoint": None,
        "tasks_path": "/src/data/tasks.jsonl",
        "seed": 7,
        "steps": 5,
        "tasks_per_step": 6,
        "group_size": 4,
        "algorithm": "grpo",
        "learning_rate": 0.5,
        "clip_low": 0.1,
        "clip_high": 0.4,
        "max_turns": 9,
        "max_tokens_per_turn": 11,
        "max_prompt_tokens": 100,
        "max_context_tokens": 500,
        "temperature": 0.7,
        "call_timeout_s": 1.0,
        "turn_timeout_s": 2.0,
        "rollout_timeout_s": 3.0,
        "max_infra_retries": 2,
        "max_drift_fraction": 0.25,
        "concurrency": 3,
        "micro_batch_size": 5,
        "gpus": 2,
        "checkpoint_every_steps": 3,
        "checkpoint_keep_last": 4,
        "checkpoint_dir": "/runs/r/checkpoints",
        "stall_timeout_s": 77.0,
        "failure_budget": 0.25,
        "overrides": ["a.b=c"],
    }


def test_a_rollout_worker_reads_its_config_back():
    role = rollout_role(
        job(limit=5, seed=3, runPolicy={"failureBudget": 0.5}, rollout={"groupSize": 2}), PLACES, ["http://a"]
    )
    config = RolloutWorkerConfig.model_validate_json(next(iter(role.files.values())))
    assert (config.limit, config.seed, config.failure_budget, config.rollout.group_size) == (5, 3, 0.5, 2)
    assert config.tasks_path == Path("/src/data/tasks.jsonl")
    assert role.environment == "inference"


# 4. paths of a manifest are relative to the manifest


def test_a_model_that_is_there_needs_no_role():
    assert model_role(run().spec.model, 0, PLACES) is None
    assert model_path(run().spec.model, PLACES) == Path("/src/models/m")


def test_a_model_that_is_made_gets_the_seed_and_its_place():
    model = run(model={"build": {"script": "make/model.py", "args": ["--sloppiness=0.7"]}}).spec.model
    role = model_role(model, 4, PLACES)
    assert role.arguments == (
        *("/src/make/model.py", "--sloppiness=0.7"),
        *("--seed", "4", "--output", "/runs/r/model"),
    )


@pytest.mark.parametrize("build", [None, {"script": "model.py"}])
def test_a_path_wins_over_a_build(build):
    model = run(model={"path": "/abs/m", "build": build}).spec.model
    assert model_role(model, 0, PLACES) is None
    assert model_path(model, PLACES) == Path("/abs/m")
