"""What the algorithm of a run, and how old its rollouts may be, set in verl, as Hydra overrides.

Guarantees:
1. Pure: the same config gives the same settings; nothing is imported from verl.
2. Advantages come from agentfly's own estimator, called by agentfly's own trainer; verl has the loss.
3. There is a critic where the algorithm has one, and only there; it is set up as the actor is.
4. A token that older weights sampled weighs as much as the ratio of its probabilities, which is truncated.
"""

from agentfly.api.asynchronous import Asynchronous
from agentfly.roles.trainer import TrainerConfig

TRAINER = "agentfly"
"""Name of agentfly's trainer in verl."""
AHEAD = "agentfly_ahead"
"""Name of the one whose rollouts run ahead of it."""
ESTIMATOR = "agentfly"
"""Name of agentfly's advantage estimator in verl."""
FULL_PRECISION = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def algorithm_settings(config: TrainerConfig, micro_batch: int) -> dict[str, object]:
    """All that differs between algorithms; ``micro_batch`` are rows of one pass on one rank."""
    algorithm = config.algorithm
    low, high = algorithm.clips
    values: dict[str, object] = {
        "trainer.v1.trainer_mode": TRAINER,
        "algorithm.adv_estimator": ESTIMATOR,
        "actor_rollout_ref.actor.optim.lr": algorithm.learning_rate,
        "actor_rollout_ref.actor.clip_ratio_low": low,
        "actor_rollout_ref.actor.clip_ratio_high": high,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.use_kl_loss": False,
        "critic.enable": algorithm.name == "ppo",
    }
    if config.asynchronous is not None:
        values |= _asynchronous(config.asynchronous)
    match algorithm.name:
        case "ppo":
            values |= _critic(config, micro_batch)
        case "dr_grpo":
            values["actor_rollout_ref.actor.loss_agg_mode"] = "seq-mean-token-sum-norm"
            values["actor_rollout_ref.actor.loss_scale_factor"] = config.max_response_tokens
        case "gspo":
            values["actor_rollout_ref.actor.loss_agg_mode"] = "seq-mean-token-mean"
            values["actor_rollout_ref.actor.policy_loss.loss_mode"] = "gspo"
        case "dapo":
            values["algorithm.filter_groups.enable"] = True  # verl then loads tasks one by one
    return values


def _asynchronous(asynchronous: Asynchronous) -> dict[str, object]:
    return {
        "trainer.v1.trainer_mode": AHEAD,
        "trainer.v1.sampler.custom_sampler.name": "AheadSampler",
        # For verl a group is as old as the step that it is begun for: a step waits for its own.
        "trainer.v1.sampler.max_off_policy_threshold": 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": asynchronous.importance_cap,
    }


def _critic(config: TrainerConfig, micro_batch: int) -> dict[str, object]:
    values: dict[str, object] = {
        "critic.strategy": "fsdp2",
        "critic.model.path": str(config.model_path),
        "critic.model.use_remove_padding": False,
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.ppo_micro_batch_size_per_gpu": micro_batch,
        "critic.optim.lr": config.algorithm.of_ppo.critic_learning_rate,
        "critic.data_loader_seed": config.seed,
    }
    if not config.gpus:
        values |= {
            "critic.model.enable_gradient_checkpointing": False,
            "critic.fsdp.use_torch_compile": False,
            "+critic.fsdp.mixed_precision": FULL_PRECISION,
        }
    return values
