"""One rollout: outcomes, retries, and that nothing is left behind however it ends."""

import asyncio
from typing import Any

import pytest

from agentfly.agent import reward, tool
from agentfly.context import Context, Deadlines
from agentfly.models import ContextOverflow, ModelUnavailable, Sampled, Sampling
from agentfly.resources.errors import Infra, LeaseLost, PoolNotFound, Saturated, StartFailed, Timeout
from agentfly.rollout import Chain, Ended, Masked, rollout_one
from agentfly.rollout.play import COUNTED, Play
from agentfly.sandbox import SandboxError, SandboxLeaseLost, SandboxUnreachable
from tests.unit.rollout import toys
from tests.unit.rollout.test_chain import observations, play, play_with_model
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call

LS = call("shell", command="ls")


def raising_tool(error: Exception, *, acquire: bool = True) -> Any:
    @tool
    async def shell(command: str, ctx: Context) -> str:
        """Run a command.

        Args:
            command: a line.
        """
        if acquire:
            await ctx.acquire("shell")
        raise error

    return shell


def raising_reward(error: Exception, *, acquire: bool = True) -> Any:
    @reward
    async def judged(ctx: Context) -> float:
        if acquire:
            await ctx.acquire("shell")
        raise error

    return judged


def outcome(trajectory: Any) -> tuple[str, str]:
    return trajectory.outcome.type, getattr(trajectory.outcome, "reason", "")


# 1. whatever happens, a trajectory comes back


async def test_scored_rollout_is_complete() -> None:
    trajectory = await play(LS, "done")
    assert outcome(trajectory) == ("scored", "")
    assert (trajectory.rollout_id, trajectory.group_id, trajectory.task) == ("r", "g", dict(toys.TASK))
    assert trajectory.drift.tokens == len(trajectory.rows[0].prompt_ids) + len(
        trajectory.rows[0].response_ids
    )
    assert trajectory.drift.drifted == 0
    assert (trajectory.resources[0].pool, trajectory.resources[0].member_id) == ("shell", "member-1")
    assert trajectory.seconds > 0
    assert trajectory.started_at > 1e9


async def test_missing_task_field_fails_before_the_model_is_asked() -> None:
    @reward
    def right(answer: str) -> float:
        return 1.0

    trajectory, model, _ = await play_with_model("done", agent=toys.make_agent(reward=right))
    assert outcome(trajectory) == ("failed", "TaskInvalid")
    assert trajectory.outcome.message == (
        "reward right: task field answer is missing in the row of g (has: what); "
        "hint: add it to the row, or give the parameter a default"
    )
    assert model.prompts == []


async def test_error_of_the_prompt_fails_with_its_phase() -> None:
    def prompt(row: Any) -> Any:
        return row["absent"]

    trajectory = await play("done", agent=toys.make_agent(prompt=prompt))
    assert outcome(trajectory) == ("failed", "PromptError")
    assert trajectory.outcome.message.startswith("prompt: KeyError: 'absent' (prompt at ")
    assert trajectory.metrics == dict.fromkeys(COUNTED, 0.0)


async def test_error_of_the_setup_fails_with_its_phase() -> None:
    async def prepare(ctx: Context, what: str) -> None:
        await ctx.acquire("shell")
        raise ValueError(what)

    trajectory = await play("done", agent=toys.make_agent(setup=prepare))
    assert outcome(trajectory) == ("failed", "SetupError")
    assert trajectory.outcome.message.startswith("setup: ValueError: the thing (prepare at ")


async def test_setup_over_its_limit_fails() -> None:
    async def prepare(ctx: Context) -> None:
        await asyncio.Event().wait()

    deadlines = Deadlines(call=0.02, turn=0.02)
    trajectory = await play("done", agent=toys.make_agent(setup=prepare), deadlines=deadlines)
    assert outcome(trajectory) == ("failed", "SetupTimeout")


async def test_setup_prepares_what_the_tools_find() -> None:
    async def prepare(ctx: Context) -> None:
        await ctx.acquire("shell")

    trajectory, _, resources = await play_with_model(LS, "done", agent=toys.make_agent(setup=prepare))
    assert len(resources.acquired()) == 1
    assert trajectory.reward == 1.0


async def test_error_of_the_parser_fails_with_its_phase() -> None:
    class Broken:
        def parse(self, text: str) -> Any:
            raise IndexError("oh")

    trajectory = await play("done", agent=toys.make_agent(parser=Broken()))
    assert outcome(trajectory) == ("failed", "ParserError")
    assert trajectory.sampled_tokens > 0


