"""Every cross-field rule accepts and refuses the same in CEL and in Python."""

from typing import Any

import pytest

from agentfly.api import crd
from tests.unit.api.worlds import KINDS, OBJECTS, made, model_refusals, server_refusals, walk

API: dict[str, Any] = {
    "type": "ExternalAPI",
    "scope": "Global",
    "container": None,
    "externalAPI": {"baseUrl": "https://judge/v1"},
    "capacity": {"max": 1},
}
SERVICE: dict[str, Any] = {
    "type": "ModelService",
    "container": None,
    "modelService": {"model": "m", "maxModelLen": 1024},
}
TIMEOUTS = "spec.rollout.timeouts"
TASKS = (
    "spec.tasks: exactly one of entrypoint and path must be set; "
    "keep entrypoint: agent.py:tasks or path: tasks.jsonl"
)
PROMPT = (
    "spec.rollout.maxPromptTokens: maxPromptTokens leaves no room below maxContextTokens; "
    "set maxPromptTokens to less than maxContextTokens"
)
TURN = (
    "spec.rollout.maxTokensPerTurn: maxTokensPerTurn leaves no room below maxContextTokens; "
    "set maxTokensPerTurn to less than maxContextTokens"
)
STALL = (
    "spec.runPolicy: runPolicy has a stallTimeoutSeconds that one hanging rollout may take, which is "
    "rollout.timeouts.rolloutSeconds * (1 + rollout.maxInfraRetries); "
    "raise runPolicy.stallTimeoutSeconds or lower rollout.timeouts.rolloutSeconds"
)
# 32761 characters: with LAST and three more it is the longest that is allowed.
ENV = {f"N{number}": "x" * 4093 for number in range(7)} | {"N7": "x" * 4094}

REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "min above max": (
        "ResourcePool",
        {"capacity.min": 5},
        ["spec.capacity.max: max is less than min; raise max or lower min"],
    ),
    "buffer above max": (
        "ResourcePool",
        {"capacity.buffer": 5},
        ["spec.capacity.max: max is less than buffer; raise max or lower buffer"],
    ),
    "a Container pool without its arm": (
        "ResourcePool",
        {"container": None},
        ["spec.container: container is required when type is Container; add container: {image: host}"],
    ),
    "a Container pool with both arms": (
        "ResourcePool",
        {"modelService": SERVICE["modelService"]},
        ["spec.modelService: modelService is allowed only when type is ModelService; remove modelService"],
    ),
    "a ModelService pool with the wrong arm": (
        "ResourcePool",
        {"type": "ModelService"},
        [
            "spec.container: container is allowed only when type is Container; remove container",
            "spec.modelService: modelService is required when type is ModelService; "
            "add modelService: {model: DIR, maxModelLen: 4096}",
        ],
    ),
    "training a greedy policy": (
        "TrainingRun",
        {"rollout.temperature": 0.0},
        [
            "spec.rollout: rollout has temperature 0, and a greedy policy gives a group one rollout "
            "many times; set rollout.temperature to 1"
        ],
    ),
    "a Container shared by all": (
        "ResourcePool",
        {"scope": "Global"},
        ["spec.scope: scope does not suit a Container, which has one holder at a time; set scope to Rollout"],
    ),
    "an ExternalAPI pool without its arm": (
        "ResourcePool",
        {**API, "externalAPI": None},
        [
            "spec.externalAPI: externalAPI is required when type is ExternalAPI; "
            "add externalAPI: {baseUrl: https://HOST/v1}"
        ],
    ),
    "an InProcess pool with the wrong arm": (
        "ResourcePool",
        {"type": "InProcess", "container": None, "externalAPI": API["externalAPI"]},
        [
            "spec.externalAPI: externalAPI is allowed only when type is ExternalAPI; remove externalAPI",
            "spec.inProcess: inProcess is required when type is InProcess; "
            "add inProcess: {entrypoint: package.module:make}",
        ],
    ),
    "a Container pool with the object of another": (
        "ResourcePool",
        {"inProcess": {"entrypoint": "games.py:make"}},
        ["spec.inProcess: inProcess is allowed only when type is InProcess; remove inProcess"],
    ),
    "an ExternalAPI for one holder at a time": (
        "ResourcePool",
        {**API, "scope": "Rollout"},
        [
            "spec.scope: scope does not suit an ExternalAPI, whose limits are those of all holders "
            "together; set scope: Global"
        ],
    ),
    "an ExternalAPI with several members": (
        "ResourcePool",
        {**API, "capacity": {"max": 2}},
        [
            "spec.capacity: capacity of an ExternalAPI must have max 1: one gateway keeps the limits of "
            "all holders; set capacity: {max: 1}; externalAPI.concurrency bounds the requests"
        ],
    ),
    "an ExternalAPI with both places of a key": (
        "ResourcePool",
        {**API, "externalAPI.credentials": [{"env": "KEY", "file": "key.txt"}]},
        [
            "spec.externalAPI.credentials[]: exactly one of env and file must be set; "
            "keep env: JUDGE_API_KEY or file: key.txt"
        ],
    ),
    "money without prices": (
        "ResourcePool",
        {**API, "externalAPI.budget": {"usd": 5.0}},
        [
            "spec.externalAPI.budget.usd: usd bounds nothing while both prices are 0; "
            "set usdPerMillionInput and usdPerMillionOutput"
        ],
    ),
    "paths to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Paths"},
        ["spec.container.reset.paths: paths is required when method is Paths; add paths: [/workspace]"],
    ),
    "a repository to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Git"},
        ["spec.container.reset.git: git is required when method is Git; add git: /testbed"],
    ),
    "a command to reset, and none said": (
        "ResourcePool",
        {"container.reset.method": "Command"},
        [
            "spec.container.reset.command: command is required when method is Command; "
            "add command: [/reset.sh]"
        ],
    ),
    "images for what has none": (
        "ResourcePool",
        {**SERVICE, "images.policy": "PerAcquire"},
        ["spec.images: images is for a Container, the other types have no image; remove images"],
    ),
    "all members reserved": (
        "ResourcePool",
        {"queue.reserved": {"verifier": 3, "eval": 1}},
        [
            "spec.queue: queue reserves all of capacity.max and leaves none for others; "
            "raise capacity.max or lower queue.reserved"
        ],
    ),
    "members reserved that all share": (
        "ResourcePool",
        {**SERVICE, "scope": "Global", "queue.reserved": {"verifier": 1}},
        [
            "spec.queue: queue reserves members of a Global pool, which nobody has to wait for; "
            "remove queue.reserved"
        ],
    ),
    "a quarantine of all members": (
        "ResourcePool",
        {"reuse.quarantine": 4},
        ["spec.reuse: reuse quarantine could fill all of capacity.max; lower reuse.quarantine"],
    ),
    "tensor parallelism above the GPUs": (
        "ResourcePool",
        {**SERVICE, "modelService.gpus": 1, "modelService.tensorParallel": 2},
        [
            "spec.modelService.tensorParallel: tensorParallel times pipelineParallel is more than gpus; "
            "set gpus to their product"
        ],
    ),
    "tasks from two places": (
        "TrainingRun",
        {"tasks.path": "t.jsonl"},
        [TASKS],
    ),
    "tasks from nowhere": (
        "RolloutJob",
        {"tasks.path": None},
        [TASKS],
    ),
    "no model": (
        "TrainingRun",
        {"model.build": None},
        ["spec.model: one of path and build must be set; set path to a directory in Hugging Face layout"],
    ),
    "a call longer than its turn": (
        "TrainingRun",
        {"rollout.timeouts.callSeconds": 121},
        [
            f"{TIMEOUTS}.callSeconds: callSeconds is more than turnSeconds; "
            "set callSeconds to turnSeconds or less"
        ],
    ),
    "a turn longer than its rollout": (
        "RolloutJob",
        {"rollout.timeouts.turnSeconds": 601},
        [
            f"{TIMEOUTS}.turnSeconds: turnSeconds is more than rolloutSeconds; "
            "set turnSeconds to rolloutSeconds or less"
        ],
    ),
    "a prompt that fills the context": (
        "TrainingRun",
        {"rollout.maxPromptTokens": 4096},
        [PROMPT],
    ),
    "a turn that fills the context": (
        "TrainingRun",
        {"rollout.maxTokensPerTurn": 4096},
        [TURN],
    ),
    "two rules of one block at once": (
        "TrainingRun",
        {"rollout.maxContextTokens": 2},
        [
            PROMPT,
            TURN,
        ],
    ),
    "an upper clip below the lower one": (
        "TrainingRun",
        {"algorithm.clipLow": 0.5},
        ["spec.algorithm.clipHigh: clipHigh is less than clipLow; raise clipHigh or lower clipLow"],
    ),
    "a hang of one rollout that is taken for a hang of the attempt": (
        "TrainingRun",
        {"runPolicy.stallTimeoutSeconds": 1200},
        [STALL],
    ),
    "more retries than the stall timeout has time for": (
        "TrainingRun",
        {"rollout.maxInfraRetries": 5},
        [STALL],
    ),
    "an image that is a form alone": (
        "ResourcePool",
        {"container.image": "docker-archive:"},
        ["spec.container.image: image names no path after the colon; write it there, as in tar:root.tar.gz"],
    ),
    "an environment longer than a daemon reads": (
        "ResourcePool",
        {"container.env": {**ENV, "LAST": "x" * 4}},
        [
            "spec.container.env: env has more than 32768 characters of names and values together; "
            "let the agent's setup write long values to files"
        ],
    ),
    "a group of one": (
        "TrainingRun",
        {"rollout.groupSize": 1},
        [
            "spec.rollout: rollout has groupSize 1, and grpo compares the rollouts of one task with each "
            "other; set rollout.groupSize to 2 or more"
        ],
    ),
}

ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "the right pool": ("ResourcePool", {}),
    "the right run": ("TrainingRun", {}),
    "the right job": ("RolloutJob", {}),
    "min equal to max": ("ResourcePool", {"capacity.min": 4}),
    "a ModelService pool": ("ResourcePool", SERVICE),
    "tensor parallelism equal to the GPUs": (
        "ResourcePool",
        {**SERVICE, "modelService.gpus": 2, "modelService.tensorParallel": 2},
    ),
    "tensor parallelism on the CPU": ("ResourcePool", {**SERVICE, "modelService.tensorParallel": 2}),
    "tasks from a file": ("TrainingRun", {"tasks.entrypoint": None, "tasks.path": "t.jsonl"}),
    "a model with path and build": ("TrainingRun", {"model.path": "model"}),
    "equal timeouts": (
        "TrainingRun",
        {"rollout.timeouts": {"callSeconds": 9, "turnSeconds": 9, "rolloutSeconds": 9}},
    ),
    "room for one token": (
        "TrainingRun",
        {"rollout.maxPromptTokens": 4095, "rollout.maxTokensPerTurn": 4095},
    ),
    "a ModelService shared by all": ("ResourcePool", {**SERVICE, "scope": "Global"}),
    "equal clips": ("TrainingRun", {"algorithm.clipLow": 0.28}),
    "a stall timeout above two rollouts": ("TrainingRun", {"runPolicy.stallTimeoutSeconds": 1201}),
    "the longest environment": ("ResourcePool", {"container.env": {**ENV, "LAST": "x" * 3}}),
    "a group of two": ("TrainingRun", {"rollout.groupSize": 2}),
    "a job with a greedy policy": ("RolloutJob", {"rollout.temperature": 0.0}),
    "a job with groups of one": ("RolloutJob", {"rollout.groupSize": 1}),
}

