"""What the members of a ResourcePool are: one block for each type.

Guarantees:
1. A field means the same on every platform; one that a platform does not read says so. What a platform
   cannot give is refused there (`agentfly.broker.pools`).
2. Credentials are references, never values.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from agentfly.api.base import ApiModel, Args, Int, Rule
from agentfly.api.common import ENTRYPOINT_PATTERN, REFERENCE, DType
from agentfly.api.pods import (
    LABEL_KEY_PATTERN,
    VARIABLE_PATTERN,
    EnvVars,
    ObjectName,
    SecretKey,
    SecretSource,
)
from agentfly.api.quantity import Cpu, Memory, parse

URL_PATTERN = "^https?://"
ENV_MAX = 32 * 1024
"""Characters of a sandbox's environment: what its daemon reads at the start is bounded."""

VLLM_IMAGE = "vllm/vllm-openai:v0.24.0"
"""Image of model servers in a cluster, unless the pool names one."""

Path = Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")]


def _needs(method: str, field: str, cel: str, example: str) -> Rule:
    return Rule(
        cel=f"self.method != '{method}' || {cel}",
        holds=lambda self: self.method != method or bool(getattr(self, field)),
        field=field,
        problem=f"is required when method is {method}",
        hint=f"add {field}: {example}",
    )


class Reset(ApiModel):
    """How a container is made pristine between two holders; verified in every case."""

    method: Literal["Auto", "Overlay", "OverlaySharedPID", "Paths", "Git", "Command", "Recreate"] = Field(
        default="Auto",
        description="Overlay: what was written is dropped. OverlaySharedPID: the same in a cluster, where a "
        "member has no process namespace of its own. Paths: declared folders are swapped for a prepared "
        "copy. Git: a declared repository goes back to its commit. Command: the image's own. Recreate: a new "
        "container. Auto: the first of these that works, in a cluster the best that security.podSecurity "
        "and the node permit, Scratch among them: where nothing else can be written, scratch folders are "
        "emptied; status.reset says which. Default Auto.",
    )
    paths: tuple[Path, ...] = Field(
        default=(),
        strict=False,
        max_length=16,
        description="Folders that holders may write, for Paths. Absent: none.",
    )
    git: Path | None = Field(default=None, description="Repository, for Git. Absent: none.")
    command: Args = Field(default=(), description="Argument list, for Command. Absent: none.")
    timeout_seconds: int = Field(
        default=30, ge=1, le=600, description="Longest reset; after it the container is replaced. Default 30."
    )
    rules: ClassVar = (
        _needs("Paths", "paths", "size(self.paths) > 0", "[/workspace]"),
        _needs("Git", "git", "has(self.git)", "/testbed"),
        _needs("Command", "command", "size(self.command) > 0", "[/reset.sh]"),
    )


_FORM_ALONE = "^(dir|tar|oci|oci-archive|docker-archive|packages):$"


class Requests(ApiModel):
    """What a member is promised, of what it may use."""

    cpu: Cpu | None = Field(default=None, description="CPU cores. Absent: as many as its limit.")
    memory: Memory | None = Field(default=None, description="Memory. Absent: as much as its limit.")
    rules: ClassVar = (
        Rule(
            cel="has(self.cpu) || has(self.memory)",
            holds=lambda self: self.cpu is not None or self.memory is not None,
            problem="cpu or memory must be set",
            hint="write {cpu: 100m}",
        ),
    )


def _within_limit(resource: Literal["cpu", "memory"], example: str) -> Rule:
    def holds(self: "Container") -> bool:
        wanted = getattr(self.requests, resource, None)
        return wanted is None or parse(str(wanted)) <= parse(str(getattr(self, resource)))

    text = "string(self.{})" if resource == "cpu" else "self.{}"  # a number or text; to convert text costs
    wanted, limit = text.format(f"requests.{resource}"), text.format(resource)
    return Rule(
        cel=f"!has(self.requests) || !has(self.requests.{resource}) || "
        f"quantity({wanted}).asApproximateFloat() <= quantity({limit}).asApproximateFloat()",
        holds=holds,
        field="requests",
        problem=f"has more {resource} than {resource}, which is the limit",
        hint=f"lower requests.{resource} or raise {resource}, as in {example}",
    )