async def test_error_of_the_reward_fails_with_its_phase() -> None:
    trajectory = await play("done", agent=toys.make_agent(reward=raising_reward(KeyError("x"))))
    assert outcome(trajectory) == ("failed", "RewardError")
    assert (trajectory.reward, trajectory.attempt) == (None, 0)


async def test_model_that_refuses_the_length_fails_at_once() -> None:
    trajectory, model, _ = await play_with_model(ContextOverflow("model: too long"))
    assert outcome(trajectory) == ("failed", "ContextOverflow")
    assert len(model.prompts) == 1


async def test_unexpected_error_is_a_failure_too() -> None:
    trajectory = await play(RuntimeError("bug"))
    assert outcome(trajectory) == ("failed", "RolloutError")
    assert trajectory.outcome.message.startswith("generate: RuntimeError: bug (generate at ")


async def test_sample_that_cannot_be_trained_fails() -> None:
    trajectory = await play(Sampled([40], [float("nan")], "stop", None))
    assert outcome(trajectory) == ("failed", "InvalidSample")


async def test_template_that_rewrites_history_gives_another_row() -> None:
    trajectory = await play("<think>hm, what is there</think>" + LS, "done", render=toys.forgetful)
    assert outcome(trajectory) == ("scored", "")
    assert (len(trajectory.rows), trajectory.drift.forks) == (2, 1)


async def test_strategy_can_end_with_an_outcome_of_its_own() -> None:
    class Bored:
        async def run(self, play: Play) -> str:
            raise Ended(Masked("bored"))

    assert outcome(await play("done", strategy=Bored())) == ("masked", "bored")


# 2. one rollout is one scope

PHASES = ["prompt", "setup", "acquire", "generate", "parse", "tool", "observe", "reward"]


class Phases:
    """An agent and a model that stop in one phase: raise there, or wait there for ever."""

    def __init__(self, phase: str, *, wait: bool) -> None:
        self.phase, self.wait = phase, wait
        self.reached = asyncio.Event()
        self.resources = FakeResources()

    def now(self, phase: str) -> None:
        if self.phase == phase:
            self.reached.set()
            raise ValueError(phase)

    async def at(self, phase: str) -> None:
        if self.phase == phase and self.wait:
            self.reached.set()
            await asyncio.Event().wait()
        self.now(phase)

    def run(self, deadlines: Deadlines) -> Any:
        phases = self

        def prompt(row: Any) -> Any:
            phases.now("prompt")
            return [{"role": "user", "content": "go"}]

        async def prepare(ctx: Context) -> None:
            await ctx.acquire("shell", key="setup")
            await phases.at("setup")

        @tool
        async def shell(command: str, ctx: Context) -> str:
            """Run a command."""
            await ctx.acquire("shell")
            if phases.phase == "acquire":
                phases.resources.gate = asyncio.Event()
                phases.resources.failures = (
                    [] if phases.wait else [StartFailed("no image", reason="no image")] * 9
                )
                if not phases.wait:
                    phases.resources.gate.set()
                phases.reached.set()
                await ctx.acquire("other")
            await phases.at("tool")
            return "ok"

        @reward
        async def judged(ctx: Context) -> float:
            await ctx.acquire("shell")
            await phases.at("reward")
            return 1.0

        class Parser:
            def parse(self, text: str) -> Any:
                phases.now("parse")
                from agentfly.agent import HermesParser

                return HermesParser().parse(text)

        agent = toys.make_agent(prompt=prompt, setup=prepare, tools=[shell], reward=judged, parser=Parser())
        tokenizer = ToyTokenizer(toys.one_turn if self.phase == "observe" else toys.grouping)
        generate: Any = LS
        if self.phase == "generate":
            generate = _Reached(self.reached) if self.wait else ValueError("generate")
        return rollout_one(
            agent, toys.TASK, model=Script(tokenizer, generate, "done"), tokenizer=tokenizer,
            resources=self.resources, strategy=Chain(), deadlines=deadlines, sampling=Sampling(),
            rollout_id="r", group_id="g",
        )  # fmt: skip


class _Reached(asyncio.Event):
    def __init__(self, reached: asyncio.Event) -> None:
        super().__init__()
        self.reached = reached

    async def wait(self) -> Any:
        self.reached.set()
        return await super().wait()


