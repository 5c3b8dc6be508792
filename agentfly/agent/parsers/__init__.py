"""The forms in which models write tool calls, by name."""

from collections.abc import Callable, Sequence

from agentfly.agent.errors import AgentDefinitionError
from agentfly.agent.parsers.base import Parsed, Parser, Schema, TextFormat, ToolCall
from agentfly.agent.parsers.block import BlockParser
from agentfly.agent.parsers.hermes import HermesParser
from agentfly.agent.parsers.react import ReActParser
from agentfly.agent.parsers.vllm import PREFIX, VLLMParser
from agentfly.agent.parsers.xml import XMLParser

__all__ = [
    "BlockParser",
    "HermesParser",
    "Parsed",
    "Parser",
    "ReActParser",
    "TextFormat",
    "ToolCall",
    "VLLMParser",
    "XMLParser",
    "parser_named",
]

PARSERS: dict[str, Callable[[Sequence[Schema]], Parser]] = {
    "hermes": lambda tools: HermesParser(),
    "xml": XMLParser,
    "react": ReActParser,
    "python": lambda tools: BlockParser("python", tools),
    "bash": lambda tools: BlockParser("bash", tools),
}


def parser_named(name: str, tools: Sequence[Schema]) -> Parser:
    """The parser of this name for an agent with these tools.

    Raises:
        AgentDefinitionError: there is none, or it does not fit the tools.
    """
    if name.startswith(PREFIX):
        return VLLMParser(name.removeprefix(PREFIX), tools)
    if name not in PARSERS:
        raise AgentDefinitionError(
            f"parser: {name!r} is not known (known: {', '.join(sorted(PARSERS))})",
            hints=[f"use one of {sorted(PARSERS)}, vllm:NAME, or pass an object with parse(text)"],
        )
    return PARSERS[name](tools)