class Container(ApiModel):
    """A sandbox: one container in which tools run commands."""

    image: str = Field(
        default="host",
        min_length=1,
        max_length=1024,
        description="Root file system. Bubblewrap: host for this machine's own, read-only under an overlay; "
        "a directory, tar:PATH, oci:PATH[:NAME], oci-archive:PATH[:NAME] or docker-archive:PATH[:NAME], "
        "relative to the manifest; or packages:SUITE/PACKAGE,PACKAGE of Debian. Else, and in a cluster "
        "always, an image of a registry such as python:3.12. Default host.",
    )
    runtime: Literal["Bubblewrap", "ContainerCLI", "Enroot"] = Field(
        default="Bubblewrap",
        description="What runs it on one machine: Bubblewrap needs no engine, ContainerCLI uses docker, "
        "podman or nerdctl. In a cluster members are pods, and this is not read. Default Bubblewrap.",
    )
    cpu: Cpu = Field(
        default=1, description='CPU cores: a whole number, or text such as "0.5" or 500m. Default 1.'
    )
    memory: Memory = Field(
        default="256Mi", description="Memory limit, bytes with a unit such as 256Mi. Default 256Mi."
    )
    requests: Requests | None = Field(
        default=None,
        description="What a node of a cluster sets aside for each member, as {cpu: 100m}: less than the "
        "limits lets more members on it than could all work at once. capacity.quota counts it. One machine "
        "sets nothing aside. Absent: cpu and memory.",
    )
    disk: Memory | None = Field(
        default=None,
        description="What may be written to the root file system, bytes with a unit such as 1Gi. Absent: "
        "as much as memory with Bubblewrap, which keeps it in memory, else what the platform gives.",
    )
    pids: Int = Field(default=64, ge=8, description="Processes and threads at the same time. Default 64.")
    env: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default={},
        max_length=64,
        description=f"Environment of commands, at most {ENV_MAX} characters of names and values together. "
        "Absent: none.",
    )
    network: bool = Field(
        default=False,
        description="Whether commands reach the network: on one machine all that the machine reaches, in a "
        "cluster what security.egress says. Default false.",
    )
    workdir: str = Field(
        default="/workspace",
        max_length=1024,
        pattern="^/",
        description="Absolute directory in which commands start. Default /workspace.",
    )
    reset: Reset = Field(default=Reset(), description="Between two holders. Absent: its defaults.")

    def counted(self, resource: Literal["cpu", "memory"]) -> int | str:
        """What a member takes of a node, and of a quota."""
        asked: int | str | None = getattr(self.requests, resource, None)
        limit: int | str = getattr(self, resource)
        return limit if asked is None else asked

    rules: ClassVar = (
        _within_limit("cpu", "cpu: 1, requests: {cpu: 100m}"),
        _within_limit("memory", "memory: 1Gi, requests: {memory: 256Mi}"),
        Rule(
            cel=f"!self.image.matches('{_FORM_ALONE}')",
            holds=lambda self: re.fullmatch(_FORM_ALONE, self.image) is None,
            field="image",
            problem="names no path after the colon",
            hint="write it there, as in tar:root.tar.gz",
        ),
        Rule(
            cel=f"self.env.map(name, size(name) + size(self.env[name])).sum() <= {ENV_MAX}",
            holds=lambda self: sum(len(name) + len(self.env[name]) for name in self.env) <= ENV_MAX,
            field="env",
            problem=f"has more than {ENV_MAX} characters of names and values together",
            hint="let the agent's setup write long values to files",
        ),
    )


