"""Sections follow the guarantees of `agentfly.roles.plan`."""

import json
from pathlib import Path

import pytest

from agentfly.api import RolloutJob, TrainingRun
from agentfly.errors import AgentflyError
from agentfly.roles.launch import PrepareLaunch, ShardLaunch, TrainerLaunch
from agentfly.roles.plan import (
    Places,
    cluster_places,
    inference_pool,
    model_path,
    model_role,
    policy_name,
    prepare_launch,
    rollout_config,
    rollout_role,
    serves_itself,
    shard_launch,
    trainer_config,
    trainer_launch,
    trainer_role,
)
from agentfly.roles.trainer import ColocatedServers, TrainerConfig
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
    assert pool.spec.model_service.model_dump(exclude_unset=True) == {
        "model": "/src/models/m",
        "max_model_len": 9000,
        "max_num_seqs": 32,
        "dtype": "bfloat16",
        "tensor_parallel": 2,
        "gpus": 2,
        "args": ("--seed=1",),
    }


def test_a_server_on_the_cpu_is_one_device():
    service = inference_pool(job(), PLACES).spec.model_service
    assert (service.gpus, service.tensor_parallel) == (0, 1)


def test_the_name_of_the_pool_is_a_name_for_every_run():
    longest = TrainingRun.model_validate({"metadata": {"name": "a" * 40}, "spec": SPEC})
    name = inference_pool(longest, PLACES).metadata.name
    assert len(name) == 40
    assert name.startswith("a" * 24 + "-")
    assert name.endswith("-policy")
    assert policy_name("a" * 33) == "a" * 33 + "-policy"
    assert len({policy_name("a" * 33 + end) for end in ("", "b", "-b", "-bcdefg", "-bcdefh")}) == 5


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
        "algorithm": {
            **{"name": "gigpo", "learningRate": 0.5, "clipLow": 0.1, "clipHigh": 0.4, "gamma": 0.9},
            "gigpo": {"stepWeight": 2, "meanOver": "Steps"},
        },
        "asynchronous": {"maxStaleness": 3, "importanceCap": 5},
        "rollout": {
            "groupSize": 4,
            "concurrency": 3,
            "strategy": {"type": "Step", "history": 3, "promptBuilder": "agent.py:see"},
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
        "algorithm": {
            **{"name": "gigpo", "learning_rate": 0.5, "clip_low": 0.1, "clip_high": 0.4, "gamma": 0.9},
            **{"ppo": None, "hgpo": None, "dapo": None},
            "gigpo": {"step_weight": 2.0, "normalization": "Mean", "mean_over": "Steps"},
        },
        "asynchronous": {"max_staleness": 3, "importance_cap": 5.0},
        "strategy": {"type": "Step", "when_full": "Stop", "history": 3, "prompt_builder": "agent.py:see"},
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
        "nodes": 1,
        "gpus": 2,
        "servers": None,
        "ray_address": "",
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


# 5. in a cluster

CLAIM = {"storage": {"claim": "runs"}}
UID = "01234567-89ab-cdef"
BROKER = "http://agentfly-broker.ns.svc:7080"


def test_a_run_in_a_cluster_lives_on_its_claim_under_its_name_and_uid():
    places = cluster_places(run(**CLAIM), UID, BROKER)
    want = Places(Path("/agentfly-cache/runs/r-01234567"), Path("."), BROKER, "runs")
    assert places == want


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ({"configMap": "q"}, "/agentfly/source"),
        ({"claim": "c", "path": "below"}, "/agentfly/source"),
        ({"path": "app"}, "app"),
        ({"path": "/app"}, "/app"),
    ],
)
def test_the_folder_of_the_manifest_is_a_volume_or_in_the_image(source, folder):
    work = run(source=source, model={"path": "/models/m"}, **CLAIM)
    assert cluster_places(work, UID, BROKER).base_dir == Path(folder)


def test_a_run_without_a_claim_has_no_place_in_a_cluster():
    with pytest.raises(AgentflyError, match=r"spec\.storage"):
        cluster_places(run(), UID, BROKER)


def test_on_one_machine_blocks_of_clusters_change_nothing():
    inference = {"pod": {"image": "i", "cpu": 2}}
    assert inference_pool(run(inference=inference, **CLAIM), PLACES) == inference_pool(run(), PLACES)
    assert trainer_config(run(**CLAIM), PLACES, 1) == trainer_config(run(), PLACES, 1)


