"""RolloutJob: run an agent over tasks against a model and write trajectories.

Guarantees:
1. What decides the result of a job never changes after creation; only `runPolicy`, `workers.count` and
   `suspend` may.
2. `status.phase` is derived from conditions, for printing; programs read conditions.
"""

from typing import ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Decimal, Int
from agentfly.api.common import (
    FIXED,
    REACHABLE_MODEL,
    ApiObject,
    Inference,
    RolePod,
    WorkSpec,
    WorkStatus,
)
from agentfly.api.reasons import RolloutJobPhase


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


class Workers(ApiModel):
    """Pods that play the tasks in a cluster; one machine has one worker, and does not read this block."""

    count: Int = Field(
        default=1,
        ge=0,
        le=10_000,
        description="Pods at the same time, each with rollout.concurrency "
        "rollouts; may be changed. Default 1.",
    )
    tasks_per_shard: Int = Field(
        default=32,
        ge=1,
        description="Tasks that a pod plays before the next one takes over; what a lost pod has to do again "
        "is at most as many. Default 32.",
        json_schema_extra=FIXED,
    )
    pod: RolePod = Field(
        default=RolePod(), description="The pods. Absent: its defaults.", json_schema_extra=FIXED
    )


class RolloutJobSpec(WorkSpec):
    """What should be rolled out."""

    suspend: bool | None = Field(
        default=None,
        description="True: end the workers and the policy's servers until it is false again; finished shards "
        "stay. In a cluster only. Absent: false.",
    )
    workers: Workers = Field(default=Workers(), description="Worker pods. Absent: its defaults.")
    seed: Int = Field(
        default=0, ge=0, description="Seed of tasks and sampling. Default 0.", json_schema_extra=FIXED
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
    rules: ClassVar = (REACHABLE_MODEL,)


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


class ShardStatus(ApiModel):
    """Shards of the tasks; each is one index of the Job."""

    total: Int = Field(default=0, ge=0, description="How many there are; 0 while not known.")
    done: Int = Field(default=0, ge=0, description="Whose results are complete.")
    counted: str = Field(
        default="", max_length=32768, description="Whose results stand in this status, as 0-4,7."
    )
    sampled_tokens: int = Field(default=0, ge=0, description="Tokens that the policy sampled in these.")
    drift_tokens: int = Field(
        default=0, ge=0, description="Tokens of these whose drift is known; driftFraction is of them."
    )


class RolloutJobStatus(WorkStatus):
    """What the job is doing. Written by the controller."""

    phase: RolloutJobPhase | None = Field(
        default=None, strict=False, description="One word for people. Absent: not looked at yet."
    )
    tasks: RolloutCounts | None = Field(default=None, description="Rollouts by outcome. Absent: none yet.")
    failures: dict[str, Int] = Field(
        default={}, max_length=32, description="Failed rollouts by reason. Absent: none."
    )
    reward: RewardSummary | None = Field(default=None, description="Rewards. Absent: nothing scored yet.")
    drift_fraction: Decimal | None = Field(
        default=None,
        description="Share of tokens that differ from a rendering of the text. Absent: not known.",
    )
    forks: Int = Field(
        default=0, ge=0, description="Rows begun because the chat template rewrote what came before."
    )
    shards: ShardStatus | None = Field(default=None, description="In a cluster. Absent: one machine.")
    workers: Int = Field(default=0, ge=0, description="Worker pods that run; in a cluster only.")
    selector: str | None = Field(
        default=None, max_length=1024, description="Label selector of the worker pods. Absent: one machine."
    )
    trajectories_per_second: Decimal | None = Field(
        default=None, description="Finished rollouts a second since the start. Absent: none yet."
    )
    tokens_per_second: Decimal | None = Field(
        default=None, description="Tokens to train on, a second, since the start. Absent: none yet."
    )
    path: str | None = Field(
        default=None, max_length=4096, description="Folder of the results on the claim. Absent: one machine."
    )


class RolloutJob(ApiObject):
    """Run an agent over tasks and keep the trajectories."""

    kind: Literal["RolloutJob"] = Field(default="RolloutJob", description="Kind of the object.")
    spec: RolloutJobSpec = Field(description="What should be rolled out.")
    status: RolloutJobStatus = Field(default=RolloutJobStatus(), description="What the job is doing.")
