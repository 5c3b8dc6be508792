"""Prompts that remember; the numbers are those of agentfly.rollout.prompts."""

import asyncio
from typing import Any

import pytest

from agentfly.agent.memory import NOTE_CHARS, NOTES, Notes
from agentfly.context import Context, Deadlines
from agentfly.rollout import Failed, Scored, Step, StepView, Trajectory, rollout_one
from agentfly.rollout.prompts import Summarised, with_notes
from tests.unit.rollout import toys
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call, make_agent, shell

LS = call("shell", command="ls")
LIMITS: dict[str, Any] = {"max_context_tokens": 100_000, "max_prompt_tokens": 100_000}


async def play(*says: str, **options: Any) -> tuple[Trajectory, list[str]]:
    tokenizer = ToyTokenizer(toys.chatml)
    model = Script(tokenizer, *says)
    trajectory = await rollout_one(
        make_agent(tools=[Notes, shell]),
        toys.TASK,
        model=model,
        tokenizer=tokenizer,
        resources=FakeResources(),
        deadlines=options.pop("deadlines", None),
        strategy=Step(**LIMITS, **options),
    )
    return trajectory, [tokenizer.decode(ids) for ids in model.prompts]


# 1. 2. notes


async def test_notes_are_shown_at_the_end_of_the_opening_from_the_next_turn_on() -> None:
    note = call("remember", key="place", text="the shelf")
    trajectory, prompts = await play(note, LS, "done", history=1, prompt_builder=with_notes())
    assert trajectory.outcome == Scored(1.0)
    assert "Your notes" not in prompts[0]
    for prompt in prompts[1:]:
        assert "user\ndo the thing\n\nYour notes:\n- place: the shelf<|im_end|>" in prompt
    assert "written" not in prompts[2]


async def test_notes_that_are_no_tool_of_the_agent_fail_the_rollout() -> None:
    tokenizer = ToyTokenizer(toys.chatml)
    trajectory = await rollout_one(
        make_agent(),
        toys.TASK,
        model=Script(tokenizer, "done"),
        tokenizer=tokenizer,
        strategy=Step(prompt_builder=with_notes()),
    )
    assert isinstance(trajectory.outcome, Failed)
    assert "Notes: is no tool class of this rollout's agent" in trajectory.outcome.message


async def test_notes_are_bounded_and_say_so() -> None:
    ctx, notes = Context("r", {}, FakeResources()), Notes()
    for number in range(NOTES):
        assert (await notes.remember.run({"key": str(number), "text": "x"}, ctx)).observation == "written"
    assert "forget one first" in notes.remember("more", "x")
    assert notes.remember("0", "y") == "written"
    assert f"at most {NOTE_CHARS} characters" in notes.remember("0", "z" * NOTE_CHARS)
    assert (notes.recall("0"), notes.forget("0"), len(notes)) == ("y", "forgotten", NOTES - 1)
    assert (notes.forget("0"), notes.recall("0")[:19]) == ("there is no note 0", "there is no note 0;")


# 3. summaries


async def counted(ctx: Context, text: str) -> str:
    return f"{text.count('ran ')} commands"


async def test_turn_that_leaves_the_window_is_folded_into_the_summary_once() -> None:
    texts: list[str] = []

    async def by(ctx: Context, text: str) -> str:
        texts.append(text)
        return f"summary {len(texts)}"

    says = [call("shell", command=name) for name in "abcd"]
    builder = Summarised(by, keep=1)
    trajectory, prompts = await play(*says, "done", history=2, prompt_builder=builder)
    assert trajectory.turns == 5
    assert [prompt.count("ran ") for prompt in prompts] == [0, 1, 1, 1, 1]
    assert "before" not in prompts[1]
    assert "do the thing\n\nWhat happened before:\nsummary 3<|im_end|>" in prompts[4]
    assert [text.splitlines()[0] for text in texts[1:]] == ["summary 1", "summary 2"]
    assert ["ran a in" in texts[0], "ran b in" in texts[1], "ran c in" in texts[2]] == [True] * 3
    assert "ran a in" not in texts[1]


async def test_wider_history_changes_nothing() -> None:
    says = [call("shell", command=name) for name in "abcd"]
    one = await play(*says, "done", history=2, prompt_builder=Summarised(counted, keep=1))
    other = await play(*says, "done", history=9, prompt_builder=Summarised(counted, keep=1))
    assert one[1] == other[1]


async def test_summary_of_another_rollout_is_not_seen() -> None:
    builder = Summarised(counted, keep=1)
    (_, one), (_, other) = await asyncio.gather(
        *(play(LS, LS, LS, "done", history=2, prompt_builder=builder) for _ in range(2))
    )
    assert one == other


async def test_history_that_is_too_short_is_told() -> None:
    trajectory, _ = await play(LS, LS, "done", history=1, prompt_builder=Summarised(counted, keep=1))
    assert isinstance(trajectory.outcome, Failed)
    assert "keep=1 reads 2 turns, and is shown 1" in trajectory.outcome.message


async def test_builder_that_takes_too_long_fails_the_rollout() -> None:
    async def never(view: StepView) -> Any:
        await asyncio.Event().wait()

    short = Deadlines(call=0.1, turn=0.1, rollout=60)
    trajectory, _ = await play("done", prompt_builder=never, deadlines=short)
    assert trajectory.outcome == Failed("PromptTimeout", "prompt of turn 1 took more than 0.1 s")


@pytest.mark.parametrize("made", [None, [], [{"role": "user"}]])
async def test_coroutine_that_gives_no_messages_is_an_error_of_the_prompt(made: Any) -> None:
    async def builder(view: StepView) -> Any:
        return made

    trajectory, _ = await play("done", prompt_builder=builder)
    assert trajectory.outcome.type == "failed"
    assert trajectory.outcome.reason == "PromptError"
