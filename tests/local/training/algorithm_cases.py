"""What test_algorithms.py runs in the trainer environment: ``python algorithm_cases.py CASE FOLDER``."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from agentfly.api.algorithm import NAMES, OF_STEPS
from agentfly.roles.trainer import ENV_CONFIG, TrainerConfig
from agentfly.rollout.outcomes import Scored
from agentfly.rollout.trajectory import Row, RowStep, Trajectory
from agentfly.training.main import compose_config
from agentfly.training.rows import verl_rows
from agentfly.training.verl_config import environment, overrides

ROWS = 8
TOKENS = 6


def write_config(folder: Path, name: str, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "run_dir": folder / "run",
        "attempt": 1,
        "model_path": folder / "model",
        "agent_entrypoint": "agent.py:agent",
        "base_dir": folder,
        "tasks_path": folder / "tasks.jsonl",
        "steps": 3,
        "tasks_per_step": 4,
        "group_size": 4,
        "algorithm": {"name": name},
        "max_turns": 3,
        "max_tokens_per_turn": 48,
        "max_prompt_tokens": 64,
        "max_context_tokens": 512,
        "checkpoint_dir": folder / "run" / "checkpoints",
    }
    config = TrainerConfig(**{**fields, **changes})
    path = folder / "run.json"
    path.write_text(config.model_dump_json())
    os.environ |= environment(config, path, os.environ)
    assert os.environ[ENV_CONFIG] == str(path)
    return config


def composes(folder: Path) -> None:
    """verl takes its configuration for every algorithm, and has what it names."""
    for name in NAMES:
        composed = compose_config(overrides(write_config(folder, name), {}))
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
        from verl.trainer.ppo.utils import need_critic
        from verl.trainer.ppo.v1 import get_trainer_cls

        from agentfly.training.verl_advantages import estimate
        from agentfly.training.verl_trainer import Trainer

        assert get_adv_estimator_fn(composed.algorithm.adv_estimator) is estimate
        assert get_trainer_cls(composed.trainer.v1.trainer_mode) is Trainer
        get_policy_loss_fn(composed.actor_rollout_ref.actor.policy_loss.loss_mode)
        assert need_critic(composed) == (name == "ppo"), name
    assert composed.actor_rollout_ref.actor.clip_ratio_high == 4e-4


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Rewards, mask and groups of one row a rollout: uneven lengths, observations, two groups and ties."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(ROWS, TOKENS, generator=generator) < 0.7).long()
    rewards = torch.zeros(ROWS, TOKENS)
    for row in range(ROWS):
        length = 2 + row % 5
        mask[row, length:] = 0
        mask[row, length - 1] = 1
        rewards[row, length - 1] = int(torch.randint(0, 3, (1,), generator=generator)) / 2
    rewards[:3] = rewards[:3].sign()  # more ties
    return rewards, mask, np.array(["a", "b"] * (ROWS // 2), dtype=object)


def ours(folder: Path, name: str, rewards: Any, mask: Any, groups: Any, values: Any, **settings: Any) -> Any:
    write_config(folder, name, algorithm={"name": name, **settings})
    from agentfly.training.verl_advantages import Rows, estimate, rows_are

    keys = [f"{group}_{row}_0" for row, group in enumerate(groups)]
    rows = Rows(keys, rewards.sum(1).tolist(), [{"steps": []}] * len(keys), values)
    with rows_are(rows):
        return estimate(token_level_rewards=rewards, response_mask=mask, index=groups, config=None)


def theirs(verl: Any, name: str, rewards: Any, mask: Any, groups: Any, values: Any) -> Any:
    given = {"token_level_rewards": rewards, "response_mask": mask}
    match name:
        case "grpo" | "dapo" | "gspo":
            return verl.compute_grpo_outcome_advantage(**given, index=groups)
        case "dr_grpo":
            return verl.compute_grpo_outcome_advantage(**given, index=groups, norm_adv_by_std_in_grpo=False)
        case "rloo":
            return verl.compute_rloo_outcome_advantage(**given, index=groups)
        case "reinforce_plus_plus":
            return verl.compute_reinforce_plus_plus_outcome_advantage(
                **given, config=SimpleNamespace(gamma=0.9)
            )
        case "reinforce_plus_plus_baseline":
            return verl.compute_reinforce_plus_plus_baseline_outcome_advantage(**given, index=groups)
        case "ppo":
            return verl.compute_gae_advantage_return(**given, values=values, gamma=0.9, lam=0.8)
    raise AssertionError(name)


def agrees(folder: Path) -> None:
    """Where verl has an estimator, and a rollout is one row in a group of several, both say the same."""
    write_config(folder, "grpo")
    from verl.trainer.ppo import core_algos

    settings = {"reinforce_plus_plus": {"gamma": 0.9}, "ppo": {"gamma": 0.9, "ppo": {"gaeLambda": 0.8}}}
    for seed in range(20):
        rewards, mask, groups = batch(seed)
        values = torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(seed))
        for name in sorted(set(NAMES) - set(OF_STEPS)):
            want = theirs(core_algos, name, rewards, mask, groups, values)
            got = ours(folder, name, rewards, mask, groups, values, **settings.get(name, {}))
            for first, second in zip(want, got, strict=True):
                # What verl leaves on tokens that were not sampled its loss does not read.
                assert torch.allclose(first * mask, second, atol=1e-4), (name, seed, first * mask, second)
                assert second.dtype == torch.float32


def equal_rewards(folder: Path) -> None:
    """A group that teaches nothing gets nothing; verl's rounding pushes all of it the same way."""
    rewards = torch.zeros(8, 2)
    rewards[:, 1] = 0.7
    mask, groups = torch.ones(8, 2, dtype=torch.long), np.array(["a"] * 8, dtype=object)
    write_config(folder, "grpo")
    from verl.trainer.ppo import core_algos as verl

    theirs, _ = verl.compute_grpo_outcome_advantage(rewards, mask, groups)
    assert float(theirs.min()) > 0.05, "verl is right now: its own estimator will do for grpo"
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "gspo"):
        found, _ = ours(folder, name, rewards, mask, groups, None)
        assert not found.any(), name