RUN = "field is immutable; make a new run under another name"
JOB = "field is immutable; make a new job under another name"
CHANGES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "the type of a pool": (
        "ResourcePool",
        SERVICE,
        ["spec.type: field is immutable; make a new pool under another name"],
    ),
    "the scope of a pool": (
        "ResourcePool",
        {**SERVICE, "scope": "Global"},
        [
            "spec.scope: field is immutable; make a new pool under another name",
            "spec.type: field is immutable; make a new pool under another name",
        ],
    ),
    "the size of a pool": ("ResourcePool", {"capacity": {"min": 1, "max": 8}}, []),
    "the image of a pool": ("ResourcePool", {"container.image": "/images/other"}, []),
    "the agent": ("TrainingRun", {"agent.entrypoint": "other.py:agent"}, [f"spec.agent: {RUN}"]),
    "the tasks": ("TrainingRun", {"tasks.entrypoint": "other.py:tasks"}, [f"spec.tasks: {RUN}"]),
    "the pools": ("TrainingRun", {"pools": None}, [f"spec.pools: {RUN}"]),
    "the model": ("TrainingRun", {"model.path": "model"}, [f"spec.model: {RUN}"]),
    "the seed": ("TrainingRun", {"seed": 1}, [f"spec.seed: {RUN}"]),
    "the algorithm": ("TrainingRun", {"algorithm.clipLow": 0.1}, [f"spec.algorithm: {RUN}"]),
    "the rollout": ("TrainingRun", {"rollout.maxTurns": 2}, [f"spec.rollout: {RUN}"]),
    "the inference": ("TrainingRun", {"inference.replicas": 2}, [f"spec.inference: {RUN}"]),
    "the trainer": ("TrainingRun", {"trainer.microBatchSize": 2}, [f"spec.trainer: {RUN}"]),
    "the steps": ("TrainingRun", {"steps": 101}, [f"spec.steps: {RUN}"]),
    "the tasks of a step": ("TrainingRun", {"tasksPerStep": 4}, [f"spec.tasksPerStep: {RUN}"]),
    "the checkpoints": ("TrainingRun", {"checkpoint.keepLast": 1}, [f"spec.checkpoint: {RUN}"]),
    "the overrides": ("TrainingRun", {"overrides": ["a=b"]}, [f"spec.overrides: {RUN}"]),
    "the run policy": ("TrainingRun", {"runPolicy": {"backoffLimit": 0}}, []),
    "nothing but spelling a default out": ("TrainingRun", {"seed": 0, "steps": 100}, []),
    "the agent of a job": ("RolloutJob", {"agent.entrypoint": "other.py:agent"}, [f"spec.agent: {JOB}"]),
    "the tasks of a job": ("RolloutJob", {"tasks.path": "t"}, [f"spec.tasks: {JOB}"]),
    "the pools of a job": ("RolloutJob", {"pools": ["shell"]}, [f"spec.pools: {JOB}"]),
    "the model of a job": ("RolloutJob", {"model.path": "m"}, [f"spec.model: {JOB}"]),
    "the seed of a job": ("RolloutJob", {"seed": 1}, [f"spec.seed: {JOB}"]),
    "the rollout of a job": ("RolloutJob", {"rollout.maxTurns": 2}, [f"spec.rollout: {JOB}"]),
    "the inference of a job": ("RolloutJob", {"inference.gpus": 1}, [f"spec.inference: {JOB}"]),
    "a limit that was absent": (
        "RolloutJob",
        {"limit": 5},
        ["spec.limit: limit is immutable; make a new job under another name"],
    ),
    "the policy of a job": ("RolloutJob", {"runPolicy.failureBudget": 1.0}, []),
}


