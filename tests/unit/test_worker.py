"""The rollout worker: what it asks of the rollouts, and what it reports; the numbers are its guarantees."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from agentfly import worker
from agentfly.api import Rollout
from agentfly.errors import AgentflyError
from agentfly.models import Sampled
from agentfly.roles.trainer import ENV_BROKER, ENV_INFERENCE_URLS
from agentfly.roles.worker import EXIT_BUDGET, RolloutWorkerConfig, WorkerReport
from agentfly.rollout import RolloutReport, Scored, read_trajectories
from tests.unit.rollout import toys
from tests.unit.rollout.test_trajectory import make
from tests.unit.rollout.test_vision import Processor
from tests.unit.rollout.toys import ToyTokenizer

AGENT = """
from agentfly import Agent, reward

@reward
def judge(ctx, good):
    if good is None:
        raise ValueError("broken")
    return good

agent = Agent(reward=judge, prompt="do {good}")
"""
TOKENIZER = ToyTokenizer(toys.grouping)


class Server:
    """Stands for a model server; says `done`."""

    seeds: list[int | None] = []  # noqa: RUF012 - replaced in each test

    def __init__(self, url: str) -> None:
        self.url = url

    async def generate(
        self, prompt_ids: Any, sampling: Any, *, request_id: str, deadline: float, images: Any = ()
    ) -> Sampled:
        self.seeds.append(sampling.seed)
        return toys.sampled(
            [*TOKENIZER.encode("done", add_special_tokens=False), TOKENIZER.eos_token_id or 0]
        )

    async def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the worker over rows; returns its exit code."""
    transformers = types.ModuleType("transformers")
    transformers.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda _: TOKENIZER)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(worker, "VLLMModel", Server)
    monkeypatch.setattr(Server, "seeds", [])
    monkeypatch.setenv(ENV_INFERENCE_URLS, "http://a,http://b")
    monkeypatch.setenv(ENV_BROKER, "unix:///nowhere")
    (tmp_path / "agent.py").write_text(AGENT.replace("good)", "good: float | None) -> float"))

    def run(*good: float | None, **changes: Any) -> int:
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"good": value}) + "\n" for value in good))
        config = RolloutWorkerConfig(
            run_dir=tmp_path, model_path=tmp_path, agent_entrypoint="agent.py:agent", base_dir=tmp_path,
            tasks_path=tmp_path / "tasks.jsonl", **changes,
        )  # fmt: skip
        (tmp_path / "config.json").write_text(config.model_dump_json())
        return worker.main(["--config", str(tmp_path / "config.json")])

    return run


def report_in(folder: Path) -> WorkerReport:
    return WorkerReport.model_validate_json((folder / "report.json").read_text())


SHAPE = Rollout(group_size=2)


# 1. lines, and going on


def test_rollouts_are_written_and_a_second_worker_has_nothing_to_do(run: Any, tmp_path: Path) -> None:
    for _ in range(2):
        assert run(1.0, 0.0, rollout=SHAPE) == 0
        assert len(list(read_trajectories(tmp_path / "trajectories" / "rollouts.jsonl"))) == 4


def test_failed_rollouts_go_on_with_a_raised_budget(run: Any, tmp_path: Path) -> None:
    assert run(None, 1.0, rollout=SHAPE, failure_budget=0.0) == EXIT_BUDGET
    assert run(None, 1.0, rollout=SHAPE, failure_budget=0.5) == 0
    report = report_in(tmp_path)
    assert (report.total, report.scored, report.failed) == (4, 2, {"RewardError": 2})


@pytest.mark.parametrize("name", ["preflight.json", "preprocessor_config.json", "processor_config.json"])
def test_model_with_a_processor_sees(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    loaded: list[Path] = []
    processor = types.SimpleNamespace(from_pretrained=lambda path: loaded.append(path) or Processor())
    monkeypatch.setattr(sys.modules["transformers"], "AutoProcessor", processor, raising=False)
    (tmp_path / name).write_text("{}")
    assert run(1.0, rollout=SHAPE) == 0
    assert loaded == ([] if name == "preflight.json" else [tmp_path])


# 2. the report


def test_report_counts_the_rollouts_of_the_jobs_rows_alone(run: Any, tmp_path: Path) -> None:
    assert run(1.0, 0.0, 0.5, rollout=SHAPE) == 0
    assert run(0.25, rollout=SHAPE) == 0
    report = report_in(tmp_path)
    assert (report.total, report.scored, report.reward_mean) == (2, 2, 0.25)


def test_report_is_written_when_the_budget_ends_the_job(run: Any, tmp_path: Path) -> None:
    assert run(None, rollout=SHAPE, failure_budget=0.5) == EXIT_BUDGET
    assert report_in(tmp_path).failed == {"RewardError": 2}


def test_report_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    reporter, report = worker.Reporter(tmp_path / "report.json"), RolloutReport(total=3)
    reporter.write()
    assert list(tmp_path.iterdir()) == []
    reporter.show(report)
    for _ in range(3):
        report.add(make(outcome=Scored(0.5)))
        reporter.show(report)
    assert report_in(tmp_path).scored == 0
    reporter.write()
    assert (report_in(tmp_path).scored, report_in(tmp_path).reward_mean) == (3, 0.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outcomes.txt", "report.json"]


def test_what_failed_is_told_with_its_first_message(run: Any, tmp_path: Path) -> None:
    assert run(None, rollout=SHAPE, failure_budget=1.0) == 0
    (line,) = (tmp_path / "outcomes.txt").read_text().splitlines()
    assert line.startswith("failed 2 (RewardError): reward: ValueError: broken (judge at ")


# 3. exit codes


def test_wrong_rows_end_it_with_1_and_without_a_report(
    run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(rollout=SHAPE) == 1
    assert "tasks: there is none" in caplog.text
    assert not (tmp_path / "report.json").exists()


def test_drift_above_the_jobs_limit_ends_it_with_1(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RolloutReport, "drift_fraction", 0.25)
    assert run(1.0, rollout=Rollout(group_size=2, max_drift_fraction=0.3)) == 0
    assert run(1.0, rollout=Rollout(group_size=2, max_drift_fraction=0.2)) == 1
    assert "rollout.maxDriftFraction: 0.2500 of" in caplog.text


def test_source_without_an_end_needs_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_TASKS", 2)
    (tmp_path / "tasks.jsonl").write_text('{"good": 1}\n' * 3)
    config = RolloutWorkerConfig(  # type: ignore[call-arg]
        run_dir=tmp_path, model_path=tmp_path, agent_entrypoint="a:b", base_dir=tmp_path, rollout=SHAPE,
        tasks_path=tmp_path / "tasks.jsonl",
    )  # fmt: skip
    with pytest.raises(AgentflyError, match=r"spec\.limit"):
        worker.rows_of(config)
    assert len(worker.rows_of(config.model_copy(update={"limit": 3}))) == 3


# 4. the seed


def test_seed_of_the_job_decides_the_seed_of_every_draw(run: Any, tmp_path: Path) -> None:
    drawn = []
    for seed in (0, 7, 7):
        (tmp_path / "trajectories" / "rollouts.jsonl").unlink(missing_ok=True)
        Server.seeds = []
        assert run(1.0, rollout=SHAPE, seed=seed) == 0
        drawn.append(sorted(seed for seed in Server.seeds if seed is not None))
    assert [len(set(seeds)) for seeds in drawn] == [2, 2, 2]
    assert drawn[1] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])