@pytest.mark.parametrize("phase", PHASES)
async def test_error_in_any_phase_leaves_no_lease(phase: str) -> None:
    phases = Phases(phase, wait=False)
    trajectory = await phases.run(Deadlines())
    # What a tool raises is the policy's to read; everywhere else the rollout fails.
    assert (trajectory.outcome.type, trajectory.reward) == (
        ("scored", 1.0) if phase == "tool" else ("failed", None)
    )
    assert phases.resources.held == {}


@pytest.mark.parametrize("phase", ["setup", "acquire", "generate", "tool", "reward"])
async def test_cancel_in_any_phase_leaves_no_lease(phase: str) -> None:
    phases = Phases(phase, wait=True)
    task = asyncio.create_task(phases.run(Deadlines()))
    await asyncio.wait_for(phases.reached.wait(), 5)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert phases.resources.held == {}
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("setup", ("masked", "deadline")),
        ("acquire", ("failed", "Timeout")),
        ("generate", ("masked", "deadline")),
        ("tool", ("masked", "deadline")),
        ("reward", ("masked", "deadline")),
    ],
)
async def test_deadline_in_any_phase_leaves_no_lease(phase: str, expected: tuple[str, str]) -> None:
    phases = Phases(phase, wait=True)
    trajectory = await phases.run(Deadlines(call=0.2, turn=0.2, rollout=0.2))
    assert phases.reached.is_set()
    assert outcome(trajectory) == expected
    assert phases.resources.held == {}
    assert trajectory.attempt == 0


async def test_cancel_during_the_release_still_releases() -> None:
    class Slow(FakeResources):
        releasing = asyncio.Event()

        async def release(self, lease_id: str, *, dirty: bool = False) -> None:
            self.releasing.set()
            await asyncio.sleep(0.02)
            await super().release(lease_id, dirty=dirty)

    resources, tokenizer = Slow(), ToyTokenizer(toys.grouping)
    task = asyncio.create_task(
        rollout_one(
            toys.make_agent(),
            toys.TASK,
            model=Script(tokenizer, LS, "done"),
            tokenizer=tokenizer,
            resources=resources,
            strategy=Chain(),
            deadlines=Deadlines(),
            sampling=Sampling(),
            rollout_id="r",
            group_id="g",
        )
    )
    await asyncio.wait_for(resources.releasing.wait(), 5)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert resources.held == {}


# 3. infrastructure failures are retried in a fresh context


@pytest.mark.parametrize(
    "error",
    [
        Infra("broker gone"),
        StartFailed("no", reason="no"),
        Timeout("none free"),
        LeaseLost("gone", incarnation=1),
    ],
)
async def test_failed_acquire_is_retried_from_the_start(error: Exception) -> None:
    resources = FakeResources(error)
    trajectory, model, _ = await play_with_model(LS, "done", resources=resources)
    assert outcome(trajectory) == ("scored", "")
    assert (trajectory.attempt, trajectory.turns, len(model.prompts)) == (1, 2, 3)
    assert observations(trajectory) == ["ran ls in member-1"]


async def test_exhausted_retries_fail_with_the_last_reason() -> None:
    errors = [StartFailed("no image", reason="no image") for _ in range(9)]
    trajectory, _, resources = await play_with_model(
        LS, resources=FakeResources(*errors), max_infra_retries=2
    )
    assert outcome(trajectory) == ("failed", "StartFailed")
    assert (trajectory.outcome.message, trajectory.attempt) == ("no image", 2)
    assert len(resources.acquired()) == 3


async def test_no_retries_are_allowed() -> None:
    resources = FakeResources(Infra("gone"))
    trajectory = await play(LS, resources=resources, max_infra_retries=0)
    assert (outcome(trajectory), trajectory.attempt) == (("failed", "Infra"), 0)


async def test_unavailable_model_is_retried() -> None:
    class Waking(Script):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            if not self.prompts:
                self.prompts.append([])
                raise ModelUnavailable("model: 503")
            return await super().generate(*args, **kwargs)

    tokenizer, resources = ToyTokenizer(toys.grouping), FakeResources()
    trajectory = await rollout_one(
        toys.make_agent(), toys.TASK, model=Waking(tokenizer, "done"), tokenizer=tokenizer,
        resources=resources, strategy=Chain(), deadlines=Deadlines(), sampling=Sampling(),
        rollout_id="r", group_id="g",
    )  # fmt: skip
    assert (outcome(trajectory), trajectory.attempt) == (("scored", ""), 1)


