"""Blocks that several kinds share, and the root that all kinds have.

Guarantees:
1. A block has one definition; kinds use it by name.
2. Every default stands in the model: a manifest without the block and one with an empty block mean the same.
"""

from typing import ClassVar, Literal

from pydantic import Field

from agentfly.api.base import ApiModel, Args, Conditions, Int, Metadata, NameSet, Rule, Time, immutable
from agentfly.api.pods import LABEL_KEY_PATTERN, EnvVars, ObjectName, Placement
from agentfly.api.quantity import Cpu, Memory

ENTRYPOINT_PATTERN = r"^([^:]+\.py|[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*):[A-Za-z_][A-Za-z0-9_]*$"

REFERENCE = "Form: file.py:name with the file relative to the manifest, or package.module:name."

FIXED = immutable("make a new one under another name")

DType = Literal["auto", "bfloat16", "float16", "float32"]


class ApiObject(ApiModel):
    """Root of a kind."""

    api_version: Literal["agentfly.dev/v1alpha1"] = Field(
        default="agentfly.dev/v1alpha1", description="Version of the API."
    )
    metadata: Metadata = Field(description="Name and labels, as {name: first}; the API server adds more.")


class AgentRef(ApiModel):
    """The agent: prompt, tools and reward, as one Python object."""

    entrypoint: str = Field(
        max_length=512,
        pattern=ENTRYPOINT_PATTERN,
        description=f"The agentfly.Agent. {REFERENCE}",
    )


class TasksRef(ApiModel):
    """Where tasks come from: exactly one of the two fields."""

    entrypoint: str | None = Field(
        default=None,
        max_length=512,
        pattern=ENTRYPOINT_PATTERN,
        description="Function that is called with seed=int and yields one dict a task. Absent: tasks are "
        "read "
        f"from path. {REFERENCE}",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="JSON-lines file with one object a task, relative to the manifest. Absent: entrypoint "
        "is called.",
    )
    rules: ClassVar = (
        Rule(
            cel="has(self.entrypoint) != has(self.path)",
            holds=lambda self: (self.entrypoint is None) != (self.path is None),
            problem="exactly one of entrypoint and path must be set",
            hint="keep entrypoint: agent.py:tasks or path: tasks.jsonl",
        ),
    )


class ModelBuild(ApiModel):
    """A script that makes the model directory, for models too small to download."""

    script: str = Field(
        min_length=1,
        max_length=4096,
        description="Python script, relative to the manifest. It is called with args, then with --seed and "
        "the seed of spec, then with --output and the directory to write.",
    )
    args: Args = Field(default=(), description="Arguments of the script. Absent: none.")


class ModelRef(ApiModel):
    """The policy's first weights and its tokenizer. With both fields set, path wins."""

    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Directory in Hugging Face layout, relative to the manifest; in a cluster "
        "/agentfly-cache/DIR is DIR on the claim of storage. Absent: what build makes.",
    )
    build: ModelBuild | None = Field(
        default=None, description="How to make the model when path is absent. Absent: path must be set."
    )
    rules: ClassVar = (
        Rule(
            cel="has(self.path) || has(self.build)",
            holds=lambda self: self.path is not None or self.build is not None,
            problem="one of path and build must be set",
            hint="set path to a directory in Hugging Face layout",
        ),
    )


