"""Algorithms that do not go with their settings or with the rest of a run, and some that do."""

from typing import Any

from agentfly.api.algorithm import NAMES, WITHOUT_GROUPS
from tests.unit.api.pool_rules import Case

CLIPS = "spec.algorithm.clipHigh: clipHigh is less than clipLow; raise clipHigh or lower clipLow"
GAMMA = (
    "spec.algorithm.gamma: gamma discounts later rewards, which this algorithm does not; "
    "remove it, or set name to one of ppo, reinforce_plus_plus, gigpo, hgpo"
)
GROUPS = (
    "spec.algorithm: algorithm compares the rollouts of one task with each other, and rollout.groupSize is "
    "1; set rollout.groupSize to 2 or more, or name to one of ppo, reinforce_plus_plus"
)
TURNS = (
    "spec.algorithm: algorithm compares turns with each other, and rollout.maxTurns is 1: it would count the "
    "one reward twice; set rollout.maxTurns to 2 or more, or name to grpo"
)
WHOLE = (
    "spec.algorithm: algorithm clips the probability of whole rollouts, and with this rollout.strategy they "
    "are cut into several rows; set rollout.strategy to {type: Chain}, or name to grpo"
)
REPLACED = (
    "spec.asynchronous: asynchronous plays the tasks of later steps ahead, and dapo replaces groups within "
    "their step; set algorithm.name to grpo, or remove asynchronous"
)
STILL = (
    "spec.asynchronous: asynchronous needs servers that go on while the policy is updated, and "
    "inference.mode is Colocated; set inference.mode to Separate, or remove asynchronous"
)
BUFFER = (
    "spec.algorithm.dapo.overlong.bufferTokens: bufferTokens is not less than maxTokens: the shortest "
    "rollout would lose reward; set bufferTokens to less than maxTokens"
)


STEP = {"type": "Step", "history": 1}


def _other(block: str) -> str:
    said = f"{block} is of another algorithm than name; remove it, or set name to {block}"
    return f"spec.algorithm.{block}: {said}"


def _named(name: str, **more: Any) -> dict[str, Any]:
    return {"algorithm": {"name": name, **more}}


def _overlong(longest: int, buffer: int) -> dict[str, Any]:
    return _named("dapo", dapo={"overlong": {"maxTokens": longest, "bufferTokens": buffer}})


REFUSED: dict[str, Case] = {
    "an upper clip below the lower one": ("TrainingRun", {"algorithm.clipLow": 0.5}, [CLIPS]),
    "an upper clip below the lower one that belongs to the algorithm": (
        "TrainingRun",
        _named("gspo", clipHigh=0.0002),
        [CLIPS],
    ),
    "a lower clip above the upper one of ppo": ("TrainingRun", _named("ppo", clipLow=0.25), [CLIPS]),
    "both clips": ("TrainingRun", {"algorithm": {"clipLow": 0.2, "clipHigh": 0.1}}, [CLIPS]),
    **{
        f"a discount for {name}": ("TrainingRun", _named(name, gamma=0.9), [GAMMA])
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "dapo", "gspo")
    },
    **{
        f"a block {block} for rloo": ("TrainingRun", _named("rloo", **{block: {}}), [_other(block)])
        for block in ("ppo", "gigpo", "hgpo", "dapo")
    },
    **{
        f"a group of one for {name}": ("TrainingRun", {**_named(name), "rollout.groupSize": 1}, [GROUPS])
        for name in NAMES
        if name not in WITHOUT_GROUPS
    },
    **{
        f"one turn for {name}": ("TrainingRun", {**_named(name), "rollout.maxTurns": 1}, [TURNS])
        for name in ("gigpo", "hgpo")
    },
    **{
        f"gspo with {strategy}": ("TrainingRun", {**_named("gspo"), "rollout.strategy": strategy}, [WHOLE])
        for strategy in ({"type": "Step"}, {"whenFull": "DropOldest"}, {"whenFull": "Summarise"})
    },
    "dapo with rollouts ahead": ("TrainingRun", {**_named("dapo"), "asynchronous": {}}, [REPLACED]),
    "rollouts ahead of servers that stand still": (
        "TrainingRun",
        {"asynchronous": {}, "trainer.gpusPerNode": 1, "inference": {"mode": "Colocated", "gpus": 1}},
        [STILL],
    ),
    "a penalty for the shortest rollout": ("TrainingRun", _overlong(64, 64), [BUFFER]),
}

ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name} with a row for each turn": ("TrainingRun", {**_named(name), "rollout.strategy": STEP})
        for name in NAMES
        if name != "gspo"
    },
    **{name: ("TrainingRun", _named(name)) for name in NAMES},
    **{
        f"a discount for {name}": ("TrainingRun", _named(name, gamma=0.9))
        for name in ("ppo", "reinforce_plus_plus", "gigpo", "hgpo")
    },
    **{
        f"{name} with groups of one": ("TrainingRun", {**_named(name), "rollout.groupSize": 1})
        for name in WITHOUT_GROUPS
    },
    **{
        f"{name} with rollouts ahead": ("TrainingRun", {**_named(name), "asynchronous": {"maxStaleness": 4}})
        for name in NAMES
        if name != "dapo"
    },
    "equal clips": ("TrainingRun", {"algorithm.clipLow": 0.28}),
    "a group of two": ("TrainingRun", {"rollout.groupSize": 2}),
    "equal clips of gspo": ("TrainingRun", _named("gspo", clipLow=0.0004)),
    "all of ppo": ("TrainingRun", _named("ppo", ppo={"criticLearningRate": 1e-4, "gaeLambda": 0.95})),
    "all of gigpo": (
        "TrainingRun",
        _named("gigpo", gigpo={"stepWeight": 0.5, "normalization": "MeanStd", "meanOver": "Steps"}),
    ),
    "all of hgpo": (
        "TrainingRun",
        _named("hgpo", hgpo={"history": 4, "lengthExponent": 0, "normalization": "Mean"}),
    ),
    "all of dapo": (
        "TrainingRun",
        _named("dapo", dapo={"maxBatches": 1, "overlong": {"maxTokens": 64, "bufferTokens": 63}}),
    ),
}
