"""What one attempt of a training run needs to know: the file between the role renderer and the trainer.

Guarantees:
1. The file is complete: the trainer reads it and the environment variables below, nothing else about the run.
2. An unknown field, a value out of its range and fields that contradict each other are errors when the file
   is read, each naming the field.
3. Importing this module needs pydantic alone: operator and command line render the file without torch.
"""

import os
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentfly.api import Strategy
from agentfly.api.algorithm import Algorithm
from agentfly.api.asynchronous import Asynchronous

EXIT_SUSPENDED: Final = 85  # asked to suspend: the checkpoint is on disk, start again to go on
EXIT_STALLED: Final = 86  # the watchdog saw no step for stall_timeout_s
EXIT_INVALID: Final = 87  # what is wrong would be wrong again: another attempt is of no use

ENV_BROKER: Final = "AGENTFLY_BROKER"  # unix:///path of the broker that hands out sandboxes
ENV_INFERENCE_URLS: Final = "AGENTFLY_INFERENCE_URLS"  # http://host:port of every vLLM server, by comma
ENV_CONFIG: Final = "AGENTFLY_TRAINER_CONFIG"  # path of the file, for code of ours that verl instantiates
ENV_JOB: Final = "AGENTFLY_JOB"  # name of the run or job: its share in every queue
ENV_RUN_DIR: Final = "AGENTFLY_RUN_DIR"  # metrics, trajectories, control files; same path in every process


class ColocatedServers(BaseModel):
    """vLLM inside the trainer's ranks, which takes turns with them on the same GPUs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: int = Field(ge=1)  # ranks that one server spans
    memory_utilization: float = Field(default=0.5, gt=0, lt=1)  # share of each GPU, while it samples
    max_num_seqs: int = Field(default=64, ge=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"


class TrainerConfig(BaseModel):
    """One attempt of one training run. Durations are seconds, lengths are tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    attempt: int = Field(ge=0)
    model_path: Path

    agent_entrypoint: str
    base_dir: Path  # what relative references start from: the folder of the manifest
    tasks_entrypoint: str | None = None  # called with seed=int, yields one dict for each task
    tasks_path: Path | None = None  # JSON lines, one task each

    seed: int = 0
    steps: int = Field(ge=1)
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)

    algorithm: Algorithm = Algorithm()
    asynchronous: Asynchronous | None = None  # None: a step trains on its own rollouts

    strategy: Strategy = Strategy()
    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_prompt_tokens: int = Field(ge=1)
    max_context_tokens: int = Field(ge=2)  # prompt and everything after it
    temperature: float = Field(default=1.0, gt=0)
    call_timeout_s: float = Field(default=30, gt=0)
    turn_timeout_s: float = Field(default=120, gt=0)
    rollout_timeout_s: float = Field(default=600, gt=0)
    max_infra_retries: int = Field(default=1, ge=0)
    max_drift_fraction: float | None = Field(default=None, ge=0, le=1)
    concurrency: int = Field(default=64, ge=1)  # rollouts at a time

    micro_batch_size: int = Field(default=8, ge=1)  # rows of one forward pass on one rank
    nodes: int = Field(default=1, ge=1)  # of Ray, each with as many ranks
    gpus: int = Field(default=0, ge=0)  # ranks on one node; 0 = one rank on the CPU
    servers: ColocatedServers | None = None  # None: servers of their own, told by ENV_INFERENCE_URLS
    ray_address: Literal["", "auto"] = ""  # auto: Ray runs on all nodes already; else the trainer has its own

    checkpoint_every_steps: int = Field(default=20, ge=1)
    checkpoint_keep_last: int = Field(default=2, ge=1)
    checkpoint_dir: Path

    stall_timeout_s: float = Field(default=3600, gt=0)  # longest time between two steps, once there is one
    failure_budget: float = Field(default=0.5, ge=0, le=1)  # share of one step's rollouts that may fail
    overrides: tuple[str, ...] = ()  # verl's own Hydra form; the last one wins

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.tasks_entrypoint is None) == (self.tasks_path is None):
            raise ValueError("tasks_entrypoint, tasks_path: exactly one must be set")
        if self.max_prompt_tokens >= self.max_context_tokens:
            raise ValueError(
                f"max_prompt_tokens: {self.max_prompt_tokens} leaves no room for a response in "
                f"max_context_tokens {self.max_context_tokens}"
            )
        if self.group_size < self.algorithm.least_rollouts:
            raise ValueError(f"group_size: {self.group_size} is none, which {self.algorithm.name} needs")
        if self.nodes > 1 and not self.ray_address:
            raise ValueError(f"nodes: {self.nodes} nodes need a Ray that runs on all of them: ray_address")
        if self.servers is not None and (not self.gpus or self.gpus % self.servers.gpus):
            raise ValueError(
                f"gpus: {self.gpus} cannot be shared out among servers of {self.servers.gpus} GPUs each"
            )
        return self

    @property
    def max_response_tokens(self) -> int:
        """Tokens after the prompt: sampled ones and observations."""
        return self.max_context_tokens - self.max_prompt_tokens

    @property
    def ahead(self) -> int:
        """How many steps of rollouts are played ahead."""
        return 0 if self.asynchronous is None else self.asynchronous.max_staleness

    @property
    def rows(self) -> int:
        """How many tasks the whole run may play: those of groups that are replaced too."""
        dapo = self.algorithm.of_dapo
        return self.steps * self.tasks_per_step * (1 if dapo is None else dapo.max_batches)

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return self.nodes * max(self.gpus, 1)

    @property
    def config_file(self) -> Path:
        """Where this is written for all processes of the attempt."""
        return self.run_dir / "control" / f"trainer-{self.attempt}.json"

    @property
    def suspend_file(self) -> Path:
        """Its existence asks the trainer to write a checkpoint and end with ``EXIT_SUSPENDED``."""
        return self.run_dir / "control" / "suspend"

    @property
    def suspended_file(self) -> Path:
        """Says that the attempt ended because it was asked to; holds the step of the checkpoint."""
        return self.run_dir / "control" / "suspended"

    @property
    def metrics_file(self) -> Path:
        """One JSON line for each finished step, of all attempts."""
        return self.run_dir / "metrics.jsonl"

    @property
    def trajectories_dir(self) -> Path:
        """``attempt-A-worker-PID.jsonl``: whole trajectories, one a line."""
        return self.run_dir / "trajectories"

    @property
    def outcomes_dir(self) -> Path:
        """``attempt-A-worker-PID.jsonl``: what a step's metrics need of each rollout, one a line."""
        return self.run_dir / "outcomes"

    @property
    def weights_dir(self) -> Path:
        """Where new weights wait until the inference servers have read them."""
        return self.run_dir / "weights"

    @property
    def tasks_file(self) -> Path:
        """The tasks as JSON lines, fixed by the first attempt."""
        return self.run_dir / "trainer" / "tasks.jsonl"

    @property
    def agent_loop_file(self) -> Path:
        """verl's list of agent loops."""
        return self.run_dir / "trainer" / "agent_loop.yaml"

    @property
    def verl_metrics_file(self) -> Path:
        """What verl itself logs; a file for each attempt, because verl empties the one it opens."""
        return self.run_dir / "trainer" / f"verl-{self.attempt}.jsonl"


def current_config() -> TrainerConfig:
    """The config of the attempt that this process belongs to."""
    return TrainerConfig.model_validate_json(Path(os.environ[ENV_CONFIG]).read_text())
