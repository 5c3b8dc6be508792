"""Tools: functions that the policy may call.

Guarantees:
1. The schema that the model sees comes from the signature and the docstring; what pydantic can express works:
   optionals, lists, enums, literals, nested models. ``ctx`` is injected and hidden.
2. A definition that would fail in a rollout fails at decoration, naming function, parameter and remedy.
3. Arguments are validated before the call; wrong ones become an observation and a metric, never an exception.
4. Text, numbers, dicts, models, command results and ``ToolResult`` are normalised to one ``ToolResult``. One
   whose observation is no text, whose metrics are no finite numbers, or whose control is unknown is an
   exception of the tool: ``ToolResultInvalid``.
5. A tool is still the plain function: calling it directly runs it, without validation.
6. A plain (not async) tool runs in a thread and never blocks the loop.

Not here: deadlines and what happens to exceptions (``agentfly.rollout.calls``).
"""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from agentfly.agent.docstring import Docstring, parse_docstring
from agentfly.agent.errors import ToolDefinitionError, ToolResultInvalid
from agentfly.agent.signature import Signature, call, read_signature
from agentfly.context import Context
from agentfly.sandbox import ExecResult

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ToolResult:
    """What a tool call gave.

    Args:
        observation: the text that the policy reads next.
        metrics: finite numbers to sum up over the rollout, by name.
        control: ``"end"`` ends the rollout after this turn; what happened and what to do next are two fields.
    """

    observation: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    control: Literal["end"] | None = None


class Tool(Generic[P, R]):
    """A function with a name, a description and a schema; made by ``@tool``."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._signature = read_signature(function, "tool", ToolDefinitionError)
        self._function = function
        functools.update_wrapper(self, function)
        docstring = _documented(self._signature, function)
        self.name = self._signature.name
        self.description = docstring.description
        self._arguments = _arguments_model(self._signature, docstring)
        self.parameters = _json_schema(self._arguments, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}{inspect.signature(self._function)}>"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and chat APIs take it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}

    async def run(self, arguments: Mapping[str, Any], ctx: Context) -> ToolResult:
        """Validate the arguments as the model wrote them, call the function, normalise what it returns."""
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            return ToolResult(_explain(self, error), metrics={"invalid_arguments": 1})
        fields = type(checked).model_fields
        given = {str(info.alias): getattr(checked, attribute) for attribute, info in fields.items()}
        return normalise(await call(self._signature, given, ctx), self.name)


def tool(function: Callable[P, R]) -> Tool[P, R]:
    """Make a tool of a function, sync or async, that has types and a docstring."""
    return Tool(function)


def normalise(value: Any, name: str = "") -> ToolResult:
    """A tool's return value as a ``ToolResult``: text as it is, None as empty text, the rest as JSON.

    Raises:
        ToolResultInvalid: it is a ``ToolResult`` with something wrong in it; ``name`` is the tool's.
    """
    if isinstance(value, ToolResult):
        return _checked(value, name)
    if isinstance(value, ExecResult):
        return ToolResult(value.text, metrics={"exit_code": value.exit_code})
    if isinstance(value, str):
        return ToolResult(value)
    if value is None:
        return ToolResult("")
    return ToolResult(to_json(value, fallback=str, inf_nan_mode="constants").decode())


def _checked(result: ToolResult, name: str) -> ToolResult:
    problem, hint = "", ""
    if not isinstance(result.observation, str):
        problem = f"observation is {_kind(result.observation)}, not text"
        hint = "return the value itself to have it written as JSON, or make text of it"
    elif not (result.control is None or result.control == "end"):
        problem, hint = f"control {result.control!r} is unknown", 'use control="end", or leave it out'
    elif not isinstance(result.metrics, Mapping):
        problem, hint = f"metrics is {_kind(result.metrics)}, not a dict", 'write metrics={"name": 1.0}'
    else:
        for metric, value in result.metrics.items():
            if not isinstance(metric, str) or not metric.isprintable():
                problem, hint = f"metric {metric!r} is not a name", "name metrics by printable text"
            elif not _finite(value):
                problem, hint = f"metric {metric!r} is {value!r}, not a finite number", "leave the metric out"
    if problem:
        raise ToolResultInvalid(f"tool {name}: ToolResult: {problem}", hints=[hint])
    return result


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def _kind(value: Any) -> str:
    return type(value).__name__


def _documented(signature: Signature, function: Callable[..., Any]) -> Docstring:
    docstring = parse_docstring(function.__doc__)
    if not docstring.description:
        raise ToolDefinitionError(
            f"tool {signature.name}: has no docstring, so the model would not know what it is for",
            hints=[f'add """What {signature.name} does.""" as the first line of its body'],
        )
    for name in docstring.arguments:
        if name not in signature.parameters and name != "ctx":
            raise ToolDefinitionError(
                f"tool {signature.name}: the docstring describes {name}, which is not a parameter"
                f" (has: {', '.join(signature.parameters) or 'none'})",
                hints=[f"rename or remove {name} in the Args section"],
            )
    return docstring


def _arguments_model(signature: Signature, docstring: Docstring) -> type[BaseModel]:
    """A model with one field for each argument.

    Attributes get names of their own and the arguments' names are aliases, so that an argument may be called
    ``schema``, ``json`` or ``model_config`` without meeting pydantic's own.
    """
    fields: dict[str, Any] = {}
    for at, (name, parameter) in enumerate(signature.parameters.items()):
        if name not in signature.types:
            raise ToolDefinitionError(
                f"tool {signature.name}: parameter {name} has no type",
                hints=[f"annotate it, for example `{name}: str`", "a Context is injected as `ctx`"],
            )
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        described: dict[str, Any] = {}
        if name in docstring.arguments:
            described["description"] = docstring.arguments[name]
        info: Any = Field(default, alias=name, **described)
        fields[f"argument_{at}"] = (signature.types[name], info)
    try:
        config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        return create_model(signature.name, __config__=config, **fields)
    except PydanticUserError as cause:
        raise ToolDefinitionError(
            f"tool {signature.name}: an argument's type has no JSON schema ({_first_line(cause)})",
            hints=["use str, int, float, bool, list, dict, Literal, Enum, or a pydantic model"],
        ) from cause


class _Schema(GenerateJsonSchema):
    """Pydantic's JSON schema without the titles that it makes up from field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Schema, by_alias=True)
    except PydanticUserError as cause:
        raise ToolDefinitionError(
            f"tool {name}: an argument's type has no JSON schema ({_first_line(cause)})",
            hints=["use str, int, float, bool, list, dict, Literal, Enum, or a pydantic model"],
        ) from cause
    schema.pop("title", None)
    return schema


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _explain(called: Tool[..., Any], error: ValidationError) -> str:
    lines = [f"invalid arguments for {called.name}:"]
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in problem["loc"]) or "arguments"
        lines.append(f"- {place}: {problem['msg']}")
    return "\n".join(lines)
