"""A task without tools: say something with many digits. Even a random model gets some reward and learns."""

from collections.abc import Iterator
from typing import Any

from agentfly.agent import Agent, reward
from agentfly.context import Context


@reward
def digits(ctx: Context) -> float:
    """The share of digits in the answer."""
    text = ctx.final_response
    return sum(char.isdigit() for char in text) / max(1, len(text))


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless."""
    number = seed
    while True:
        yield {"question": f"add {number} and {number + 1}"}
        number += 1


agent = Agent(prompt="{question}", tools=[], reward=digits)
