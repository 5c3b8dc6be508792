"""A judge by an API: an agent without tools, whose answers another model grades."""

import re
from collections.abc import Iterator

from agentfly import Agent, ChatModel, Context, reward

QUESTION = """\
Grade this explanation for a child of ten, from 0 (wrong or unclear) to 10. Write the number alone.

{topic}:
{text}"""


@reward
async def graded(ctx: Context, topic: str) -> float | None:
    """The grade in tenths; None, which leaves the rollout out, where the judge gives none."""
    lease = await ctx.acquire("judge")  # an ExternalAPI pool has the key, the limits and the retries
    async with ChatModel(lease.base_url, "judge-large", api_key=lease.info.token) as judge:
        asked = QUESTION.format(topic=topic, text=ctx.final_response)
        said = (await judge.chat([{"role": "user", "content": asked}], deadline=60)).text
    found = re.fullmatch(r"\s*(\d+)\s*(?:/\s*10)?\.?\s*", said)
    return min(10, int(found[1])) / 10 if found else None


agent = Agent(prompt="Explain to a child of ten, in at most three sentences: {topic}", reward=graded)


def tasks(seed: int) -> Iterator[dict[str, str]]:
    yield {"topic": "why the sky is blue"}
    yield {"topic": "what a rainbow is"}
