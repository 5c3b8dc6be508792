"""What a TrainingRun or a RolloutJob needs to run: pools and roles, as data.

The same plan becomes processes on one machine (`agentfly.local`) and pods on Kubernetes. Nothing here starts,
reads or waits for anything.

Guarantees:
1. Equal arguments give equal plans.
2. The policy's servers are a pool like any other: members of type ModelService, as many as
   ``inference.replicas``, all kept for as long as the run needs them.
3. A role is complete: its command, environment and files say all that it needs, so that only where it runs is
   left to decide. What is known only once other roles run (addresses of servers) comes in as an argument.
4. Relative paths of a manifest are relative to the manifest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentfly.api import ModelRef, ResourcePool, RolloutJob, TrainingRun
from agentfly.api.base import NAME_MAX
from agentfly.roles.trainer import ENV_BROKER, ENV_INFERENCE_URLS, ENV_JOB, ENV_RUN_DIR, TrainerConfig
from agentfly.roles.worker import RolloutWorkerConfig

Environment = Literal["trainer", "inference"]
POLICY = "-policy"  # ends the name of the pool of a run's own servers
BUILD_DEADLINE_S = 1800.0  # a model made on the spot; anything larger is downloaded, not built


@dataclass(frozen=True)
class Places:
    """Where a run lives, as its roles see it.

    Attributes:
        run_dir: the folder of the run: logs, metrics, trajectories, checkpoints.
        base_dir: the folder of the manifest.
        broker: address of the broker that leases resources; empty until it listens.
    """

    run_dir: Path
    base_dir: Path
    broker: str = ""


@dataclass(frozen=True)
class Role:
    """One process that the run needs.

    Attributes:
        name: of the role, unique in the run.
        environment: which packages it needs.
        arguments: of the Python interpreter.
        variables: environment variables.
        files: text by path, to be written before it starts.
    """

    name: str
    environment: Environment
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)


def model_path(model: ModelRef, places: Places) -> Path:
    """The directory that holds, or will hold, the policy's first weights."""
    return places.base_dir / model.path if model.path is not None else places.run_dir / "model"


def model_role(model: ModelRef, seed: int, places: Places) -> Role | None:
    """The role that makes the model; None if the manifest names one that is there already."""
    if model.path is not None or model.build is None:
        return None
    script = places.base_dir / model.build.script
    target = model_path(model, places)
    arguments = (str(script), *model.build.args, "--seed", str(seed), "--output", str(target))
    return Role("model", "trainer", arguments, variables={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def inference_pool(work: TrainingRun | RolloutJob, places: Places) -> ResourcePool:
    """The pool of the policy's servers."""
    spec, inference = work.spec, work.spec.inference
    return ResourcePool.model_validate(
        {
            "metadata": {"name": work.metadata.name[: NAME_MAX - len(POLICY)].rstrip("-") + POLICY},
            "spec": {
                "type": "ModelService",
                "modelService": {
                    "model": str(model_path(spec.model, places)),
                    "maxModelLen": spec.rollout.max_context_tokens,
                    "maxNumSeqs": inference.max_num_seqs,
                    "dtype": inference.dtype,
                    "tensorParallel": max(1, inference.gpus),
                    "gpus": inference.gpus,
                    "args": list(inference.args),
                },
                "capacity": {"min": inference.replicas, "max": inference.replicas},
            },
        }
    )


def trainer_role(run: TrainingRun, places: Places, attempt: int, inference_urls: Sequence[str]) -> Role:
    """The verl trainer of one attempt."""
    config = trainer_config(run, places, attempt)
    path = places.run_dir / "control" / f"trainer-{attempt}.json"
    return Role(
        name="trainer",
        environment="trainer",
        arguments=("-m", "agentfly.training.main", "--config", str(path)),
        variables=_data_plane(run.metadata.name, places, inference_urls),
        files={path: config.model_dump_json(indent=2) + "\n"},
    )


def trainer_config(run: TrainingRun, places: Places, attempt: int) -> TrainerConfig:
    """The file that the trainer reads."""
    spec, rollout = run.spec, run.spec.rollout
    return TrainerConfig(
        run_dir=places.run_dir,
        attempt=attempt,
        model_path=model_path(spec.model, places),
        agent_entrypoint=spec.agent.entrypoint,
        base_dir=places.base_dir,
        tasks_entrypoint=spec.tasks.entrypoint,
        tasks_path=places.base_dir / spec.tasks.path if spec.tasks.path is not None else None,
        seed=spec.seed,
        steps=spec.steps,
        tasks_per_step=spec.tasks_per_step,
        group_size=rollout.group_size,
        algorithm=spec.algorithm.name,
        learning_rate=spec.algorithm.learning_rate,
        clip_low=spec.algorithm.clip_low,
        clip_high=spec.algorithm.clip_high,
        max_turns=rollout.max_turns,
        max_tokens_per_turn=rollout.max_tokens_per_turn,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_context_tokens=rollout.max_context_tokens,
        temperature=rollout.temperature,
        call_timeout_s=rollout.timeouts.call_seconds,
        turn_timeout_s=rollout.timeouts.turn_seconds,
        rollout_timeout_s=rollout.timeouts.rollout_seconds,
        max_infra_retries=rollout.max_infra_retries,
        max_drift_fraction=rollout.max_drift_fraction,
        concurrency=rollout.concurrency,
        micro_batch_size=spec.trainer.micro_batch_size,
        gpus=spec.trainer.gpus_per_node,
        checkpoint_every_steps=spec.checkpoint.every_steps,
        checkpoint_keep_last=spec.checkpoint.keep_last,
        checkpoint_dir=places.run_dir / "checkpoints",
        stall_timeout_s=spec.run_policy.stall_timeout_seconds,
        failure_budget=spec.run_policy.failure_budget,
        overrides=spec.overrides,
    )


def rollout_role(job: RolloutJob, places: Places, inference_urls: Sequence[str]) -> Role:
    """The worker that rolls out the tasks of a job."""
    spec, rollout = job.spec, job.spec.rollout
    config = RolloutWorkerConfig(
        run_dir=places.run_dir,
        model_path=model_path(spec.model, places),
        agent_entrypoint=spec.agent.entrypoint,
        base_dir=places.base_dir,
        tasks_entrypoint=spec.tasks.entrypoint,
        tasks_path=places.base_dir / spec.tasks.path if spec.tasks.path is not None else None,
        seed=spec.seed,
        limit=spec.limit,
        rollout=rollout,
        failure_budget=spec.run_policy.failure_budget,
    )
    path = places.run_dir / "control" / "rollout.json"
    return Role(
        name="rollout",
        environment="inference",
        arguments=("-m", "agentfly.worker", "--config", str(path)),
        variables=_data_plane(job.metadata.name, places, inference_urls),
        files={path: config.model_dump_json(indent=2, by_alias=True) + "\n"},
    )


def _data_plane(job: str, places: Places, inference_urls: Sequence[str]) -> dict[str, str]:
    return {
        ENV_JOB: job,
        ENV_BROKER: places.broker,
        ENV_INFERENCE_URLS: ",".join(inference_urls),
        ENV_RUN_DIR: str(places.run_dir),
    }
