"""TrainingRun: rollouts and verl updates until done.

Guarantees:
1. What decides the result of a run never changes after creation; only `runPolicy` may.
2. `status.phase` is derived from conditions, for printing; programs read conditions.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Conditions, Decimal, Int, NameSet, Rule, Time, immutable
from agentfly.api.common import AgentRef, ApiObject, Inference, ModelRef, PoolUse, Rollout, TasksRef
from agentfly.api.reasons import TrainingRunPhase

OVERRIDE_PATTERN = r"^(\+{0,2}[^=\s+~]+=.*|~[^=\s]+(=.*)?)$"
FIXED = immutable("make a new run under another name")


class Algorithm(ApiModel):
    """The update."""

    name: Literal["grpo"] = Field(default="grpo", description="Advantage estimator. Default grpo.")
    learning_rate: float = Field(
        default=1e-6, gt=0, le=1, description="AdamW learning rate, constant. Default 1e-6."
    )
    clip_low: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="The probability ratio is clipped below at 1 - clipLow. Default 0.2.",
    )
    clip_high: float = Field(
        default=0.28,
        gt=0,
        le=100,
        description="The probability ratio is clipped above at 1 + clipHigh. Default 0.28.",
    )
    rules: ClassVar = (
        Rule(
            cel="self.clipLow <= self.clipHigh",
            holds=lambda self: self.clip_low <= self.clip_high,
            field="clipHigh",
            problem="is less than clipLow",
            hint="raise clipHigh or lower clipLow",
        ),
    )


class Trainer(ApiModel):
    """The processes that update the policy."""

    gpus_per_node: int = Field(
        default=0, ge=0, le=64, description="GPUs; 0 trains on the CPU (gloo). Default 0."
    )
    micro_batch_size: Int = Field(
        default=8, ge=1, description="Sequences of one forward and backward pass on a device. Default 8."
    )


class Checkpoint(ApiModel):
    """Saved states to continue from."""

    every_steps: Int = Field(
        default=20, ge=1, description="Steps between checkpoints; the last step saves too. Default 20."
    )
    keep_last: Int = Field(
        default=2, ge=1, description="Checkpoints kept; older ones are deleted. Default 2."
    )


class TrainingRunPolicy(ApiModel):
    """When a run ends or restarts without being asked."""

    active_deadline_seconds: Int | None = Field(
        default=None,
        ge=1,
        description="Seconds in phase Running after which the run fails; suspended time does not count. "
        "Absent: none.",
    )
    startup_deadline_seconds: Int = Field(
        default=1800,
        ge=1,
        description="Seconds from the start of an attempt's trainer to its first finished step. "
        "Default 1800.",
    )
    stall_timeout_seconds: Int = Field(
        default=3600,
        ge=1,
        description="Seconds from one finished step of an attempt to the next; more than "
        "rollout.timeouts.rolloutSeconds * (1 + rollout.maxInfraRetries). Default 3600.",
    )
    backoff_limit: Int = Field(
        default=3,
        ge=0,
        description="Restarts after attempts that made no checkpoint; one more fails the run. Default 3.",
    )
    failure_budget: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the rollouts of one step, 0 to 1, that may fail; more fails the run. "
        "Default 0.5.",
    )


class TrainingRunSpec(ApiModel):
    """What should be trained, and how."""

    agent: AgentRef = Field(
        description='The agent, as {entrypoint: "agent.py:agent"}.', json_schema_extra=FIXED
    )
    tasks: TasksRef = Field(description="The tasks, as {path: tasks.jsonl}.", json_schema_extra=FIXED)
    pools: NameSet = Field(
        default=(),
        description="ResourcePools in the same namespace that tools and reward acquire by name. Absent: "
        "none.",
        json_schema_extra=FIXED,
    )
    model: ModelRef = Field(
        description="First weights and tokenizer, as {path: DIR}.", json_schema_extra=FIXED
    )
    seed: Int = Field(
        default=0,
        ge=0,
        description="Seed of the order of tasks, of model.build and of the trainer; sampling is not seeded. "
        "Default 0.",
        json_schema_extra=FIXED,
    )
    algorithm: Algorithm = Field(
        default=Algorithm(), description="The update. Absent: its defaults.", json_schema_extra=FIXED
    )
    rollout: Rollout = Field(
        default=Rollout(),
        description="From task to trajectories. Absent: its defaults.",
        json_schema_extra=FIXED,
    )
    inference: Inference = Field(
        default=Inference(),
        description="Servers of the policy. Absent: its defaults.",
        json_schema_extra=FIXED,
    )
    trainer: Trainer = Field(
        default=Trainer(), description="Training processes. Absent: its defaults.", json_schema_extra=FIXED
    )
    steps: Int = Field(
        default=100, ge=1, description="Updates until the run is done. Default 100.", json_schema_extra=FIXED
    )
    tasks_per_step: Int = Field(
        default=8,
        ge=1,
        description="Tasks of one step; rollouts are tasksPerStep * rollout.groupSize. Default 8.",
        json_schema_extra=FIXED,
    )
    checkpoint: Checkpoint = Field(
        default=Checkpoint(), description="Saved states. Absent: its defaults.", json_schema_extra=FIXED
    )
    run_policy: TrainingRunPolicy = Field(
        default=TrainingRunPolicy(),
        description="Deadlines and restarts; may be changed. Absent: its defaults.",
    )
    overrides: Annotated[
        tuple[Annotated[str, Field(max_length=1024, pattern=OVERRIDE_PATTERN)], ...],
        Field(strict=False, max_length=128),
    ] = Field(
        default=(),
        description="Settings of verl in Hydra's form (trainer.x=y), applied last; the last wins. Absent: "
        "none.",
        json_schema_extra=FIXED,
    )
    rules: ClassVar = (
        Rule(
            cel="self.algorithm.name != 'grpo' || self.rollout.groupSize >= 2",
            holds=lambda self: self.algorithm.name != "grpo" or self.rollout.group_size >= 2,
            field="rollout",
            problem="has groupSize 1, and grpo compares the rollouts of one task with each other",
            hint="set rollout.groupSize to 2 or more",
        ),
        Rule(
            cel="self.rollout.temperature > 0.0",
            holds=lambda self: self.rollout.temperature > 0,
            field="rollout",
            problem="has temperature 0, and a greedy policy gives a group one rollout many times",
            hint="set rollout.temperature to 1",
        ),
        Rule(
            cel="self.runPolicy.stallTimeoutSeconds > "
            "self.rollout.timeouts.rolloutSeconds * (1 + self.rollout.maxInfraRetries)",
            holds=lambda self: (
                self.run_policy.stall_timeout_seconds
                > self.rollout.timeouts.rollout_seconds * (1 + self.rollout.max_infra_retries)
            ),
            field="runPolicy",
            problem="has a stallTimeoutSeconds that one hanging rollout may take, which is "
            "rollout.timeouts.rolloutSeconds * (1 + rollout.maxInfraRetries)",
            hint="raise runPolicy.stallTimeoutSeconds or lower rollout.timeouts.rolloutSeconds",
        ),
    )


class RoleStatus(ApiModel):
    """Processes or pods of one role."""

    desired: Int = Field(default=0, ge=0, description="How many there should be.")
    ready: Int = Field(default=0, ge=0, description="How many answer.")
    reason: str | None = Field(
        default=None, max_length=1024, description="Why not all are ready. Absent: all are."
    )


class Progress(ApiModel):
    """How far the run is."""

    step: Int = Field(default=0, ge=0, description="Steps done.")
    total_steps: Int = Field(default=0, ge=0, description="Steps to do: spec.steps.")
    eta_seconds: Int | None = Field(
        default=None, ge=0, description="Estimated seconds left. Absent: not known yet."
    )
    metrics: dict[str, Decimal] = Field(
        default={}, max_length=16, description="Metrics of the last step, as text. Absent: none yet."
    )


class CheckpointStatus(ApiModel):
    """The newest complete checkpoint."""

    latest_step: Int = Field(ge=0, description="Step it was saved at.")
    path: str = Field(max_length=4096, description="Its directory.")
    time: Time = Field(description="When it was complete.")


class Failure(ApiModel):
    """Why an attempt ended."""

    attempt: Int = Field(ge=0, description="Which attempt.")
    reason: str = Field(max_length=1024, description="One of agentfly.api.reasons.Reason.")
    message: str = Field(max_length=4096, description="What happened, with the last lines of the log.")
    exit_code: int | None = Field(
        default=None, description="Exit status of the process. Absent: it was killed or hung."
    )
    time: Time = Field(description="When it ended.")


class TrainingRunStatus(ApiModel):
    """What the run is doing. Written by the controller."""

    observed_generation: int = Field(
        default=-1,
        ge=-1,
        description="metadata.generation that this status describes; -1 before the first look.",
    )
    phase: TrainingRunPhase | None = Field(
        default=None, strict=False, description="One word for people. Absent: not looked at yet."
    )
    start_time: Time | None = Field(default=None, description="When it first ran. Absent: not yet.")
    completion_time: Time | None = Field(default=None, description="When it ended for good. Absent: not yet.")
    attempt: Int = Field(
        default=0, ge=0, description="Number of the attempt, from 1; counted up before it starts."
    )
    restarts: Int = Field(default=0, ge=0, description="Attempts after a failure.")
    roles: dict[str, RoleStatus] = Field(default={}, max_length=16, description="By name of the role.")
    progress: Progress | None = Field(default=None, description="How far it is. Absent: no step yet.")
    checkpoint: CheckpointStatus | None = Field(
        default=None, description="Newest complete one. Absent: none."
    )
    last_failure: Failure | None = Field(
        default=None, description="Why the last failed attempt ended. Absent: none."
    )
    pools: dict[str, PoolUse] = Field(default={}, max_length=16, description="By name of the pool.")
    conditions: Conditions = Field(default=(), description="Running, Succeeded, Failed and others, by type.")


class TrainingRun(ApiObject):
    """Train an agent's policy by reinforcement learning."""

    kind: Literal["TrainingRun"] = Field(default="TrainingRun", description="Kind of the object.")
    spec: TrainingRunSpec = Field(description="What should be trained, and how.")
    status: TrainingRunStatus = Field(default=TrainingRunStatus(), description="What the run is doing.")
