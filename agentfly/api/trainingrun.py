"""TrainingRun: rollouts and verl updates until done.

Guarantees:
1. What decides the result of a run never changes after creation; only `runPolicy` and `suspend` may, and
   `trainer` while nothing of the run is there: before its first attempt, and while it is suspended.
2. `status.phase` is derived from conditions, for printing; programs read conditions.
"""

import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentfly.api.algorithm import WITH_ROLLOUTS, Algorithm
from agentfly.api.asynchronous import WITH_THE_REST, Asynchronous
from agentfly.api.base import ApiModel, Decimal, Int, Rule, Time, untouched
from agentfly.api.common import (
    FIXED,
    REACHABLE_MODEL,
    ApiObject,
    Inference,
    RolePod,
    WorkSpec,
    WorkStatus,
)
from agentfly.api.pods import LABEL_KEY_PATTERN
from agentfly.api.reasons import TrainingRunPhase

MIG_PATTERN = "^nvidia[.]com/mig-"
INTERFACE_PATTERN = r"^[A-Za-z0-9][-A-Za-z0-9_.]*$"
OVERRIDE_PATTERN = r"^(\+{0,2}[^=\s+~]+=.*|~[^=\s]+(=.*)?)$"


class Rdma(ApiModel):
    """Network cards that write into the memory of other nodes."""

    resource_name: str = Field(
        max_length=317,
        pattern=LABEL_KEY_PATTERN,
        description="What nodes call them, such as rdma/hca.",
    )
    count: int = Field(default=1, ge=1, le=64, description="Cards of each pod. Default 1.")


class Network(ApiModel):
    """Between trainer pods in a cluster. One machine does not read this block."""

    socket_interface: str | None = Field(
        default=None,
        min_length=1,
        max_length=15,
        pattern=INTERFACE_PATTERN,
        description="Network interface for NCCL and gloo, as in eth0. Absent: they choose.",
    )
    rdma: Rdma | None = Field(default=None, description="RDMA cards. Absent: none.")


Engine = Literal["Native", "KubeRay"]


class Trainer(ApiModel):
    """The processes that update the policy."""

    engine: Literal["Auto", "Native", "KubeRay"] = Field(
        default="Auto",
        description="Who makes their pods in a cluster: the operator itself (Native), or KubeRay, as a "
        "RayCluster for each attempt. Auto: KubeRay for several nodes where it is installed, else Native. "
        "Default Auto.",
    )

    nodes: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Pods, each with gpusPerNode GPUs; one machine has one. Default 1.",
    )
    gpus_per_node: int = Field(
        default=0,
        ge=0,
        le=64,
        description="GPUs, one rank on each; 0 trains one rank on the CPU (gloo). Default 0.",
    )
    micro_batch_size: Int = Field(
        default=8, ge=1, description="Sequences of one forward and backward pass on a device. Default 8."
    )
    pod: RolePod = Field(default=RolePod(), description="Their pods. Absent: its defaults.")
    network: Network = Field(default=Network(), description="Between the pods. Absent: its defaults.")

    rules: ClassVar = (
        Rule(
            cel=f"self.gpusPerNode <= 1 || !self.pod.gpuResource.matches('{MIG_PATTERN}')",
            holds=lambda self: self.gpus_per_node <= 1 or not re.match(MIG_PATTERN, self.pod.gpu_resource),
            field="gpusPerNode",
            problem="is more than 1, and NCCL joins no slices of GPUs, which pod.gpuResource asks for",
            hint="set gpusPerNode to 1, or pod.gpuResource to that of whole GPUs",
        ),
    )

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return self.nodes * max(self.gpus_per_node, 1)


def _only_separate(field: str, cel: str, holds: Callable[["RunInference"], bool], hint: str) -> Rule:
    return Rule(
        cel=f"self.mode == 'Separate' || {cel}",
        holds=lambda self: self.mode == "Separate" or holds(self),
        field=field,
        problem="is of servers of their own, and mode is Colocated",
        hint=hint,
    )