@pytest.mark.parametrize(("kind", "changes", "refusals"), REFUSED.values(), ids=REFUSED.keys())
def test_server_and_model_refuse_alike(kind: str, changes: dict[str, Any], refusals: list[str]) -> None:
    obj = made(kind, changes)
    assert server_refusals(kind, obj) == refusals
    assert model_refusals(kind, obj) == refusals


@pytest.mark.parametrize(("kind", "changes"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_server_and_model_accept_alike(kind: str, changes: dict[str, Any]) -> None:
    obj = made(kind, changes)
    assert server_refusals(kind, obj) == []
    assert model_refusals(kind, obj) == []


@pytest.mark.parametrize(("kind", "changes", "refusals"), CHANGES.values(), ids=CHANGES.keys())
def test_server_refuses_changes_of_what_is_fixed(
    kind: str, changes: dict[str, Any], refusals: list[str]
) -> None:
    assert server_refusals(kind, made(kind, changes), OBJECTS[kind]) == refusals


def test_a_limit_is_as_fixed_as_its_absence() -> None:
    five, six = made("RolloutJob", {"limit": 5}), made("RolloutJob", {"limit": 6})
    assert server_refusals("RolloutJob", six, five) == [f"spec.limit: {JOB}"]
    assert server_refusals("RolloutJob", OBJECTS["RolloutJob"], five) == [
        "spec.limit: limit is immutable; make a new job under another name"
    ]


def test_every_rule_of_every_schema_was_seen_to_refuse() -> None:
    refused = {text for _, _, texts in [*REFUSED.values(), *CHANGES.values()] for text in texts}
    known = {
        f"{path}{rule.get('fieldPath', '')}: {rule['message']}"
        for kind in KINDS.values()
        for path, node in walk(crd.schema(kind.model))
        for rule in node.get(crd.VALIDATIONS, ())
    }
    assert len(known) > 30
    assert known - refused == {f"spec.limit: {JOB}"}  # two worlds: test_a_limit_is_as_fixed_as_its_absence
