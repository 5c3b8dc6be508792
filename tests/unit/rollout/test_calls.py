"""Tool calls that end in ways of their own; the numbers are those of agentfly.rollout.calls."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any

import pytest

from agentfly.agent import apart, reward, tool
from agentfly.context import Context, Deadlines
from agentfly.models import Sampling
from agentfly.rollout import Chain, Failed, Masked, Outcome, Scored, Trajectory, rollout, rollout_one
from agentfly.rollout.calls import OBSERVATION_CHARS
from tests.unit.rollout import toys
from tests.unit.rollout.toys import TASK, FakeResources, Script, ToyTokenizer, call

TOKENIZER = ToyTokenizer(toys.grouping)


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
    parts = {name: options.pop(name) for name in ("reward", "setup") if name in options}
    return await rollout_one(
        toys.make_agent(tools=[act], **parts),
        TASK,
        model=Script(TOKENIZER, call("act", what=what), "done"),
        tokenizer=TOKENIZER,
        resources=FakeResources(),
        strategy=Chain(max_context_tokens=options.pop("context", 4096)),
        deadlines=options.pop("deadlines", Deadlines(call=0.05, turn=5, rollout=10)),
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
        (Deadlines(call=0.1, turn=0.1, rollout=5), Masked("turn_deadline", "turn 1 took more than 0.1 s")),
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


# 5. length of an observation


async def test_observation_of_the_limit_is_whole() -> None:
    trajectory = await play(str(OBSERVATION_CHARS), context=10 * OBSERVATION_CHARS, deadlines=Deadlines())
    assert observed(trajectory) == "x" * OBSERVATION_CHARS


async def test_observation_beyond_the_limit_is_cut_and_says_so() -> None:
    trajectory = await play(str(OBSERVATION_CHARS + 7), context=10 * OBSERVATION_CHARS, deadlines=Deadlines())
    assert observed(trajectory) == "x" * OBSERVATION_CHARS + "\n[7 more characters were dropped]"
    assert trajectory.tool_calls[0].observation_chars == len(observed(trajectory))
