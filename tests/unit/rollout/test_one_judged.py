"""One rollout and its reward: guarantees 6 and 7 of ``one``."""

import asyncio
from typing import Any

import pytest

from agentfly.agent import reward
from agentfly.context import Context, Deadlines
from agentfly.errors import AgentflyError
from agentfly.rollout import Failed, Masked
from tests.unit.rollout import toys
from tests.unit.rollout.test_chain import play
from tests.unit.rollout.test_one import LS, outcome, raising_reward


async def test_unscored_rollout_is_masked() -> None:
    @reward
    def unsure() -> float | None:
        return None

    trajectory = await play("done", agent=toys.make_agent(reward=unsure))
    assert trajectory.outcome == Masked("unscored", "reward unsure returned None")
    assert trajectory.rows


@pytest.mark.parametrize("value", ["1.0", float("nan"), float("inf"), [1.0], {"reward": 1}])
async def test_wrong_reward_fails_with_its_value(value: Any) -> None:
    @reward
    def wrong() -> float:
        return value  # type: ignore[no-any-return]

    trajectory = await play("done", agent=toys.make_agent(reward=wrong))
    assert outcome(trajectory) == ("failed", "RewardInvalid")
    assert repr(value) in trajectory.outcome.message
    assert trajectory.reward is None


@pytest.mark.parametrize("sync", [True, False])
async def test_reward_that_raises_is_named_with_its_line(sync: bool) -> None:
    def inner() -> float:
        return 1 / 0

    @reward
    async def broken() -> float:
        return inner()

    @reward
    def plain() -> float:
        return inner()

    trajectory = await play("done", agent=toys.make_agent(reward=plain if sync else broken))
    name, line = ("plain", line_of(plain)) if sync else ("broken", line_of(broken))
    said = f"reward: ZeroDivisionError: division by zero ({name} at {__file__}:{line})"
    assert trajectory.outcome == Failed("RewardError", said)


def line_of(function: Any) -> int:
    code = function.__wrapped__.__code__
    return int(code.co_firstlineno) + 2


async def test_failure_has_the_remedies_of_its_error() -> None:
    error = AgentflyError("x: is wrong", hints=["set x to 1"])
    trajectory = await play("done", agent=toys.make_agent(reward=raising_reward(error)))
    assert trajectory.outcome == Failed("AgentflyError", "x: is wrong; hint: set x to 1")


async def test_reward_over_its_limit_is_masked() -> None:
    @reward
    async def slow() -> float:
        await asyncio.Event().wait()
        return 1.0

    deadlines = Deadlines(call=0.05, turn=0.05)
    trajectory = await play("done", agent=toys.make_agent(reward=slow), deadlines=deadlines)
    assert outcome(trajectory) == ("masked", "reward_deadline")


async def test_reward_gets_the_context_and_the_fields_of_the_task() -> None:
    seen: list[Any] = []

    @reward
    async def judged(ctx: Context, what: str, other: int = 3) -> bool:
        seen.append((ctx.final_response, what, other))
        return True

    trajectory = await play(LS, "the end", agent=toys.make_agent(reward=judged))
    assert seen == [("the end", "the thing", 3)]
    assert trajectory.reward == 1.0
