"""Agents: what does not fit is told when the agent is made."""

from typing import Any

import pytest

from agentfly.agent import AgentDefinitionError, HermesParser, TaskInvalid, tool
from agentfly.agent.agent import Agent
from agentfly.context import Context
from tests.unit.rollout.toys import always_one, make_agent, shell

# 1. what does not fit is an error when the agent is made


@tool
def other(x: int) -> str:
    """Do other things."""
    return ""


def shell_again() -> Any:
    @tool
    def shell(x: int) -> str:
        """Another shell."""
        return ""

    return shell


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"tools": [shell, shell_again()]}, "tools: shell is there twice", "rename one of the two functions"),
        ({"tools": [len]}, "tools: len is not a tool", "put @tool on len"),
        ({"reward": None}, "reward: is missing", "@reward"),
        ({"reward": len}, "reward: len is not a reward", "put @reward on len"),
        ({"parser": "xml"}, "parser: 'xml' is not known (known: hermes)", "['hermes']"),
        ({"prompt": 3}, "prompt: 3 is neither a template nor a function", "Fix {issue}"),
        ({"prompt": "a } b"}, "prompt: the template cannot be read", "{{ and }}"),
        ({"prompt": "json: {'a': 1}"}, "prompt: {'a'} is not the name of a task field", "{{ and }}"),
        ({"prompt": "{}"}, "prompt: {} is not the name of a task field", "{{ and }}"),
        ({"prompt": "{a.b}"}, "prompt: {a.b} is not the name of a task field", "function for nested fields"),
    ],
)
def test_parts_that_do_not_fit_are_told(changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(AgentDefinitionError) as error:
        make_agent(**changes)
    assert error.value.message.startswith(message)
    assert any(hint in given for given in error.value.hints)


def test_agent_without_tools_is_fine() -> None:
    agent = Agent(reward=always_one, prompt="answer {question}")
    assert agent.schemas() == []


def test_schemas_are_those_of_the_tools() -> None:
    assert make_agent(tools=[shell, other]).schemas() == [shell.schema, other.schema]


def test_parser_may_be_an_object() -> None:
    mine = HermesParser()
    assert make_agent(parser=mine).parser is mine


# 2. templates


def test_template_is_filled_from_the_row() -> None:
    agent = make_agent(prompt="Set {key} to {value:>4} in {{braces}}")
    assert agent.messages({"key": "port", "value": 26, "unused": 1}) == [
        {"role": "user", "content": "Set port to   26 in {braces}"}
    ]


def test_missing_field_of_the_template_is_told() -> None:
    with pytest.raises(TaskInvalid) as error:
        make_agent(prompt="Fix {issue} in {repo}").check({"issue": "x"}, "row 3")
    assert error.value.message == "prompt: task field repo is missing in row 3 (has: issue)"
    assert error.value.hints == ("add it to the row, or write {{repo}} for the text itself",)


def test_values_of_the_row_are_not_templates() -> None:
    agent = make_agent(prompt="{code}")
    assert agent.messages({"code": "{x} }"})[0]["content"] == "{x} }"


def test_fields_of_setup_and_reward_are_checked_too() -> None:
    async def prepare(ctx: Context, files: dict[str, str]) -> None: ...

    agent = make_agent(setup=prepare)
    with pytest.raises(TaskInvalid, match="setup prepare: task field files is missing in the task"):
        agent.check({"what": "x"})


# 3. messages have a role and text


def test_function_may_make_the_messages() -> None:
    made = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    assert make_agent(prompt=lambda row: made).messages({}) == made


def test_system_message_comes_first() -> None:
    agent = make_agent(prompt="go", system="be brief")
    assert agent.messages({}) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "go"},
    ]


def test_two_system_messages_are_refused() -> None:
    agent = make_agent(prompt=lambda row: [{"role": "system", "content": "a"}], system="b")
    with pytest.raises(TaskInvalid, match="makes a system message for row 2"):
        agent.messages({}, "row 2")


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("text", "str is not a list with at least one message"),
        ([], "list is not a list with at least one message"),
        (None, "NoneType is not a list"),
        (["text"], "message 0 is not a dict with a role"),
        ([{"content": "x"}], "message 0 is not a dict with a role"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": None}],
            r"message 1 \(user\) has no text",
        ),
    ],
)
def test_what_is_no_chat_is_refused(made: Any, problem: str) -> None:
    with pytest.raises(TaskInvalid, match=f"prompt: {problem}.*, for row 5"):
        make_agent(prompt=lambda row: made).messages({}, "row 5")


# 4. one agent serves many rollouts


def test_prompt_function_cannot_change_the_row() -> None:
    def greedy(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": row.pop("what")}]

    row = {"what": "x"}
    agent = make_agent(prompt=greedy)
    assert agent.messages(row) == agent.messages(row)
    assert row == {"what": "x"}


def test_messages_of_one_rollout_are_not_those_of_another() -> None:
    shared = [{"role": "user", "content": "go"}]
    agent = make_agent(prompt=lambda row: shared)
    agent.messages({})[0]["content"] = "changed"
    assert agent.messages({})[0]["content"] == "go"


def test_public_names_are_importable() -> None:
    import agentfly

    for name in agentfly.__all__:
        assert getattr(agentfly, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = agentfly.nothing