def test_the_servers_of_a_cluster_are_pods_that_read_what_the_trainer_writes():
    pod = {
        "image": "i@sha256:0",
        "cpu": "4",
        "memory": "8Gi",
        "sharedMemory": "1Gi",
        "gpuResource": "amd.com/gpu",
        "placement": {"nodeSelector": {"gpu": "big"}},
    }
    work = run(inference={"gpus": 1, "pod": pod}, **CLAIM)
    spec = inference_pool(work, cluster_places(work, UID, BROKER)).spec
    service = spec.model_service
    assert (service.image, service.cpu, service.memory) == ("i@sha256:0", "4", "8Gi")
    assert (service.shared_memory, service.gpu_resource) == ("1Gi", "amd.com/gpu")
    assert (service.cache_claim, service.tensor_parallel) == ("runs", 1)
    assert spec.security.pod_security == "Restricted"
    assert spec.placement.node_selector == {"gpu": "big"}
    assert spec.scope == "Rollout"
    assert spec.lease.ttl_seconds == 600  # a broker that is replaced is away longer than a beat or two


def test_workers_of_a_job_share_its_servers():
    work = job(**CLAIM)
    spec = inference_pool(work, cluster_places(work, UID, BROKER)).spec
    assert (spec.scope, spec.lease.ttl_seconds) == ("Global", 600)  # as for a trainer
    assert inference_pool(work, PLACES).spec.scope == "Rollout"


def test_an_attempt_in_a_cluster_trains_on_a_ray_of_all_pods():
    work = run(
        trainer={"nodes": 2, "gpusPerNode": 4},
        inference={"replicas": 3, "startTimeoutSeconds": 60},
        runPolicy={"startupDeadlineSeconds": 100},
        **CLAIM,
    )
    places = cluster_places(work, UID, BROKER)
    launch = trainer_launch(work, places, 2, ["p-0", "p-1"], "p-0.svc")
    assert TrainerLaunch.model_validate_json(launch.model_dump_json()) == launch
    assert launch.trainer == trainer_config(work, places, 2)
    trainer = launch.trainer
    assert (trainer.nodes, trainer.gpus, trainer.ranks, trainer.ray_address) == (2, 4, 8, "auto")
    assert (launch.job, launch.broker, launch.policy) == (
        "r",
        BROKER,
        inference_pool(work, places).metadata.name,
    )
    assert (launch.servers, launch.servers_deadline_s) == (3, 60)
    assert (launch.pods, launch.head) == (("p-0", "p-1"), "p-0.svc")
    assert launch.barrier_s < 100


def test_nodes_without_a_ray_of_all_are_refused():
    config = trainer_config(run(), PLACES, 1).model_dump()
    with pytest.raises(ValueError, match="nodes: 2 nodes need a Ray"):
        TrainerConfig(**{**config, "nodes": 2})


def test_what_is_prepared_is_what_the_roles_use():
    build = {"build": {"script": "make.py", "args": ["--small"]}}
    work = run(model=build, seed=4, source={"configMap": "q"}, **CLAIM)
    places = cluster_places(work, UID, BROKER)
    launch = prepare_launch(work, places)
    assert PrepareLaunch.model_validate_json(launch.model_dump_json()) == launch
    model = "/agentfly-cache/runs/r-01234567/model"
    assert (launch.model, launch.script) == (Path(model), Path("/agentfly/source/make.py"))
    assert launch.arguments == ("--small", "--seed", "4", "--output", model)
    assert (launch.trainer, launch.worker) == (trainer_config(work, places, 0), None)


def test_a_job_prepares_its_tasks_and_no_model_that_is_there():
    work = job(**CLAIM)
    places = cluster_places(work, UID, BROKER)
    launch = prepare_launch(work, places)
    assert (launch.script, launch.arguments, launch.trainer) == (None, (), None)
    assert launch.worker == rollout_config(work, places)


def test_a_shard_knows_the_whole_job():
    work = job(workers={"tasksPerShard": 5}, inference={"replicas": 2}, **CLAIM)
    places = cluster_places(work, UID, BROKER)
    launch = shard_launch(work, places)
    assert ShardLaunch.model_validate_json(launch.model_dump_json()) == launch
    assert launch.worker == rollout_config(work, places)
    assert (launch.job, launch.policy, launch.servers) == ("j", policy_name("j"), 2)
    assert launch.tasks_per_shard == 5


# 2. a policy that the trainer serves has no servers


def test_a_trainer_that_serves_the_policy_is_told_so():
    inference = {"mode": "Colocated", "gpus": 2, "maxNumSeqs": 5, "dtype": "bfloat16"}
    own = run(trainer={"gpusPerNode": 8}, inference=inference)
    assert trainer_config(own, PLACES, 1).servers == ColocatedServers(
        gpus=2, memory_utilization=0.5, max_num_seqs=5, dtype="bfloat16"
    )
    more = run(trainer={"gpusPerNode": 8}, inference={**inference, "gpuMemoryUtilization": 0.9})
    assert trainer_config(more, PLACES, 1).servers.memory_utilization == 0.9
    assert trainer_role(own, PLACES, 1, []).environment == "colocated"
    assert trainer_launch(own, PLACES, 1, ["p"], "h").servers == 0
    assert [serves_itself(each) for each in (own, run(), job())] == [True, False, False]
