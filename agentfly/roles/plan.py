"""What a TrainingRun or a RolloutJob needs to run: pools and roles, as data.

The same plan becomes processes on one machine (`agentfly.local`) and pods on Kubernetes. Nothing here starts,
reads or waits for anything.

Guarantees:
1. Equal arguments give equal plans.
2. The policy's servers are a pool like any other: members of type ModelService, as many as
   ``inference.replicas``, all kept for as long as the run needs them. Where the trainer's own processes
   serve the policy there is no such pool.
3. A role is complete: its command, environment and files say all that it needs, so that only where it runs is
   left to decide. What is known only once other roles run (addresses of servers) comes in as an argument.
4. Relative paths of a manifest are relative to the manifest.
5. In a cluster the policy's servers run under the user of the trainer and see what it writes: its weight
   files are readable for their owner alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from agentfly.api import ModelRef, ResourcePool, RolloutJob, TrainingRun
from agentfly.api.base import NAME_MAX
from agentfly.errors import AgentflyError
from agentfly.roles.launch import SOURCE, STORAGE, PrepareLaunch, ShardLaunch, TrainerLaunch
from agentfly.roles.trainer import (
    ENV_BROKER,
    ENV_INFERENCE_URLS,
    ENV_JOB,
    ENV_RUN_DIR,
    ColocatedServers,
    TrainerConfig,
)
from agentfly.roles.worker import RolloutWorkerConfig

Environment = Literal["trainer", "inference", "colocated"]
POLICY = "-policy"  # ends the name of the pool of a run's own servers
BUILD_DEADLINE_S = 1800.0  # a model made on the spot; anything larger is downloaded, not built
_DIGEST = 8  # letters of the digest of a name that is cut
LEASE_S = 600  # of a cluster's servers: while a broker is replaced or moved, those who hold them go on
_BARRIER = 0.9  # of the time for the first step: the head can still say which pods did not come


@dataclass(frozen=True)
class Places:
    """Where a run lives, as its roles see it.

    Attributes:
        run_dir: the folder of the run: logs, metrics, trajectories, checkpoints.
        base_dir: the folder of the manifest.
        broker: address of the broker that leases resources; empty until it listens.
        claim: name of the claim at ``STORAGE``; None on one machine.
    """

    run_dir: Path
    base_dir: Path
    broker: str = ""
    claim: str | None = None


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


def cluster_places(work: TrainingRun | RolloutJob, uid: str, broker: str) -> Places:
    """Where a run lives in the pods of a cluster. A run made again under the same name has another ``uid``.

    Raises:
        AgentflyError: spec.storage is absent.
    """
    spec = work.spec
    if spec.storage is None:
        raise AgentflyError(
            "spec.storage: a cluster needs a claim to keep the run on",
            hints=["set spec.storage: {claim: NAME} to a PersistentVolumeClaim of the namespace"],
        )
    mounted = spec.source.config_map is not None or spec.source.claim is not None
    return Places(
        run_dir=STORAGE / "runs" / f"{work.metadata.name}-{uid[:8]}",
        base_dir=SOURCE if mounted else Path(spec.source.path or "."),
        broker=broker,
        claim=spec.storage.claim,
    )


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


def policy_name(name: str) -> str:
    """Name of the pool of the policy's servers of a run or job: another one for every name."""
    if len(name) + len(POLICY) <= NAME_MAX:
        return name + POLICY
    digest = "-" + sha256(name.encode()).hexdigest()[:_DIGEST]
    return name[: NAME_MAX - len(digest) - len(POLICY)].rstrip("-") + digest + POLICY


def serves_itself(work: TrainingRun | RolloutJob) -> bool:
    """Whether the trainer's own processes serve the policy: then it has no pool."""
    return isinstance(work, TrainingRun) and work.spec.inference.colocated


def inference_pool(work: TrainingRun | RolloutJob, places: Places) -> ResourcePool:
    """The pool of the policy's servers, where they are on their own."""
    spec, inference = work.spec, work.spec.inference
    service: dict[str, Any] = {
        "model": str(model_path(spec.model, places)),
        "maxModelLen": spec.rollout.max_context_tokens,
        "maxNumSeqs": inference.max_num_seqs,
        "dtype": inference.dtype,
        "tensorParallel": max(1, inference.gpus),
        "gpus": inference.gpus,
        "args": list(inference.args),
    }
    pool: dict[str, Any] = {
        "type": "ModelService",
        "modelService": service,
        "capacity": {"min": inference.replicas, "max": inference.replicas},
    }
    if places.claim is not None:
        pod = inference.pod
        service |= {"sharedMemory": pod.shared_memory, "gpuResource": pod.gpu_resource}
        service |= {"cacheClaim": places.claim, "env": [each.to_json() for each in pod.env]}
        asked = {"image": pod.image, "cpu": pod.cpu, "memory": pod.memory}
        asked |= {"ephemeralStorage": pod.ephemeral_storage}
        service |= {name: value for name, value in asked.items() if value is not None}
        security = {"podSecurity": "Restricted", "runtimeClassName": pod.runtime_class_name}
        pool |= {"security": security, "placement": pod.placement.to_json()}
        pool["lease"] = {"ttlSeconds": LEASE_S}
        if isinstance(work, RolloutJob):
            pool["scope"] = "Global"  # all workers of the job share them
    return ResourcePool.model_validate({"metadata": {"name": policy_name(work.metadata.name)}, "spec": pool})


