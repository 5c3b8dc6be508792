"""Parsers of vLLM's, with a stand-in for vLLM; the real ones are tried in tests/local."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from agentfly.agent import AgentDefinitionError, HermesParser, Parsed, ToolCall
from agentfly.agent.parsers import VLLMParser
from tests.unit.rollout.toys import make_agent, shell


class Request(SimpleNamespace):
    """As vLLM's: made of keywords."""


class Pipes:
    """Reads ``name|arguments`` lines; ``boom`` raises."""

    made = 0

    def __init__(self, tokenizer: Any, tools: Any) -> None:
        Pipes.made += 1
        self.tools = tools

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        if text == "boom":
            raise KeyError(text)
        assert request.tools == [shell.schema]
        calls = [line.split("|", 1) for line in text.splitlines() if "|" in line]
        functions = [SimpleNamespace(name=name, arguments=arguments) for name, arguments in calls]
        content = "\n".join(line for line in text.splitlines() if "|" not in line)
        return SimpleNamespace(
            content=content or None, tool_calls=[SimpleNamespace(function=function) for function in functions]
        )


class Manager:
    tool_parsers: ClassVar[dict[str, Any]] = {}
    lazy_parsers: ClassVar[dict[str, Any]] = {"pipes": ("module", "Pipes")}

    @staticmethod
    def get_tool_parser(name: str) -> type:
        return {"pipes": Pipes}[name]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.tool_parsers": {"ToolParserManager": Manager},
        "vllm.entrypoints": {},
        "vllm.entrypoints.openai": {},
        "vllm.entrypoints.openai.chat_completion": {},
        "vllm.entrypoints.openai.chat_completion.protocol": {"ChatCompletionRequest": Request},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def bound() -> Any:
    return VLLMParser("pipes", [shell.schema]).with_tokenizer(object())


# any text, thoughts, what is malformed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ('I look\nshell|{"command": "ls"}', Parsed("I look", [ToolCall("shell", {"command": "ls"})])),
        ("shell|", Parsed("", [ToolCall("shell", {})])),
        ("just text", Parsed("just text")),
        ("boom", Parsed("boom", malformed=["not a call of pipes (KeyError)"])),
        ("shell|{", Parsed("", malformed=["shell: arguments are not a JSON object"])),
        ("shell|[1]", Parsed("", malformed=["shell: arguments are not a JSON object"])),
        ('shell|{"a": "\\ud800"}', Parsed("", malformed=["shell: arguments are not a JSON object"])),
        ("|{}", Parsed("", malformed=["a call without a name: arguments are not a JSON object"])),
        ("<think>shell|{}</think>so", Parsed("<think>shell|{}</think>so")),
    ],
)
def test_what_vllm_finds_is_taken(vllm: None, text: str, parsed: Parsed) -> None:
    assert bound().parse(text) == parsed


# 1. where there is no vLLM


def test_agent_is_loaded_and_checked_without_vllm() -> None:
    agent = make_agent(parser="vllm:pipes")
    agent.check({"what": "tea"})
    assert agent.schemas() == [shell.schema]


def test_playing_without_vllm_says_what_to_do() -> None:
    agent = make_agent(parser="vllm:pipes")
    for play in (agent.check_parser, lambda: agent.parser_for(object())):
        with pytest.raises(AgentDefinitionError, match="vllm:pipes needs vLLM, which is not in") as error:
            play()
        assert "hermes, xml" in error.value.hints[0]
    make_agent().check_parser()


def test_name_that_vllm_does_not_have_is_told(vllm: None) -> None:
    with pytest.raises(AgentDefinitionError, match=r"vLLM has no tool parser tubes \(has: pipes\)"):
        make_agent(parser="vllm:tubes").parser_for(object())


def test_parser_is_made_once_for_a_tokenizer(vllm: None) -> None:
    agent, tokenizer = make_agent(parser="vllm:pipes"), object()
    before = Pipes.made
    assert agent.parser_for(tokenizer) is agent.parser_for(tokenizer)
    assert Pipes.made == before + 1


def test_text_of_an_api_is_read_without_vllm() -> None:
    agent = make_agent(parser="vllm:pipes")
    assert isinstance(agent.parser_for(None), HermesParser)
    with pytest.raises(AgentDefinitionError, match="reads what a policy with a tokenizer writes"):
        agent.parser.parse("x")