class Source(ApiModel):
    """Where a cluster has the folder of the manifest: agent, tasks, scripts. One machine does not read this
    block.
    """

    config_map: ObjectName | None = Field(
        default=None,
        description="ConfigMap whose keys are the files of the folder. Absent: another field is set.",
    )
    claim: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim with the folder. Absent: configMap or the image has it.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Folder on the claim, or in the image, whose working folder it is relative to. "
        "Absent: the claim's root, or the working folder of the image.",
    )
    rules: ClassVar = (
        Rule(
            cel="!has(self.configMap) || (!has(self.claim) && !has(self.path))",
            holds=lambda self: self.config_map is None or (self.claim is None and self.path is None),
            field="configMap",
            problem="is a whole folder, and claim or path name another one",
            hint="keep configMap alone, or claim with path",
        ),
        Rule(
            cel="!has(self.path) || !self.path.split('/').exists(part, part == '..')",
            holds=lambda self: self.path is None or ".." not in self.path.split("/"),
            field="path",
            problem="leaves its volume by ..",
            hint="name a folder below it",
        ),
        Rule(
            cel="!has(self.claim) || !has(self.path) || !self.path.startsWith('/')",
            holds=lambda self: self.claim is None or self.path is None or not self.path.startswith("/"),
            field="path",
            problem="is absolute, and a folder of a claim is named from its root",
            hint="remove the slash it begins with",
        ),
    )


REACHABLE_MODEL = Rule(
    cel="(!has(self.source.configMap) && !has(self.source.claim)) || !has(self.model.path) "
    "|| self.model.path.startsWith('/')",
    holds=lambda self: (
        (self.source.config_map is None and self.source.claim is None)
        or self.model.path is None
        or self.model.path.startswith("/")
    ),
    field="model",
    problem="has a path in source, which the policy's servers do not have",
    hint="put the model on the claim of storage and set model.path to /agentfly-cache/DIR",
)
"""Of every spec with a model and a source."""


class Storage(ApiModel):
    """Where a cluster keeps what a run or job writes. One machine does not read this block."""

    claim: ObjectName = Field(
        description="PersistentVolumeClaim with access mode ReadWriteMany, or ReadWriteOnce where all pods "
        "are on one node. Every pod has it at /agentfly-cache: model, weights, checkpoints, trajectories, "
        "logs. It is never deleted.",
    )


