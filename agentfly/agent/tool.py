"""Tools: functions that the policy may call.

Guarantees:
1. The schema that the model sees comes from the signature and the docstring; what pydantic can express works:
   optionals, lists, enums, literals, nested models. ``ctx`` is injected and hidden.
2. A definition that would fail in a rollout fails at decoration, naming function, parameter and remedy.
3. Arguments are validated before the call; wrong ones become an observation and a metric, never an exception.
4. A tool is still the plain function: calling it directly runs it, without validation.
5. A plain (not async) tool runs in a thread and never blocks the loop.
6. A method is a tool of the object it is taken from, which all rollouts share. A class stands for those of
   its methods that are tools: each attempt at a rollout has an object of its own, made before the first
   turn, with ``ctx`` and task fields injected into ``__init__``. A class is still the class.

Not here: what a tool may return (``result``), deadlines and exceptions (``agentfly.rollout.calls``).
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from agentfly.agent.docstring import Docstring, parse_docstring
from agentfly.agent.errors import ToolDefinitionError
from agentfly.agent.injected import Injected
from agentfly.agent.result import ToolResult, normalise
from agentfly.agent.signature import Signature, call, read_signature
from agentfly.context import Context

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

_TOOLS = "__agentfly_tools__"  # on a class: what makes the object of a rollout


class Tool(Generic[P, R]):
    """A function with a name, a description and a schema; made by ``@tool``."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._signature = read_signature(function, "tool", ToolDefinitionError)
        self._function = function
        self._object: Any = None
        self._class: type | None = None
        functools.update_wrapper(self, function)
        docstring = _documented(self._signature, function)
        self.name = self._signature.name
        self.description = docstring.description
        self._arguments = _arguments_model(self._signature, docstring)
        self.parameters = _json_schema(self._arguments, self._signature)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> "Tool[..., R]":
        if instance is None or not self._signature.is_method:
            return self
        taken = copy.copy(self)
        taken._object = instance
        taken._function = types.MethodType(self._function, instance)
        return taken

    def __repr__(self) -> str:
        return f"<tool {self.name}{inspect.signature(self._function)}>"

    @property
    def lacks_object(self) -> bool:
        """Whether it is a method that nobody has said the object of."""
        return self._signature.is_method and self._object is None and self._class is None

    def of_class(self, kind: type) -> Self:
        """The method as a tool of the object that each rollout has of this class."""
        taken = copy.copy(self)
        taken._class = kind
        return taken

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
        return normalise(await call(self._bound(ctx), given, ctx), self.name)

    def _bound(self, ctx: Context) -> Signature:
        if self._signature.is_method:
            of = self._object if self._class is None else ctx.instance(self._class)
            return replace(self._signature, function=types.MethodType(self._signature.function, of))
        return self._signature


@overload
def tool(function: type[C]) -> type[C]: ...  # type: ignore[overload-overlap]
@overload
def tool(function: Callable[P, R]) -> Tool[P, R]: ...
def tool(function: Any) -> Any:
    """Make a tool of a function or method, sync or async, that has types and a docstring.

    On a class: make each of its methods that are tools a tool of the object that a rollout gets of it.
    """
    if not inspect.isclass(function):
        return Tool(function)
    if not _methods(function):
        raise ToolDefinitionError(
            f"tool {function.__name__}: has no method that is a tool",
            hints=["put @tool on the methods that the model may call"],
        )
    setattr(function, _TOOLS, ClassInit(function))
    return function


class ClassInit(Injected[..., Any]):
    """Makes the object that a rollout has of a class of tools."""

    kind = "tool class"
    error = ToolDefinitionError


def class_init(kind: Any) -> ClassInit | None:
    """What makes a rollout's object of this class; None if ``@tool`` does not stand on it."""
    found = vars(kind).get(_TOOLS) if inspect.isclass(kind) else None
    return found if isinstance(found, ClassInit) else None


def tools_of_class(kind: type) -> list[Tool[..., Any]]:
    """The tools of a class, in the order in which it defines them, inherited ones first."""
    return [found.of_class(kind) for found in _methods(kind).values()]


def _methods(kind: type) -> dict[str, Tool[..., Any]]:
    names = [name for base in reversed(kind.__mro__) for name in vars(base)]
    found = {name: getattr(kind, name, None) for name in dict.fromkeys(names)}
    return {name: value for name, value in found.items() if isinstance(value, Tool)}


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
        raise _without_schema(signature) from cause


def _without_schema(signature: Signature) -> ToolDefinitionError:
    """The error for the first parameter whose type has no JSON schema."""
    for name in signature.parameters:
        of = signature.types[name]
        try:
            TypeAdapter(of).json_schema()
        except PydanticUserError:
            what = f"parameter {name}: {inspect.formatannotation(of)} has no JSON schema"
            break
    else:  # none by itself, so it is a default
        what = "a parameter has no JSON schema"
    return ToolDefinitionError(
        f"tool {signature.name}: {what}",
        hints=["use str, int, float, bool, list, dict, Literal, Enum, or a pydantic model"],
    )


class _Schema(GenerateJsonSchema):
    """Pydantic's JSON schema without the titles that it makes up from field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _json_schema(model: type[BaseModel], signature: Signature) -> dict[str, Any]:
    try:
        schema = model.model_json_schema(schema_generator=_Schema, by_alias=True)
    except PydanticUserError as cause:
        raise _without_schema(signature) from cause
    schema.pop("title", None)
    return schema


def _explain(called: Tool[..., Any], error: ValidationError) -> str:
    lines = [f"invalid arguments for {called.name}:"]
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in problem["loc"]) or "arguments"
        lines.append(f"- {place}: {problem['msg']}")
    return "\n".join(lines)
