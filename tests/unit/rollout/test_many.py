"""Many rollouts: concurrency, restarts, budget."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from agentfly.agent import Agent, TaskInvalid, reward, tool
from agentfly.context import Context, Deadlines
from agentfly.errors import AgentflyError
from agentfly.models import Sampling
from agentfly.rollout import (
    Chain,
    DriftExceeded,
    Failed,
    FailureBudgetExceeded,
    RolloutReport,
    Trajectory,
    TrajectoryList,
    TrajectoryWriter,
    read_trajectories,
    rollout,
)
from agentfly.sandbox import SandboxUnreachable
from tests.unit.rollout import toys
from tests.unit.rollout.talkers import says, talking
from tests.unit.rollout.toys import FakeResources, Script, ToyTokenizer, call

TASKS = [{"what": f"thing {number}"} for number in range(4)]


class Memory:
    """A sink that keeps everything."""

    def __init__(self, earlier: Iterable[Trajectory] = ()) -> None:
        self.earlier = list(earlier)
        self.written: list[Trajectory] = []

    def finished(self) -> Iterable[Trajectory]:
        return [*self.earlier, *self.written]

    def write(self, trajectory: Trajectory) -> None:
        self.written.append(trajectory)


async def play(tasks: Any = TASKS, **options: Any) -> RolloutReport:
    tokenizer = ToyTokenizer(toys.grouping)
    return await rollout(
        options.pop("agent", None) or toys.make_agent(),
        tasks,
        model=options.pop("model", None) or Script(tokenizer, call("shell", command="ls"), "done"),
        tokenizer=tokenizer,
        resources=options.pop("resources", None) or FakeResources(),
        strategy=Chain(),
        sink=options.pop("sink", None) or Memory(),
        deadlines=options.pop("deadlines", Deadlines()),
        sampling=Sampling(),
        **options,
    )


async def until(true: Callable[[], bool]) -> None:
    """Let others run until it is true; a test that never gets there fails instead of hanging."""
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("did not happen within 5 s")


@reward
async def even_places_work(ctx: Context) -> float:
    if int(ctx.rollout_id.rpartition("-")[2]) % 2:
        raise ValueError("odd")
    return 1.0


async def test_groups_are_played_for_every_task() -> None:
    sink = Memory()
    report = await play(group_size=3, sink=sink)
    assert (report.total, report.scored, report.finished, report.resumed) == (12, 12, 12, 0)
    groups = {trajectory.group_id for trajectory in sink.written}
    assert len(groups) == 4
    assert len({trajectory.rollout_id for trajectory in sink.written}) == 12
    for trajectory in sink.written:
        assert trajectory.rollout_id.startswith(trajectory.group_id)
    assert report.tool_calls == 12
    assert report.reward is not None
    assert (report.reward.mean, report.reward.std) == (1.0, 0.0)
    assert report.drift_fraction == 0.0
    assert report.sampled_tokens == sum(trajectory.sampled_tokens for trajectory in sink.written)


# 1. at most so many at once; each goes to the sink when it is finished


@pytest.mark.parametrize("concurrency", [1, 3, 100])
async def test_concurrency_bounds_what_runs(concurrency: int) -> None:
    running = peak = 0

    @tool
    async def shell(command: str) -> str:
        """Run a command."""
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.002)
        running -= 1
        return "ok"

    await play(agent=toys.make_agent(tools=[shell]), group_size=2, concurrency=concurrency)
    assert peak == min(concurrency, 8)


async def test_finished_rollouts_do_not_wait_for_slow_ones() -> None:
    sink, slow = Memory(), asyncio.Event()

    @reward
    async def patient(ctx: Context, what: str) -> float:
        if what == "thing 0":
            await slow.wait()
        return 1.0

    task = asyncio.create_task(play(agent=toys.make_agent(reward=patient), sink=sink, concurrency=2))
    await until(lambda: len(sink.written) == 3)
    assert not task.done()
    slow.set()
    assert (await task).scored == 4


async def test_cancelled_job_leaves_no_lease() -> None:
    resources, sink = FakeResources(), Memory()

    @reward
    async def hang(ctx: Context) -> float:
        await asyncio.Event().wait()
        return 1.0

    job = play(agent=toys.make_agent(reward=hang), resources=resources, sink=sink, group_size=2)
    task = asyncio.create_task(job)
    await until(lambda: len(resources.held) == 8)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (resources.held, sink.written) == ({}, [])


class Crowd:
    """A model that answers nobody before all are waiting for it, and counts who waits."""

    def __init__(self, tokenizer: ToyTokenizer, size: int) -> None:
        self._script = Script(tokenizer, call("shell", command="ls"), "done")
        self._all = asyncio.Barrier(size)
        self.waiting = self.most = 0

    async def generate(
        self, prompt_ids: Any, sampling: Sampling, *, request_id: str, deadline: float, images: Any = ()
    ) -> Any:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self._all.wait()
        self.waiting -= 1
        return await self._script.generate(prompt_ids, sampling, request_id=request_id, deadline=deadline)


@pytest.mark.timeout(900)  # it counts, and may take as long as a busy machine lets it
async def test_thousands_run_at_once_in_one_process() -> None:
    size = 2000
    model, resources = Crowd(ToyTokenizer(toys.grouping), size), FakeResources()
    patient = Deadlines(call=3600, turn=3600, rollout=3600)
    report = await play(
        [{"what": "x"}],
        model=model,
        resources=resources,
        group_size=size,
        concurrency=size,
        deadlines=patient,
    )
    assert (model.most, report.scored, report.tool_calls, report.failures) == (size, size, size, 0)
    assert (resources.count, resources.held) == (size, {})
    assert len(asyncio.all_tasks()) == 1


# 2. restarts


async def test_restart_plays_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as sink:
        await play(TASKS[:2], sink=sink, group_size=2)
    resources = FakeResources()
    with TrajectoryWriter(path) as sink:
        report = await play(TASKS, sink=sink, group_size=2, resources=resources)
    assert (report.total, report.resumed, report.scored) == (8, 4, 8)
    assert len(resources.acquired()) == 4
    ids = [trajectory.rollout_id for trajectory in read_trajectories(path)]
    assert len(ids) == len(set(ids)) == 8


async def test_third_run_has_nothing_to_do(tmp_path: Path) -> None:
    reports = []
    for _ in range(3):
        with TrajectoryWriter(tmp_path / "t.jsonl") as sink:
            reports.append(await play(sink=sink))
    assert [(report.resumed, report.finished) for report in reports] == [(0, 4), (4, 4), (4, 4)]


async def test_changed_row_is_played_anew() -> None:
    first = Memory()
    await play(sink=first)
    changed = [{**TASKS[0], "hint": "look"}, *TASKS[1:]]
    report = await play(changed, sink=Memory(first.written))
    assert (report.resumed, report.finished) == (3, 4)


async def test_report_counts_rows_of_this_job_alone() -> None:
    first = Memory()
    await play(sink=first, group_size=2)
    changed = [{**TASKS[0], "hint": "look"}]
    seen: list[tuple[int, int, int]] = []

    def progress(report: RolloutReport) -> None:
        seen.append((report.total, report.resumed, report.finished))

    await play(changed, sink=Memory(first.written), group_size=2, progress=progress)
    assert seen == [(2, 0, 0), (2, 0, 1), (2, 0, 2)]


async def test_row_written_twice_is_counted_once() -> None:
    first = Memory()
    await play(sink=first)
    report = await play(sink=Memory(first.written * 2))
    assert (report.resumed, report.finished) == (4, 4)


async def test_name_of_the_job_tells_its_rollouts_apart() -> None:
    sink = Memory()
    await play(TASKS[:1], sink=sink, name="job-a")
    await play(TASKS[:1], sink=sink, name="job-b")
    assert [trajectory.rollout_id.split("-0-")[0] for trajectory in sink.written] == ["job-a", "job-b"]


# 4. failures


async def test_one_failing_rollout_does_not_touch_the_others() -> None:
    report = await play(agent=toys.make_agent(reward=even_places_work), group_size=2, failure_budget=0.5)
    assert (report.scored, report.failed) == (4, {"RewardError": 4})


async def test_budget_ends_the_job_with_reasons_counted() -> None:
    resources, sink = FakeResources(), Memory()
    with pytest.raises(FailureBudgetExceeded) as error:
        await play(
            agent=toys.make_agent(reward=even_places_work), group_size=2, failure_budget=0.3,
            resources=resources, sink=sink, concurrency=1,
        )  # fmt: skip
    assert error.value.message == (
        "spec.runPolicy.failureBudget: 3 of 8 rollouts failed (RewardError 3), over the budget of 0.3"
    )
    assert error.value.hints[0].startswith("mend the first RewardError: reward: ")
    assert (len(sink.written), resources.held) == (6, {})


async def test_budget_of_zero_stops_at_the_first_failure() -> None:
    sink = Memory()
    with pytest.raises(FailureBudgetExceeded, match="1 of 8"):
        await play(
            agent=toys.make_agent(reward=even_places_work),
            group_size=2,
            failure_budget=0,
            sink=sink,
            concurrency=1,
        )
    assert len(sink.written) == 2


# 3. what failed is played again in the next life of the job


async def test_job_that_its_budget_ended_goes_on_with_a_raised_one() -> None:
    sink = Memory()
    agent = toys.make_agent(reward=even_places_work)
    with pytest.raises(FailureBudgetExceeded):
        await play(agent=agent, group_size=2, failure_budget=0, sink=sink, concurrency=1)
    report = await play(agent=agent, group_size=2, failure_budget=0.5, sink=sink)
    assert (report.resumed, report.scored, report.failed) == (1, 4, {"RewardError": 4})


async def test_failed_rollouts_are_played_again_and_their_newest_line_counts() -> None:
    sink = Memory()
    await play(agent=toys.make_agent(reward=even_places_work), group_size=2, failure_budget=1, sink=sink)
    report = await play(group_size=2, failure_budget=0, sink=sink)
    assert (report.resumed, report.scored, report.failed) == (4, 8, {})
    newest = {trajectory.rollout_id: trajectory.outcome for trajectory in sink.written}
    assert (len(sink.written), {outcome.type for outcome in newest.values()}) == (12, {"scored"})
    again = await play(group_size=2, sink=sink)
    assert (again.resumed, again.scored, again.failed) == (8, 8, {})


async def test_masked_rollouts_are_not_played_again() -> None:
    @reward
    def unsure() -> float | None:
        return None

    sink = Memory()
    await play(agent=toys.make_agent(reward=unsure), sink=sink)
    report = await play(sink=sink)
    assert (report.resumed, report.masked, report.scored) == (4, {"unscored": 4}, 0)


async def test_lost_sandbox_is_not_drawn_again() -> None:
    @reward
    async def lost(ctx: Context) -> float:
        raise SandboxUnreachable("gone")

    sink = Memory()
    with pytest.raises(FailureBudgetExceeded):
        await play(agent=toys.make_agent(reward=lost), failure_budget=0.9, sink=sink)
    with pytest.raises(FailureBudgetExceeded, match="SandboxLost 4"):
        await play(failure_budget=0.9, sink=sink)
    report = await play(failure_budget=1, sink=sink)
    assert (report.resumed, report.failed, len(sink.written)) == (4, {"SandboxLost": 4}, 4)


# 4. drift


def drifting(tokenizer: ToyTokenizer) -> Script:
    """Says one word in two tokens where the tokenizer has one."""
    assert tokenizer.encode("done", add_special_tokens=False) != list(map(ord, "done"))
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "done"]
    return Script(tokenizer, toys.sampled([*ids, tokenizer.special("<|im_end|>")]))


async def test_drift_above_its_limit_ends_the_job_and_names_the_field() -> None:
    seen: list[RolloutReport] = []
    with pytest.raises(DriftExceeded) as error:
        await play(
            model=drifting(ToyTokenizer(toys.grouping)), max_drift_fraction=0.001, progress=seen.append
        )
    report = seen[-1]
    assert 0.001 < report.drift_fraction < 1
    assert report.finished == 4  # so few tokens are judged at the end alone
    assert error.value.message == (
        f"rollout.maxDriftFraction: {report.drift_fraction:.4f} of {report.tokens} tokens drifted,"
        " the limit is 0.001"
    )
    assert error.value.hints


async def test_drift_is_judged_early_once_enough_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.rollout.many.DRIFT_TOKENS", 1)
    sink = Memory()
    model = drifting(ToyTokenizer(toys.grouping))
    with pytest.raises(DriftExceeded):
        await play(model=model, max_drift_fraction=0.0, sink=sink, concurrency=1)
    assert len(sink.written) == 1


@pytest.mark.parametrize("limit", [None, 0.9])
async def test_drift_within_its_limit_is_counted(limit: float | None) -> None:
    report = await play(model=drifting(ToyTokenizer(toys.grouping)), max_drift_fraction=limit)
    assert (report.scored, report.drifted_rollouts) == (4, 4)


async def test_masked_rollouts_are_no_failures() -> None:
    @reward
    def unsure() -> float | None:
        return None

    report = await play(agent=toys.make_agent(reward=unsure), failure_budget=0)
    assert (report.masked, report.failures, report.reward) == ({"unscored": 4}, 0, None)


async def test_error_of_the_sink_ends_the_job_as_itself() -> None:
    class Full(Memory):
        def write(self, trajectory: Trajectory) -> None:
            raise OSError(28, "No space left on device")

    resources = FakeResources()
    with pytest.raises(OSError, match="No space left"):
        await play(sink=Full(), resources=resources)
    assert resources.held == {}


# 5. rows are checked first


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ([*TASKS, {"id": 5}], r"prompt: task field what is missing in row 4 \(has: id\)"),
        ([{"what": {1, 2}}], "row 0 is not JSON"),
        ([{"what": "\ud800"}], "row 0 is not JSON .*surrogates"),
        ([], "tasks: there is none"),
    ],
)
async def test_bad_rows_are_refused_before_anything_starts(tasks: Any, problem: str) -> None:
    resources = FakeResources()
    with pytest.raises(TaskInvalid, match=problem):
        await play(tasks, resources=resources)
    assert resources.log == []


async def test_tasks_may_be_a_generator() -> None:
    assert (await play({"what": str(n)} for n in range(3))).scored == 3


@pytest.mark.parametrize("name", ["group_size", "concurrency"])
async def test_counts_below_one_are_refused(name: str) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(AgentflyError, match=f"{name}: 0 is less than 1"):
        await play(**options)


# what may be left out


async def test_rollouts_of_a_notebook_need_agent_tasks_and_model() -> None:
    kept = TrajectoryList()
    async with talking(says("done")) as (model, asked):
        agent = Agent(prompt="do {what}", reward=toys.always_one)
        report = await rollout(agent, [{"what": "tea"}, {"what": "milk"}], model=model, sink=kept)
        again = await rollout(agent, [{"what": "tea"}, {"what": "milk"}], model=model, sink=kept)
    assert (report.scored, again.resumed, len(kept), len(asked)) == (2, 2, 2, 2)
    assert {trajectory.task["what"] for trajectory in kept} == {"tea", "milk"}


async def test_model_of_tokens_needs_its_tokenizer() -> None:
    model = Script(ToyTokenizer(toys.chatml), "done")
    with pytest.raises(AgentflyError, match="tokenizer: is missing, and a Script reads token ids") as error:
        await rollout(toys.make_agent(), TASKS[:1], model=model, sink=TrajectoryList())
    assert "AutoTokenizer" in error.value.hints[0]


@pytest.mark.parametrize("sink", [None, TrajectoryList, "played.jsonl"])
async def test_sink_that_is_none_is_refused(sink: Any) -> None:
    with pytest.raises(AgentflyError, match=r"^sink: .* takes no trajectories") as error:
        await rollout(toys.make_agent(), TASKS, model=Script(ToyTokenizer(toys.grouping), "done"), sink=sink)
    assert error.value.hints == ("pass sink=TrajectoryList(), or TrajectoryWriter(PATH) for a file",)


async def test_acquire_without_resources_fails_the_rollout_and_says_what_to_pass() -> None:
    kept = TrajectoryList()
    async with talking(says("", ("shell", '{"command": "ls"}'))) as (model, _):
        await rollout(toys.make_agent(), TASKS[:1], model=model, sink=kept, failure_budget=1.0)
    assert kept[0].outcome == Failed(
        "PoolNotFound",
        "pool shell: is not here; this rollout was given no resources; hint: pass resources=..., as "
        '`async with local_pools("pools.yaml") as resources` gives them',
    )
