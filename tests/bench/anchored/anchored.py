"""The agent of the quickstart with a tool that says which state it left, for algorithms that compare turns.

Copied beside the quickstart's own files by `tests.bench.algorithms`.
"""

import importlib
from typing import Any

from agentfly import Agent, Context, tool
from agentfly.agent import ToolResult

plain: Any = importlib.import_module("agent")
tasks = plain.tasks


@tool
async def shell(command: str, ctx: Context) -> ToolResult:
    """Run a shell command in the folder that holds the files.

    Args:
        command: one shell line, such as ``grep -r port .``
    """
    box = await ctx.acquire("shell")
    seen = (await box.sandbox.exec(command, timeout=5)).text[:200].rstrip("\n")
    return ToolResult(seen, anchor=f"{command}\n{seen}")  # the task and what was seen last decide what to do


agent = Agent(
    prompt=plain.prompt, setup=plain.put_files, tools=[shell], reward=plain.repaired, parser="hermes"
)
