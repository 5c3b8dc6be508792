"""What a tool call gave, whatever the tool returned.

Guarantees:
1. Text, numbers, dicts, models, command results and ``ToolResult`` are normalised to one ``ToolResult``.
2. What is none of these has no JSON and is an exception of the tool, never a ``repr`` for the policy to read.
3. A result that holds what cannot be used (an observation or anchor that is no text, an image that is no
   bytes, a number that is not finite, an unknown control) is an exception of the tool, ``ToolResultInvalid``,
   that names tool, field, value and remedy.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import PydanticSerializationError, to_json

from agentfly.agent.errors import ToolResultInvalid
from agentfly.sandbox import ExecResult


@dataclass(frozen=True)
class ToolResult:
    """What a tool call gave. What happened and what to do next are two fields: the latter is ``control``.

    Args:
        observation: the text that the policy reads next.
        images: what it sees next, below the text: the bytes of PNG, JPEG, GIF or WebP files. A policy that
            reads text alone cannot see them: its rollout fails and says so.
        metrics: finite numbers to sum up over the rollout, by name.
        step_reward: what this step earned by itself, for estimators that credit steps; the rollout's reward
            stays what the reward function says.
        anchor: names the state that the call left the environment in. Steps of one group with an equal anchor
            are compared with one another.
        control: ``"end"`` ends the rollout after this turn.
    """

    observation: str
    images: Sequence[bytes] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_reward: float | None = None
    anchor: str | None = None
    control: Literal["end"] | None = None


def normalise(value: Any, name: str = "") -> ToolResult:
    """A tool's return value as a ``ToolResult``: text as it is, None as empty text, the rest as JSON.

    Raises:
        ToolResultInvalid: it has no JSON, or is a ``ToolResult`` with something wrong in it; ``name`` is the
            tool's.
    """
    if isinstance(value, ToolResult):
        if problem := _problem(value):
            what, hint = problem
            raise ToolResultInvalid(f"tool {name}: ToolResult: {what}", hints=[hint])
        return value
    if isinstance(value, ExecResult):
        return ToolResult(value.text, metrics={"exit_code": value.exit_code})
    if isinstance(value, str):
        return ToolResult(value)
    if value is None:
        return ToolResult("")
    try:
        return ToolResult(to_json(value, inf_nan_mode="constants").decode())
    except PydanticSerializationError as cause:
        raise ToolResultInvalid(
            f"tool {name}: returned {_kind(value)} that has no JSON: {cause}",
            hints=["return text, what JSON has, a dataclass, a pydantic model, or a ToolResult"],
        ) from cause


def _problem(result: ToolResult) -> tuple[str, str] | None:
    """What is wrong and what to do about it."""
    if not isinstance(result.observation, str):
        hint = "return the value itself to have it written as JSON, or make text of it"
        return f"observation is {_kind(result.observation)}, not text", hint
    if not (result.control is None or result.control == "end"):
        return f"control {result.control!r} is unknown (known: 'end')", 'use control="end", or leave it out'
    if result.step_reward is not None and not _finite(result.step_reward):
        return f"step_reward is {result.step_reward!r}, not a finite number", "leave step_reward out"
    if not (result.anchor is None or isinstance(result.anchor, str)):
        return f"anchor is {_kind(result.anchor)}, not text", "make text of what tells one state from others"
    return _problem_of_images(result.images) or _problem_of_metrics(result.metrics)


def _problem_of_images(images: Any) -> tuple[str, str] | None:
    hint = "write images=[data], each the bytes of a PNG or JPEG file"
    if not isinstance(images, list | tuple):
        return f"images is {_kind(images)}, not a list", hint
    for image in images:
        if not isinstance(image, bytes):
            return f"an image is {_kind(image)}, not bytes", hint
    return None


def _problem_of_metrics(metrics: Any) -> tuple[str, str] | None:
    if not isinstance(metrics, Mapping):
        return f"metrics is {_kind(metrics)}, not a dict", 'write metrics={"name": 1.0}'
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not metric.isprintable():
            return f"metric {metric!r} is not a name", "name metrics by printable text"
        if not _finite(value):
            return f"metric {metric!r} is {value!r}, not a finite number", "leave the metric out"
    return None


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an int beyond floats
        return False


def _kind(value: Any) -> str:
    return type(value).__name__
