"""Every cross-field rule accepts and refuses the same in CEL and in Python."""

from typing import Any

import pytest

from agentfly.api import crd
from tests.unit.api import algorithm_rules, pool_rules, run_rules
from tests.unit.api.pool_rules import SERVICE
from tests.unit.api.run_rules import FIXED, STATES, WRONG_RUNS
from tests.unit.api.worlds import OBJECTS, SCHEMAS, made, model_refusals, server_refusals, walk

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

REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    **pool_rules.REFUSED,
    **run_rules.REFUSED,
    **algorithm_rules.REFUSED,
    "training a greedy policy": (
        "TrainingRun",
        {"rollout.temperature": 0.0},
        [
            "spec.rollout: rollout has temperature 0, and a greedy policy gives a group one rollout "
            "many times; set rollout.temperature to 1"
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
}

ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    **pool_rules.ACCEPTED,
    **run_rules.ACCEPTED,
    **algorithm_rules.ACCEPTED,
    "the right run": ("TrainingRun", {}),
    "the right job": ("RolloutJob", {}),
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
    "a stall timeout above two rollouts": ("TrainingRun", {"runPolicy.stallTimeoutSeconds": 1201}),
    "a job with a greedy policy": ("RolloutJob", {"rollout.temperature": 0.0}),
    "a job with groups of one": ("RolloutJob", {"rollout.groupSize": 1}),
}

CHANGES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    **run_rules.CHANGES,
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
    "who names the image": (
        "ResourcePool",
        {"images.policy": "PerAcquire"},
        ["spec.images.policy: field is immutable; make a new pool under another name"],
    ),
    "the size of a pool": ("ResourcePool", {"capacity": {"min": 1, "max": 8}}, []),
    "the image of a pool": ("ResourcePool", {"container.image": "/images/other"}, []),
    "the agent": ("TrainingRun", {"agent.entrypoint": "other.py:agent"}, [f"spec.agent: {FIXED}"]),
    "the tasks": ("TrainingRun", {"tasks.entrypoint": "other.py:tasks"}, [f"spec.tasks: {FIXED}"]),
    "the pools": ("TrainingRun", {"pools": None}, [f"spec.pools: {FIXED}"]),
    "the model": ("TrainingRun", {"model.path": "model"}, [f"spec.model: {FIXED}"]),
    "the seed": ("TrainingRun", {"seed": 1}, [f"spec.seed: {FIXED}"]),
    "the algorithm": ("TrainingRun", {"algorithm.clipLow": 0.1}, [f"spec.algorithm: {FIXED}"]),
    "the rollout": ("TrainingRun", {"rollout.maxTurns": 2}, [f"spec.rollout: {FIXED}"]),
    "the inference": ("TrainingRun", {"inference.replicas": 2}, [f"spec.inference: {FIXED}"]),
    "the steps": ("TrainingRun", {"steps": 101}, [f"spec.steps: {FIXED}"]),
    "the tasks of a step": ("TrainingRun", {"tasksPerStep": 4}, [f"spec.tasksPerStep: {FIXED}"]),
    "the checkpoints": ("TrainingRun", {"checkpoint.keepLast": 1}, [f"spec.checkpoint: {FIXED}"]),
    "the overrides": ("TrainingRun", {"overrides": ["a=b"]}, [f"spec.overrides: {FIXED}"]),
    "the run policy": ("TrainingRun", {"runPolicy": {"backoffLimit": 0}}, []),
    "nothing but spelling a default out": ("TrainingRun", {"seed": 0, "steps": 100}, []),
    "the agent of a job": ("RolloutJob", {"agent.entrypoint": "other.py:agent"}, [f"spec.agent: {FIXED}"]),
    "the tasks of a job": ("RolloutJob", {"tasks.path": "t"}, [f"spec.tasks: {FIXED}"]),
    "the pools of a job": ("RolloutJob", {"pools": ["shell"]}, [f"spec.pools: {FIXED}"]),
    "the model of a job": ("RolloutJob", {"model.path": "m"}, [f"spec.model: {FIXED}"]),
    "the seed of a job": ("RolloutJob", {"seed": 1}, [f"spec.seed: {FIXED}"]),
    "the rollout of a job": ("RolloutJob", {"rollout.maxTurns": 2}, [f"spec.rollout: {FIXED}"]),
    "the inference of a job": ("RolloutJob", {"inference.gpus": 1}, [f"spec.inference: {FIXED}"]),
    "a limit that was absent": (
        "RolloutJob",
        {"limit": 5},
        ["spec.limit: limit is immutable; make a new one under another name"],
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


@pytest.mark.parametrize(("status", "changes", "refusals"), STATES.values(), ids=STATES.keys())
def test_the_trainer_changes_only_while_nothing_of_the_run_is_there(
    status: dict[str, Any], changes: dict[str, Any], refusals: list[str]
) -> None:
    old, new = ({**made("TrainingRun", each), "status": status} for each in ({}, changes))
    assert server_refusals("TrainingRun", new, old) == refusals


@pytest.mark.parametrize(("changes", "_"), WRONG_RUNS.values(), ids=WRONG_RUNS.keys())
def test_what_people_get_wrong_is_refused_by_the_model_too(changes: dict[str, Any], _: str) -> None:
    assert model_refusals("TrainingRun", made("TrainingRun", changes)) != []


def test_a_limit_is_as_fixed_as_its_absence() -> None:
    five, six = made("RolloutJob", {"limit": 5}), made("RolloutJob", {"limit": 6})
    assert server_refusals("RolloutJob", six, five) == [f"spec.limit: {FIXED}"]
    assert server_refusals("RolloutJob", OBJECTS["RolloutJob"], five) == [
        "spec.limit: limit is immutable; make a new one under another name"
    ]


@pytest.mark.parametrize(("kind", "text"), [("RolloutJob", FIXED), ("TrainingRun", FIXED)])
def test_a_storage_is_as_fixed_as_its_absence(kind: str, text: str) -> None:
    one, other = (made(kind, {"storage": {"claim": claim}}) for claim in ("a", "b"))
    assert server_refusals(kind, other, one) == [f"spec.storage: {text}"]


def test_playing_ahead_is_as_fixed_as_its_absence() -> None:
    one, two = (made("TrainingRun", {"asynchronous": {"maxStaleness": n}}) for n in (1, 2))
    assert server_refusals("TrainingRun", two, one) == [f"spec.asynchronous: {FIXED}"]


def test_every_rule_of_every_schema_was_seen_to_refuse() -> None:
    refused = {text for _, _, texts in [*REFUSED.values(), *CHANGES.values()] for text in texts}
    known = {
        f"{path}{rule.get('fieldPath', '')}: {rule['message']}".lstrip(".")
        for schema in SCHEMAS.values()
        for path, node in walk(schema)
        for rule in node.get(crd.VALIDATIONS, ())
    }
    assert len(known) > 30
    # What takes two states or two worlds has tests of its own.
    of_states = {text for _, _, texts in STATES.values() for text in texts}
    assert known - refused - of_states == {
        f"spec.limit: {FIXED}",
        f"spec.asynchronous: {FIXED}",
        f"spec.storage: {FIXED}",
        f"spec.storage: {FIXED}",
    }
