"""Plain functions as tools: an agent that looks things up before it answers."""

from collections.abc import Iterator
from typing import Literal

from agentfly import Agent, Context, reward, tool

PAGES = {
    "rhine": "The Rhine rises in the Alps, is 1,230 km long and flows into the North Sea.",
    "danube": "The Danube rises in the Black Forest, is 2,850 km long and flows into the Black Sea.",
    "elbe": "The Elbe rises in the Giant Mountains, is 1,094 km long and flows into the North Sea.",
}


@tool
def search(words: list[str], match: Literal["all", "any"] = "all") -> list[str]:
    """Find pages that contain words.

    Args:
        words: looked for without regard to case.
        match: whether a page must have all of them, or any.
    """
    enough = all if match == "all" else any
    return [name for name, text in PAGES.items() if enough(word.lower() in text.lower() for word in words)]


@tool
async def read(page: str) -> str:
    """Read a page.

    Args:
        page: its name, as search gives it.
    """
    return PAGES.get(page) or f"there is no page {page}; there are: {', '.join(PAGES)}"


@reward
def exact(ctx: Context, answer: str) -> float:
    """1 if the last word of the last turn is the answer."""
    words = ctx.final_response.rstrip(". ").split()
    return float(words[-1:] == [answer])


agent = Agent(
    system="Look things up before you answer. End with the answer itself, as one word.",
    prompt="{question}",
    tools=[search, read],
    reward=exact,
)


def tasks(seed: int) -> Iterator[dict[str, str]]:
    yield {"question": "How long is the Danube, in km?", "answer": "2,850"}
    yield {"question": "Which river rises in the Alps?", "answer": "Rhine"}
