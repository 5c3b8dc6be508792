"""A conversation between a person and an agent whose turns an API writes.

Guarantees:
1. It is a rollout as any other: the same tools, setup, deadlines of calls and release of what was held.
2. With a task it begins with the agent's prompt and ends with its reward; without one it begins with what the
   person says, and nobody is judged.
3. It ends when the person has nothing more to say, or a tool ends it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentfly.agent import Agent
from agentfly.context import Deadlines
from agentfly.models import ChatModel
from agentfly.resources.lease import Resources
from agentfly.rollout import Trajectory, rollout_one
from agentfly.rollout.play import Play
from agentfly.rollout.turns import Limits, take_turn

# A person may think for as long as they like; what a tool or an answer may take is bounded as ever.
DEADLINES = Deadlines(call=120.0, turn=600.0, rollout=7 * 86400.0)
LIMITS = Limits(
    max_turns=1_000_000, max_tokens_per_turn=4096, max_context_tokens=1 << 20, max_prompt_tokens=1 << 20
)

Ask = Callable[[], Awaitable[str | None]]
Show = Callable[[Mapping[str, Any]], None]


async def talk(
    agent: Agent,
    row: Mapping[str, Any] | None,
    *,
    model: ChatModel,
    resources: Resources | None,
    ask: Ask,
    show: Show,
) -> Trajectory | None:
    """Talk until nobody has anything to say.

    Args:
        row: the task; None: the first thing that the person says begins the conversation.
        ask: gives what the person says next, None if nothing.
        show: is given each message that is not the person's, turn by turn.

    Returns:
        What happened; None if nothing was said at all.
    """
    if row is None:
        said = await ask()
        if said is None:
            return None
        agent, row = agent.unjudged(), {"said": said}
    return await rollout_one(
        agent,
        row,
        model=model,
        resources=resources,
        strategy=_Talk(ask, show),
        deadlines=DEADLINES,
        max_infra_retries=0,
    )


class _Talk:
    """The strategy: turns of the agent until it has no more calls, then one of the person."""

    def __init__(self, ask: Ask, show: Show) -> None:
        self._ask = ask
        self._show = show

    async def run(self, play: Play) -> str:
        while play.turns < LIMITS.max_turns and LIMITS.room(play) > 0:
            before = len(play.messages)
            turn = await take_turn(play, LIMITS)
            for message in play.messages[before:]:
                self._show(message)
            if turn.observations:
                play.ledger.observe(turn.observations)
            if turn.stop == "end":
                return "end"
            if turn.stop:
                said = await self._ask()
                if said is None:
                    return turn.stop
                play.messages.append({"role": "user", "content": said})
                play.ledger.observe(play.messages[-1:])
        return "turns" if play.turns >= LIMITS.max_turns else "context"
