"""An agent: prompt, tools, reward and how its calls are written. It holds no state of any rollout.

Guarantees:
1. What does not fit together (two tools of one name, an unknown parser, no reward, a broken template) is an
   error when the agent is made, not in the middle of a run.
2. A prompt template takes task fields by name; a field that the row lacks is an error naming field and row.
3. ``messages`` gives chat messages with a role and text content, whatever made them.
4. One agent serves any number of rollouts at the same time.
5. Of a class of tools each attempt at a rollout has an object of its own, made before ``setup`` runs.
6. Where no chat template knows how the parser's calls are written, the system message says it, the template
   is told of no tools, and observations are messages of the user.
"""

import copy
import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentfly.agent.content import problem_of, with_images
from agentfly.agent.errors import AgentDefinitionError, TaskInvalid
from agentfly.agent.injected import Injected
from agentfly.agent.parsers import HermesParser, Parser, TextFormat, VLLMParser, parser_named
from agentfly.agent.reward import Judge, Reward, Score, judge_of
from agentfly.agent.tool import ClassInit, Tool, class_init, tools_of_class
from agentfly.context import Context

Message = dict[str, Any]
Row = dict[str, Any]
Prompt = str | Callable[[Row], Sequence[Mapping[str, Any]]]


class _Nobody:
    """Judges no rollout of an agent that is only talked to."""

    name = "nobody"

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Need nothing."""

    async def score(self, row: Mapping[str, Any], ctx: Context) -> Score:
        """None."""
        return Score(None)


class Agent:
    """What the policy is asked, what it may do, and how it is judged.

    Args:
        tools: functions, methods and classes made by ``@tool``.
        reward: a function made by ``@reward``, or a dict from such functions to the weights of their sum.
        prompt: a template over the task's fields, such as ``"Fix {issue}"`` (``{{`` for a brace), which
            becomes one user message; or a function from the row to a list of messages.
        system: text of a system message before the prompt's messages.
        setup: a function that prepares the resources before the first turn, injected like a reward.
        parser: how the model writes tool calls: the name of a form (``hermes``, ``xml``, ``react``, or
            ``python`` and ``bash`` for blocks of code), ``vllm:NAME`` for a parser of vLLM's, or an object
            with ``parse``.
    """

    def __init__(
        self,
        *,
        reward: Reward[..., Any] | Mapping[Reward[..., Any], float],
        prompt: Prompt,
        tools: Sequence[Tool[..., Any] | type] = (),
        system: str | None = None,
        setup: Callable[..., Any] | None = None,
        parser: str | Parser = "hermes",
    ) -> None:
        self._classes = _classes(tools)
        self.tools = _by_name(tools)
        self.reward: Judge = judge_of(reward)
        self.setup = Injected(setup) if setup is not None else None
        self.system = system
        self.parser = parser if not isinstance(parser, str) else parser_named(parser, self._schemas())
        self._prompt = prompt
        self._fields = _template_fields(prompt) if isinstance(prompt, str) else ()
        if not isinstance(prompt, str) and not callable(prompt):
            raise AgentDefinitionError(
                f"prompt: {prompt!r} is neither a template nor a function",
                hints=['write prompt="Fix {issue}", or a function from the row to a list of messages'],
            )

    def unjudged(self) -> "Agent":
        """The same agent for whoever talks to it: the row's ``said`` is its prompt, and nobody judges."""
        twin = copy.copy(self)
        twin._prompt, twin._fields, twin.reward = "{said}", ("said",), _Nobody()
        return twin

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them; none where the prompt itself says how to call them."""
        return [] if isinstance(self.parser, TextFormat) else self._schemas()

    def check_parser(self) -> None:
        """Raise ``AgentDefinitionError`` if the parser cannot work in this environment."""
        if isinstance(self.parser, VLLMParser):
            self.parser.check()

    def parser_for(self, tokenizer: Any) -> Parser:
        """The parser of what a policy with this tokenizer writes; None: of one that writes text."""
        if isinstance(self.parser, VLLMParser):
            return HermesParser() if tokenizer is None else self.parser.with_tokenizer(tokenizer)
        return self.parser

    def observation(self, name: str, text: str, images: Sequence[Any] = ()) -> Message:
        """What the policy is told, and shown, after a call of this tool."""
        if isinstance(self.parser, TextFormat):
            return {"role": "user", "content": with_images(self.parser.observation(text), images)}
        return {"role": "tool", "name": name, "content": with_images(text, images)}

    def _schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def check(self, row: Mapping[str, Any], where: str = "the task") -> None:
        """Raise ``TaskInvalid`` if the row lacks what template, tool classes, setup or reward need."""
        for field in self._fields:
            if field not in row:
                raise TaskInvalid(
                    f"prompt: task field {field} is missing in {where}"
                    f" (has: {', '.join(sorted(map(str, row))) or 'nothing'})",
                    hints=["add it to the row, or write {{" + field + "}} for the text itself"],
                )
        for function in (*self._classes.values(), self.setup, self.reward):
            if function is not None:
                function.check(row, where)

    async def prepare(self, row: Mapping[str, Any], ctx: Context) -> None:
        """Make the objects of the tool classes and run the setup, for one attempt at a rollout."""
        for kind, init in self._classes.items():
            ctx.instances[kind] = await init.call(row, ctx)
        if self.setup is not None:
            await self.setup.call(row, ctx)

    def messages(self, row: Mapping[str, Any], where: str = "the task") -> list[Message]:
        """The chat before the first turn."""
        if isinstance(self._prompt, str):
            made: Any = [{"role": "user", "content": self._prompt.format_map(dict(row))}]
        else:
            made = self._prompt(dict(row))
        messages = _checked_messages(made, where)
        own = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        if own is not None and self.system is not None:
            raise TaskInvalid(
                f"prompt: makes a system message for {where}, and the agent has one of its own",
                hints=["remove system= from the agent, or the system message from the prompt"],
            )
        calls = self.parser.instructions() if isinstance(self.parser, TextFormat) and self.tools else None
        system = [part for part in (own, self.system, calls) if part is not None]
        return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def _classes(tools: Sequence[Any]) -> dict[type, ClassInit]:
    found = {item: class_init(item) for item in tools if inspect.isclass(item)}
    return {kind: init for kind, init in found.items() if init is not None}


def _by_name(tools: Sequence[Any]) -> dict[str, Tool[..., Any]]:
    found: dict[str, Tool[..., Any]] = {}
    for item in (part for given in tools for part in _parts(given)):
        if item.name in found:
            raise AgentDefinitionError(
                f"tools: {item.name} is there twice", hints=["rename one of the two functions"]
            )
        found[item.name] = item
    return found


def _parts(item: Any) -> list[Tool[..., Any]]:
    """The tools that one entry of an agent's list stands for."""
    name = getattr(item, "__name__", repr(item))
    if class_init(item) is not None:
        return tools_of_class(item)
    if not isinstance(item, Tool):
        raise AgentDefinitionError(f"tools: {name} is not a tool", hints=[f"put @tool on {name}"])
    if item.lacks_object:
        whole = getattr(item, "__qualname__", name)
        home = whole.rpartition(".")[0]
        raise AgentDefinitionError(
            f"tools: {whole} is a method, and nobody says of which object",
            hints=[
                f"put @tool on {home} and pass {home}: each rollout then has an object of its own",
                f"or pass {name} of one object, which all rollouts then share",
            ],
        )
    return [item]


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
            if (wrong := problem_of(message)) is not None:
                problem = f"message {at} {wrong}"
    if problem:
        raise TaskInvalid(
            f"prompt: {problem}, for {where}",
            hints=[
                'return [{"role": "user", "content": "..."}]',
                'show an image as a part of content: [{"type": "image", "image": bytes or data URL}, '
                '{"type": "text", "text": "..."}]',
            ],
        )
    return [dict(message) for message in made]
