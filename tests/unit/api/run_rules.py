"""Runs and jobs of a cluster that break a rule, and changes of them; as `pool_rules` has pools."""

from collections.abc import Iterator
from typing import Any

from tests.unit.api import pool_rules
from tests.unit.api.pool_rules import Case

FIXED = "field is immutable; make a new one under another name"
SOURCE = (
    "spec.source.configMap: configMap is a whole folder, and claim or path name another one; "
    "keep configMap alone, or claim with path"
)
MODEL = (
    "spec.model: model has a path in source, which the policy's servers do not have; "
    "put the model on the claim of storage and set model.path to /agentfly-cache/DIR"
)
CHAIN = (
    "spec.rollout.strategy.type: type is Chain, and history and promptBuilder are of a Step; "
    "set type to Step, or remove history and promptBuilder"
)
STEP = (
    "spec.rollout.strategy.whenFull: whenFull is of a Chain, and a Step's prompts are as long as its "
    "promptBuilder makes them; remove whenFull, or set type to Chain"
)
SUMMARY = (
    "spec.rollout.maxContextTokens: maxContextTokens has no room for a prompt, an answer and a summary: it "
    "is at most maxPromptTokens + 2 * maxTokensPerTurn; raise maxContextTokens or lower maxTokensPerTurn"
)
RANKS = (
    "spec.trainer: trainer has nodes * gpusPerNode ranks, over which the tasksPerStep * rollout.groupSize "
    "rollouts of a step cannot be spread evenly; "
    "make tasksPerStep * rollout.groupSize a multiple of trainer.nodes * trainer.gpusPerNode"
)
TRAINER = (
    "spec.trainer: spec.trainer is immutable while the run is not suspended; "
    "set spec.suspend to true, wait for the condition Suspended, then change it"
)
PODS = {"TrainingRun": ("trainer.pod", "inference.pod"), "RolloutJob": ("inference.pod", "workers.pod")}
"""Where pods stand in a spec, whose placement has the rules that a pool's has."""


def _of_pods(cases: dict[str, Case]) -> dict[str, Case]:
    """The cases of a pool's placement, for every kind of pods that runs and jobs have."""
    found = {}
    for name, (_, changes, refusals) in cases.items():
        if any(not path.startswith("placement.") for path in changes):
            continue
        for kind, pods in PODS.items():
            for pod in pods:
                moved = {f"{pod}.{path}": value for path, value in changes.items()}
                texts = [text.replace("spec.placement", f"spec.{pod}.placement") for text in refusals]
                found[f"{name} in {pod} of a {kind}"] = (kind, moved, sorted(texts))
    return found


COLOCATED = {"trainer.gpusPerNode": 8, "inference": {"mode": "Colocated", "gpus": 2}}
OWN = "is of servers of their own, and mode is Colocated"
DIVIDES = (
    "spec.inference: inference has mode Colocated with gpus that do not divide trainer.gpusPerNode: some "
    "would serve nothing; set inference.gpus to a divisor of trainer.gpusPerNode"
)

ONE_VALUE = (
    "exactly one of value and valueFrom must be set; "
    "keep value: TEXT, or valueFrom: {secretKeyRef: {name: hub, key: token}}"
)


def secret(name: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": name, "key": "token"}}


def _variables() -> Iterator[tuple[str, Case]]:
    """Environment variables that no pods have."""
    own = "no AGENTFLY_, RAY_, MASTER_, POD_NAME or POD_IP"
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"name": "A"}, "", ONE_VALUE),
        ({"name": "A", "value": "b", "valueFrom": secret("hub")}, "", ONE_VALUE),
        *(
            (
                {"name": name, "value": "b"},
                ".name",
                f"name is of a variable that agentfly sets itself; remove it: {own}",
            )
            for name in ("AGENTFLY_JOB", "RAY_ADDRESS", "MASTER_PORT", "POD_NAME", "POD_IP")
        ),
        *(
            (
                {"name": "A", "valueFrom": secret(name)},
                ".valueFrom",
                "valueFrom names a Secret that is the broker's own; "
                "make another Secret for what the pods need",
            )
            for name in ("agentfly-broker", "agentfly-broker-client")
        ),
    ]
    blocks: list[tuple[str, str, dict[str, Any]]] = [
        *((kind, pod, {}) for kind, pods in PODS.items() for pod in pods),
        ("ResourcePool", "modelService", pool_rules.SERVICE),
    ]
    for kind, block, whole in blocks:
        for number, (variable, field, text) in enumerate(wrong):
            refusal = f"spec.{block}.env[]{field}: {text}"
            yield (
                f"variable {number} of {block} of a {kind}",
                (
                    kind,
                    {**whole, f"{block}.env": [variable]},
                    [refusal],
                ),
            )


