"""An agent that finds and repairs a value in configuration files, with a shell in a sandbox."""

from typing import Any

from world import tasks

from agentfly import Agent, Context, reward, tool

__all__ = ["agent", "tasks"]


async def put_files(ctx: Context, files: dict[str, str]) -> None:
    box = await ctx.acquire("shell")
    for name, text in files.items():
        await box.sandbox.write_file(f"/workspace/{name}", text.encode())


@tool
async def shell(command: str, ctx: Context) -> str:
    """Run a shell command in the folder that holds the files.

    Args:
        command: one shell line, such as ``grep -r port .``
    """
    box = await ctx.acquire("shell")
    return (await box.sandbox.exec(command, timeout=5)).text[:200].rstrip("\n")


@reward
async def repaired(ctx: Context, wanted: dict[str, str]) -> float:
    """1 if every file reads as wanted, else 0: judged in the sandbox that the agent worked in."""
    box = await ctx.acquire("shell")
    seen = await box.sandbox.exec('for f in *; do printf \'== %s\\n\' "$f"; cat -- "$f"; done', timeout=5)
    return float(seen.stdout == "".join(f"== {name}\n{wanted[name]}" for name in sorted(wanted)))


def prompt(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["request"]}]


agent = Agent(prompt=prompt, setup=put_files, tools=[shell], reward=repaired, parser="hermes")
