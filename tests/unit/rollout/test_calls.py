"""Tool calls that end in ways of their own; the numbers are those of agentfly.rollout.calls."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from agentfly.agent import Tool, ToolResult, apart, reward, tool
from agentfly.context import Context, Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import Sampling
from agentfly.rollout import Chain, Failed, Masked, Outcome, Scored, Trajectory, rollout, rollout_one
from agentfly.rollout.calls import OBSERVATION_CHARS
from tests.unit.rollout import toys
from tests.unit.rollout.toys import TASK, FakeResources, Script, ToyTokenizer, call

TOKENIZER = ToyTokenizer(toys.grouping)
PNG = b"\x89PNG\r\n\x1a\n"


@tool
async def act(what: str) -> str:
    """Misbehave."""
    if what == "cling":
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.Event().wait()
    if what == "cancel":
        raise asyncio.CancelledError
    return "x" * int(what)


async def play(what: str, **options: Any) -> Trajectory:
    parts = {name: options.pop(name) for name in ("reward", "setup", "tools") if name in options}
    return await rollout_one(
        toys.make_agent(**{"tools": [act], **parts}),
        TASK,
        model=Script(TOKENIZER, *options.pop("says", [call("act", what=what), "done"])),
        tokenizer=TOKENIZER,
        resources=FakeResources(),
        strategy=Chain(max_context_tokens=options.pop("context", 4096)),
        deadlines=options.pop("deadlines", Deadlines(call=1, turn=5, rollout=10)),
        sampling=Sampling(),
        rollout_id="r-0",
        group_id="r",
    )


def observed(trajectory: Trajectory) -> str:
    (message,) = (message for message in trajectory.messages if message["role"] == "tool")
    return str(message["content"])


# 1. deadlines


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("deadlines", "outcome"),
    [
        (Deadlines(call=0.1, turn=5, rollout=5), Scored(1.0)),
        (
            Deadlines(call=0.1, turn=0.1, rollout=5),
            Masked("turn_deadline", "turn 1 took more than 0.1 s (tool)"),
        ),
        (Deadlines(call=0.1, turn=0.1, rollout=0.1), Masked("deadline", "rollout took more than 0.1 s")),
    ],
)
async def test_tool_that_swallows_its_cancellation_is_over_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, deadlines: Deadlines, outcome: Outcome
) -> None:
    monkeypatch.setattr(apart, "GRACE_S", 0.05)
    began = time.monotonic()
    trajectory = await play("cling", deadlines=deadlines)
    assert time.monotonic() - began < 3
    assert trajectory.outcome == outcome


# 2. exceptions


async def test_tool_that_cancels_itself_is_an_observation() -> None:
    trajectory = await play("cancel")
    assert trajectory.outcome == Scored(1.0)
    assert observed(trajectory) == "RuntimeError: it waited for something that was cancelled"


async def test_reward_that_cancels_itself_fails_its_rollout() -> None:
    @reward
    async def give_up(ctx: Context) -> float:
        raise asyncio.CancelledError

    trajectory = await play("1", reward=give_up)
    assert trajectory.outcome == Failed(
        "RewardError", "reward: RuntimeError: it waited for something that was cancelled"
    )


async def test_setup_that_cancels_itself_fails_its_rollout() -> None:
    async def give_up(ctx: Context) -> None:
        raise asyncio.CancelledError

    trajectory = await play("1", setup=give_up)
    assert trajectory.outcome == Failed(
        "SetupError", "setup: RuntimeError: it waited for something that was cancelled"
    )


def act_by(function: Callable[[], Any]) -> Tool[..., Any]:
    @tool
    def act(what: str) -> Any:
        """Do it."""
        return function()

    return act


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (ToolResult({"a": 1}), "observation is dict, not text"),  # type: ignore[arg-type]
        (ToolResult("x", metrics={"loss": float("nan")}), "metric 'loss' is nan, not a finite number"),
        (ToolResult("x", control="stop"), "control 'stop' is unknown (known: 'end')"),  # type: ignore[arg-type]
    ],
)
async def test_wrong_tool_result_is_an_observation(result: ToolResult, line: str) -> None:
    trajectory = await play("1", tools=[act_by(lambda: result)])
    assert trajectory.outcome == Scored(1.0)
    assert observed(trajectory) == f"ToolResultInvalid: tool act: ToolResult: {line}"
    assert (trajectory.metrics["tool_errors"], "loss" in trajectory.metrics) == (1, False)
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


async def test_sum_of_a_metric_stays_finite() -> None:
    huge = ToolResult("x", metrics={"loss": 1.7e308})
    tools = [act_by(lambda: huge)]
    trajectory = await play("1", tools=tools, says=[call("act", what="1") * 2, "done"])
    assert trajectory.metrics["loss"] == sys.float_info.max
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


class Odd(Exception):
    """An error of a user's module."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Odd("no"), "Odd: no"),
        (AgentflyError("field: is wrong", hints=["see /home/me"]), "AgentflyError: field: is wrong"),
        (OSError("caf\udce9"), "OSError: caf?"),
    ],
)
async def test_line_of_an_exception_has_no_module_and_can_be_written(error: Exception, line: str) -> None:
    trajectory = await play("1", tools=[act_by(raising(error))])
    assert observed(trajectory) == line
    assert trajectory.tool_calls[0].error == f"exception: {line}"
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