REFUSED: dict[str, Case] = {
    **_of_pods(pool_rules.REFUSED),
    **dict(_variables()),
    "slices of GPUs that should be joined": (
        "TrainingRun",
        {"trainer.gpusPerNode": 2, "trainer.pod.gpuResource": "nvidia.com/mig-3g.40gb"},
        [
            "spec.trainer.gpusPerNode: gpusPerNode is more than 1, and NCCL joins no slices of GPUs, which "
            "pod.gpuResource asks for; set gpusPerNode to 1, or pod.gpuResource to that of whole GPUs"
        ],
    ),
    "a colocated policy without GPUs": (
        "TrainingRun",
        {"inference": {"mode": "Colocated", "gpus": 1}},
        [
            "spec.inference: inference has mode Colocated, and trainer.gpusPerNode is 0: there is no GPU to "
            "share; set trainer.gpusPerNode to 1 or more, or inference.mode to Separate"
        ],
    ),
    "a colocated server of no GPU": (
        "TrainingRun",
        {**COLOCATED, "inference.gpus": 0},
        [
            "spec.inference.gpus: gpus is 0, and mode Colocated has servers on the trainer's GPUs alone; "
            "set gpus to how many of trainer.gpusPerNode one server spans"
        ],
    ),
    "colocated servers that leave GPUs over": ("TrainingRun", {**COLOCATED, "inference.gpus": 3}, [DIVIDES]),
    "a colocated server of more than a node": ("TrainingRun", {**COLOCATED, "inference.gpus": 16}, [DIVIDES]),
    "a share of memory of servers of their own": (
        "TrainingRun",
        {"inference.gpuMemoryUtilization": 0.7},
        [
            "spec.inference.gpuMemoryUtilization: gpuMemoryUtilization is of mode Colocated, and mode is "
            "Separate; say it in args: [--gpu-memory-utilization=0.8]"
        ],
    ),
    "replicas of a colocated policy": (
        "TrainingRun",
        {**COLOCATED, "inference.replicas": 2},
        [
            f"spec.inference.replicas: replicas {OWN}; remove it: there is one server for every gpus of "
            "trainer.nodes * trainer.gpusPerNode"
        ],
    ),
    "arguments and a timeout of a colocated policy": (
        "TrainingRun",
        {**COLOCATED, "inference.args": ["--seed=1"], "inference.startTimeoutSeconds": 9},
        [
            f"spec.inference.args: args {OWN}; set spec.overrides: "
            "[+actor_rollout_ref.rollout.engine_kwargs.vllm.NAME=VALUE]",
            f"spec.inference.startTimeoutSeconds: startTimeoutSeconds {OWN}; remove it; "
            "runPolicy.startupDeadlineSeconds bounds the start of trainer and servers",
        ],
    ),
    **{
        f"pods of a colocated policy with {name}": (
            "TrainingRun",
            {**COLOCATED, f"inference.pod.{name}": value},
            [
                f"spec.inference.pod: pod {OWN}; "
                "remove it; trainer.pod has the image, memory and place of both"
            ],
        )
        for name, value in (
            ("image", "i"),
            ("cpu", 1),
            ("sharedMemory", "64Gi"),
            ("gpuResource", "a.b/c"),
            ("ephemeralStorage", "1Gi"),
            ("env", [{"name": "A", "value": "b"}]),
            ("runtimeClassName", "nvidia"),
            ("placement.nodeSelector", {"a": "b"}),
            ("placement.schedulerName", "s"),
            ("placement.tolerations", [{"operator": "Exists"}]),
        )
    },
    "ranks that cannot share a step": (
        "TrainingRun",
        {"trainer.nodes": 3, "trainer.gpusPerNode": 1},
        [RANKS],
    ),
    "nodes without GPUs that cannot share a step": ("TrainingRun", {"trainer.nodes": 5}, [RANKS]),
    "a Chain with the history of a Step": (
        "RolloutJob",
        {"rollout.strategy": {"history": 2}},
        [CHAIN],
    ),
    "a Chain with the builder of a Step": (
        "TrainingRun",
        {"rollout.strategy": {"promptBuilder": "agent.py:see"}},
        [CHAIN],
    ),
    "a Step that is full": (
        "TrainingRun",
        {"rollout.strategy": {"type": "Step", "whenFull": "DropOldest"}},
        [STEP],
    ),
    "no room for a summary": (
        "RolloutJob",
        {"rollout.strategy.whenFull": "Summarise", "rollout.maxTokensPerTurn": 1536},
        [SUMMARY],
    ),
    "a source twice": ("TrainingRun", {"source": {"configMap": "a", "claim": "b"}}, [SOURCE]),
    "a folder in a ConfigMap": (
        "RolloutJob",
        {"source": {"configMap": "a", "path": "b"}, "model.path": "/agentfly-cache/m"},
        [SOURCE],
    ),
    "a source above its claim": (
        "TrainingRun",
        {"source": {"claim": "a", "path": "../b"}},
        ["spec.source.path: path leaves its volume by ..; name a folder below it"],
    ),
    "a source above the working folder": (
        "RolloutJob",
        {"source": {"path": "a/.."}},
        ["spec.source.path: path leaves its volume by ..; name a folder below it"],
    ),
    "a folder of a claim that is absolute": (
        "TrainingRun",
        {"source": {"claim": "a", "path": "/b"}},
        [
            "spec.source.path: path is absolute, and a folder of a claim is named from its root; "
            "remove the slash it begins with"
        ],
    ),
    "a folder of a claim that is absolute, of a job": (
        "RolloutJob",
        {"source": {"claim": "a", "path": "/b"}, "model.path": "/agentfly-cache/m"},
        [
            "spec.source.path: path is absolute, and a folder of a claim is named from its root; "
            "remove the slash it begins with"
        ],
    ),
    "a model that servers do not have": (
        "TrainingRun",
        {"source": {"configMap": "a"}, "model.path": "m"},
        [MODEL],
    ),
    "a model on the claim of the source": ("RolloutJob", {"source": {"claim": "a"}}, [MODEL]),
}

ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a run of a cluster": (
        "TrainingRun",
        {
            "source": {"configMap": "agent"},
            "storage": {"claim": "runs"},
            "suspend": True,
            "trainer": {
                "nodes": 2,
                "gpusPerNode": 8,
                "pod": {"image": "trainer@sha256:0", "cpu": 64, "memory": "900Gi", "sharedMemory": "64Gi"},
                "network": {"socketInterface": "eth0", "rdma": {"resourceName": "rdma/hca", "count": 8}},
            },
            "inference.pod": {"gpuResource": "nvidia.com/mig-3g.40gb"},
        },
    ),
    "a slice of a GPU": (
        "TrainingRun",
        {"trainer.gpusPerNode": 1, "trainer.pod.gpuResource": "nvidia.com/mig-3g.40gb"},
    ),
    "pods with all they may have": (
        "TrainingRun",
        {
            f"{pod}.pod": {
                "ephemeralStorage": "100Gi",
                "runtimeClassName": "nvidia",
                "env": [
                    {"name": "HF_TOKEN", "valueFrom": secret("hub")},
                    {"name": "POD_NAMES", "value": ""},
                    {"name": "X_RAY_Y", "value": "1"},
                ],
            }
            for pod in ("trainer", "inference")
        },
    ),
    "a colocated policy": ("TrainingRun", COLOCATED),
    "a colocated policy with all it may have": (
        "TrainingRun",
        {
            **COLOCATED,
            "trainer.nodes": 2,
            "inference.gpus": 8,
            "inference.gpuMemoryUtilization": 0.5,
            "inference.maxNumSeqs": 8,
            "inference.dtype": "bfloat16",
            "inference.pod": {},
        },
    ),
    "a job of a cluster": (
        "RolloutJob",
        {
            "source": {"claim": "code", "path": "agents/shell"},
            "storage": {"claim": "runs"},
            "model.path": "/agentfly-cache/m",
            "workers": {"count": 0, "tasksPerShard": 8, "pod": {"cpu": "500m"}},
        },
    ),
    "a source in the image": ("RolloutJob", {"source": {"path": "/opt/agent"}}),
    "as many ranks as rollouts": ("TrainingRun", {"trainer.nodes": 64}),
}

