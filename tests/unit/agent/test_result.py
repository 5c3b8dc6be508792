"""Results of tools: what is understood, and what is refused."""

import threading
from typing import Any

import pytest
from pydantic import BaseModel

from agentfly.agent import ToolResult, ToolResultInvalid
from agentfly.agent.result import normalise
from agentfly.sandbox import ExecResult


class Point(BaseModel):
    x: int
    y: int = 0


# 1. whatever comes back is one ToolResult


@pytest.mark.parametrize(
    ("value", "observation"),
    [
        ("text", "text"),
        ("", ""),
        (None, ""),
        (3, "3"),
        (2.5, "2.5"),
        (True, "true"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        ({"name": "é"}, '{"name":"é"}'),
        ([1, "b"], '[1,"b"]'),
        (Point(x=1), '{"x":1,"y":0}'),
        (float("nan"), "NaN"),
    ],
)
def test_values_are_normalised(value: Any, observation: str) -> None:
    assert normalise(value) == ToolResult(observation)


def test_command_result_gives_its_text_and_exit_code() -> None:
    ran = ExecResult(
        exit_code=2, signal=None, stdout="out\n", stderr="no such file\n", stdout_truncated=False,
        stderr_truncated=False, timed_out=False, oom=False, wall_s=0.1, cpu_s=0.1,
    )  # fmt: skip
    assert normalise(ran) == ToolResult("out\nno such file", metrics={"exit_code": 2})


def test_tool_result_is_taken_as_it_is() -> None:
    parts = {"images": [b"png"], "metrics": {"files": 2}, "step_reward": 0.5, "anchor": "room 3"}
    result = ToolResult("x", **parts, control="end")
    assert normalise(result) is result


# 2. what cannot be used is refused


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (ToolResult({"a": 1}), "observation is dict, not text"),  # type: ignore[arg-type]
        (ToolResult(None), "observation is NoneType, not text"),  # type: ignore[arg-type]
        (ToolResult("x", control="stop"), r"control 'stop' is unknown \(known: 'end'\)"),  # type: ignore[arg-type]
        (ToolResult("x", metrics=[1]), "metrics is list, not a dict"),  # type: ignore[arg-type]
        (ToolResult("x", metrics={"loss": float("nan")}), "metric 'loss' is nan, not a finite number"),
        (ToolResult("x", metrics={"loss": float("inf")}), "metric 'loss' is inf, not a finite number"),
        (ToolResult("x", metrics={"loss": "1"}), "metric 'loss' is '1', not a finite number"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={"exit_code": None}), "metric 'exit_code' is None"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={7: 1}), "metric 7 is not a name"),  # type: ignore[dict-item]
        (ToolResult("x", metrics={"caf\udce9": 1}), "is not a name"),
        (ToolResult("x", step_reward=float("nan")), "step_reward is nan, not a finite number"),
        (ToolResult("x", step_reward="1"), "step_reward is '1', not a finite number"),  # type: ignore[arg-type]
        (ToolResult("x", anchor=(1, 2)), "anchor is tuple, not text"),  # type: ignore[arg-type]
        (ToolResult("x", images=b"png"), "images is bytes, not a list"),  # type: ignore[arg-type]
        (ToolResult("x", images=["a.png"]), "an image is str, not bytes"),  # type: ignore[list-item]
    ],
)
def test_wrong_tool_result_is_refused(result: ToolResult, problem: str) -> None:
    with pytest.raises(ToolResultInvalid, match=problem) as error:
        normalise(result, "search")
    assert error.value.message.startswith("tool search: ToolResult: ")
    assert error.value.hints


@pytest.mark.parametrize("value", [object(), {1: object}, [threading.Lock()], b"\xff"])
def test_what_has_no_json_is_refused(value: Any) -> None:
    with pytest.raises(ToolResultInvalid, match=rf"^tool search: returned {type(value).__name__} that has"):
        normalise(value, "search")


def test_integer_beyond_floats_is_no_metric() -> None:
    with pytest.raises(ToolResultInvalid, match="not a finite number"):
        normalise(ToolResult("x", metrics={"n": 10**400}))