class RunInference(Inference):
    """The vLLM servers that sample from the policy, and where they run."""

    mode: Literal["Separate", "Colocated"] = Field(
        default="Separate",
        description="Separate: servers of their own, beside the trainer. Colocated: inside the trainer's "
        "processes, on the same GPUs, taking turns with it; one server for every `gpus` of "
        "trainer.nodes * trainer.gpusPerNode. Default Separate.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of each GPU's memory, 0 to 1, that a Colocated server takes while it samples; the "
        "trainer keeps its weights beside it. Absent: 0.5.",
    )
    rules: ClassVar = (
        Rule(
            cel="self.mode == 'Separate' || self.gpus >= 1",
            holds=lambda self: self.mode == "Separate" or self.gpus >= 1,
            field="gpus",
            problem="is 0, and mode Colocated has servers on the trainer's GPUs alone",
            hint="set gpus to how many of trainer.gpusPerNode one server spans",
        ),
        Rule(
            cel="self.mode == 'Colocated' || !has(self.gpuMemoryUtilization)",
            holds=lambda self: self.mode == "Colocated" or self.gpu_memory_utilization is None,
            field="gpuMemoryUtilization",
            problem="is of mode Colocated, and mode is Separate",
            hint="say it in args: [--gpu-memory-utilization=0.8]",
        ),
        _only_separate(
            "replicas",
            "self.replicas == 1",
            lambda self: self.replicas == 1,
            "remove it: there is one server for every gpus of trainer.nodes * trainer.gpusPerNode",
        ),
        _only_separate(
            "args",
            "size(self.args) == 0",
            lambda self: not self.args,
            "set spec.overrides: [+actor_rollout_ref.rollout.engine_kwargs.vllm.NAME=VALUE]",
        ),
        _only_separate(
            "startTimeoutSeconds",
            "self.startTimeoutSeconds == 300",
            lambda self: self.start_timeout_seconds == 300,
            "remove it; runPolicy.startupDeadlineSeconds bounds the start of trainer and servers",
        ),
        _only_separate(
            "pod",
            untouched("self.pod", RolePod),
            lambda self: self.pod == RolePod(),
            "remove it; trainer.pod has the image, memory and place of both",
        ),
    )

    @property
    def colocated(self) -> bool:
        """Whether the trainer's own processes serve the policy."""
        return self.mode == "Colocated"


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
        description="Seconds from the start of an attempt's trainer to its first finished step. In a cluster "
        "it counts twice: until all pods of the attempt run, and anew from then to the first step. "
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


