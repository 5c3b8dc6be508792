"""Two rewards with weights, and code in a block: an agent that computes in a sandbox and is to be brief."""

from collections.abc import Iterator

from agentfly import Agent, Context, ExecResult, reward, tool


@tool
async def python(code: str, ctx: Context) -> ExecResult:
    """Run Python 3 in a sandbox and see what it prints. Write the answer, and nothing else, to answer.txt.

    Args:
        code: of the program.
    """
    box = await ctx.acquire("shell")
    await box.sandbox.write_file("/workspace/program.py", code.encode())
    return await box.sandbox.exec("python3 program.py", timeout=10)


@reward
async def right(ctx: Context, answer: int) -> float:
    """1 if the file holds the answer: the lease is the one that the tool worked in."""
    box = await ctx.acquire("shell")
    seen = await box.sandbox.exec("cat answer.txt")
    return float(seen.stdout.strip() == str(answer))


@reward
def brief(ctx: Context) -> float:
    """1 for a rollout in which nothing was written, less by 0.1 for every 100 characters."""
    written = sum(len(m["content"]) for m in ctx.messages if m["role"] == "assistant")
    return max(0.0, 1.0 - written / 1000)


agent = Agent(prompt="{question}", tools=[python], reward={right: 1.0, brief: 0.1}, parser="python")


def tasks(seed: int) -> Iterator[dict[str, object]]:
    yield {"question": "What is the sum of the squares from 1 to 100?", "answer": 338350}
    yield {"question": "How many primes are below 1000?", "answer": 168}
