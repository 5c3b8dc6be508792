"""``agentfly chat``: talk to an agent, whose turns an OpenAI-compatible API writes.

Guarantees:
1. What was said is on stdout, a message at a time; an empty line or the end of input ends it.
2. Exit code 1 if it failed, for whatever reason; the reason is on stdout too.

Not here: what a conversation is (``talk``).
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfly.errors import AgentflyError
from agentfly.local.api_rollouts import add_api, key_of

if TYPE_CHECKING:
    from agentfly.agent import Agent
    from agentfly.rollout import Trajectory

SHOWN = 2000  # characters of a message


def add_command(commands: Any) -> None:
    """Add ``chat`` to the subparsers of the command line."""
    text = "talk to an agent; an OpenAI-compatible API writes its turns"
    command = commands.add_parser("chat", help=text, description=text)
    command.add_argument("agent", metavar="FILE.py:NAME", help="the agent, as in a manifest's entrypoint")
    add_api(command, required=True)
    command.add_argument("-f", "--file", type=Path, help="manifest whose ResourcePools the tools may acquire")
    command.add_argument("--task", metavar="JSON", help="a row of tasks: play it, judge it at the end")
    command.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from agentfly.rollout import Failed

    key, agent, row = key_of(args), _agent(args.agent), None if args.task is None else _row(args.task)
    trajectory = asyncio.run(_chat(agent, row, args, key))
    if trajectory is None:
        return 0
    sys.stdout.write(told(trajectory) + "\n")
    return int(isinstance(trajectory.outcome, Failed))


async def _chat(
    agent: "Agent", row: Mapping[str, Any] | None, args: argparse.Namespace, key: str | None
) -> "Trajectory | None":
    from agentfly.local.talk import talk
    from agentfly.models import ChatModel

    async with contextlib.AsyncExitStack() as stack:
        model = await stack.enter_async_context(ChatModel(args.url, args.model, api_key=key))
        resources = None
        if args.file is not None:
            from agentfly.local.pools import local_pools

            resources = await stack.enter_async_context(local_pools(args.file))
        return await talk(agent, row, model=model, resources=resources, ask=_typed, show=_print)


def _agent(reference: str) -> "Agent":
    from agentfly.agent import Agent
    from agentfly.refs import load

    agent = load(reference, Path.cwd())
    if not isinstance(agent, Agent):
        raise AgentflyError(
            f"{reference}: is of type {type(agent).__name__}, not an agentfly.Agent",
            hints=["name the variable that holds Agent(...)"],
        )
    return agent


def _row(text: str) -> Mapping[str, Any]:
    hint = """write '{"field": "value"}'"""
    try:
        row = json.loads(text)
    except ValueError as error:
        raise AgentflyError(f"--task: is not JSON ({error})", hints=[hint]) from None
    if not isinstance(row, dict):
        raise AgentflyError(f"--task: is a {type(row).__name__}, not an object", hints=[hint])
    return row


async def _typed() -> str | None:
    from agentfly.agent.threads import in_thread

    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    return (await in_thread(sys.stdin.readline)).strip() or None


def _print(message: Mapping[str, Any]) -> None:
    from agentfly.agent.content import text_of

    text = text_of(message["content"])
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}\n[{len(text) - SHOWN} more characters]"
    # What the person said is not shown again: a user's message here is what a tool gave, in a form of text.
    who = message.get("name") or message["role"].replace("user", "observation")
    sys.stdout.write(f"{who}: {shown}\n")
    sys.stdout.flush()


def told(trajectory: "Trajectory") -> str:
    """How it ended, in a line."""
    from agentfly.rollout import Failed, Masked, Scored

    counts = f"{trajectory.turns} turns, {len(trajectory.tool_calls)} calls"
    match trajectory.outcome:
        case Scored(reward=reward):
            return f"{counts}, reward {reward:g}"
        case Masked(reason="unscored", message=""):  # nobody was to judge it
            return counts
        case Masked(reason=reason) | Failed(reason=reason):
            return ": ".join(filter(None, [f"{counts}, {reason}", trajectory.outcome.message]))
