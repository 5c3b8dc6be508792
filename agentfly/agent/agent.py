"""An agent: prompt, tools, reward and how its calls are written. It holds no state of any rollout.

Guarantees:
1. What does not fit together (two tools of one name, an unknown parser, no reward, a broken template) is an
   error when the agent is made, not in the middle of a run.
2. A prompt template takes task fields by name; a field that the row lacks is an error naming field and row.
3. ``messages`` gives chat messages with a role and text content, whatever made them.
4. One agent serves any number of rollouts at the same time.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly.agent.errors import AgentDefinitionError, TaskInvalid
from agentfly.agent.parser import PARSERS, Parser
from agentfly.agent.reward import Injected, Reward
from agentfly.agent.tool import Tool

Message = dict[str, Any]
Row = dict[str, Any]
Prompt = str | Callable[[Row], Sequence[Mapping[str, Any]]]


class Agent:
    """What the policy is asked, what it may do, and how it is judged.

    Args:
        tools: functions made by ``@tool``.
        reward: a function made by ``@reward``.
        prompt: a template over the task's fields, such as ``"Fix {issue}"`` (``{{`` for a brace), which
            becomes one user message; or a function from the row to a list of messages.
        system: text of a system message before the prompt's messages.
        setup: a function that prepares the resources before the first turn, injected like a reward.
        parser: how the model writes tool calls: a name, or an object with ``parse``.
    """

    def __init__(
        self,
        *,
        reward: Reward[..., Any],
        prompt: Prompt,
        tools: Sequence[Tool[..., Any]] = (),
        system: str | None = None,
        setup: Callable[..., Any] | None = None,
        parser: str | Parser = "hermes",
    ) -> None:
        self.tools = _by_name(tools)
        self.reward = _checked_reward(reward)
        self.setup = Injected(setup) if setup is not None else None
        self.system = system
        self.parser = _resolved(parser)
        self._prompt = prompt
        self._fields = _template_fields(prompt) if isinstance(prompt, str) else ()
        if not isinstance(prompt, str) and not callable(prompt):
            raise AgentDefinitionError(
                f"prompt: {prompt!r} is neither a template nor a function",
                hints=['write prompt="Fix {issue}", or a function from the row to a list of messages'],
            )

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.schema for tool in self.tools.values()]

    def check(self, row: Mapping[str, Any], where: str = "the task") -> None:
        """Raise ``TaskInvalid`` if the row lacks what template, setup or reward need."""
        for field in self._fields:
            if field not in row:
                raise TaskInvalid(
                    f"prompt: task field {field} is missing in {where}"
                    f" (has: {', '.join(sorted(map(str, row))) or 'nothing'})",
                    hints=["add it to the row, or write {{" + field + "}} for the text itself"],
                )
        for function in (self.setup, self.reward):
            if function is not None:
                function.check(row, where)

    def messages(self, row: Mapping[str, Any], where: str = "the task") -> list[Message]:
        """The chat before the first turn."""
        if isinstance(self._prompt, str):
            made: Any = [{"role": "user", "content": self._prompt.format_map(dict(row))}]
        else:
            made = self._prompt(dict(row))
        messages = _checked_messages(made, where)
        if self.system is None:
            return messages
        if messages[0]["role"] == "system":
            raise TaskInvalid(
                f"prompt: makes a system message for {where}, and the agent has one of its own",
                hints=["remove system= from the agent, or the system message from the prompt"],
            )
        return [{"role": "system", "content": self.system}, *messages]


def _by_name(tools: Sequence[Tool[..., Any]]) -> dict[str, Tool[..., Any]]:
    found: dict[str, Tool[..., Any]] = {}
    for item in tools:
        if not isinstance(item, Tool):
            name = getattr(item, "__name__", repr(item))
            raise AgentDefinitionError(f"tools: {name} is not a tool", hints=[f"put @tool on {name}"])
        if item.name in found:
            raise AgentDefinitionError(
                f"tools: {item.name} is there twice", hints=["rename one of the two functions"]
            )
        found[item.name] = item
    return found


def _checked_reward(reward: Any) -> Reward[..., Any]:
    if isinstance(reward, Reward):
        return reward
    if reward is None:
        raise AgentDefinitionError("reward: is missing", hints=["pass a function made by @reward"])
    name = getattr(reward, "__name__", repr(reward))
    raise AgentDefinitionError(f"reward: {name} is not a reward", hints=[f"put @reward on {name}"])


def _resolved(parser: str | Parser) -> Parser:
    if not isinstance(parser, str):
        return parser
    if parser not in PARSERS:
        raise AgentDefinitionError(
            f"parser: {parser!r} is not known (known: {', '.join(sorted(PARSERS))})",
            hints=[f"use one of {sorted(PARSERS)}, or pass an object with parse(text)"],
        )
    return PARSERS[parser]()


def _template_fields(template: str) -> tuple[str, ...]:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as cause:
        raise AgentDefinitionError(
            f"prompt: the template cannot be read ({cause})",
            hints=["write {{ and }} for braces that are text", "or pass a function from the row to messages"],
        ) from cause
    for name in fields:
        if not name.isidentifier():
            raise AgentDefinitionError(
                f"prompt: {{{name}}} is not the name of a task field",
                hints=["write {{ and }} for braces that are text", "use a function for nested fields"],
            )
    return tuple(dict.fromkeys(fields))


def _checked_messages(made: Any, where: str) -> list[Message]:
    problem = ""
    if not isinstance(made, list | tuple) or not made:
        problem = f"{type(made).__name__} is not a list with at least one message"
    else:
        for at, message in enumerate(made):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                problem = f"message {at} is not a dict with a role"
            elif not isinstance(message.get("content"), str):
                problem = f"message {at} ({message['role']}) has no text in content"
    if problem:
        raise TaskInvalid(
            f"prompt: {problem}, for {where}",
            hints=['return [{"role": "user", "content": "..."}]'],
        )
    return [dict(message) for message in made]