def trajectory(number: int, reward: float, *rows: tuple[list[int], list[RowStep]]) -> Trajectory:
    return Trajectory(
        rollout_id=f"r{number}",
        group_id="g",
        task={},
        rows=[
            Row(
                prompt_ids=[1] * (2 + number),
                response_ids=[3] * len(mask),
                response_mask=mask,
                logprobs=[-0.5 * bit for bit in mask],
                steps=steps,
            )
            for mask, steps in rows
        ],
        outcome=Scored(reward),
        started_at=0.0,
        seconds=1.0,
    )


PLAYED = [
    trajectory(
        0,
        1.0,
        (
            [1, 1, 0, 1],
            [RowStep(turn=1, start=0, end=2, anchor="s"), RowStep(turn=2, start=3, end=4, anchor="t")],
        ),
    ),
    trajectory(
        1,
        0.0,
        ([1, 1, 1], [RowStep(turn=1, start=0, end=3, anchor="s")]),
        ([1], [RowStep(turn=2, start=0, end=1, anchor="t")]),
    ),
    trajectory(
        2,
        0.0,
        (
            [1, 0, 1],
            [RowStep(turn=1, start=0, end=1, anchor="s"), RowStep(turn=2, start=2, end=3, anchor="u")],
        ),
    ),
]


def queued(folder: Path, name: str, **settings: Any) -> Any:
    """A trainer and its batch: rows as the agent loop makes them, in verl's own form, filled up by verl."""
    config = write_config(folder, name, algorithm={"name": name, **settings}, tasks_per_step=1, group_size=3)
    composed = compose_config(overrides(config, {}))
    import transfer_queue
    from fake_queue import Queue
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    from agentfly.training.verl_trainer import Trainer

    queue = Queue()
    for played in PLAYED:
        queue.put_rollout("g", int(played.rollout_id[1:]), verl_rows(played, 1))
    trainer = object.__new__(Trainer)
    trainer.config, trainer.use_critic, trainer._updates = composed, name == "ppo", 1
    keys = ["g_1_1", "g_0_0", "g_2_0", "g_1_0"]
    meta = transfer_queue.KVBatchMeta(partition_id="train", keys=keys, tags=[queue.tags[key] for key in keys])
    filled = upsample_batch_to_divisible_size(meta, trainer._get_required_batch_multiple(1), 0)
    for key in filled.keys:
        queue.fields[key]["old_log_probs"] = queue.fields[key]["rollout_log_probs"]
    return queue, trainer, filled