CHANGES: dict[str, Case] = {
    "the trainer before the first attempt": ("TrainingRun", {"trainer.microBatchSize": 2}, []),
    "suspend": ("TrainingRun", {"suspend": True}, []),
    "the source": ("TrainingRun", {"source": {"configMap": "a"}}, [f"spec.source: {FIXED}"]),
    "a storage that was absent": (
        "TrainingRun",
        {"storage": {"claim": "a"}},
        ["spec.storage: storage is immutable; make a new one under another name"],
    ),
    "rollouts that were not played ahead": (
        "TrainingRun",
        {"asynchronous": {}},
        ["spec.asynchronous: asynchronous is immutable; make a new one under another name"],
    ),
    "the pods of servers": ("TrainingRun", {"inference.pod.cpu": 1}, [f"spec.inference: {FIXED}"]),
    "suspend of a job": ("RolloutJob", {"suspend": True}, []),
    "the workers of a job": ("RolloutJob", {"workers.count": 5}, []),
    "the pods of workers": ("RolloutJob", {"workers.pod.cpu": 1}, [f"spec.workers.pod: {FIXED}"]),
    "the shards of a job": (
        "RolloutJob",
        {"workers.tasksPerShard": 1},
        [f"spec.workers.tasksPerShard: {FIXED}"],
    ),
    "the source of a job": ("RolloutJob", {"source": {"path": "a"}}, [f"spec.source: {FIXED}"]),
    "a storage of a job that was absent": (
        "RolloutJob",
        {"storage": {"claim": "a"}},
        ["spec.storage: storage is immutable; make a new one under another name"],
    ),
}


