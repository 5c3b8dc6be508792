"""The pod that prepares a run; the numbers are the module's guarantees."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentfly.api import Rollout, Strategy
from agentfly.api.reasons import Reason
from agentfly.launch import prepare
from agentfly.launch.tasks import tasks_file
from agentfly.roles.launch import PrepareLaunch, Report
from agentfly.roles.life import write_failure
from agentfly.roles.trainer import EXIT_INVALID, TrainerConfig
from agentfly.roles.worker import RolloutWorkerConfig

AGENT = """
from agentfly import Agent, reward

@reward
def judge(ctx, good: float) -> float:
    return good

agent = Agent(reward=judge, prompt="do {good}")
"""
SCRIPT = """
import pathlib, sys
arguments = sys.argv[1:]
folder = pathlib.Path(arguments[arguments.index("--output") + 1])
pathlib.Path("made").open("a").write(f"{' '.join(arguments[:3])}\\n")
folder.mkdir()
if "broken" in arguments:
    raise ValueError("no weights")
(folder / "config.json").write_text("{}")
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    reports: list[Report] = []
    monkeypatch.setattr(prepare, "tell", reports.append)
    return reports


STEP = Rollout(strategy=Strategy(type="Step", prompt_builder="agent.py:agent"))


def run(folder: Path, **changes: Any) -> int:
    launch = PrepareLaunch(**{"model": folder, "base_dir": folder, **changes})
    (folder / "launch.json").write_text(launch.model_dump_json(by_alias=True))
    return prepare.main(["--launch", str(folder / "launch.json")])


def worker(folder: Path, *rows: str, agent: str = "agent.py:agent", **changes: Any) -> RolloutWorkerConfig:
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl.in").write_text("".join(row + "\n" for row in rows))
    return RolloutWorkerConfig(
        run_dir=folder / "run", model_path=folder, agent_entrypoint=agent, base_dir=folder,
        tasks_path=folder / "tasks.jsonl.in", **{"rollout": Rollout(group_size=2), **changes},
    )  # fmt: skip


def trainer(folder: Path) -> TrainerConfig:
    return TrainerConfig(
        run_dir=folder / "run", attempt=0, model_path=folder, agent_entrypoint="agent.py:agent",
        base_dir=folder, tasks_path=folder / "tasks.jsonl", steps=1, tasks_per_step=1, group_size=2,
        max_turns=1, max_tokens_per_turn=8, max_prompt_tokens=8, max_context_tokens=32,
        checkpoint_dir=folder / "checkpoints",
    )  # fmt: skip


# 1. the model


def make(folder: Path, *more: str) -> dict[str, Any]:
    (folder / "make.py").write_text(SCRIPT)
    model = folder / "run" / "model"
    arguments = (*more, "--seed", "7", "--output", str(model))
    return {"model": model, "script": folder / "make.py", "arguments": arguments}


def test_model_is_made_once(tmp_path: Path, said: list[Report]) -> None:
    for _ in range(2):
        assert run(tmp_path, **make(tmp_path)) == 0
    assert [path.name for path in (tmp_path / "run" / "model").iterdir()] == ["config.json"]
    assert (tmp_path / "made").read_text().splitlines() == ["--seed 7 --output"]


def test_model_that_fails_is_not_there_and_may_be_tried_again(tmp_path: Path, said: list[Report]) -> None:
    assert run(tmp_path, **make(tmp_path, "broken")) == 1
    assert not (tmp_path / "run" / "model").exists()
    assert "spec.model.build: exit code 1: ValueError: no weights" in said[0].message
    assert run(tmp_path, **make(tmp_path)) == 0


def test_model_that_another_pod_made_meanwhile_is_taken(tmp_path: Path, said: list[Report]) -> None:
    changes = make(tmp_path)
    model = tmp_path / "run" / "model"
    script = (
        SCRIPT + f"\nother = pathlib.Path({str(model)!r})\nother.mkdir()\n(other / 'other').write_text('')\n"
    )
    (tmp_path / "make.py").write_text(script)
    assert run(tmp_path, **changes) == 0
    assert [path.name for path in model.iterdir()] == ["other"]
    assert sorted(path.name for path in model.parent.iterdir()) == ["logs", "model"]


def test_script_of_a_relative_folder_is_found(
    tmp_path: Path, said: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    changes = make(tmp_path / "sub")
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, **changes, base_dir=Path("sub")) == 0
    assert (tmp_path / "sub" / "made").exists()