class RolePod(ApiModel):
    """The pods of a role in a cluster. One machine does not read this block."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Image, best with its digest. Absent: the operator's for this role.",
    )
    cpu: Cpu | None = Field(default=None, description="CPU cores to ask for. Absent: none are promised.")
    memory: Memory | None = Field(
        default=None,
        description="Memory, requested and at most; sharedMemory counts to it. Absent: what the node has.",
    )
    shared_memory: Memory = Field(default="2Gi", description="Size of /dev/shm. Default 2Gi.")
    ephemeral_storage: Memory | None = Field(
        default=None,
        description="Disk of the node for /tmp, logs and the image's writes, to ask for. Absent: none is "
        "promised.",
    )
    env: EnvVars = Field(
        default=(),
        description="Further environment variables, each as {name: A, value: B} or {name: HF_TOKEN, "
        "valueFrom: {secretKeyRef: {name: hub, key: token}}}; they win over the operator's. Absent: none.",
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass of the pods, such as nvidia. Absent: that of the cluster."
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        max_length=317,
        pattern=LABEL_KEY_PATTERN,
        description="What nodes call their GPUs. Default nvidia.com/gpu.",
    )
    placement: Placement = Field(default=Placement(), description="Where the pods run. Absent: its defaults.")


class Timeouts(ApiModel):
    """Deadlines inside one rollout. Each is at most the next one."""

    call_seconds: Int = Field(default=30, ge=1, description="Longest tool call, seconds. Default 30.")
    turn_seconds: Int = Field(
        default=120, ge=1, description="Longest turn (generation and its tool calls), seconds. Default 120."
    )
    rollout_seconds: Int = Field(
        default=600,
        ge=1,
        description="Longest rollout with waiting for resources and reward, seconds. Default 600.",
    )
    rules: ClassVar = (
        Rule(
            cel="self.callSeconds <= self.turnSeconds",
            holds=lambda self: self.call_seconds <= self.turn_seconds,
            field="callSeconds",
            problem="is more than turnSeconds",
            hint="set callSeconds to turnSeconds or less",
        ),
        Rule(
            cel="self.turnSeconds <= self.rolloutSeconds",
            holds=lambda self: self.turn_seconds <= self.rollout_seconds,
            field="turnSeconds",
            problem="is more than rolloutSeconds",
            hint="set turnSeconds to rolloutSeconds or less",
        ),
    )


HISTORY = 2
"""Turns that a prompt of a Step shows where nothing is said."""


class Strategy(ApiModel):
    """How a rollout goes from its prompt to its last turn."""

    type: Literal["Chain", "Step"] = Field(
        default="Chain",
        description="Chain: one growing conversation. Step: every turn has a prompt of its own, of the task "
        "and the last turns. Default Chain.",
    )
    when_full: Literal["Stop", "DropOldest", "Summarise"] = Field(
        default="Stop",
        description="What a Chain does when maxContextTokens leaves no room: end; leave the oldest turns out "
        "of the prompt; or let the policy write down what it needs, and go on from that. Default Stop.",
    )
    history: Int | None = Field(
        default=None, ge=0, description=f"Turns that the prompts of a Step show. Absent: {HISTORY}."
    )
    prompt_builder: str | None = Field(
        default=None,
        max_length=512,
        pattern=ENTRYPOINT_PATTERN,
        description="Function from an agentfly.rollout.StepView to the chat messages of a Step's prompt. "
        f"Absent: the agent's prompt, then the last turns. {REFERENCE}",
    )
    rules: ClassVar = (
        Rule(
            cel="self.type == 'Step' || (!has(self.history) && !has(self.promptBuilder))",
            holds=lambda self: self.type == "Step" or (self.history is None and self.prompt_builder is None),
            field="type",
            problem="is Chain, and history and promptBuilder are of a Step",
            hint="set type to Step, or remove history and promptBuilder",
        ),
        Rule(
            cel="self.type == 'Chain' || self.whenFull == 'Stop'",
            holds=lambda self: self.type == "Chain" or self.when_full == "Stop",
            field="whenFull",
            problem="is of a Chain, and a Step's prompts are as long as its promptBuilder makes them",
            hint="remove whenFull, or set type to Chain",
        ),
    )

    @property
    def turns_shown(self) -> int:
        """By the prompts of a Step."""
        return HISTORY if self.history is None else self.history


class Rollout(ApiModel):
    """How one task becomes trajectories."""

    strategy: Strategy = Field(
        default=Strategy(), description="From turn to turn, as {type: Step}. Absent: its defaults."
    )

    group_size: Int = Field(default=8, ge=1, description="Rollouts of each task. Default 8.")
    concurrency: Int = Field(default=64, ge=1, description="Rollouts in flight at the same time. Default 64.")
    max_turns: Int = Field(default=10, ge=1, description="Generations in one rollout. Default 10.")
    max_tokens_per_turn: Int = Field(default=512, ge=1, description="Tokens of one generation. Default 512.")
    max_context_tokens: Int = Field(
        default=4096,
        ge=2,
        description="Tokens of prompt, generations and observations together. Default 4096.",
    )
    max_prompt_tokens: Int = Field(
        default=1024,
        ge=1,
        description="Tokens of the first prompt; a longer one fails the rollout. Default 1024.",
    )
    temperature: float = Field(
        default=1.0, ge=0, le=10, description="Sampling temperature; 0 is greedy. Default 1."
    )
    timeouts: Timeouts = Field(
        default=Timeouts(), description="Deadlines inside one rollout. Absent: their defaults."
    )
    max_infra_retries: int = Field(
        default=1,
        ge=0,
        le=100,
        description="Times a rollout is repeated in fresh resources after an infrastructure failure. "
        "Default 1.",
    )
    max_drift_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of tokens, 0 to 1, that may differ between what was sampled and what a "
        "rendering of the "
        "text gives; more fails the run. Absent: drift is counted and never fails the run.",
    )
    rules: ClassVar = (
        Rule(
            cel="self.maxPromptTokens < self.maxContextTokens",
            holds=lambda self: self.max_prompt_tokens < self.max_context_tokens,
            field="maxPromptTokens",
            problem="leaves no room below maxContextTokens",
            hint="set maxPromptTokens to less than maxContextTokens",
        ),
        Rule(
            cel="self.maxTokensPerTurn < self.maxContextTokens",
            holds=lambda self: self.max_tokens_per_turn < self.max_context_tokens,
            field="maxTokensPerTurn",
            problem="leaves no room below maxContextTokens",
            hint="set maxTokensPerTurn to less than maxContextTokens",
        ),
        Rule(
            cel="self.strategy.whenFull != 'Summarise' || "
            "self.maxPromptTokens + 2 * self.maxTokensPerTurn < self.maxContextTokens",
            holds=lambda self: (
                self.strategy.when_full != "Summarise"
                or self.max_prompt_tokens + 2 * self.max_tokens_per_turn < self.max_context_tokens
            ),
            field="maxContextTokens",
            problem="has no room for a prompt, an answer and a summary: it is at most maxPromptTokens + "
            "2 * maxTokensPerTurn",
            hint="raise maxContextTokens or lower maxTokensPerTurn",
        ),
    )


class Inference(ApiModel):
    """The vLLM servers that sample from the policy."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Servers. Default 1.")
    gpus: int = Field(
        default=0, ge=0, le=64, description="GPUs of each server; 0 runs on the CPU. Default 0."
    )
    max_num_seqs: Int = Field(default=64, ge=1, description="Sequences that one server batches. Default 64.")
    dtype: DType = Field(
        default="auto", description="Type of weights and activations. Default auto: as in the model."
    )
    start_timeout_seconds: Int = Field(
        default=300, ge=1, description="Seconds until a started server must answer. Default 300."
    )
    args: Args = Field(
        default=(), description="Further arguments of vllm serve; the last wins. Absent: none."
    )
    pod: RolePod = Field(default=RolePod(), description="Their pods. Absent: its defaults.")