def _suspended(status: str) -> dict[str, Any]:
    return {
        "observedGeneration": 1,
        "attempt": 1,
        "conditions": [
            {
                "type": "Suspended",
                "status": status,
                "lastTransitionTime": "2026-11-30T18:00:00Z",
                "reason": "SuspendedByUser",
                "message": "",
            }
        ],
    }


RUNNING: dict[str, Any] = {"observedGeneration": 1, "attempt": 1}
MORE_NODES: dict[str, Any] = {"trainer.nodes": 2}
STATES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "before it was looked at": ({"observedGeneration": -1}, MORE_NODES, []),
    "before the first attempt": ({"observedGeneration": 1, "attempt": 0}, MORE_NODES, []),
    "in an attempt": (RUNNING, MORE_NODES, [TRAINER]),
    "in an attempt, with nothing changed but the deadline": (RUNNING, {"runPolicy.backoffLimit": 9}, []),
    "while it is being suspended": (_suspended("False"), MORE_NODES, [TRAINER]),
    "while it is suspended": (_suspended("True"), MORE_NODES, []),
    "when it is resumed at once": (_suspended("True"), {**MORE_NODES, "suspend": False}, []),
}
"""Status of a TrainingRun, a change of its spec, and what is said of it."""


WRONG_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "a variable twice": (
        {"trainer.pod.env": [{"name": "A", "value": "b"}, {"name": "A", "value": "c"}]},
        "spec.trainer.pod.env[1]: Duplicate value",
    ),
    "a key in a manifest": (
        {"trainer.pod.env": [{"name": "HF_TOKEN", "valueFrom": "hf_123"}]},
        "spec.trainer.pod.env[0].valueFrom: must be of type object",
    ),
    "a variable that is none": (
        {"trainer.pod.env": [{"name": "A-B", "value": "c"}]},
        "spec.trainer.pod.env[0].name: should match",
    ),
    "a mode that there is not": (
        {"inference.mode": "Hybrid"},
        'spec.inference.mode: supported values: "Separate", "Colocated"',
    ),
    "all of a GPU's memory": (
        {"inference.gpuMemoryUtilization": 1},
        "spec.inference.gpuMemoryUtilization: should be less than 1",
    ),
    "steps as text": ({"steps": "30"}, "spec.steps: must be of type integer"),
    "no step": ({"steps": 0}, "spec.steps: should be greater than or equal to 1"),
    "GPUs below zero": ({"trainer.gpusPerNode": -1}, "spec.trainer.gpusPerNode: should be greater than"),
    "no node": ({"trainer.nodes": 0}, "spec.trainer.nodes: should be greater than or equal to 1"),
    "verl's own name of a field": ({"trainer.nnodes": 2}, 'unknown field "spec.trainer.nnodes"'),
    "an algorithm that there is not": (
        {"algorithm.name": "GRPO"},
        'spec.algorithm.name: supported values: "grpo", "dr_grpo"',
    ),
    "a group of one": ({"rollout.groupSize": 1}, "and rollout.groupSize is 1"),
    "a greedy policy": ({"rollout.temperature": 0}, "spec.rollout: rollout has temperature 0"),
    "ranks that cannot share a step": ({"trainer.nodes": 3}, "spec.trainer: trainer has nodes * gpusPerNode"),
    "a prompt as long as the context": (
        {"rollout.maxPromptTokens": 4096},
        "set maxPromptTokens to less than",
    ),
    "a hang that no timeout sees": ({"rollout.maxInfraRetries": 9}, "raise runPolicy.stallTimeoutSeconds"),
    "an agent by module alone": ({"agent.entrypoint": "agent"}, "spec.agent.entrypoint: should match"),
    "no tasks": ({"tasks": {}}, "spec.tasks: exactly one of entrypoint and path must be set"),
    "no model": ({"model": {}}, "spec.model: one of path and build must be set"),
    "an override of two words": ({"overrides": ["lr 3"]}, "spec.overrides[0]: should match"),
    "a pool twice": ({"pools": ["a", "a"]}, "spec.pools[1]: Duplicate value"),
    "storage without a claim": ({"storage": {}}, "spec.storage.claim: Required value"),
    "two sources": ({"source": {"configMap": "a", "claim": "b"}}, "keep configMap alone, or claim with path"),
    "a source above its claim": ({"source": {"claim": "a", "path": "../b"}}, "name a folder below it"),
    "memory in words": ({"trainer.pod.memory": "64 GB"}, "spec.trainer.pod.memory: should match"),
    "half a GPU": ({"inference.gpus": 0.5}, "spec.inference.gpus: must be of type integer"),
    "a budget in percent": ({"runPolicy.failureBudget": 50}, "spec.runPolicy.failureBudget: should be less"),
    "no RDMA card": (
        {"trainer.network": {"rdma": {"resourceName": "rdma/hca", "count": 0}}},
        "spec.trainer.network.rdma.count: should be greater than or equal to 1",
    ),
    "two network interfaces": (
        {"trainer.network": {"socketInterface": "eth0,eth1"}},
        "spec.trainer.network.socketInterface: should match",
    ),
}
"""What people get wrong in a TrainingRun, and words that an API server says of it."""
