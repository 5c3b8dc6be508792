"""What a user's function asks for, read from its signature.

Guarantees:
1. ``ctx`` is injected by name and never part of what the model or the task has to supply.
2. A signature that cannot be called by name (``*args``, ``**kwargs``, positional-only) is refused with the
   function, the parameter and a remedy in the error.
3. The ``self`` of a method, and that of the ``__init__`` of a class, is nobody's to supply.
4. Annotations are resolved, also postponed ones; one that cannot be is an error at decoration. So is a
   ``Context`` under another name.
"""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentfly.agent.apart import apart
from agentfly.agent.threads import in_thread
from agentfly.context import Context
from agentfly.errors import AgentflyError

CONTEXT = "ctx"


@dataclass(frozen=True)
class Signature:
    """A function's own parameters (without ``ctx``), their types, and what it returns.

    ``types`` holds the annotated parameters only; ``returns`` is ``inspect.Parameter.empty`` without one.
    """

    function: Callable[..., Any]
    name: str
    parameters: dict[str, inspect.Parameter]
    types: dict[str, Any]
    returns: Any
    takes_context: bool
    is_async: bool
    is_method: bool

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the parameters without a default."""
        empty = inspect.Parameter.empty
        return tuple(name for name, parameter in self.parameters.items() if parameter.default is empty)


def read_signature(function: Callable[..., Any], kind: str, error: type[AgentflyError]) -> Signature:
    """Read the signature of a function, of a method, or of what makes an object of a class.

    Args:
        function: the function or class as the user wrote it.
        kind: what it is to become, for messages: ``tool``, ``reward`` or ``setup``.
        error: what to raise when it cannot be that.
    """
    name, of_class = getattr(function, "__name__", ""), inspect.isclass(function)
    if not (inspect.isfunction(function) or of_class) or name == "<lambda>":
        raise error(
            f"{kind}: {function!r} is not a function with a name",
            hints=[f"write it as `def name(...)` with @{kind}"],
        )
    parameters = dict(inspect.signature(function).parameters)
    is_method = _is_method(function, parameters)
    if is_method:
        del parameters["self"]
    for parameter in parameters.values():
        _check_callable_by_name(parameter, f"{kind} {name}", error)
    try:
        types = typing.get_type_hints(function.__init__ if of_class else function, include_extras=True)
    except Exception as cause:
        raise error(
            f"{kind} {name}: an annotation cannot be resolved ({cause})",
            hints=["import the type at module level, where the function is defined"],
        ) from cause
    returns = types.pop("return", inspect.Parameter.empty)
    takes_context = parameters.pop(CONTEXT, None) is not None
    types.pop(CONTEXT, None)
    for parameter_name, of in types.items():
        if of is Context or Context in typing.get_args(of):
            raise error(
                f"{kind} {name}: parameter {parameter_name} is a Context, which is injected as {CONTEXT}",
                hints=[f"name it {CONTEXT}"],
            )
    is_async = inspect.iscoroutinefunction(function)
    return Signature(function, name, parameters, types, returns, takes_context, is_async, is_method)


def _is_method(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether it was defined in the body of a class: a plain function may call an argument ``self``."""
    home = function.__qualname__.rpartition(".")[0]
    in_class = inspect.isfunction(function) and home != "" and not home.endswith("<locals>")
    return in_class and next(iter(parameters), "") == "self"


def _check_callable_by_name(parameter: inspect.Parameter, label: str, error: type[AgentflyError]) -> None:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise error(
            f"{label}: parameter {parameter} has no schema, because its names are open",
            hints=[f"replace {parameter} by named parameters"],
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise error(
            f"{label}: parameter {parameter.name} is positional-only and cannot be passed by name",
            hints=[f"remove the `/` after {parameter.name}"],
        )


async def call(signature: Signature, arguments: Mapping[str, Any], ctx: Context) -> Any:
    """Call the function by name, with ``ctx`` if it asks: in a task of its own, a plain one in a thread."""
    given = dict(arguments)
    if signature.takes_context:
        given[CONTEXT] = ctx
    function = partial(signature.function, **given)
    return await (apart(function, signature.name) if signature.is_async else in_thread(function))


def from_row(signature: Signature, row: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the task's row supplies; parameters with a default may be absent from it."""
    return {name: row[name] for name in signature.parameters if name in row}
