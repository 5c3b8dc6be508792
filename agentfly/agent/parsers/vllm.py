"""Every tool parser that vLLM has, by vLLM itself: ``parser="vllm:qwen3_coder"``.

vLLM's class reads the text of the sampled tokens in the process that plays the rollouts; no server is asked.
That process needs vLLM: workers of RolloutJobs have it, and trainers that serve the policy themselves.

Guarantees, beside those of every parser (see ``base``):
1. An agent with such a parser can be loaded and checked where there is no vLLM. Where it is to play and there
   is none, or none with a parser of that name, the first rollout says so.
2. An exception of the parser, or arguments that are no JSON object, are a malformed call. vLLM's parsers do
   not say more: what they do not recognise as a call they call an answer.
"""

import json
from collections.abc import Sequence
from typing import Any

from agentfly.agent.errors import AgentDefinitionError
from agentfly.agent.parsers.base import Parsed, Parser, Schema, ToolCall, end_of_thinking

PREFIX = "vllm:"


class VLLMParser:
    """A parser of vLLM that has not met its tokenizer yet.

    Args:
        name: as after ``--tool-call-parser``.
        tools: schemas of the agent's tools.
    """

    def __init__(self, name: str, tools: Sequence[Schema]) -> None:
        self.name = name
        self._tools = tools
        self._bound: tuple[Any, Parser] | None = None

    def parse(self, text: str) -> Parsed:
        """Raise: vLLM's parsers need the model's tokenizer."""
        raise AgentDefinitionError(
            f"parser: {PREFIX}{self.name} reads what a policy with a tokenizer writes",
            hints=["play the agent by a RolloutJob, or give it another parser"],
        )

    def check(self) -> None:
        """Raise ``AgentDefinitionError`` if vLLM, or a parser of this name in it, is not here."""
        _of_vllm(self.name)

    def with_tokenizer(self, tokenizer: Any) -> Parser:
        """The parser for text of this tokenizer; the same one for the same tokenizer.

        Raises:
            AgentDefinitionError: see ``check``.
        """
        if self._bound is None or self._bound[0] is not tokenizer:
            self._bound = tokenizer, _Bound(self.name, self._tools, tokenizer)
        return self._bound[1]


class _Bound:
    def __init__(self, name: str, tools: Sequence[Schema], tokenizer: Any) -> None:
        made, request = _of_vllm(name)
        said = [{"role": "user", "content": ""}]
        self._request = request(model="policy", messages=said, tools=list(tools))
        self._parser = made(tokenizer, self._request.tools)
        self._name = name

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, calls and malformed calls."""
        start = end_of_thinking(text)
        try:
            found = self._parser.extract_tool_calls(text[start:], self._request)
        except Exception as error:
            return Parsed(text.strip(), malformed=[f"not a call of {self._name} ({type(error).__name__})"])
        parsed = Parsed(text[:start] + (found.content or ""))
        for call in found.tool_calls:
            name, arguments = call.function.name, _arguments(call.function.arguments)
            if name and arguments is not None:
                parsed.calls.append(ToolCall(name, arguments))
            else:
                parsed.malformed.append(f"{name or 'a call without a name'}: arguments are not a JSON object")
        return parsed


def _of_vllm(name: str) -> tuple[Any, Any]:
    """The class of the parser, and that of the request that it is given."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise AgentDefinitionError(
            f"parser: {PREFIX}{name} needs vLLM, which is not in this environment ({error})",
            hints=[
                "use one of agentfly's own: hermes, xml, react, python, bash",
                "play it in an environment with vLLM: in a cluster, the colocated image",
            ],
        ) from error
    try:
        return ToolParserManager.get_tool_parser(name), ChatCompletionRequest
    except KeyError:
        known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
        raise AgentDefinitionError(
            f"parser: vLLM has no tool parser {name} (has: {known})", hints=["use one of these"]
        ) from None


def _arguments(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
