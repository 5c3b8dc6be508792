"""Rewards: what they ask for, what they may return."""

import decimal
import fractions
import math
import threading
from typing import Any, Optional

import pytest

from agentfly.agent import AgentDefinitionError, RewardDefinitionError, RewardInvalid, TaskInvalid, reward
from agentfly.agent.injected import Injected
from agentfly.agent.reward import Score, judge_of
from agentfly.context import Context
from tests.unit.rollout.toys import FakeResources


def context() -> Context:
    return Context("r", {}, FakeResources())


# 1. injection by name


async def test_fields_and_context_are_injected_by_name() -> None:
    @reward
    async def judged(answer: str, ctx: Context, weight: float = 2.0) -> float:
        return weight * (answer == ctx.rollout_id)

    row = {"answer": "r", "other": 1}
    assert await judged.score(row, context()) == Score(2.0)
    assert await judged.score({**row, "weight": 3.0}, context()) == Score(3.0)


def test_missing_field_is_told_with_row_and_remedy() -> None:
    @reward
    def tests_pass(test_command: str) -> float:
        return 1.0

    with pytest.raises(TaskInvalid) as error:
        tests_pass.check({"prompt": "", "id": 3, "repo": ""}, "row 17 of tasks.jsonl")
    assert error.value.message == (
        "reward tests_pass: task field test_command is missing in row 17 of tasks.jsonl"
        " (has: id, prompt, repo)"
    )
    assert error.value.hints == ("add it to the row, or give the parameter a default",)


def test_optional_field_may_be_missing() -> None:
    @reward
    def judged(hint: str = "") -> float:
        return 1.0

    judged.check({}, "row 0")


def test_untyped_fields_are_fine() -> None:
    @reward
    def judged(answer, ctx) -> float:  # type: ignore[no-untyped-def]
        return 1.0

    judged.check({"answer": 1}, "row 0")


# 2. the return annotation


@pytest.mark.parametrize(
    "annotation",
    [float, int, bool, float | None, int | None, Optional[float], None | bool, int | float],  # noqa: UP045
)
def test_numeric_annotation_is_accepted(annotation: Any) -> None:
    def judged() -> Any:
        return 1

    judged.__annotations__["return"] = annotation
    assert reward(judged).name == "judged"


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (str, "returns str, which is not a number"),
        (dict[str, float], "which is not a number"),
        (float | str, "which is not a number"),
        (None, "which is not a number"),
        (Any, "which is not a number"),
    ],
)
def test_other_annotation_is_refused(annotation: Any, problem: str) -> None:
    def judged() -> Any:
        return 1

    judged.__annotations__["return"] = annotation
    with pytest.raises(RewardDefinitionError, match=problem) as error:
        reward(judged)
    assert "-> float" in error.value.hints[0]


def test_missing_annotation_is_refused() -> None:
    def judged():  # type: ignore[no-untyped-def]
        return 1

    with pytest.raises(RewardDefinitionError, match="reward judged: has no return annotation"):
        reward(judged)


def test_open_parameters_are_refused() -> None:
    def judged(**row: str) -> float:
        return 1

    with pytest.raises(RewardDefinitionError, match=r"reward judged: parameter \*\*row"):
        reward(judged)


# 3. what comes back


def returning(value: Any) -> Any:
    @reward
    def judged() -> float | None:
        return value  # type: ignore[no-any-return]

    return judged


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (True, 1.0), (False, 0.0), (-0.5, -0.5), (fractions.Fraction(1, 2), 0.5), (None, None)],
)
async def test_numbers_are_scores(value: Any, score: float | None) -> None:
    assert (await returning(value).score({}, context())).value == score


@pytest.mark.parametrize(
    "value",
    ["0.5", "", float("nan"), float("inf"), -float("inf"), [1.0], {}, 1j, decimal.Decimal(1), object()],
)
async def test_anything_else_is_an_error_with_its_value(value: Any) -> None:
    with pytest.raises(RewardInvalid) as error:
        await returning(value).score({}, context())
    assert f"reward judged: {value!r} ({type(value).__name__}) is not a finite number" == error.value.message


