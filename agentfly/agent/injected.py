"""Functions that get what they ask for by name: ``ctx``, and fields of the task's row.

Guarantees:
1. A field that the row lacks is an error that names the function, the field, the row and what the row has; a
   default makes it optional.
2. It is still the plain function; a plain (not async) one runs in a thread.
3. A class is made in the same way, from what its ``__init__`` asks for.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

from agentfly.agent.errors import RewardDefinitionError, TaskInvalid
from agentfly.agent.signature import call, from_row, read_signature
from agentfly.context import Context
from agentfly.errors import AgentflyError

P = ParamSpec("P")
R = TypeVar("R")


class Injected(Generic[P, R]):
    """A function, or a class, whose parameters are ``ctx`` and fields of the task's row."""

    kind: ClassVar[str] = "setup"
    error: ClassVar[type[AgentflyError]] = RewardDefinitionError

    def __init__(self, function: Callable[P, R]) -> None:
        self._signature = read_signature(function, self.kind, self.error)
        self._function = function
        if self._signature.is_method:
            raise self.error(
                f"{self.kind} {self._signature.name}: is a method, and nobody says of which object",
                hints=["write it as a function; ctx.instance(Class) is the rollout's object of a tool class"],
            )
        if not inspect.isclass(function):
            functools.update_wrapper(self, function)
        self.name = self._signature.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise ``TaskInvalid`` if the row lacks a field; ``where`` names the row for the message."""
        for field in self._signature.required:
            if field not in row:
                raise TaskInvalid(
                    f"{self.kind} {self.name}: task field {field} is missing in {where}"
                    f" (has: {', '.join(sorted(map(str, row))) or 'nothing'})",
                    hints=["add it to the row, or give the parameter a default"],
                )

    async def call(self, row: Mapping[str, Any], ctx: Context) -> Any:
        """Call the function with what it asks for."""
        return await call(self._signature, from_row(self._signature, row), ctx)
