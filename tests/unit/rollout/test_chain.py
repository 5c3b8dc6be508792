"""The chain strategy and its tool calls, played by a model that says what it is told."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from agentfly.agent import ToolResult, tool
from agentfly.context import Context, Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import ModelUnavailable, Sampling, VLLMModel
from agentfly.rollout import Chain, Masked, Trajectory, rollout_one
from tests.unit.models.test_vllm import serving
from tests.unit.rollout import toys
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call, sampled

Play = Callable[..., Any]


async def play(*says: Any, **options: Any) -> Trajectory:
    trajectory, _, _ = await play_with_model(*says, **options)
    return trajectory


async def play_with_model(*says: Any, **options: Any) -> tuple[Trajectory, Script, FakeResources]:
    tokenizer = ToyTokenizer(options.pop("render", toys.grouping))
    model, resources = Script(tokenizer, *says), options.pop("resources", None) or FakeResources()
    trajectory = await rollout_one(
        options.pop("agent", None) or toys.make_agent(),
        toys.TASK,
        model=model,
        tokenizer=tokenizer,
        resources=resources,
        strategy=options.pop("strategy", Chain()),
        deadlines=options.pop("deadlines", Deadlines()),
        sampling=options.pop("sampling", Sampling()),
        rollout_id=options.pop("rollout_id", "r"),
        group_id="g",
        **options,
    )
    assert resources.held == {}
    return trajectory, model, resources


def observations(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


async def test_answer_without_a_call_ends_the_rollout() -> None:
    trajectory = await play("done")
    assert (trajectory.turns, trajectory.stop_reason, trajectory.reward) == (1, "done", 1.0)
    assert trajectory.tool_calls == []


async def test_calls_are_run_and_their_observations_read() -> None:
    trajectory, model, _ = await play_with_model(call("shell", command="ls"), "done")
    assert (trajectory.turns, trajectory.stop_reason) == (2, "done")
    assert observations(trajectory) == ["ran ls in member-1"]
    assert "ran ls in member-1" in model.tokenizer.decode(model.prompts[1])
    record = trajectory.tool_calls[0]
    assert (record.turn, record.name, record.arguments, record.error) == (1, "shell", {"command": "ls"}, None)
    assert record.observation_chars == len("ran ls in member-1")


async def test_prompt_of_each_turn_starts_with_the_row_before_it() -> None:
    _, model, _ = await play_with_model(call("shell", command="a"), call("shell", command="b"), "done")
    first, second, third = model.prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second


async def test_calls_of_one_turn_run_in_their_order() -> None:
    text = call("shell", command="first") + "\n" + call("shell", command="second")
    assert observations(await play(text, "done")) == ["ran first in member-1", "ran second in member-1"]


# 1. the context budget is checked before generating


async def test_context_never_exceeds_its_budget() -> None:
    for budget in range(40, 200, 7):
        strategy = Chain(max_turns=50, max_tokens_per_turn=25, max_context_tokens=budget)
        trajectory, model, _ = await play_with_model(call("shell", command="look"), strategy=strategy)
        for prompt, (_, sampling) in zip(model.prompts, model.requests, strict=True):
            assert 1 <= sampling.max_tokens <= 25
            assert len(prompt) + sampling.max_tokens <= budget
        assert sum(len(row.prompt_ids) + len(row.response_ids) for row in trajectory.rows) <= budget


async def test_used_up_context_stops_with_its_reason() -> None:
    trajectory = await play(
        call("shell", command="look"), strategy=Chain(max_context_tokens=100, max_turns=99)
    )
    assert trajectory.stop_reason == "context"
    assert trajectory.reward == 1.0


async def test_prompt_without_room_for_an_answer_fails() -> None:
    trajectory, model, _ = await play_with_model("done", strategy=Chain(max_context_tokens=10))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "PromptTooLong")
    assert (trajectory.rows, model.prompts) == ([], [])


async def test_prompt_above_its_own_limit_fails_before_the_model_is_asked() -> None:
    trajectory, model, _ = await play_with_model("done", strategy=Chain(max_prompt_tokens=10))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "PromptTooLong")
    assert trajectory.outcome.message.endswith("tokens, over the limit of 10")
    assert (trajectory.rows, model.prompts) == ([], [])


# 3. and 4. a full context

LOOK = call("shell", command="look around")


async def test_oldest_turns_are_left_out_of_a_full_context() -> None:
    strategy = Chain(max_turns=12, max_tokens_per_turn=60, max_context_tokens=400, when_full="drop_oldest")
    trajectory, model, _ = await play_with_model(LOOK, strategy=strategy)
    assert (trajectory.stop_reason, trajectory.turns, trajectory.reward) == ("turns", 12, 1.0)
    assert len(observations(trajectory)) == 12  # what is left out of the prompt was said all the same
    opening = model.prompts[0][:-2]
    for prompt, (_, sampling) in zip(model.prompts, model.requests, strict=True):
        assert prompt[: len(opening)] == opening
        assert len(prompt) + sampling.max_tokens <= 400
    shorter = [at for at in range(1, 12) if len(model.prompts[at]) < len(model.prompts[at - 1])]
    assert shorter
    assert all(len(model.prompts[at]) <= 200 for at in shorter)
    assert len(trajectory.rows) == len(shorter) + 1
    assert trajectory.drift.forks == 0
    left = (
        sum(1 for m in trajectory.messages if m["role"] == "assistant") - trajectory.metrics["dropped_turns"]
    )
    assert model.tokenizer.decode(model.prompts[-1]).count("look around") / 2 == left - 1


async def test_what_is_left_out_are_the_oldest_turns() -> None:
    says = [call("shell", command=f"number {n}") for n in range(12)]
    strategy = Chain(max_turns=12, max_tokens_per_turn=60, max_context_tokens=400, when_full="drop_oldest")
    _, model, _ = await play_with_model(*says, strategy=strategy)
    for turn, prompt in enumerate(model.prompts):
        text = model.tokenizer.decode(prompt)
        seen = [n for n in range(12) if f"ran number {n} " in text]
        assert seen == list(range(turn - len(seen), turn))
        assert text.startswith("<|im_start|>user\ndo the thing<|im_end|>")


async def test_context_that_one_turn_fills_stops_the_rollout() -> None:
    strategy = Chain(max_turns=9, max_tokens_per_turn=60, max_context_tokens=100, when_full="drop_oldest")
    trajectory = await play(LOOK, strategy=strategy)
    assert (trajectory.stop_reason, trajectory.reward) == ("context", 1.0)


async def test_policy_goes_on_from_its_own_summary() -> None:
    strategy = Chain(max_turns=9, max_tokens_per_turn=250, max_context_tokens=950, when_full="summarise")
    says = [LOOK, LOOK, LOOK, LOOK, "<think>hm</think> the port is 53", LOOK, "done"]
    trajectory, model, _ = await play_with_model(*says, strategy=strategy)
    asked = next(
        at for at, p in enumerate(model.prompts) if "Write down everything" in model.tokenizer.decode(p)
    )
    assert says[asked] == "<think>hm</think> the port is 53"
    after = model.tokenizer.decode(model.prompts[asked + 1])
    assert after == (
        "<|im_start|>user\ndo the thing\n\nYou have worked on this before, and wrote down:\nthe port is 53"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (trajectory.stop_reason, trajectory.metrics["summaries"], trajectory.turns) == ("done", 1, 7)
    assert not any("53" in m["content"] for m in trajectory.messages)
    assert [[step.turn for step in row.steps] for row in trajectory.rows] == [[1, 2, 3, 4, 5], [6, 7]]
    assert all(len(row.prompt_ids) + len(row.response_ids) <= 950 for row in trajectory.rows)


async def test_full_context_without_room_for_the_request_stops_the_rollout() -> None:
    strategy = Chain(max_turns=20, max_tokens_per_turn=60, max_context_tokens=300, when_full="summarise")
    trajectory = await play(LOOK, strategy=strategy)
    assert (trajectory.stop_reason, trajectory.metrics["summaries"]) == ("context", 0)


async def test_summaries_are_turns_and_end_with_them() -> None:
    strategy = Chain(max_turns=11, max_tokens_per_turn=250, max_context_tokens=950, when_full="summarise")
    trajectory = await play(LOOK, strategy=strategy)
    assert (trajectory.stop_reason, trajectory.turns) == ("turns", 11)
    assert trajectory.metrics["summaries"] + len(trajectory.tool_calls) == 11


def test_unknown_policy_for_a_full_context_is_refused() -> None:
    with pytest.raises(AgentflyError, match="when_full: 'explode' is not known"):
        Chain(when_full="explode")


# 2. at most so many turns; the last one's calls still run


async def test_calls_of_the_last_turn_still_run() -> None:
    trajectory = await play(call("shell", command="ls"), strategy=Chain(max_turns=2))
    assert (trajectory.turns, trajectory.stop_reason) == (2, "turns")
    assert len(trajectory.tool_calls) == 2
    assert trajectory.rows[0].response_mask[-1] == 1


async def test_answer_cut_by_its_limit_is_told_apart() -> None:
    trajectory = await play("an answer that is too long", strategy=Chain(max_tokens_per_turn=5))
    assert (trajectory.stop_reason, trajectory.sampled_tokens) == ("length", 5)


async def test_call_cut_by_its_limit_is_told_to_the_policy() -> None:
    strategy = Chain(max_tokens_per_turn=10)
    trajectory = await play(call("shell", command="ls"), "done", strategy=strategy)
    assert observations(trajectory)[0].startswith("malformed tool call: not valid JSON")
    assert trajectory.metrics["malformed_calls"] == 1
    assert trajectory.stop_reason == "done"


@pytest.mark.parametrize("name", ["max_turns", "max_tokens_per_turn", "max_context_tokens"])
def test_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(AgentflyError, match=f"{name}: 0 is less than 1"):
        Chain(**{name: 0})


# 3. a turn over its deadline


async def test_answer_cut_by_the_turns_deadline_is_masked_and_not_drawn_again() -> None:
    deadlines = Deadlines(call=0.02, turn=0.02, rollout=60)
    trajectory, model, _ = await play_with_model(asyncio.Event(), deadlines=deadlines)
    assert trajectory.outcome == Masked("turn_deadline", "turn 1 took more than 0.02 s (generate)")
    assert (trajectory.attempt, len(model.prompts)) == (0, 1)


async def test_server_that_is_still_answering_at_the_deadline_masks_the_rollout() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1)
        return web.Response()

    async with serving(handler) as url, VLLMModel(url) as model:
        trajectory = await rollout_one(
            toys.make_agent(), toys.TASK, model=model, tokenizer=ToyTokenizer(toys.grouping),
            resources=FakeResources(), strategy=Chain(), sampling=Sampling(), rollout_id="r", group_id="g",
            deadlines=Deadlines(call=0.2, turn=0.2, rollout=60),
        )  # fmt: skip
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("masked", "turn_deadline")  # type: ignore[union-attr]


async def test_server_that_is_not_there_is_an_infrastructure_failure() -> None:
    error = ModelUnavailable("model: connection refused")
    trajectory, model, _ = await play_with_model(error)
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "ModelUnavailable")
    assert (trajectory.attempt, len(model.prompts)) == (1, 2)


async def test_slow_tools_of_a_turn_mask_the_rollout() -> None:
    @tool
    async def slow() -> str:
        """Take long."""
        await asyncio.sleep(0.04)
        return "ok"

    agent = toys.make_agent(tools=[slow])
    text = call("slow") * 20
    trajectory = await play(text, agent=agent, deadlines=Deadlines(call=0.08, turn=0.1, rollout=60))
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("masked", "turn_deadline")
    assert (trajectory.reward, trajectory.attempt) == (None, 0)


# 4. an aborted answer is continued


async def test_aborted_answer_is_continued_from_where_it_stopped() -> None:
    tokenizer = ToyTokenizer(toys.grouping)
    begun = sampled(tokenizer.encode("do", add_special_tokens=False), finish="abort", version="1")
    rest = sampled(
        [*tokenizer.encode("ne", add_special_tokens=False), tokenizer.special("<|im_end|>")], version="2"
    )
    trajectory, model, _ = await play_with_model(begun, rest)
    assert trajectory.messages[-1] == {"role": "assistant", "content": "done"}
    assert model.prompts[1] == model.prompts[0] + begun.ids
    assert [span.version for span in trajectory.rows[0].weight_versions] == ["1", "2"]
    assert (trajectory.turns, trajectory.rows[0].logprobs) == (1, begun.logprobs + rest.logprobs)


async def test_pieces_of_an_aborted_answer_share_one_limit() -> None:
    piece = sampled([40, 41, 42], finish="abort")
    trajectory, model, _ = await play_with_model(piece, strategy=Chain(max_tokens_per_turn=9))
    assert [sampling.max_tokens for _, sampling in model.requests] == [9, 6, 3]
    assert trajectory.sampled_tokens == 9


async def test_answer_aborted_before_its_first_token_is_asked_for_again() -> None:
    nothing, answer = sampled([], finish="abort"), sampled([40, 41, 42], finish="length")
    trajectory, model, _ = await play_with_model(nothing, nothing, answer)
    assert (trajectory.sampled_tokens, trajectory.attempt, len(model.prompts)) == (3, 0, 3)
    assert model.prompts[0] == model.prompts[2]


async def test_answer_aborted_at_once_each_time_is_an_infrastructure_failure() -> None:
    trajectory = await play(*[sampled([], finish="abort")] * 3)
    assert (trajectory.outcome.type, trajectory.outcome.reason) == ("failed", "ModelUnavailable")


# 5. seeds and requests


async def test_each_turn_of_each_rollout_has_its_own_seed() -> None:
    seeds = []
    for rollout_id in ("a", "b", "a"):
        _, model, _ = await play_with_model(
            call("shell", command="ls"), "done", sampling=Sampling(seed=3), rollout_id=rollout_id
        )
        seeds.append([sampling.seed for _, sampling in model.requests])
    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 4


async def test_requests_are_told_apart_and_stop_at_the_template_end() -> None:
    _, model, _ = await play_with_model(call("shell", command="ls"), "done")
    ids = [request_id for request_id, _ in model.requests]
    assert len(set(ids)) == 2
    assert all(request_id.startswith("r.0.") for request_id in ids)
    assert model.requests[0][1].stop_token_ids == (model.tokenizer.special("<|im_end|>"),)
    assert model.requests[0][1].seed is None


# Tool calls: deadline (1), exceptions (2), what cannot be called (3)


async def test_tool_over_its_deadline_is_an_observation() -> None:
    @tool
    async def hang() -> str:
        """Never end."""
        await asyncio.Event().wait()
        return ""

    agent = toys.make_agent(tools=[hang])
    trajectory = await play(call("hang"), "done", agent=agent, deadlines=Deadlines(call=0.02))
    assert observations(trajectory) == ["timed out after 0.02 s"]
    assert trajectory.tool_calls[0].error == "timeout"
    assert trajectory.metrics["tool_timeouts"] == 1
    assert (trajectory.stop_reason, trajectory.reward) == ("done", 1.0)


async def test_stuck_plain_tool_is_left_behind_and_blocks_nobody() -> None:
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool
    def stuck() -> str:
        """Block the thread."""
        while not released.is_set():
            time.sleep(0.005)
        return ""

    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.005)

    heart = loop.create_task(beat())
    agent = toys.make_agent(tools=[stuck])
    trajectory = await play(call("stuck"), "done", agent=agent, deadlines=Deadlines(call=0.1))
    released.set()
    heart.cancel()
    assert trajectory.tool_calls[0].error == "timeout"
    assert beats >= 5


async def test_waiting_for_a_resource_is_not_the_tools_time() -> None:
    resources = FakeResources()
    resources.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, resources.gate.set)
    trajectory = await play(
        call("shell", command="ls"), "done", resources=resources, deadlines=Deadlines(call=0.5, turn=0.5)
    )
    assert trajectory.tool_calls[0].error is None
    assert observations(trajectory) == ["ran ls in member-1"]
    assert trajectory.resources[0].wait_seconds > 0.5  # more than the call and the turn may take


@pytest.mark.parametrize(
    "error", [ValueError("no such file\nsecond line"), TimeoutError("mine"), SystemExit(3)]
)
async def test_exception_of_a_tool_is_an_observation(error: BaseException) -> None:
    @tool
    async def broken() -> str:
        """Raise."""
        raise error

    trajectory = await play(call("broken"), "done", agent=toys.make_agent(tools=[broken]))
    line = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert observations(trajectory) == [line]
    assert trajectory.tool_calls[0].error == f"exception: {line}"
    assert trajectory.metrics["tool_errors"] == 1
    assert trajectory.reward == 1.0


async def test_exception_of_a_plain_tool_is_an_observation_too() -> None:
    @tool
    def broken(n: int) -> int:
        """Divide."""
        return 1 // n

    trajectory = await play(call("broken", n=0), "done", agent=toys.make_agent(tools=[broken]))
    assert observations(trajectory) == ["ZeroDivisionError: integer division or modulo by zero"]


async def test_unknown_tool_is_told_with_the_known_ones() -> None:
    trajectory = await play(call("search", query="x"), "done")
    assert observations(trajectory) == ["unknown tool search (known: shell)"]
    assert (trajectory.tool_calls[0].error, trajectory.metrics["unknown_tools"]) == ("unknown_tool", 1)


async def test_wrong_arguments_are_told_and_the_tool_is_not_run() -> None:
    trajectory, _, resources = await play_with_model(call("shell", cmd="ls"), "done")
    assert "command: Field required" in observations(trajectory)[0]
    assert (trajectory.tool_calls[0].error, trajectory.metrics["invalid_arguments"]) == (
        "invalid_arguments",
        1,
    )
    assert resources.acquired() == []


async def test_malformed_and_good_calls_are_both_answered() -> None:
    trajectory = await play("<tool_call>{]</tool_call>" + call("shell", command="ls"), "done")
    first, second = observations(trajectory)
    assert first == "ran ls in member-1"
    assert second.startswith("malformed tool call: not valid JSON")


async def test_tool_can_end_the_rollout() -> None:
    @tool
    def submit(answer: str) -> ToolResult:
        """Submit the answer."""
        return ToolResult("thanks", metrics={"length": len(answer), "exit_code": 0}, control="end")

    agent = toys.make_agent(tools=[submit])
    trajectory = await play(call("submit", answer="42"), "more", agent=agent)
    assert (trajectory.turns, trajectory.stop_reason) == (1, "end")
    assert trajectory.metrics["length"] == 2
    assert trajectory.tool_calls[0].exit_code == 0
    assert "exit_code" not in trajectory.metrics


async def test_observation_that_cannot_be_encoded_is_repaired() -> None:
    @tool
    def listing() -> str:
        """List files."""
        return "caf\udce9"

    trajectory = await play(call("listing"), "done", agent=toys.make_agent(tools=[listing]))
    assert observations(trajectory) == ["caf?"]


async def test_tools_and_rewards_see_the_conversation() -> None:
    seen: list[Any] = []

    @tool
    async def peek(ctx: Context) -> str:
        """Look at the conversation."""
        seen.append((ctx.final_response, [message["role"] for message in ctx.messages]))
        return "ok"

    await play(call("peek"), "done", agent=toys.make_agent(tools=[peek]))
    assert seen == [(call("peek"), ["user", "assistant"])]
