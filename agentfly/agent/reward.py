"""Rewards: functions that judge a rollout, once, after its last turn.

Guarantees:
1. A reward asks for what it needs by name: ``ctx``, and fields of the task's row. A field that the row lacks
   is an error that names the reward, the field, the row and what the row has; a default makes it optional.
2. The return annotation is checked at decoration: float, int, bool, or one of them with None.
3. What comes back at run time is a finite number or None (not scored). Anything else is ``RewardInvalid``
   with the value in it, never a silent 0.0.
4. A reward is still the plain function; a plain (not async) one runs in a thread.
5. Several rewards are judged one after the other, in the order in which they were given, in the same rollout:
   what they acquire is what the tools acquired. Their sum has the weights that were given; where one of them
   left the rollout unscored, the sum does too, and is not what the others say.
"""

import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from agentfly.agent.errors import AgentDefinitionError, RewardDefinitionError, RewardInvalid
from agentfly.agent.injected import Injected
from agentfly.agent.signature import Signature
from agentfly.context import Context

P = ParamSpec("P")
R = TypeVar("R")

# A wrong value is quoted in the error, but a reward may return a megabyte of text by mistake.
_QUOTED = 80


@dataclass(frozen=True)
class Score:
    """A judgement; ``value`` is None where the rollout is left unscored.

    ``parts`` has what each of several rewards said, by name and without its weight; ``unscored`` names those
    that returned None.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    unscored: tuple[str, ...] = ()


class Judge(Protocol):
    """What an agent is judged by: one reward, or several with weights."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise ``TaskInvalid`` if the row lacks a field."""
        ...

    async def score(self, row: Mapping[str, Any], ctx: Context) -> Score:
        """Judge one rollout."""
        ...


class Reward(Injected[P, R]):
    """A function that judges a rollout; made by ``@reward``."""

    kind = "reward"

    def __init__(self, function: Callable[P, R]) -> None:
        super().__init__(function)
        _check_returns(self._signature)

    async def score(self, row: Mapping[str, Any], ctx: Context) -> Score:
        """The reward, or None where the function could not or would not judge."""
        value = await self.call(row, ctx)
        if value is None:
            return Score(None, unscored=(self.name,))
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        if not math.isfinite(number):
            shown = repr(value)
            shown = shown if len(shown) <= _QUOTED else f"{shown[:_QUOTED]}..."
            raise RewardInvalid(
                f"reward {self.name}: {shown} ({type(value).__name__}) is not a finite number",
                hints=["return a float, or None to leave the rollout unscored"],
            )
        return Score(number)


class WeightedRewards:
    """The weighted sum of several rewards."""

    def __init__(self, weights: Mapping[Reward[..., Any], float]) -> None:
        self._weights = dict(weights)
        self.name = " + ".join(f"{weight:g} {part.name}" for part, weight in self._weights.items())

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Raise ``TaskInvalid`` if the row lacks a field that one of them needs."""
        for part in self._weights:
            part.check(row, where)

    async def score(self, row: Mapping[str, Any], ctx: Context) -> Score:
        """The sum, with what each part said."""
        parts: dict[str, float] = {}
        for part in self._weights:
            said = (await part.score(row, ctx)).value
            if said is not None:
                parts[part.name] = said
        if unscored := tuple(part.name for part in self._weights if part.name not in parts):
            return Score(None, parts, unscored)
        total = sum(weight * parts[part.name] for part, weight in self._weights.items())
        if not math.isfinite(total):
            raise RewardInvalid(
                f"reward {self.name}: {total} is not a finite number", hints=["use smaller weights"]
            )
        return Score(total, parts)


def judge_of(reward: Any) -> Judge:
    """The judge that an agent's ``reward`` names: a reward, or a dict from rewards to weights.

    Raises:
        AgentDefinitionError: it is neither.
    """
    if isinstance(reward, Reward):
        return reward
    if reward is None or reward == {}:
        raise AgentDefinitionError("reward: is missing", hints=["pass a function made by @reward"])
    if isinstance(reward, list | tuple):
        names_of = ", ".join(f"{getattr(part, '__name__', part)}: 1.0" for part in reward)
        raise AgentDefinitionError(
            f"reward: is a {type(reward).__name__}, and the sum needs weights",
            hints=[f"write reward={{{names_of}}}"],
        )
    if not isinstance(reward, Mapping):
        raise _no_reward(reward)
    names: set[str] = set()
    for part, weight in reward.items():
        if not isinstance(part, Reward):
            raise _no_reward(part)
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise AgentDefinitionError(
                f"reward: weight {weight!r} of {part.name} is not a finite number",
                hints=[f"write reward={{{part.name}: 1.0, ...}}"],
            )
        if part.name in names:
            raise AgentDefinitionError(
                f"reward: {part.name} is there twice", hints=["rename one of the two functions"]
            )
        names.add(part.name)
    return WeightedRewards(reward)


def _no_reward(given: Any) -> AgentDefinitionError:
    name = getattr(given, "__name__", repr(given))
    return AgentDefinitionError(f"reward: {name} is not a reward", hints=[f"put @reward on {name}"])


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
