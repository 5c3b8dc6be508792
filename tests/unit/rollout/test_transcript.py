"""Rollouts whose turns an API of text writes."""

from typing import Any

import pytest

from agentfly.agent import Agent, ToolCall, XMLParser, tool
from agentfly.models import ModelRefused, Sampling
from agentfly.rollout import Chain, Failed, Scored, Trajectory, rollout_one
from agentfly.rollout.transcript import Transcript
from tests.unit.rollout.talkers import roles, says, serving, talking
from tests.unit.rollout.toys import FakeResources, always_one, make_agent, shell


async def play(
    *answers: dict[str, Any], agent: Agent | None = None, **options: Any
) -> tuple[Trajectory, list[dict[str, Any]]]:
    async with talking(*answers) as (model, asked):
        trajectory = await rollout_one(
            agent or make_agent(), {"what": "tea"}, model=model, resources=FakeResources(), **options
        )
    return trajectory, asked


LS = ("shell", '{"command": "ls"}')

# 1. how the model is told of the tools


async def test_api_is_told_of_the_tools_and_of_what_they_gave() -> None:
    trajectory, asked = await play(says("I look.", LS), says("done"))
    assert trajectory.outcome == Scored(1.0)
    assert asked[0]["tools"] == [shell.schema]
    _, answer, observation = asked[1]["messages"]
    (call,) = answer["tool_calls"]
    assert (answer["content"], call["function"]) == ("I look.", {"name": "shell", "arguments": LS[1]})
    assert observation == {"role": "tool", "tool_call_id": call["id"], "content": "ran ls in member-1"}


async def test_form_of_the_parser_is_left_to_the_prompt() -> None:
    text = 'Action: shell\nAction Input: {"command": "ls"}'
    trajectory, asked = await play(says(text), says("Final Answer: 1"), agent=make_agent(parser="react"))
    assert trajectory.tool_calls[0].arguments == {"command": "ls"}
    assert "tools" not in asked[0]
    assert roles(asked[1]["messages"]) == ["system", "user", "assistant", "user"]
    assert asked[1]["messages"][-1]["content"] == "Observation: ran ls in member-1"


async def test_parser_without_a_form_for_calls_reads_what_the_model_writes() -> None:
    class Mine:
        def parse(self, text: str) -> Any:
            return XMLParser().parse(text)

    text = XMLParser().render(ToolCall("shell", {"command": "ls"}))
    trajectory, asked = await play(says(text), says("done"), agent=make_agent(parser=Mine()))
    assert [call.name for call in trajectory.tool_calls] == ["shell"]
    assert "tools" not in asked[0]


# 2. calls of the API are calls


@pytest.mark.parametrize("parser", ["hermes", "xml", "vllm:hermes"])
async def test_several_calls_are_run_in_their_order(parser: str) -> None:
    other = ("shell", '{"command": "pwd"}')
    trajectory, asked = await play(says(None, LS, other), says("done"), agent=make_agent(parser=parser))
    assert [call.arguments["command"] for call in trajectory.tool_calls] == ["ls", "pwd"]
    assert roles(asked[1]["messages"]) == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("parser", ["hermes", "xml"])
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"a": 2, "b": ', "not valid JSON: Expecting value at character 14"),
        ("ls", "not valid JSON: Expecting value at character 0"),
        ("[1,2]", '"arguments" is not a JSON object'),
        ('{"command": "ls"} now', "not valid JSON: there is text behind the arguments"),
    ],
)
async def test_arguments_that_are_no_object_are_a_malformed_call(
    arguments: str, problem: str, parser: str
) -> None:
    answers = says("", ("shell", arguments), LS), says("done")
    trajectory, asked = await play(*answers, agent=make_agent(parser=parser))
    assert trajectory.outcome == Scored(1.0)
    counts = [trajectory.metrics[name] for name in ("malformed_calls", "invalid_arguments", "tool_calls")]
    assert counts == [1, 0, 1]
    assert asked[1]["messages"][-1]["content"] == f"malformed tool call: {problem}"
    assert arguments in trajectory.messages[1]["content"].replace('\\"', '"')


async def test_only_malformed_calls_leave_the_answer_as_text() -> None:
    _, asked = await play(says("", ("shell", "{")), says("done"))
    assert roles(asked[1]["messages"]) == ["user", "assistant", "user"]
    assert "tool_calls" not in asked[1]["messages"][1]


async def test_unknown_tool_is_an_observation() -> None:
    trajectory, asked = await play(says("", ("fly", "{}")), says("done"))
    assert trajectory.metrics["unknown_tools"] == 1
    assert asked[1]["messages"][-1]["content"] == "unknown tool fly (known: shell)"


async def test_call_without_arguments_is_one() -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    trajectory, _ = await play(says("", ("look", "")), says("done"), agent=make_agent(tools=[look]))
    assert trajectory.tool_calls[0].error is None


# 3. no tokens


async def test_there_are_messages_and_no_rows() -> None:
    trajectory, _ = await play(says("I look.", LS), says("done"))
    assert (trajectory.rows, trajectory.drift.tokens, trajectory.turns) == ([], 0, 2)
    assert roles(trajectory.messages) == ["user", "assistant", "tool", "assistant"]
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


async def test_answer_of_a_server_that_does_not_count_is_an_answer() -> None:
    answer = says("done")
    del answer["usage"]
    trajectory, _ = await play(answer)
    assert trajectory.outcome == Scored(1.0)


# 4. length


async def test_context_ends_where_the_server_counted_it() -> None:
    trajectory, asked = await play(says("", LS, tokens=90), strategy=Chain(max_context_tokens=100))
    assert (trajectory.stop_reason, len(asked)) == ("context", 1)


async def test_what_is_asked_for_is_what_fits() -> None:
    _, asked = await play(
        says("", LS), says("done"), strategy=Chain(max_tokens_per_turn=90, max_context_tokens=100)
    )
    assert [request["max_tokens"] for request in asked] == [90, 87]


async def test_length_of_other_messages_is_by_their_characters() -> None:
    async with talking(says("12345678", tokens=2)) as (model, _):
        transcript = Transcript(model, [{"role": "user", "content": "1234"}], [], XMLParser())
        await transcript.answer(Sampling(), 10)
        assert transcript.end_turn() == "12345678"
        assert len(transcript) == 12
        assert transcript.length_of([{"role": "user", "content": "123"}]) == 3
        transcript.restart([{"role": "user", "content": "123"}])
        assert (len(transcript), transcript.messages) == (3, [{"role": "user", "content": "123"}])


# what an API refuses


async def test_refusal_fails_the_rollout_with_its_words() -> None:
    from aiohttp import web

    from agentfly.models import ChatModel

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text="no such key")

    async with serving({"/v1/chat/completions": refuse}) as url, ChatModel(f"{url}/v1", "m") as model:
        agent = Agent(prompt="go", reward=always_one)
        trajectory = await rollout_one(agent, {}, model=model)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.reason == ModelRefused.__name__
    assert "HTTP 401: no such key" in trajectory.outcome.message