def test_pod_that_is_asked_to_stop_ends_with_what_it_started(
    tmp_path: Path, said: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = make(tmp_path)
    (tmp_path / "make.py").write_text(
        f"import os, signal, time\nopen('pid', 'w').write(str(os.getpid()))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, **changes)
    assert ended.value.code == 143
    assert not Path("/proc", (tmp_path / "pid").read_text(), "exe").exists()
    assert not (tmp_path / "run" / "model").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_stop_that_came_before_it_listened_is_heard(
    tmp_path: Path, said: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "early", [signal.SIGTERM])
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, **make(tmp_path))
    assert ended.value.code == 143
    assert not (tmp_path / "run").exists()


# 2. wrong for good


def test_model_that_nobody_makes_is_wrong_for_good(tmp_path: Path, said: list[Report]) -> None:
    assert run(tmp_path, model=tmp_path / "absent") == EXIT_INVALID
    assert said[0].reason == Reason.InvalidSpec
    assert f"spec.model.path: {tmp_path / 'absent'} is not there" in said[0].message


@pytest.mark.parametrize(
    ("rows", "changes", "problem"),
    [
        ([], {}, "tasks: there is none"),
        (["{"], {}, "is no JSON"),
        (['{"bad": 1}'], {}, "good"),
        (['{"good": 1}'], {"agent": "agent.py:absent"}, "has no absent"),
        (
            ['{"good": 1}'],
            {"rollout": STEP},
            "spec.rollout.strategy.promptBuilder: agent.py:agent is of type",
        ),
    ],
)
def test_tasks_that_cannot_be_played_are_wrong_for_good(
    tmp_path: Path, said: list[Report], rows: list[str], changes: dict[str, Any], problem: str
) -> None:
    assert run(tmp_path, worker=worker(tmp_path, *rows, **changes)) == EXIT_INVALID
    assert problem in said[0].message
    assert said[0].exit_code == EXIT_INVALID
    assert not tasks_file(tmp_path / "run").exists()


def trainer_of(command: list[str]) -> TrainerConfig:
    return TrainerConfig.model_validate_json(Path(command[command.index("--config") + 1]).read_text())


class Check:
    """Stands for the trainer's check of its settings."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.command: list[str] = []

    async def __call__(self, name: str, command: list[str], log: Path, **_: Any) -> int:
        self.command = command
        config = trainer_of(command)
        if self.code:
            write_failure(config.run_dir, config.attempt, Reason.InvalidSpec, "spec.overrides: no such key")
        return self.code


@pytest.mark.parametrize("code", [0, EXIT_INVALID])
def test_settings_that_verl_refuses_are_wrong_for_good(
    tmp_path: Path, said: list[Report], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    check = Check(code)
    monkeypatch.setattr(prepare, "_run", check)
    assert run(tmp_path, trainer=trainer(tmp_path)) == code
    assert check.command[1:3] == ["-m", "agentfly.training.main"]
    assert check.command[-1] == "--check"
    assert said[0].message == ("spec.overrides: no such key" if code else "")


def test_what_may_go_better_next_time_ends_with_1(tmp_path: Path, said: list[Report]) -> None:
    assert prepare.main(["--launch", str(tmp_path / "absent.json")]) == 1
    assert said[0].exit_code == 1
    assert "absent.json" in said[0].message


# 3. the tasks


def test_tasks_are_kept_and_counted(tmp_path: Path, said: list[Report]) -> None:
    rows = ['{"good": 0.5}', '{"good": 1.0}', '{"good": 0.0}']
    assert run(tmp_path, worker=worker(tmp_path, *rows)) == 0
    assert run(tmp_path, worker=worker(tmp_path, '{"good": 0.25}')) == 0
    assert [report.tasks for report in said] == [3, 3]
    kept = tasks_file(tmp_path / "run").read_text().splitlines()
    assert [json.loads(row) for row in kept] == [json.loads(row) for row in rows]


def test_limit_of_the_job_holds(tmp_path: Path, said: list[Report]) -> None:
    assert run(tmp_path, worker=worker(tmp_path, *['{"good": 1.0}'] * 3, limit=2)) == 0
    assert said[0].tasks == 2


def test_tasks_of_a_relative_folder_are_found(
    tmp_path: Path, said: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    config = worker(tmp_path / "sub", '{"good": 1.0}')
    monkeypatch.chdir(tmp_path)
    relative = {"base_dir": Path("sub"), "tasks_path": Path("sub/tasks.jsonl.in")}
    assert run(tmp_path, worker=config.model_copy(update=relative)) == 0
    assert said[0].tasks == 1
