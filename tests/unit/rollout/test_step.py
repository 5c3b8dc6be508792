"""The step strategy: a prompt for every turn, and the same environment as under a chain."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.agent import ToolResult, tool
from agentfly.errors import AgentflyError
from agentfly.rollout import Chain, Step, StepTurn, StepView, Trajectory, rollout_one, window
from tests.unit.rollout import toys
from tests.unit.rollout.talkers import says, talking
from tests.unit.rollout.test_chain import play, play_with_model
from tests.unit.rollout.toys import call

LS = call("shell", command="ls")


def one_message(view: StepView) -> list[dict[str, Any]]:
    """As verl-agent: everything in one user message."""
    seen = " | ".join(str(m["content"]) for turn in view.turns for m in turn.observations)
    return [{"role": "user", "content": f"{view.task['what']} at {view.number}, seen: {seen}"}]


# 1. the environment sees the same


def environment(trajectory: Trajectory) -> tuple[Any, ...]:
    calls = [(c.turn, c.name, c.arguments, c.error, c.observation_chars) for c in trajectory.tool_calls]
    counted = (trajectory.turns, trajectory.stop_reason, trajectory.outcome, trajectory.metrics)
    return trajectory.messages, calls, counted


ANSWERS = (
    LS, LS + call("shell", command="b"), "<think>so</think>" + LS, call("unknown"), call("shell", wrong=1),
    "<tool_call>{]</tool_call>", "done",
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=5), st.sampled_from([0, 1, 2, 9]), st.booleans()
)
async def test_same_answers_do_the_same_under_chain_and_step(
    says: list[str], history: int, flat: bool
) -> None:
    limits: dict[str, Any] = {"max_turns": 4, "max_context_tokens": 100_000, "max_prompt_tokens": 100_000}
    builder = one_message if flat else window
    chain = await play(*says, strategy=Chain(**limits))
    step = await play(*says, strategy=Step(**limits, history=history, prompt_builder=builder))
    assert environment(step) == environment(chain)
    assert step.sampled_tokens == chain.sampled_tokens


# 2. the prompt is what the builder makes


async def test_builder_sees_task_opening_and_the_last_turns() -> None:
    views: list[StepView] = []

    def builder(view: StepView) -> Sequence[Any]:
        views.append(view)
        return window(view)

    await play(LS, LS, LS, "done", strategy=Step(history=2, prompt_builder=builder))
    assert [view.number for view in views] == [1, 2, 3, 4]
    assert [len(view.turns) for view in views] == [0, 1, 2, 2]
    assert dict(views[3].task) == dict(toys.TASK)
    assert views[3].opening == [{"role": "user", "content": "do the thing"}]
    seen = ({"role": "tool", "name": "shell", "content": "ran ls in member-1"},)
    assert views[3].turns == (StepTurn(LS, seen), StepTurn(LS, seen))


async def test_prompt_is_what_the_builder_made_and_nothing_else() -> None:
    strategy = Step(history=1, prompt_builder=one_message)
    trajectory, model, _ = await play_with_model(LS, LS, "done", strategy=strategy)
    texts = [model.tokenizer.decode(prompt) for prompt in model.prompts]
    assert [text.partition("user\n")[2].partition("<|im_end|>")[0] for text in texts] == [
        "the thing at 1, seen: ",
        "the thing at 2, seen: ran ls in member-1",
        "the thing at 3, seen: ran ls in member-1",
    ]
    assert [row.prompt_ids for row in trajectory.rows] == model.prompts


async def test_without_history_the_prompt_is_the_task() -> None:
    _, model, _ = await play_with_model(LS, LS, "done", strategy=Step(history=0))
    assert model.prompts[0] == model.prompts[1] == model.prompts[2]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([], " gave no messages: return a list of dicts with role and content"),
        ("text", " gave no messages: return a list of dicts with role and content"),
        ([{"role": "user"}], "'s message 0 (user) has no text in content"),
        ([{"content": "x"}], "'s message 0 is not a dict with a role"),
        (None, " gave no messages: return a list of dicts with role and content"),
    ],
)
async def test_builder_that_makes_no_messages_fails_the_rollout(made: Any, problem: str) -> None:
    trajectory = await play("done", strategy=Step(prompt_builder=lambda view: made))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "PromptError")  # type: ignore[union-attr]
    assert trajectory.outcome.message == f"prompt: TypeError: the prompt builder{problem}"


async def test_builder_that_raises_fails_the_rollout() -> None:
    def broken(view: StepView) -> Sequence[Any]:
        raise KeyError("goal")

    trajectory = await play("done", strategy=Step(prompt_builder=broken))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "PromptError")  # type: ignore[union-attr]


async def test_first_prompt_that_is_too_long_fails_before_the_model_is_asked() -> None:
    trajectory, model, _ = await play_with_model("done", strategy=Step(max_prompt_tokens=10))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "PromptTooLong")
    assert model.prompts == []


async def test_later_prompt_that_is_too_long_ends_the_rollout() -> None:
    strategy = Step(history=50, max_prompt_tokens=250, max_turns=50)
    trajectory, model, _ = await play_with_model(LS, strategy=strategy)
    assert (trajectory.stop_reason, trajectory.reward) == ("context", 1.0)
    assert max(map(len, model.prompts)) <= 250


@pytest.mark.parametrize(("field", "value"), [("max_turns", 0), ("history", -1)])
def test_limit_out_of_its_range_is_refused(field: str, value: int) -> None:
    with pytest.raises(AgentflyError, match=f"{field}: {value} is less than"):
        Step(**{field: value})


# 3. turns


async def test_calls_of_the_last_turn_still_run() -> None:
    trajectory = await play(LS, strategy=Step(max_turns=2))
    assert (trajectory.turns, trajectory.stop_reason, len(trajectory.tool_calls)) == (2, "turns", 2)


# 4. rows


async def test_each_turn_is_a_row_with_its_state_and_reward() -> None:
    @tool
    def move(to: str) -> ToolResult:
        """Go there."""
        return ToolResult(f"at {to}", step_reward=0.5, anchor=to)

    agent = toys.make_agent(tools=[move])
    says = (call("move", to="a"), call("move", to="b"), "done")
    trajectory = await play(*says, agent=agent, strategy=Step(prompt_builder=one_message))
    steps = [[(s.turn, s.anchor, s.step_reward) for s in row.steps] for row in trajectory.rows]
    assert steps == [[(1, "", 0.5)], [(2, "a", 0.5)], [(3, "b", 0.0)]]
    chain = await play(*says, agent=agent)
    assert [[(s.turn, s.anchor, s.step_reward) for s in row.steps] for row in chain.rows] == [
        [(1, "", 0.5), (2, "a", 0.5), (3, "b", 0.0)]
    ]


async def test_prompt_that_goes_on_from_a_row_is_no_row_of_its_own() -> None:
    trajectory, model, _ = await play_with_model(LS, LS, "done", strategy=Step(history=9))
    assert len(trajectory.rows) == 1
    assert trajectory.drift.forks == 0
    row = trajectory.rows[0]
    assert [*row.prompt_ids, *row.response_ids][: len(model.prompts[2])] == model.prompts[2]


@pytest.mark.parametrize(("strategy", "name"), [("Step", "'Step'"), (Step, "Step"), (3, "3")])
async def test_what_is_no_strategy_is_refused(strategy: Any, name: str) -> None:
    async with talking(says("done")) as (model, asked):
        with pytest.raises(AgentflyError) as error:
            await rollout_one(toys.make_agent(), {"what": "tea"}, model=model, strategy=strategy)
    assert error.value.message == f"strategy: {name} is not a strategy"
    assert error.value.hints[0].startswith("pass an object, as in strategy=Step(history=2)")
    assert asked == []
