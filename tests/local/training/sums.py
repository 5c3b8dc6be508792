"""A task for a random model: say something with many digits. A sandbox counts them, so it is used too."""

from collections.abc import Iterator
from typing import Any

from agentfly.agent import Agent, reward
from agentfly.context import Context


async def prepare(question: str, ctx: Context) -> None:
    """Leave the question in the sandbox."""
    box = (await ctx.acquire("shell")).sandbox
    await box.write_file("/workspace/question", question.encode())


@reward
async def digits(question: str, ctx: Context) -> float:
    """The share of digits in the answer; the sandbox must still be the one that was prepared."""
    box = (await ctx.acquire("shell")).sandbox
    assert (await box.read_file("/workspace/question")).decode() == question
    text = ctx.final_response
    counted = await box.exec("tr -cd 0-9 | wc -c", stdin=text)
    return int(counted.stdout) / max(1, len(text))


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless."""
    number = seed
    while True:
        yield {"question": f"add {number} and {number + 1}"}
        number += 1


agent = Agent(prompt="{question}", setup=prepare, reward=digits)
