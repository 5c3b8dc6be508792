"""A task for a random model that sees: whatever it says first, it is shown a picture and asked again.

Every third task has a picture in its prompt too, and every fourth one gets text instead of a picture.
"""

import io
from collections.abc import Iterator
from typing import Any

from PIL import Image

from agentfly.agent import Agent, Parsed, ToolCall, ToolResult, reward, tool
from agentfly.context import Context
from agentfly.models.images import data_url

SIZES = ((60, 80), (120, 56), (90, 90))


def picture(number: int) -> bytes:
    """A PNG in one colour of many; some have transparency, which no model sees."""
    colour = (37 * number % 256, 101 * number % 256, 211 * number % 256)
    made = Image.new("RGBA", SIZES[number % 3], (*colour, 128 if number % 2 else 255))
    written = io.BytesIO()
    made.save(written, "PNG")
    return written.getvalue()


def prompt(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Text, or text below a picture."""
    if "picture" not in row:
        return [{"role": "user", "content": "what is here"}]
    parts = [{"type": "image", "image": row["picture"]}, {"type": "text", "text": "what is here"}]
    return [{"role": "user", "content": parts}]


@tool
def look(ctx: Context) -> ToolResult:
    """Look."""
    number = int(ctx.task["number"])
    return ToolResult("nothing" if number % 4 == 0 else "look", [] if number % 4 == 0 else [picture(number)])


class Looking:
    """Reads every answer as a call."""

    def parse(self, text: str) -> Parsed:
        """The call."""
        return Parsed(text, [ToolCall("look", {})])


@reward
def letters(ctx: Context) -> float:
    """The share of small letters in the last answer."""
    text = ctx.final_response
    return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))


def tasks(seed: int) -> Iterator[dict[str, Any]]:
    """Endless."""
    number = seed
    while True:
        with_picture = {"picture": data_url(picture(number))} if number % 3 == 0 else {}
        yield {"number": number, **with_picture}
        number += 1


agent = Agent(prompt=prompt, tools=[look], reward=letters, parser=Looking())