async def test_traceback_of_the_first_exception_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    says = [call("act", what="1"), call("act", what="2"), "done"]
    trajectory = await play("1", tools=[act_by(raising(KeyError("at")))], says=says)
    assert trajectory.metrics["tool_errors"] == 2
    (record,) = [record for record in caplog.records if record.name == "agentfly.rollout.calls"]
    assert record.getMessage().endswith("tool act: KeyError: 'at'")
    assert record.exc_info is not None
    assert "test_calls.py" in caplog.text


async def test_message_of_a_failed_rollout_can_be_written() -> None:
    @reward
    def broken(ctx: Context) -> float:
        raise OSError("caf\udce9")

    trajectory = await play("1", reward=broken)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.message.startswith("reward: OSError: caf? (broken at ")
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


async def test_no_rollout_is_missing_when_a_tool_cancels_itself() -> None:
    written: list[Trajectory] = []

    class Sink:
        def finished(self) -> Iterable[Trajectory]:
            return []

        def write(self, trajectory: Trajectory) -> None:
            written.append(trajectory)

    report = await rollout(
        toys.make_agent(tools=[act]),
        [{"what": str(number)} for number in range(4)],
        model=Script(TOKENIZER, call("act", what="cancel"), "done"),
        tokenizer=TOKENIZER,
        resources=FakeResources(),
        strategy=Chain(),
        sink=Sink(),
        deadlines=Deadlines(),
        sampling=Sampling(),
        concurrency=1,
    )
    assert (report.total, report.scored, len(written)) == (4, 4, 4)


# 5. images


async def test_image_for_a_policy_that_reads_text_fails_the_rollout() -> None:
    trajectory = await play("1", tools=[act_by(lambda: ToolResult("see", images=[PNG, PNG]))])
    assert trajectory.outcome == Failed(
        "ImagesNotReadable",
        "tool act: images: the policy reads text alone; "
        "hint: say in text what there is to see; hint: or use a model that sees images",
    )


async def test_step_reward_and_anchor_are_kept_with_the_call() -> None:
    result = ToolResult("moved", step_reward=0.5, anchor="room \udce9")
    trajectory = await play("1", tools=[act_by(lambda: result)])
    (record,) = trajectory.tool_calls
    assert (record.step_reward, record.anchor, trajectory.reward) == (0.5, "room ?", 1.0)
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


# 6. length of an observation


async def test_observation_of_the_limit_is_whole() -> None:
    trajectory = await play(str(OBSERVATION_CHARS), context=10 * OBSERVATION_CHARS, deadlines=Deadlines())
    assert observed(trajectory) == "x" * OBSERVATION_CHARS


async def test_observation_beyond_the_limit_is_cut_and_says_so() -> None:
    trajectory = await play(str(OBSERVATION_CHARS + 7), context=10 * OBSERVATION_CHARS, deadlines=Deadlines())
    assert observed(trajectory) == "x" * OBSERVATION_CHARS + "\n[7 more characters were dropped]"
    assert trajectory.tool_calls[0].observation_chars == len(observed(trajectory))
