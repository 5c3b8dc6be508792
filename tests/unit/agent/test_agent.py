"""Agents: what does not fit is told when the agent is made."""

from typing import Any

import pytest

from agentfly.agent import AgentDefinitionError, HermesParser, TaskInvalid, tool
from agentfly.agent.agent import Agent
from agentfly.context import Context
from agentfly.errors import AgentflyError
from tests.unit.rollout.toys import FakeResources, always_one, make_agent, shell

# 1. what does not fit is an error when the agent is made


@tool
def other(x: int) -> str:
    """Do other things."""
    return ""


@tool
class Notes:
    """What the policy wrote down in this rollout."""

    def __init__(self, what: str, ctx: Context) -> None:
        self.lines = [f"{ctx.rollout_id}: {what}"]

    @tool
    def write(self, line: str) -> str:
        """Write a line."""
        self.lines.append(line)
        return "\n".join(self.lines)


class Unmarked:
    @tool
    def look(self) -> str:
        """Look."""
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
        ({"tools": [Notes.write]}, "tools: Notes.write is a method, and nobody", "put @tool on Notes"),
        ({"tools": [Unmarked]}, "tools: Unmarked is not a tool", "put @tool on Unmarked"),
        ({"tools": [Notes, Notes]}, "tools: write is there twice", "rename"),
        ({"reward": None}, "reward: is missing", "@reward"),
        ({"reward": len}, "reward: len is not a reward", "put @reward on len"),
        ({"parser": "yaml"}, "parser: 'yaml' is not known (known: bash, hermes, python, react", "'xml'"),
        ({"parser": "python", "tools": [shell, other]}, "parser: python blocks go to one", "tools=[one]"),
        ({"parser": "python", "tools": []}, "parser: python blocks go to one tool", "tools=[one]"),
        ({"parser": "bash", "tools": [other]}, "parser: bash blocks go to one tool with", "bash: str"),
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
        ([{"role": "system", "content": [{"type": "text", "text": "x"}]}], r"message 0 \(system\) has parts"),
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


# 5. classes of tools


async def prepared(agent: Agent, rollout_id: str) -> Context:
    ctx = Context(rollout_id, {"what": "tea"}, FakeResources())
    await agent.prepare(ctx.task, ctx)
    return ctx


async def test_each_rollout_has_an_object_of_its_own() -> None:
    agent = make_agent(tools=[Notes, shell])
    one, other = await prepared(agent, "r-1"), await prepared(agent, "r-2")
    await agent.tools["write"].run({"line": "milk"}, one)
    said = await agent.tools["write"].run({"line": "sugar"}, other)
    assert said.observation == "r-2: tea\nsugar"
    assert one.instance(Notes).lines == ["r-1: tea", "milk"]
    assert [schema["function"]["name"] for schema in agent.schemas()] == ["write", "shell"]


async def test_setup_finds_the_objects() -> None:
    async def prepare(ctx: Context) -> None:
        ctx.instance(Notes).lines.append("prepared")

    ctx = await prepared(make_agent(tools=[Notes], setup=prepare), "r")
    assert ctx.instance(Notes).lines == ["r: tea", "prepared"]


def test_fields_of_a_tool_class_are_asked_for() -> None:
    with pytest.raises(TaskInvalid, match="tool class Notes: task field what is missing in row 3"):
        make_agent(tools=[Notes], prompt="go").check({}, "row 3")


async def test_class_that_is_no_tool_of_the_agent_is_told() -> None:
    ctx = await prepared(make_agent(tools=[Notes]), "r")
    with pytest.raises(AgentflyError, match=r"Unmarked: is no tool class .* \(known: Notes\)"):
        ctx.instance(Unmarked)


# 6. forms that no template knows


def test_text_form_is_told_in_the_system_message_and_not_to_the_template() -> None:
    agent = make_agent(parser="react", system="Be brief.")
    system, user = agent.messages({"what": "tea"})
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nYou can use these tools:\n\nshell: Run a command.")
    assert (user, agent.schemas()) == ({"role": "user", "content": "do tea"}, [])
    assert agent.observation("shell", "ok") == {"role": "user", "content": "Observation: ok"}


def test_text_form_is_added_to_the_system_message_of_the_prompt() -> None:
    def prompt(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "system", "content": "Yours."}, {"role": "user", "content": "go"}]

    system, user = make_agent(parser="bash", prompt=prompt).messages({})
    assert system["content"].startswith("Yours.\n\nRun a command.")
    assert user == {"role": "user", "content": "go"}


def test_form_of_the_template_is_left_to_it() -> None:
    agent = make_agent(parser="xml")
    assert agent.messages({"what": "tea"}) == [{"role": "user", "content": "do tea"}]
    assert agent.schemas() == [shell.schema]
    assert agent.observation("shell", "ok") == {"role": "tool", "name": "shell", "content": "ok"}


def test_text_form_without_tools_is_told_nothing() -> None:
    assert len(make_agent(parser="react", tools=[]).messages({"what": "tea"})) == 1
