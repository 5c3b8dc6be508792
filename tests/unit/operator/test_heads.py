"""Asking heads: how often, what is told, what is kept, and when to ask no more; and the figures of runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from agentfly.api import Condition, RolloutJobStatus, TrainingRunStatus
from agentfly.api.rolloutjob import RewardSummary, RolloutCounts
from agentfly.api.trainingrun import CheckpointStatus, Progress
from agentfly.roles.launch import Report
from agentfly_operator.cluster import heads as module
from agentfly_operator.cluster.heads import Heads
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.plan.children import WorkKey
from agentfly_operator.plan.run_seen import PodOf
from tests.unit.operator.make import NOW

RUN: WorkKey = ("TrainingRun", "team", "first")
HEAD = PodOf("first-trainer-1-0", "head-1", 1, 0, phase="Running", ip="127.0.0.1")


@dataclass
class Trainer:
    """What a head answers."""

    report: Report = field(default_factory=lambda: Report(attempt=1))
    text: str | None = None
    status: int = 200
    slow_s: float = 0.0
    questions: int = 0

    async def answer(self, _: web.Request) -> web.Response:
        self.questions += 1
        await asyncio.sleep(self.slow_s)
        text = self.report.model_dump_json() if self.text is None else self.text
        return web.Response(text=text, status=self.status)


World = tuple[Trainer, Heads, list[WorkKey]]


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    trainer, news = Trainer(), list[WorkKey]()
    app = web.Application()
    app.router.add_get("/state", trainer.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    heads = Heads(news.append, Metrics(), port=runner.addresses[0][1])
    yield trainer, heads, news
    await heads.close()
    await runner.cleanup()


async def asked(trainer: Trainer, times: int) -> None:
    """Wait until it was asked so often from now on."""
    until = trainer.questions + times
    end = asyncio.get_running_loop().time() + 10
    while trainer.questions < until:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.005)


async def test_a_head_is_asked_again_and_again_and_only_news_is_told(world: World) -> None:
    trainer, heads, news = world
    heads.follow(RUN, HEAD)
    await asked(trainer, 4)
    assert news == [RUN]
    assert heads.report(RUN, 1) == trainer.report
    trainer.report = Report(attempt=1, phase="Running", progress=Progress(step=3, total_steps=9))
    await asked(trainer, 3)
    assert news == [RUN, RUN]
    assert heads.report(RUN, 1) == trainer.report
    assert heads.report(RUN, 2) is None


async def test_following_again_asks_no_more_often(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 60.0)
    trainer, heads, _ = world
    heads.follow(RUN, HEAD)
    await asked(trainer, 1)
    for _ in range(20):
        heads.follow(RUN, HEAD)
        await asyncio.sleep(0.005)
    assert trainer.questions == 1


@pytest.mark.parametrize("text", ["", "{}x", '{"attempt": "x"}', "a" * (module.ANSWER_MAX + 1)])
async def test_an_answer_that_is_none_keeps_the_last_report(world: World, text: str) -> None:
    trainer, heads, news = world
    heads.follow(RUN, HEAD)
    await asked(trainer, 2)
    trainer.text = text
    await asked(trainer, 3)
    trainer.text, trainer.status = None, 503
    await asked(trainer, 3)
    assert heads.report(RUN, 1) == trainer.report
    assert news == [RUN]


async def test_a_head_that_hangs_is_given_up_and_asked_again(world: World) -> None:
    trainer, heads, _ = world
    trainer.slow_s = 5.0
    heads.follow(RUN, HEAD)
    await asked(trainer, 2)
    assert heads.report(RUN, 1) is None
    trainer.slow_s = 0.0
    await asked(trainer, 2)
    assert heads.report(RUN, 1) == trainer.report


async def test_a_report_of_another_attempt_is_none(world: World) -> None:
    trainer, heads, news = world
    trainer.report = Report(attempt=7)
    heads.follow(RUN, HEAD)
    await asked(trainer, 3)
    assert heads.report(RUN, 1) is None
    assert news == []


async def test_who_rests_is_asked_no_more_and_what_was_said_is_kept(world: World) -> None:
    trainer, heads, _ = world
    heads.follow(RUN, HEAD)
    await asked(trainer, 2)
    heads.rest(RUN)
    await asyncio.sleep(0.03)
    before = trainer.questions
    await asyncio.sleep(0.1)
    assert trainer.questions == before
    assert heads.report(RUN, 1) == trainer.report
    heads.follow(RUN, replace(HEAD, uid="head-2", attempt=2))
    assert heads.report(RUN, 1) is None
    heads.forget(RUN)
    assert heads.report(RUN, 2) is None


async def test_silence_says_nothing_before_there_was_time_to_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, heads, _ = world
    assert heads.heard(RUN)  # nobody is followed
    trainer.status = 503
    heads.follow(RUN, HEAD)
    await asked(trainer, 2)
    assert not heads.heard(RUN)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    assert heads.heard(RUN)
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    trainer.status = 200
    await asked(trainer, 2)
    assert heads.heard(RUN)


async def test_a_head_that_does_not_answer_any_more_is_silent_until_it_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, heads, _ = world
    assert not heads.silent(RUN)
    heads.follow(RUN, HEAD)
    await asked(trainer, 2)
    heads._lines[RUN].since = float("-inf")  # it was followed for as long as you like, and answers
    assert not heads.silent(RUN)
    heads._lines[RUN].since = asyncio.get_running_loop().time()
    trainer.status = 503
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    end = asyncio.get_running_loop().time() + 10
    while not heads.silent(RUN):
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)
    assert heads.report(RUN, 1) == trainer.report
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    trainer.status = 200
    await asked(trainer, 2)
    heads.rest(RUN)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    assert not heads.silent(RUN)  # nobody asks


# The figures of runs


def test_figures_of_a_run_go_with_it() -> None:
    metrics = Metrics()
    condition = Condition(
        type="Running", status="True", reason="Training", message="", last_transition_time=NOW
    )
    status = TrainingRunStatus(
        restarts=2,
        progress=Progress(step=3, total_steps=12, metrics={"reward": "0.25", "lr": "1"}),
        checkpoint=CheckpointStatus(latest_step=2, path="/x", time=NOW),
        step_time=NOW,
        conditions=(condition, condition.model_copy(update={"type": "Failed", "status": "False"})),
    )
    metrics.runs.put(("team", "first"), status)
    metrics.runs.put(("team", "second"), TrainingRunStatus())
    who = {"namespace": "team", "name": "first"}

    def figure(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"agentfly_trainingrun_{name}", {**who, **more})

    assert (figure("step"), figure("progress_ratio"), figure("checkpoint_step")) == (3, 0.25, 2)
    assert (figure("restarts_total"), figure("reward")) == (2, 0.25)
    assert figure("last_step_timestamp_seconds") == NOW.timestamp()
    assert (figure("condition", type="Running"), figure("condition", type="Failed")) == (1, 0)
    assert metrics.text().count(b'name="second"') == 1
    metrics.runs.drop(("team", "first"))
    metrics.runs.drop(("team", "first"))
    assert b'name="first"' not in metrics.text()


def test_figures_of_a_job_go_with_it() -> None:
    metrics = Metrics()
    condition = Condition(
        type="Running", status="True", reason="RollingOut", message="", last_transition_time=NOW
    )
    status = RolloutJobStatus(
        tasks=RolloutCounts(total=40, scored=20, masked=2, failed=1),
        reward=RewardSummary(mean="0.25", min="0", max="1"),
        workers=3,
        conditions=(condition, condition.model_copy(update={"type": "Failed", "status": "False"})),
    )
    metrics.jobs.put(("team", "look"), status)
    metrics.jobs.put(("team", "new"), RolloutJobStatus())

    def figure(name: str, job: str = "look", **more: str) -> float | None:
        who = {"namespace": "team", "name": job}
        return metrics.registry.get_sample_value(f"agentfly_rolloutjob_{name}", {**who, **more})

    assert (figure("planned_rollouts"), figure("workers"), figure("reward")) == (40, 3, 0.25)
    assert [figure("rollouts", outcome=each) for each in ("scored", "masked", "failed")] == [20, 2, 1]
    assert (figure("condition", type="Running"), figure("condition", type="Failed")) == (1, 0)
    assert (figure("workers", "new"), figure("planned_rollouts", "new")) == (0, None)
    metrics.jobs.drop(("team", "look"))
    assert b'name="look"' not in metrics.text()