class TrainingRunSpec(WorkSpec):
    """What should be trained, and how."""

    suspend: bool | None = Field(
        default=None,
        description="True: write a checkpoint, then give everything back until it is false again. In a "
        "cluster only. Absent: false.",
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
    asynchronous: Asynchronous | None = Field(
        default=None,
        description="Rollouts go on while the policy is updated. Absent: each step waits for its own.",
        json_schema_extra=FIXED,
    )
    inference: RunInference = Field(
        default=RunInference(),
        description="Servers of the policy. Absent: its defaults.",
        json_schema_extra=FIXED,
    )
    trainer: Trainer = Field(
        default=Trainer(),
        description="Training processes; may be changed before the first attempt, and while the run is "
        "suspended. Absent: its defaults.",
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
        REACHABLE_MODEL,
        *WITH_ROLLOUTS,
        *WITH_THE_REST,
        Rule(
            cel="self.tasksPerStep * self.rollout.groupSize % "
            "(self.trainer.nodes * (self.trainer.gpusPerNode == 0 ? 1 : self.trainer.gpusPerNode)) == 0",
            holds=lambda self: self.tasks_per_step * self.rollout.group_size % self.trainer.ranks == 0,
            field="trainer",
            problem="has nodes * gpusPerNode ranks, over which the tasksPerStep * rollout.groupSize rollouts "
            "of a step cannot be spread evenly",
            hint="make tasksPerStep * rollout.groupSize a multiple of trainer.nodes * trainer.gpusPerNode",
        ),
        Rule(
            cel="self.inference.mode == 'Separate' || self.trainer.gpusPerNode >= 1",
            holds=lambda self: not self.inference.colocated or self.trainer.gpus_per_node >= 1,
            field="inference",
            problem="has mode Colocated, and trainer.gpusPerNode is 0: there is no GPU to share",
            hint="set trainer.gpusPerNode to 1 or more, or inference.mode to Separate",
        ),
        Rule(
            cel="self.inference.mode == 'Separate' || self.inference.gpus == 0 "
            "|| self.trainer.gpusPerNode % self.inference.gpus == 0",
            holds=lambda self: (
                not self.inference.colocated
                or self.inference.gpus == 0
                or self.trainer.gpus_per_node % self.inference.gpus == 0
            ),
            field="inference",
            problem="has mode Colocated with gpus that do not divide trainer.gpusPerNode: some would serve "
            "nothing",
            hint="set inference.gpus to a divisor of trainer.gpusPerNode",
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
    ranks: Int | None = Field(default=None, ge=1, description="Ranks that wrote it. Absent: not known.")
    path: str = Field(max_length=4096, description="Its directory.")
    time: Time = Field(description="When it was complete.")


class EngineStatus(ApiModel):
    """Who makes the pods of the newest attempt."""

    kind: Engine = Field(description="Native or KubeRay.")
    message: str = Field(max_length=1024, description="Why it is this one.")
    head: str | None = Field(
        default=None,
        max_length=64,
        description="Uid of the pod that is the head of the attempt: KubeRay would put another one in its "
        "place. Absent: not seen yet, or Native.",
    )


class Failure(ApiModel):
    """Why an attempt ended."""

    attempt: Int = Field(ge=0, description="Which attempt.")
    reason: str = Field(max_length=1024, description="One of agentfly.api.reasons.Reason.")
    message: str = Field(max_length=4096, description="What happened, with the last lines of the log.")
    exit_code: int | None = Field(
        default=None, description="Exit status of the process. Absent: it was killed or hung."
    )
    pod_name: str | None = Field(
        default=None, max_length=253, description="Pod that failed first. Absent: none did, or one machine."
    )
    node_name: str | None = Field(
        default=None, max_length=253, description="Its node. Absent: none, or one machine."
    )
    time: Time = Field(description="When it ended.")


class TrainingRunStatus(WorkStatus):
    """What the run is doing. Written by the controller."""

    phase: TrainingRunPhase | None = Field(
        default=None, strict=False, description="One word for people. Absent: not looked at yet."
    )
    attempt: Int = Field(
        default=0, ge=0, description="Number of the attempt, from 1; counted up before it starts."
    )
    restarts: Int = Field(default=0, ge=0, description="Attempts after a failure.")
    failures: Int = Field(
        default=0, ge=0, description="Failed attempts without a new checkpoint, which backoffLimit counts."
    )
    attempt_time: Time | None = Field(
        default=None, description="When the newest attempt began or ended. Absent: there was none."
    )
    step_time: Time | None = Field(
        default=None, description="When its newest step was finished. Absent: none yet, or one machine."
    )
    resumed_step: Int = Field(
        default=0, ge=0, description="Step of the checkpoint that the newest attempt began with; 0: none."
    )
    restart_time: Time | None = Field(
        default=None, description="When the next attempt begins. Absent: none is planned."
    )
    active_seconds: Int = Field(
        default=0, ge=0, description="Seconds that ended attempts spent in phase Running; in a cluster only."
    )
    engine: EngineStatus | None = Field(
        default=None,
        description="Who makes the pods of the newest attempt. Absent: no attempt yet, or one machine.",
    )
    roles: dict[str, RoleStatus] = Field(default={}, max_length=16, description="By name of the role.")
    progress: Progress | None = Field(default=None, description="How far it is. Absent: no step yet.")
    checkpoint: CheckpointStatus | None = Field(
        default=None, description="Newest complete one. Absent: none."
    )
    last_failure: Failure | None = Field(
        default=None, description="Why the last failed attempt ended. Absent: none."
    )


class TrainingRun(ApiObject):
    """Train an agent's policy by reinforcement learning."""

    kind: Literal["TrainingRun"] = Field(default="TrainingRun", description="Kind of the object.")
    spec: TrainingRunSpec = Field(description="What should be trained, and how.")
    status: TrainingRunStatus = Field(default=TrainingRunStatus(), description="What the run is doing.")
