"""Code in a fenced block as the call of one tool. See ``base`` for the guarantees of parsers."""

import re
from collections.abc import Sequence

from agentfly.agent.errors import AgentDefinitionError
from agentfly.agent.parsers.base import Parsed, Schema, ToolCall, end_of_thinking, text_parameter

_FORM = """\
{description}

To do that, write one block of this form, and stop:

```{language}
...
```

You then read what it gave. An answer without such a block is your last one."""


class BlockParser:
    """One block of code a turn, which goes to the agent's one tool; a turn without one is an answer.

    Two blocks are malformed, since it is not said which one is meant, and so is one without an end: it may
    have been cut.

    Args:
        language: written behind the opening fence.
        tools: schema of the tool, which has one required parameter, a text.
    """

    def __init__(self, language: str, tools: Sequence[Schema]) -> None:
        parameter = text_parameter(tools[0]) if len(tools) == 1 else None
        if parameter is None:
            names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
            raise AgentDefinitionError(
                f"parser: {language} blocks go to one tool with one text parameter (tools: {names})",
                hints=[f"pass tools=[one], such as `def run({language}: str) -> str`", "or another parser"],
            )
        self.language = language
        self._tool = tools[0]
        self._parameter = parameter
        self._open = re.compile(rf"^```{re.escape(language)}[ \t]*$", re.M)

    def parse(self, text: str) -> Parsed:
        """Split a turn's text into content, a call, or a malformed call."""
        found = list(self._open.finditer(text, end_of_thinking(text)))
        if not found:
            return Parsed(text.strip())
        content = text[: found[0].start()].strip()
        if len(found) > 1:
            return Parsed(content, malformed=[f"{len(found)} blocks of {self.language}: write one"])
        code, fence, _ = text[found[0].end() :].partition("\n```")
        if not fence:
            return Parsed(content, malformed=[f"the block of {self.language} has no end"])
        arguments = {self._parameter: code.removeprefix("\n")}
        return Parsed(content, [ToolCall(self._tool["function"]["name"], arguments)])

    def render(self, call: ToolCall) -> str:
        """The call as the model would write it."""
        return f"```{self.language}\n{call.arguments[self._parameter]}\n```"

    def instructions(self) -> str:
        """What the tool is for and how to call it."""
        return _FORM.format(description=self._tool["function"]["description"], language=self.language)

    def observation(self, text: str) -> str:
        """What the user's message says after a call."""
        return f"Output:\n{text}"
