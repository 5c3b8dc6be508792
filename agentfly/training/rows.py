"""A trajectory in verl's terms, without verl.

Guarantees:
1. Only a scored rollout is trained on; anything else gives no rows, and verl goes on with the rest of the
   group.
2. All rows have the same fields: verl stacks them.
3. The reward stands on the last row of the rollout; verl gives it to the others. What a rollout loses for
   its length is taken off there, and nowhere else: ``outcome`` is what the agent's reward said.
4. Each row says which of its tokens are of which turn: ``steps``, as (start, end, anchor, reward).
5. Each row has the images whose tokens stand in it, as data URLs, in order.
6. Each row says which weights are the oldest and the newest that sampled the rollout, by their steps.
"""

from typing import Any

from agentfly.api.algorithm import Overlong
from agentfly.rollout.trajectory import Trajectory


def verl_rows(trajectory: Trajectory, weights: int, overlong: Overlong | None = None) -> list[dict[str, Any]]:
    """Arguments for one ``AgentLoopOutput`` for each row, and its ``images``.

    Args:
        trajectory: the rollout.
        weights: those that the step's rollouts come from, where the trajectory does not say.
        overlong: what a long rollout loses. None: nothing.
    """
    if trajectory.reward is None:
        return []
    penalty = 0.0 if overlong is None else overlong.penalty(trajectory.sampled_tokens)
    last = len(trajectory.rows) - 1
    spans = [span.version for row in trajectory.rows for span in row.weight_versions]
    versions = [int(version) for version in spans if version is not None] or [weights]
    tool_seconds = sum(call.seconds for call in trajectory.tool_calls)
    return [
        {
            "prompt_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "response_mask": list(row.response_mask),
            "response_logprobs": list(row.logprobs),
            "reward_score": trajectory.reward - penalty if number == last else None,
            "images": [trajectory.images[number] for number in row.images],
            "num_turns": 1 + trajectory.turns + len(trajectory.tool_calls),
            "metrics": {"generate_sequences": trajectory.seconds, "tool_calls": tool_seconds},
            "extra_fields": {
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                "global_steps": max(versions),
                "reward_extra_info": {},
                "turn_scores": [],
                "tool_rewards": [],
                "outcome": trajectory.reward,
                "steps": [(step.start, step.end, step.anchor, step.step_reward) for step in row.steps],
            },
        }
        for number, row in enumerate(trajectory.rows)
    ]