def trainer_role(run: TrainingRun, places: Places, attempt: int, inference_urls: Sequence[str]) -> Role:
    """The verl trainer of one attempt."""
    config = trainer_config(run, places, attempt)
    path = config.config_file
    return Role(
        name="trainer",
        environment="colocated" if serves_itself(run) else "trainer",
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
        algorithm=spec.algorithm,
        asynchronous=spec.asynchronous,
        strategy=rollout.strategy,
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
        nodes=spec.trainer.nodes,
        gpus=spec.trainer.gpus_per_node,
        servers=_colocated_servers(run),
        ray_address="" if places.claim is None else "auto",
        checkpoint_every_steps=spec.checkpoint.every_steps,
        checkpoint_keep_last=spec.checkpoint.keep_last,
        checkpoint_dir=places.run_dir / "checkpoints",
        stall_timeout_s=spec.run_policy.stall_timeout_seconds,
        failure_budget=spec.run_policy.failure_budget,
        overrides=spec.overrides,
    )


def _colocated_servers(run: TrainingRun) -> ColocatedServers | None:
    inference = run.spec.inference
    if not inference.colocated:
        return None
    share = inference.gpu_memory_utilization
    return ColocatedServers(
        gpus=inference.gpus,
        max_num_seqs=inference.max_num_seqs,
        dtype=inference.dtype,
        **({} if share is None else {"memory_utilization": share}),
    )


def rollout_role(job: RolloutJob, places: Places, inference_urls: Sequence[str]) -> Role:
    """The worker that rolls out the tasks of a job."""
    config = rollout_config(job, places)
    path = places.run_dir / "control" / "rollout.json"
    return Role(
        name="rollout",
        environment="inference",
        arguments=("-m", "agentfly.worker", "--config", str(path)),
        variables=_data_plane(job.metadata.name, places, inference_urls),
        files={path: config.model_dump_json(indent=2, by_alias=True) + "\n"},
    )


def rollout_config(job: RolloutJob, places: Places) -> RolloutWorkerConfig:
    """The file that a rollout worker reads."""
    spec = job.spec
    return RolloutWorkerConfig(
        run_dir=places.run_dir,
        model_path=model_path(spec.model, places),
        agent_entrypoint=spec.agent.entrypoint,
        base_dir=places.base_dir,
        tasks_entrypoint=spec.tasks.entrypoint,
        tasks_path=places.base_dir / spec.tasks.path if spec.tasks.path is not None else None,
        seed=spec.seed,
        limit=spec.limit,
        rollout=spec.rollout,
        failure_budget=spec.run_policy.failure_budget,
    )


def prepare_launch(work: TrainingRun | RolloutJob, places: Places) -> PrepareLaunch:
    """What must be done once before the roles of a run start in a cluster."""
    making = model_role(work.spec.model, work.spec.seed, places)
    return PrepareLaunch(
        model=model_path(work.spec.model, places),
        base_dir=places.base_dir,
        script=Path(making.arguments[0]) if making is not None else None,
        arguments=making.arguments[1:] if making is not None else (),
        trainer=trainer_config(work, places, 0) if isinstance(work, TrainingRun) else None,
        worker=rollout_config(work, places) if isinstance(work, RolloutJob) else None,
    )


def trainer_launch(
    run: TrainingRun, places: Places, attempt: int, pods: Sequence[str], head: str
) -> TrainerLaunch:
    """One attempt in a cluster: ``pods`` are their names, ``head`` is the first one's name in DNS."""
    return TrainerLaunch(
        trainer=trainer_config(run, places, attempt),
        job=run.metadata.name,
        broker=places.broker,
        policy=policy_name(run.metadata.name),
        servers=0 if serves_itself(run) else run.spec.inference.replicas,
        servers_deadline_s=run.spec.inference.start_timeout_seconds,
        head=head,
        pods=tuple(pods),
        barrier_s=_BARRIER * run.spec.run_policy.startup_deadline_seconds,
    )


def shard_launch(job: RolloutJob, places: Places) -> ShardLaunch:
    """What every worker pod of a job reads."""
    return ShardLaunch(
        worker=rollout_config(job, places),
        job=job.metadata.name,
        broker=places.broker,
        policy=policy_name(job.metadata.name),
        servers=job.spec.inference.replicas,
        servers_deadline_s=job.spec.inference.start_timeout_seconds,
        tasks_per_shard=job.spec.workers.tasks_per_shard,
    )


def _data_plane(job: str, places: Places, inference_urls: Sequence[str]) -> dict[str, str]:
    return {
        ENV_JOB: job,
        ENV_BROKER: places.broker,
        ENV_INFERENCE_URLS: ",".join(inference_urls),
        ENV_RUN_DIR: str(places.run_dir),
    }