async def test_saturated_pool_is_left_alone_for_a_while() -> None:
    resources = FakeResources(Saturated("full", retry_after=0.05))
    trajectory = await play(LS, "done", resources=resources)
    assert trajectory.attempt == 1
    assert trajectory.seconds >= 0.05


async def test_sandbox_lost_before_the_first_call_is_retried() -> None:
    failures = [SandboxUnreachable("sandbox: refused")]

    async def prepare(ctx: Context) -> None:
        await ctx.acquire("shell")
        if failures:
            raise failures.pop()

    trajectory = await play(LS, "done", agent=toys.make_agent(setup=prepare))
    assert (outcome(trajectory), trajectory.attempt) == (("scored", ""), 1)


async def test_unknown_pool_is_nobodys_observation_and_not_retried() -> None:
    resources = FakeResources(PoolNotFound("pool shell: is not there"))
    trajectory = await play(LS, "done", resources=resources)
    assert (outcome(trajectory), trajectory.attempt) == (("failed", "PoolNotFound"), 0)


async def test_retry_after_the_policy_acted_is_for_acquires_only() -> None:
    resources = FakeResources()

    @tool
    async def shell(command: str, ctx: Context) -> str:
        """Run a command."""
        await ctx.acquire("shell")
        if ctx.attempt == 0:
            resources.failures = [Infra("broker gone")]
        await ctx.acquire("other")
        return "ok"

    trajectory = await play(LS, "done", agent=toys.make_agent(tools=[shell]), resources=resources)
    assert (outcome(trajectory), trajectory.attempt) == (("scored", ""), 1)


# 4. a sandbox that is lost after the policy's first call

LOST = [LeaseLost("gone", incarnation=1), Infra("gone"), SandboxUnreachable("gone"), SandboxLeaseLost("gone")]


@pytest.mark.parametrize("error", LOST)
async def test_sandbox_lost_in_a_call_is_final_and_has_no_reward(error: Exception) -> None:
    agent = toys.make_agent(tools=[raising_tool(error)])
    trajectory, model, _ = await play_with_model(LS, "done", agent=agent, max_infra_retries=5)
    assert outcome(trajectory) == ("failed", "SandboxLost")
    assert (trajectory.reward, trajectory.attempt, len(model.prompts)) == (None, 0, 1)
    assert trajectory.outcome.message == f"tool: {type(error).__name__}: gone"


@pytest.mark.parametrize("error", LOST)
async def test_sandbox_found_lost_by_the_reward_is_final_too(error: Exception) -> None:
    agent = toys.make_agent(reward=raising_reward(error))
    trajectory = await play(LS, "done", agent=agent, max_infra_retries=5)
    assert (outcome(trajectory), trajectory.attempt) == (("failed", "SandboxLost"), 0)


async def test_sandbox_lost_under_the_reward_of_an_idle_policy_is_retried() -> None:
    agent = toys.make_agent(reward=raising_reward(SandboxUnreachable("gone")))
    trajectory = await play("done", agent=agent)
    assert (outcome(trajectory), trajectory.attempt) == (("failed", "SandboxUnreachable"), 1)


async def test_refused_request_to_the_sandbox_is_an_observation() -> None:
    error = SandboxError("file /x: is not there", code="NotFound")
    trajectory = await play(LS, "done", agent=toys.make_agent(tools=[raising_tool(error)]))
    assert (trajectory.reward, trajectory.metrics["tool_errors"]) == (1.0, 1)
    assert "file /x: is not there" in observations(trajectory)[0]


# 5. the rollout's deadline


async def test_rollout_deadline_keeps_what_was_sampled() -> None:
    trajectory = await play(LS, asyncio.Event(), deadlines=Deadlines(call=0.1, turn=0.1, rollout=0.1))
    assert outcome(trajectory) == ("masked", "deadline")
    assert (trajectory.turns, len(trajectory.tool_calls)) == (2, 1)
    assert trajectory.sampled_tokens > 0


async def test_spent_waiting_names_the_pool() -> None:
    resources = FakeResources()
    resources.gate = asyncio.Event()
    trajectory = await play(LS, resources=resources, deadlines=Deadlines(call=0.05, turn=0.05, rollout=0.05))
    assert outcome(trajectory) == ("failed", "Timeout")
    assert trajectory.outcome.message == "still waiting for shell after 0.05 s"
