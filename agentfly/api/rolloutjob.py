"""RolloutJob: run an agent over tasks against a model and write trajectories.

Guarantees:
1. What decides the result of a job never changes after creation; only `runPolicy` may.
2. `status.phase` is derived from conditions, for printing; programs read conditions.
"""

from typing import Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Conditions, Decimal, Int, NameSet, Time, immutable
from agentfly.api.common import AgentRef, ApiObject, Inference, ModelRef, PoolUse, Rollout, TasksRef
from agentfly.api.reasons import RolloutJobPhase

FIXED = immutable("make a new job under another name")


class RolloutJobPolicy(ApiModel):
    """When a job ends before its tasks do."""

    active_deadline_seconds: Int | None = Field(
        default=None, ge=1, description="Seconds since the start after which the job fails. Absent: none."
    )
    failure_budget: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of rollouts, 0 to 1, that may fail; more fails the job. Default 0.1.",
    )


class RolloutJobSpec(ApiModel):
    """What should be rolled out."""

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
    model: ModelRef = Field(description="Weights and tokenizer, as {path: DIR}.", json_schema_extra=FIXED)
    seed: Int = Field(
        default=0, ge=0, description="Seed of tasks and sampling. Default 0.", json_schema_extra=FIXED
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
    limit: Int | None = Field(
        default=None, ge=1, description="Tasks taken from the start. Absent: all.", json_schema_extra=FIXED
    )
    run_policy: RolloutJobPolicy = Field(
        default=RolloutJobPolicy(), description="Deadline and failures; may be changed. Absent: its defaults."
    )


class RolloutCounts(ApiModel):
    """Counts of rollouts by outcome; `total` counts those planned."""

    total: Int = Field(default=0, ge=0, description="Rollouts to do: tasks * groupSize; 0 while not known.")
    scored: Int = Field(default=0, ge=0, description="Rollouts with a reward.")
    masked: Int = Field(default=0, ge=0, description="Rollouts without a reward on purpose.")
    failed: Int = Field(default=0, ge=0, description="Rollouts that failed.")


class RewardSummary(ApiModel):
    """Rewards of the scored rollouts, as text."""

    mean: Decimal = Field(description="Mean.")
    min: Decimal = Field(description="Smallest.")
    max: Decimal = Field(description="Largest.")


class RolloutJobStatus(ApiModel):
    """What the job is doing. Written by the controller."""

    observed_generation: int = Field(
        default=-1,
        ge=-1,
        description="metadata.generation that this status describes; -1 before the first look.",
    )
    phase: RolloutJobPhase | None = Field(
        default=None, strict=False, description="One word for people. Absent: not looked at yet."
    )
    start_time: Time | None = Field(default=None, description="When it first ran. Absent: not yet.")
    completion_time: Time | None = Field(default=None, description="When it ended for good. Absent: not yet.")
    tasks: RolloutCounts | None = Field(default=None, description="Rollouts by outcome. Absent: none yet.")
    failures: dict[str, Int] = Field(
        default={}, max_length=32, description="Failed rollouts by reason. Absent: none."
    )
    reward: RewardSummary | None = Field(default=None, description="Rewards. Absent: nothing scored yet.")
    drift_fraction: Decimal | None = Field(
        default=None,
        description="Share of tokens that differ from a rendering of the text. Absent: not known.",
    )
    pools: dict[str, PoolUse] = Field(default={}, max_length=16, description="By name of the pool.")
    conditions: Conditions = Field(default=(), description="Running, Succeeded, Failed and others, by type.")


class RolloutJob(ApiObject):
    """Run an agent over tasks and keep the trajectories."""

    kind: Literal["RolloutJob"] = Field(default="RolloutJob", description="Kind of the object.")
    spec: RolloutJobSpec = Field(description="What should be rolled out.")
    status: RolloutJobStatus = Field(default=RolloutJobStatus(), description="What the job is doing.")
