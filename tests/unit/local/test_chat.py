"""``agentfly chat``: the conversation, and the command."""

import asyncio
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from agentfly.agent import Agent, ToolResult, reward, tool
from agentfly.cli import main
from agentfly.context import Context
from agentfly.local.talk import talk
from agentfly.rollout import Scored, Trajectory
from tests.unit.rollout.talkers import roles, says, talking
from tests.unit.rollout.toys import FakeResources, make_agent


async def converse(
    *answers: dict[str, Any], types: list[str], row: dict[str, Any] | None = None, agent: Agent | None = None
) -> tuple[Trajectory | None, list[dict[str, Any]], list[dict[str, Any]], FakeResources]:
    typed: Iterator[str] = iter(types)
    shown: list[dict[str, Any]] = []
    resources = FakeResources()

    async def ask() -> str | None:
        return next(typed, None)

    async with talking(*answers) as (model, asked):
        trajectory = await talk(
            agent or make_agent(), row, model=model, resources=resources, ask=ask, show=shown.append
        )
    return trajectory, asked, shown, resources


LS = ("shell", '{"command": "ls"}')

# 1. a rollout as any other


async def test_tools_are_called_and_what_they_held_is_released() -> None:
    trajectory, asked, shown, resources = await converse(says("", LS), says("two files"), types=["look"])
    assert roles(shown) == ["assistant", "tool", "assistant"]
    assert shown[1]["content"] == "ran ls in member-1"
    assert (resources.held, trajectory and trajectory.turns) == ({}, 2)
    assert asked[0]["messages"] == [{"role": "user", "content": "look"}]


# 2. with and without a task


async def test_conversation_goes_on_with_what_is_typed_and_is_not_judged() -> None:
    trajectory, asked, _, _ = await converse(says("hello"), says("bye"), types=["hi", "go"])
    assert trajectory is not None
    assert trajectory.reward is None
    assert roles(asked[1]["messages"]) == ["user", "assistant", "user"]
    assert trajectory.messages[2:] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "bye"},
    ]


async def test_task_begins_with_the_prompt_and_ends_with_the_reward() -> None:
    @reward
    def polite(ctx: Context, what: str) -> float:
        return float(ctx.final_response == f"here is {what}")

    agent, row = make_agent(reward=polite), {"what": "tea"}
    trajectory, asked, _, _ = await converse(
        says("what?"), says("here is tea"), types=["tea!"], row=row, agent=agent
    )
    assert asked[0]["messages"] == [{"role": "user", "content": "do tea"}]
    assert trajectory is not None
    assert trajectory.outcome == Scored(1.0)


async def test_setup_that_needs_a_field_asks_for_a_task() -> None:
    async def prepare(ctx: Context, files: list[str]) -> None: ...

    trajectory, *_ = await converse(says("x"), types=["hi"], agent=make_agent(setup=prepare))
    assert trajectory is not None
    assert "setup prepare: task field files is missing" in trajectory.outcome.message


# 3. how it ends


async def test_nothing_said_is_no_conversation() -> None:
    trajectory, asked, _, _ = await converse(says("x"), types=[])
    assert (trajectory, asked) == (None, [])


async def test_tool_ends_it() -> None:
    @tool
    def leave() -> ToolResult:
        """Leave."""
        return ToolResult("bye", control="end")

    trajectory, *_ = await converse(
        says("", ("leave", "{}")), types=["hi", "more"], agent=make_agent(tools=[leave])
    )
    assert (trajectory and trajectory.stop_reason, trajectory and trajectory.turns) == ("end", 1)


# the command


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = self.headers["authorization"] == "Bearer secret"
        text = json.dumps(says(f"you said {asked['messages'][-1]['content']}") if known else {}).encode()
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


AGENT = """\
from agentfly import Agent, Context, reward


@reward
def told(ctx: Context) -> float:
    return float("tea" in ctx.final_response)


agent = Agent(prompt="do {what}", reward=told)
other = 3
"""


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Any:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def run(*arguments: str, types: str = "", agent: str = "agent.py:agent") -> int:
        (tmp_path / "typed").write_text(types)
        with (tmp_path / "typed").open() as typed:
            monkeypatch.setattr(sys, "stdin", typed)
            return main(["chat", agent, "--url", url, "--model", "m", *arguments])

    return run


def test_command_talks(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(types="hello\n\nnot read\n") == 0
    assert capsys.readouterr().out == "assistant: you said hello\n1 turns, 0 calls\n"


def test_command_plays_a_task(chat: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat("--task", '{"what": "tea"}') == 0
    assert capsys.readouterr().out == "assistant: you said do tea\n1 turns, 0 calls, reward 1\n"


def test_command_that_fails_says_why(
    chat: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert chat(types="hello\n") == 1
    assert "ModelRefused: model http://127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "agent", "problem"),
    [
        (["--task", "tea"], "agent.py:agent", "--task: is not JSON"),
        (["--task", "[1]"], "agent.py:agent", "--task: is a list, not an object"),
        (
            ["--url", "localhost/v1"],
            "agent.py:agent",
            "--url: localhost/v1 has no scheme\n  hint: write http://",
        ),
        (["--key-env", "NOT_SET"], "agent.py:agent", "--key-env: NOT_SET is not set"),
        ([], "agent.py:other", "agent.py:other: is of type int, not an agentfly.Agent"),
    ],
)
def test_wrong_input_starts_nothing(
    chat: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], agent: str, problem: str
) -> None:
    assert chat(*arguments, agent=agent) == 2
    assert problem in capsys.readouterr().err


def test_loop_that_runs_already_is_no_hindrance() -> None:
    async def notebook() -> Trajectory | None:
        ticks = asyncio.create_task(asyncio.sleep(3600))
        try:
            return (await converse(says("hello"), types=["hi"]))[0]
        finally:
            ticks.cancel()

    for _ in range(2):
        assert asyncio.run(notebook()) is not None