class ModelService(ApiModel):
    """A vLLM server."""

    model: str = Field(
        min_length=1,
        max_length=4096,
        description="Directory in Hugging Face layout, relative to the manifest, or name on the hub.",
    )
    max_model_len: Int = Field(ge=2, description="Tokens of prompt and answer together.")
    max_num_seqs: Int = Field(default=64, ge=1, description="Sequences that one member batches. Default 64.")
    dtype: DType = Field(
        default="auto", description="Type of weights and activations. Default auto: as in the model."
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Devices that share each layer. Default 1."
    )
    pipeline_parallel: int = Field(
        default=1, ge=1, le=64, description="Groups of devices that share the layers. Default 1."
    )
    gpus: int = Field(
        default=0, ge=0, le=64, description="GPUs of each member; 0 runs on the CPU. Default 0."
    )
    args: Args = Field(
        default=(), description="Further arguments of vllm serve; the last wins. Absent: none."
    )
    image: str = Field(
        default=VLLM_IMAGE,
        min_length=1,
        max_length=1024,
        description=f"Image of vLLM in a cluster. One machine does not read this. Default {VLLM_IMAGE}.",
    )
    cpu: Cpu | None = Field(
        default=None,
        description="CPU cores of each member in a cluster. One machine does not read this. Absent: what "
        "the node has.",
    )
    memory: Memory | None = Field(
        default=None,
        description="Memory limit of each member in a cluster, which counts sharedMemory too. One machine "
        "does not read this. Absent: what the node has.",
    )
    shared_memory: Memory = Field(
        default="2Gi",
        description="Size of /dev/shm in a cluster, where processes of one member exchange tensors. One "
        "machine does not read this. Default 2Gi.",
    )
    ephemeral_storage: Memory | None = Field(
        default=None,
        description="Disk of the node for each member in a cluster, to ask for. One machine does not read "
        "this. Absent: none is promised.",
    )
    env: EnvVars = Field(
        default=(),
        description="Further environment variables of members in a cluster, each as {name: A, value: B} or "
        "{name: A, valueFrom: {secretKeyRef: {name: hub, key: token}}}. One machine does not read this. "
        "Absent: none.",
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        max_length=317,
        pattern=LABEL_KEY_PATTERN,
        description="What nodes of the cluster call their GPUs. One machine does not read this. Default "
        "nvidia.com/gpu.",
    )
    cache_claim: ObjectName | None = Field(
        default=None,
        description="PersistentVolumeClaim in a cluster that keeps downloaded models, with access mode "
        "ReadWriteMany where there are several members. One machine does not read this. Absent: each member "
        "downloads its own.",
    )
    hub_token: SecretSource | None = Field(
        default=None,
        description="Key for the hub, as {secretKeyRef: {name: hub, key: token}}. One machine reads HF_TOKEN "
        "instead. Absent: none.",
    )
    rules: ClassVar = (
        Rule(
            cel="self.gpus == 0 || self.tensorParallel * self.pipelineParallel <= self.gpus",
            holds=lambda self: self.gpus == 0 or self.tensor_parallel * self.pipeline_parallel <= self.gpus,
            field="tensorParallel",
            problem="times pipelineParallel is more than gpus",
            hint="set gpus to their product",
        ),
    )


class Credential(ApiModel):
    """Where a key is: exactly one of the three fields. The key itself is nowhere in a manifest."""

    env: str | None = Field(
        default=None,
        max_length=256,
        pattern=VARIABLE_PATTERN,
        description="Environment variable of the process that keeps the pool. One machine only. Absent: "
        "another field is set.",
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="File with the key, read again while the pool lives by the process that keeps it. One "
        "machine only. Absent: another field is set.",
    )
    secret_key_ref: SecretKey | None = Field(
        default=None,
        description="Key of a Secret, as {name: judge, key: token}. A cluster only. Absent: another field is "
        "set.",
    )
    rules: ClassVar = (
        Rule(
            cel="[has(self.env), has(self.file), has(self.secretKeyRef)].filter(set, set).size() == 1",
            holds=lambda self: [self.env, self.file, self.secret_key_ref].count(None) == 2,
            problem="exactly one of env, file and secretKeyRef must be set",
            hint="keep env: JUDGE_API_KEY, file: key.txt, or in a cluster secretKeyRef: "
            "{name: judge, key: token}",
        ),
    )