def trainer(folder: Path) -> None:
    """The estimator is called by verl with verl's tensors, and knows which rows are one rollout."""
    step = [[-0.83333], [1.0, 1.0, 0, 1.16667], [-0.5, 0, -0.33333], [-0.5] * 3]
    whole = [[-0.577350], [1.154699, 1.154699, 0, 1.154699], [-0.577350, 0, -0.577350], [-0.577350] * 3]
    for name, want in (("gigpo", step), ("grpo", whole)):
        more = {"gamma": 0.5} if name == "gigpo" else {}
        queue, made, meta = queued(folder, name, **more)
        assert len(meta) == 6  # of 4 rows, in groups of 3
        made._compute_advantage(meta, {})
        for key, row in zip(meta.keys, [*want, [0.0], [0.0]], strict=True):
            found = queue.fields[key]["advantages"]
            assert torch.allclose(found, torch.tensor(row), atol=1e-4), (name, key, found, row)
            assert torch.equal(found, queue.fields[key]["returns"])
    queue, made, meta = queued(folder, "ppo")
    for key in meta.keys:
        queue.fields[key]["values"] = torch.full_like(queue.fields[key]["rm_scores"], 0.25)
    made._compute_advantage(meta, {})
    returns = {key: queue.fields[key]["returns"].tolist() for key in meta.keys[:4]}
    # Lambda and gamma 1: what the rollout was worth, in all of its rows, once.
    assert returns["g_0_0"] == [1, 1, 0, 1]
    assert returns["g_1_0"] == [0, 0, 0]
    assert returns["g_1_1"] == [0]


def updates(folder: Path) -> None:
    """A step makes one update of all rows, and as many as an override asks for."""
    _, made, meta = queued(folder, "grpo")
    asked: list[int] = []

    def update_actor(batch: Any) -> Any:
        asked.append(batch.extra_info["mini_batch_size"])
        return {"metrics": {"mfu": [0.0]}}

    made.actor_rollout_wg = SimpleNamespace(update_actor=update_actor)
    made.distillation_config = None
    made._update_actor(meta, {})
    made._update_actor(meta, {})
    assert asked == [6, 6]
    made._updates = 2
    assert made._get_required_batch_multiple(1) == 6
    made._update_actor(meta, {})
    assert asked[2:] == [3]


def sampler(folder: Path) -> None:
    """Groups that teach nothing are replaced until the step has played as many tasks as it may."""
    write_config(folder, "dapo", algorithm={"name": "dapo", "dapo": {"maxBatches": 3}}, tasks_per_step=2)
    from fake_queue import Queue

    from agentfly.training.sampler import GroupSampler

    def sample(*rewards: list[float]) -> tuple[list[str], int]:
        """The groups of a step, and how many were played; rewards of each, equal ones once there are none."""
        queue, waiting = Queue(), list(rewards)
        played = 0

        def play(groups: int) -> None:
            nonlocal played
            for _ in range(groups):
                name = f"g{played}"
                given = waiting.pop(0) if waiting else [0.5, 0.5]
                queue.put_prompt(name)
                for number, reward in enumerate(given):
                    rows = [([1], [])] * (1 + number)
                    queue.put_rollout(name, number, verl_rows(trajectory(number, reward, *rows), 1))
                played += 1

        play(2)
        made = GroupSampler(
            trainer_mode="agentfly",
            trainer_config={},
            max_off_policy_threshold=8,
            max_off_policy_strategy="drop",
            sampler_kwargs={},
            refill_fn=play,
        )
        meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=2)
        return sorted({key.split("_")[0] for key in meta.keys}), played

    assert sample([0, 1], [1, 0]) == (["g0", "g1"], 2)
    assert sample([0, 1], [1, 1], [0, 0], [1, 0]) == (["g0", "g3"], 4)
    assert sample([0, 1], [], [1], [1, 0]) == (["g0", "g3"], 4)  # without, and with one scored rollout
    groups, played = sample()
    assert len(groups) == 2
    assert played == 6
    groups, played = sample([0, 1])
    assert groups[0] == "g0"
    assert played <= 6


def refill(folder: Path) -> None:
    """verl takes tasks one by one where groups may be replaced, and all of them are others."""
    config = write_config(folder, "dapo", tasks_per_step=2)
    config.tasks_file.parent.mkdir(parents=True)
    config.tasks_file.write_text("".join(f'{{"n": {number}}}\n' for number in range(24)))
    composed = compose_config(overrides(config, {}))
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from agentfly.training.verl_trainer import Trainer

    made = object.__new__(Trainer)
    made.config, made.trainer_mode, made.parameter_sync_step, made.global_steps = composed, "sync", 1, 1
    made.tokenizer = made.processor = None
    PPOTrainer._init_dataloader(made)
    assert made.total_training_steps == 3
    assert made.steps_per_epoch * 2 == config.rows == 3 * 2 * 4
    asked: list[list[str]] = []
    made._submit_batch_to_rollout = lambda batch: asked.append(list(batch["task"]))
    made._add_batch_to_generate()
    made._add_prompts_to_generate(3)
    assert [[json.loads(task)["n"] for task in tasks] for tasks in asked] == [[0, 1], [2, 3, 4]]


if __name__ == "__main__":
    cases = {
        "composes": composes,
        "agrees": agrees,
        "equal": equal_rewards,
        "trainer": trainer,
        "updates": updates,
        "sampler": sampler,
        "refill": refill,
    }
    cases[sys.argv[1]](Path(sys.argv[2]))
