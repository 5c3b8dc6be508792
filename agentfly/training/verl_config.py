"""A ``TrainerConfig`` in verl's own terms: Hydra overrides and the environment of its processes.

Guarantees:
1. Pure: the same config gives the same text; nothing is imported from verl.
2. The user's overrides come last.
3. The rows of one rank are a multiple of the micro batch: verl asserts that only when the first step
   computes.
4. On a CPU no setting of a GPU is left, on GPUs none of a CPU.
5. The policy is served by agentfly's own backend, or by verl's vLLM on the trainer's GPUs: then with weights
   from the trainer alone, memory that is given back while it trains, and the log-probabilities of what was
   drawn.
6. A Ray that somebody else started is taken as it is, and every process that verl starts on any of its nodes
   has the variables of the trainer.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from agentfly.broker.access import TOKEN_FILE
from agentfly.roles.trainer import (
    ENV_BROKER,
    ENV_CONFIG,
    ENV_INFERENCE_URLS,
    ENV_JOB,
    ENV_RUN_DIR,
    ColocatedServers,
    TrainerConfig,
)
from agentfly.training.algorithm_config import FULL_PRECISION, algorithm_settings

LOOP_NAME = "agentfly"

_LOGICAL_CPUS = 16  # Ray's bookkeeping, not cores: with fewer than 6 verl waits for ever, in silence
_OBJECT_STORE_BYTES = 200_000_000
_RAY_DIR = "/dev/shm/agentfly-ray"  # private to the guard and gone with it; a short path for Ray's sockets


def overrides(config: TrainerConfig, shared: Mapping[str, str]) -> list[str]:
    """The command line for ``verl.trainer.main_ppo``; ``shared`` is what `shared_variables` gave."""
    micro = micro_batch(config.tasks_per_step * config.group_size // config.ranks, config.micro_batch_size)
    values = (
        _data(config) | _actor(config, micro) | _rollout(config) | _trainer(config) | _ray(config, shared)
    )
    values |= algorithm_settings(config, micro)
    return [f"{key}={_hydra(value)}" for key, value in values.items()] + list(config.overrides)


def environment(config: TrainerConfig, config_path: Path, base: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment ``base`` before verl is imported, in every process."""
    modules = [m for m in base.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
    if "agentfly.training.plugin" not in modules:
        modules.insert(0, "agentfly.training.plugin")
    added = {
        ENV_CONFIG: str(config_path),
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_FILE_LOGGER_PATH": str(config.verl_metrics_file),
        "VERL_LOGGING_LEVEL": "WARN",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "RAY_AUTH_MODE": base.get("RAY_AUTH_MODE", "disabled"),
        "RAY_DEDUP_LOGS": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if not config.gpus:
        # verl registers its FSDP engine for cuda and npu alone; the second line makes a CPU find it.
        added |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    return added


def shared_variables(config: TrainerConfig, config_path: Path, base: Mapping[str, str]) -> dict[str, str]:
    """What the processes of verl need of the environment ``base`` of the trainer, on whichever node."""
    names = (ENV_BROKER, ENV_INFERENCE_URLS, ENV_JOB, ENV_RUN_DIR, TOKEN_FILE, "PYTHONPATH")
    found = {name: base[name] for name in names if name in base}
    ours = environment(config, config_path, base)
    return found | {name: value for name, value in ours.items() if not name.startswith("RAY_")}


def agent_loop_yaml() -> str:
    """The file that tells verl's agent loop workers about ours."""
    return json.dumps([{"name": LOOP_NAME, "_target_": "agentfly.training.agent_loop.AgentflyLoop"}])


def micro_batch(rows: int, limit: int) -> int:
    """The largest divisor of ``rows`` that is at most ``limit``."""
    return next(size for size in range(min(rows, limit), 0, -1) if rows % size == 0)


def _data(config: TrainerConfig) -> dict[str, object]:
    return {
        "data.train_files": str(config.tasks_file),
        "data.val_files": str(config.tasks_file),
        "data.custom_cls.path": "pkg://agentfly.training.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_batch_size": config.tasks_per_step,
        "data.max_prompt_length": config.max_prompt_tokens,
        "data.max_response_length": config.max_response_tokens,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,  # the dataset has an order of its own, the same in every attempt
        "data.seed": config.seed,
    }


def _actor(config: TrainerConfig, micro: int) -> dict[str, object]:
    values: dict[str, object] = {
        "actor_rollout_ref.model.path": str(config.model_path),
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.tasks_per_step,  # one update a step: on policy
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.actor.data_loader_seed": config.seed,
    }
    if not config.gpus:
        values |= {
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
            "+actor_rollout_ref.actor.fsdp_config.mixed_precision": FULL_PRECISION,
        }
    return values


def _rollout(config: TrainerConfig) -> dict[str, object]:
    return {
        **(_separate() if config.servers is None else _colocated(config.servers)),
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.n": config.group_size,
        "actor_rollout_ref.rollout.temperature": config.temperature,
        "actor_rollout_ref.rollout.max_model_len": config.max_context_tokens,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(config.agent_loop_file),
        "actor_rollout_ref.rollout.agent.default_agent_loop": LOOP_NAME,
        "reward.num_workers": 0,  # the rollout brings its reward
    }


def _separate() -> dict[str, object]:
    return {
        "actor_rollout_ref.rollout.name": "agentfly_vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.load_format": "auto",
    }


def _colocated(servers: ColocatedServers) -> dict[str, object]:
    return {
        "actor_rollout_ref.hybrid_engine": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": servers.gpus,
        "actor_rollout_ref.rollout.gpu_memory_utilization": servers.memory_utilization,
        "actor_rollout_ref.rollout.max_num_seqs": servers.max_num_seqs,
        "actor_rollout_ref.rollout.dtype": servers.dtype,
        "actor_rollout_ref.rollout.free_cache_engine": True,
        "actor_rollout_ref.rollout.load_format": "dummy",  # the first ones come from the trainer, as all do
        "actor_rollout_ref.rollout.logprobs_mode": "processed_logprobs",
        "actor_rollout_ref.rollout.checkpoint_engine.backend": "naive",
    }


def _trainer(config: TrainerConfig) -> dict[str, object]:
    return {
        "trainer.device": "cuda" if config.gpus else "cpu",
        "trainer.nnodes": config.nodes,
        "trainer.n_gpus_per_node": max(config.gpus, 1),
        "trainer.logger": ["console", "file"],
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.total_epochs": config.steps,
        "trainer.total_training_steps": config.steps,
        "trainer.save_freq": config.checkpoint_every_steps,
        "trainer.default_local_dir": str(config.checkpoint_dir),
        "trainer.resume_mode": "auto",
        "trainer.checkpoint_callback_class": "agentfly.training.control.Control",
        "trainer.v1.sampler.custom_sampler.path": "pkg://agentfly.training.sampler",
        "trainer.v1.sampler.custom_sampler.name": "GroupSampler",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }


def _ray(config: TrainerConfig, shared: Mapping[str, str]) -> dict[str, object]:
    if config.ray_address:
        return {
            "+ray_kwargs.ray_init.address": config.ray_address,
            "+ray_kwargs.ray_init.runtime_env.env_vars": dict(shared),
        }
    values: dict[str, object] = {
        "ray_kwargs.ray_init.num_cpus": _LOGICAL_CPUS,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init._temp_dir": _RAY_DIR,
    }
    if not config.gpus:
        values["+ray_kwargs.ray_init.num_gpus"] = 1  # a rank asks for one; without hardware it is a number
        values["+ray_kwargs.ray_init.object_store_memory"] = _OBJECT_STORE_BYTES
    return values


def _hydra(value: object) -> str:
    """A value in the grammar of Hydra's overrides; strings are quoted, so that no path is parsed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    return str(value)
