"""Rewards: functions that judge a rollout, once, after its last turn.

Guarantees:
1. A reward asks for what it needs by name: ``ctx``, and fields of the task's row. A field that the row lacks
   is an error that names the reward, the field, the row and what the row has; a default makes it optional.
2. The return annotation is checked at decoration: float, int, bool, or one of them with None.
3. What comes back at run time is a finite number or None (not scored). Anything else is ``RewardInvalid``
   with the value in it, never a silent 0.0.
4. A reward is still the plain function; a plain (not async) one runs in a thread.

Setup functions are injected in the same way and live here for that reason; they return nothing.
"""

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

from agentfly.agent.errors import RewardDefinitionError, RewardInvalid, TaskInvalid
from agentfly.agent.signature import Signature, call, from_row, read_signature
from agentfly.context import Context

P = ParamSpec("P")
R = TypeVar("R")

# A wrong value is quoted in the error, but a reward may return a megabyte of text by mistake.
_QUOTED = 80


class Injected(Generic[P, R]):
    """A function whose parameters are ``ctx`` and fields of the task's row."""

    kind = "setup"

    def __init__(self, function: Callable[P, R]) -> None:
        self._signature = read_signature(function, self.kind, RewardDefinitionError)
        self._function = function
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


class Reward(Injected[P, R]):
    """A function that judges a rollout; made by ``@reward``."""

    kind = "reward"

    def __init__(self, function: Callable[P, R]) -> None:
        super().__init__(function)
        _check_returns(self._signature)

    async def score(self, row: Mapping[str, Any], ctx: Context) -> float | None:
        """The reward, or None where the function could not or would not judge."""
        value = await self.call(row, ctx)
        if value is None:
            return None
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        if not math.isfinite(number):
            shown = repr(value)
            shown = shown if len(shown) <= _QUOTED else f"{shown[:_QUOTED]}..."
            raise RewardInvalid(
                f"reward {self.name}: {shown} ({type(value).__name__}) is not a finite number",
                hints=["return a float, or None to leave the rollout unscored"],
            )
        return number


def reward(function: Callable[P, R]) -> Reward[P, R]:
    """Make a reward of a function, sync or async, whose return annotation says that it gives a number."""
    return Reward(function)


def _check_returns(signature: Signature) -> None:
    returns = signature.returns
    union = typing.get_origin(returns) in (typing.Union, types.UnionType)
    members = typing.get_args(returns) if union else (returns,)
    numeric = {member for member in members if member in (float, int, bool)}
    if numeric and set(members) <= numeric | {type(None)}:
        return
    if returns is inspect.Parameter.empty:
        problem = "has no return annotation"
    else:
        problem = f"returns {inspect.formatannotation(returns)}, which is not a number"
    raise RewardDefinitionError(
        f"reward {signature.name}: {problem}",
        hints=["annotate it `-> float`, or `-> float | None` if it may leave a rollout unscored"],
    )