class PoolUse(ApiModel):
    """What a run sees of one of its pools. Counts of members."""

    ready: Int = Field(default=0, ge=0, description="Members that are verified, leased or free.")
    leased: Int = Field(default=0, ge=0, description="Members that are leased.")
    queued: Int = Field(default=0, ge=0, description="Waiting acquires.")
    max: Int = Field(default=0, ge=0, description="The pool's capacity.max.")


class WorkSpec(ApiModel):
    """What the spec of a TrainingRun and of a RolloutJob have in common."""

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
        description="The policy to begin with: weights and tokenizer, as {path: DIR}.",
        json_schema_extra=FIXED,
    )
    source: Source = Field(
        default=Source(),
        description="Folder of the manifest in a cluster, as {configMap: quickstart}. Absent: it is in the "
        "image of the pods.",
        json_schema_extra=FIXED,
    )
    storage: Storage | None = Field(
        default=None,
        description="Where a cluster keeps what is made, as {claim: runs}; it needs this. One machine has "
        "--runs. Absent: one machine.",
        json_schema_extra=FIXED,
    )
    rollout: Rollout = Field(
        default=Rollout(),
        description="From task to trajectories. Absent: its defaults.",
        json_schema_extra=FIXED,
    )


class WorkStatus(ApiModel):
    """What the status of a TrainingRun and of a RolloutJob have in common."""

    observed_generation: int = Field(
        default=-1,
        ge=-1,
        description="metadata.generation that this status describes; -1 before the first look.",
    )
    phase: str | None = Field(default=None, description="One word for people. Absent: not looked at yet.")
    start_time: Time | None = Field(default=None, description="When it first ran. Absent: not yet.")
    completion_time: Time | None = Field(default=None, description="When it ended for good. Absent: not yet.")
    pools: dict[str, PoolUse] = Field(default={}, max_length=16, description="By name of the pool.")
    conditions: Conditions = Field(default=(), description="Running, Succeeded, Failed and others, by type.")