async def test_long_value_is_quoted_in_part() -> None:
    with pytest.raises(RewardInvalid) as error:
        await returning("x" * 10_000).score({}, context())
    assert len(error.value.message) < 200


# 4. still the plain function


async def test_plain_reward_runs_in_a_thread_and_stays_callable() -> None:
    seen: list[str] = []

    @reward
    def judged(answer: int) -> float:
        seen.append(threading.current_thread().name)
        return answer * 2

    assert judged(answer=3) == 6
    assert await judged.score({"answer": 4}, context()) == Score(8.0)
    assert seen == ["MainThread", "agentfly-call"]


async def test_setup_is_injected_in_the_same_way() -> None:
    seen: list[Any] = []

    async def prepare(ctx: Context, files: dict[str, str]) -> None:
        seen.append((ctx.rollout_id, files))

    setup = Injected(prepare)
    with pytest.raises(TaskInvalid, match="setup prepare: task field files is missing in row 1"):
        setup.check({}, "row 1")
    await setup.call({"files": {"a": "b"}}, context())
    assert seen == [("r", {"a": "b"})]


def test_method_cannot_be_a_reward() -> None:
    class Judge:
        def judged(self) -> float:
            return 1.0

    with pytest.raises(RewardDefinitionError, match="reward judged: is a method") as error:
        reward(Judge.judged)
    assert "ctx.instance(Class)" in error.value.hints[0]


# 5. several rewards


@reward
async def solved(ctx: Context, answer: str) -> float | None:
    ctx.instances[list] = [*ctx.instances.get(list, []), "solved"]
    return {"right": 1.0, "wrong": 0.0}.get(answer)


@reward
def brief(ctx: Context, words: int = 10) -> float:
    ctx.instances[list] = [*ctx.instances.get(list, []), "brief"]
    return -words


async def test_several_rewards_are_summed_by_weight_in_their_order() -> None:
    both, ctx = judge_of({solved: 1.0, brief: 0.1}), context()
    assert await both.score({"answer": "right", "words": 5}, ctx) == Score(0.5, {"solved": 1, "brief": -5})
    assert (both.name, ctx.instances[list]) == ("1 solved + 0.1 brief", ["solved", "brief"])


async def test_sum_with_an_unscored_part_is_unscored() -> None:
    both = judge_of({solved: 1.0, brief: 0.1})
    assert await both.score({"answer": "?", "words": 5}, context()) == Score(None, {"brief": -5}, ("solved",))


def test_fields_of_every_part_are_asked_for() -> None:
    with pytest.raises(TaskInvalid, match="reward solved: task field answer is missing in row 1"):
        judge_of({brief: 1.0, solved: 1.0}).check({}, "row 1")


async def test_sum_beyond_floats_is_invalid() -> None:
    with pytest.raises(RewardInvalid, match="is not a finite number"):
        await judge_of({brief: 1e308}).score({"words": 100}, context())


def twin() -> Any:
    @reward
    def brief() -> float:
        return 0.0

    return brief


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "reward: is missing"),
        ({len: 1.0}, "reward: len is not a reward"),
        ([brief, solved], "reward: is a list, and the sum needs weights"),
        (3, "reward: 3 is not a reward"),
        ({brief: "1"}, "reward: weight '1' of brief is not a finite number"),
        ({brief: math.inf}, "reward: weight inf of brief is not a finite number"),
        ({brief: 1.0, twin(): 1.0}, "reward: brief is there twice"),
    ],
)
def test_what_is_no_reward_is_told(given: Any, problem: str) -> None:
    with pytest.raises(AgentDefinitionError, match=problem) as error:
        judge_of(given)
    assert error.value.hints


def test_list_of_rewards_is_answered_with_the_dict_to_write() -> None:
    with pytest.raises(AgentDefinitionError) as error:
        judge_of([brief, solved])
    assert error.value.hints == ("write reward={brief: 1.0, solved: 1.0}",)


def test_context_of_another_name_is_refused() -> None:
    def judged(context: Context) -> float:
        return 1.0

    with pytest.raises(RewardDefinitionError) as error:
        reward(judged)
    said = "reward judged: parameter context is a Context, which is injected as ctx\n  hint: name it ctx"
    assert error.value.render() == said