class ApiBudget(ApiModel):
    """What the API may cost while the pool lives."""

    calls: Int | None = Field(default=None, ge=1, description="Requests at most. Absent: any number.")
    usd: float | None = Field(default=None, gt=0, description="US dollars at most. Absent: any amount.")
    usd_per_million_input: float = Field(
        default=0.0, ge=0, description="Price of a million input tokens, US dollars. Default 0."
    )
    usd_per_million_output: float = Field(
        default=0.0, ge=0, description="Price of a million output tokens, US dollars. Default 0."
    )
    rules: ClassVar = (
        Rule(
            cel="!has(self.usd) || self.usdPerMillionInput > 0.0 || self.usdPerMillionOutput > 0.0",
            holds=lambda self: (
                self.usd is None or self.usd_per_million_input > 0 or self.usd_per_million_output > 0
            ),
            field="usd",
            problem="bounds nothing while both prices are 0",
            hint="set usdPerMillionInput and usdPerMillionOutput",
        ),
    )


class Breaker(ApiModel):
    """When to leave a failing API alone."""

    failures: Int = Field(default=5, ge=1, description="Failures in a row that open it. Default 5.")
    window_seconds: Int = Field(default=60, ge=1, description="Seconds within which they count. Default 60.")
    open_seconds: Int = Field(
        default=30, ge=1, description="Seconds without a request; then one is tried. Default 30."
    )


class ExternalAPI(ApiModel):
    """An HTTP API of somebody else, such as a judge model, behind limits that all holders share."""

    base_url: str = Field(
        max_length=2048, pattern=URL_PATTERN, description="Base of all requests, such as https://host/v1."
    )
    model: str = Field(
        default="", max_length=512, description="Model that requests without one ask for. Default none."
    )
    credentials: tuple[Credential, ...] = Field(
        default=(),
        strict=False,
        max_length=16,
        description="Keys, in order, each as {env: JUDGE_KEY}; one that the API refuses or limits is set "
        "aside. Absent: none is sent.",
    )
    concurrency: Int = Field(default=32, ge=1, description="Requests at the same time. Default 32.")
    requests_per_second: float | None = Field(
        default=None, gt=0, description="Rate of requests. Absent: not limited."
    )
    tokens_per_second: float | None = Field(
        default=None, gt=0, description="Rate of tokens, input and output. Absent: not limited."
    )
    timeout_seconds: Int = Field(
        default=120,
        ge=1,
        description="Longest try of a request, and longest that one waits in all. Default 120.",
    )
    max_retries: int = Field(
        default=3, ge=0, le=10, description="Further tries of a request that failed there. Default 3."
    )
    budget: ApiBudget = Field(default=ApiBudget(), description="What it may cost. Absent: not limited.")
    circuit_breaker: Breaker = Field(default=Breaker(), description="Absent: its defaults.")


class InProcess(ApiModel):
    """A Python object, such as a game or a simulator."""

    entrypoint: str = Field(
        max_length=512,
        pattern=ENTRYPOINT_PATTERN,
        description=f"Function or class that makes one instance. {REFERENCE} In a cluster the broker's "
        "image must have it.",
    )
    kwargs: dict[str, JsonValue] = Field(
        default={},
        max_length=64,
        description="Arguments of entrypoint by name. Absent: none.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    isolated: bool = Field(
        default=False, description="Whether each instance has its own process. Default false."
    )
    call_timeout_seconds: Int = Field(default=60, ge=1, description="Longest call. Default 60.")
    start_timeout_seconds: Int = Field(default=60, ge=1, description="Longest start. Default 60.")
