"""The trainer process around verl; verl itself is replaced."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentfly.api import Strategy
from agentfly.api.reasons import Reason
from agentfly.errors import AgentflyError
from agentfly.roles.life import begin_attempt, read_failure
from agentfly.roles.trainer import ENV_CONFIG, TrainerConfig
from agentfly.training import main as trainer
from tests.unit.training.conftest import MakeConfig

Verl = Callable[[TrainerConfig], None]


AGENT = """
from agentfly.agent import Agent, reward
from agentfly.context import Context

@reward
async def right(n: int, ctx: Context) -> float:
    return 1.0

agent = Agent(prompt="{n}", reward=right)
needy = Agent(prompt="{n}", reward=right, parser="vllm:hermes")
nothing = 3
"""


@pytest.fixture
def run(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(trainer, "_watch", lambda config, follower: None)

    def start(verl: Verl, **changes: object) -> int:
        config = make_config(**changes)
        path = tmp_path / "run.json"
        path.write_text(config.model_dump_json())
        monkeypatch.setattr(trainer, "run_verl", lambda config, arguments: verl(config))
        return trainer.main(["--config", str(path)])

    return start


def step(config: TrainerConfig, number: int) -> None:
    with config.verl_metrics_file.open("a") as handle:
        handle.write(json.dumps({"step": number, "data": {}}) + "\n")


def test_a_run_that_ends_exits_with_0_and_has_all_its_lines(
    run: Callable[..., int], make_config: MakeConfig
) -> None:
    def verl(config: TrainerConfig) -> None:
        assert os.environ[ENV_CONFIG].endswith("run.json")
        assert json.loads(config.agent_loop_file.read_text())[0]["name"] == "agentfly"
        assert config.tasks_file.read_text() == '{"n": 1}\n'
        step(config, 1)
        step(config, 2)

    assert run(verl) == 0
    assert len(make_config().metrics_file.read_text().splitlines()) == 2


def test_a_step_that_a_killed_attempt_saved_and_did_not_write_is_written(
    run: Callable[..., int], make_config: MakeConfig
) -> None:
    config = make_config(attempt=2)
    saved = config.checkpoint_dir / "global_step_1"
    saved.mkdir(parents=True)
    (saved / "data.pt").touch()
    (config.checkpoint_dir / "latest_checkpointed_iteration.txt").write_text("1")
    config.outcomes_dir.mkdir(parents=True)
    left = ("turns", "tool_calls", "sampled_tokens", "tokens", "forks", "drifted_tokens")
    outcome = {
        "step": 1,
        "rollout": "r",
        "outcome": "scored",
        "reason": "",
        "stop": "",
        "reward": 1.0,
        **dict.fromkeys(left, 1),
    }
    (config.outcomes_dir / "attempt-1-worker-1.jsonl").write_text(json.dumps(outcome) + "\n")
    assert run(lambda config: step(config, 2), attempt=2) == 0
    lines = [json.loads(line) for line in config.metrics_file.read_text().splitlines()]
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 2)]


def test_a_suspended_run_exits_with_85_and_the_next_attempt_does_not(run: Callable[..., int]) -> None:
    assert run(lambda config: void(config.suspended_file.write_text("4"))) == 85
    assert run(lambda config: None, attempt=2) == 0


def void(_: object) -> None: ...


def test_a_failure_exits_with_1_and_the_log_ends_with_the_cause(
    run: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    def verl(config: TrainerConfig) -> None:
        raise RuntimeError("ray::TaskRunner.run()\n  File x\nRuntimeError: weights: http://m: HTTP 500")

    assert run(verl) == 1
    last = caplog.records[-1].getMessage()
    assert last == "RuntimeError: weights: http://m: HTTP 500; rollouts of unfinished steps: none"


def test_an_error_with_a_remedy_is_shown_with_it_and_is_for_good(
    run: Callable[..., int], make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def verl(config: TrainerConfig) -> None:
        raise AgentflyError("a: b", hints=["do c"])

    assert run(verl) == 87
    assert caplog.records[-1].getMessage() == "a: b\n  hint: do c"
    assert read_failure(make_config().run_dir, 1) == (Reason.InvalidSpec, "a: b\n  hint: do c")


def test_tasks_that_cannot_be_trained_on_are_for_good(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    assert run(void) == 87


def test_agent_that_cannot_be_played_in_this_environment_is_for_good(run: Callable[..., int]) -> None:
    assert run(lambda config: pytest.fail("verl was started"), agent_entrypoint="agent.py:needy") == 87


def test_drift_that_is_seen_only_at_the_end_is_for_good(
    run: Callable[..., int], make_config: MakeConfig
) -> None:
    def verl(config: TrainerConfig) -> None:
        drifted(config)
        step(config, 1)

    assert run(verl, max_drift_fraction=0.1) == 87
    failure = read_failure(make_config().run_dir, 1)
    assert failure is not None
    assert (failure[0], failure[1].split(":")[0]) == (Reason.DriftExceeded, "maxDriftFraction")


def test_too_many_failed_rollouts_end_the_attempt_and_not_the_run(
    run: Callable[..., int], make_config: MakeConfig
) -> None:
    def verl(config: TrainerConfig) -> None:
        failed(config)
        step(config, 1)

    assert run(verl, failure_budget=0.1) == 1
    failure = read_failure(make_config().run_dir, 1)
    assert failure is not None
    assert (failure[0], failure[1].split(":")[0]) == (Reason.FailureBudgetExceeded, "failureBudget")


def test_a_failure_of_the_last_look_at_the_metrics_is_logged(
    run: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    def verl(config: TrainerConfig) -> None:
        config.verl_metrics_file.write_text("no JSON\n")

    assert run(verl) == 1
    assert "Expecting value" in caplog.records[-1].getMessage()


def verl_modules(monkeypatch: pytest.MonkeyPatch, **replaced: object) -> None:
    """Hydra and verl that accept everything but where replaced."""
    names = {
        "hydra": {"compose": lambda name, overrides: overrides, "initialize_config_module": module},
        "verl.trainer.ppo.utils": {"need_critic": bool, "need_reference_policy": bool},
        "verl.utils.config": {"validate_config": lambda *_: None},
        "verl.utils.device": {"auto_set_device": lambda config: None},
    }
    for name, content in names.items():
        found = {key: replaced.get(key, value) for key, value in content.items()}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**found))


@contextlib.contextmanager
def module(name: str, version_base: None) -> Iterator[None]:
    yield


def refuse(*_: object, **__: object) -> None:
    raise ValueError("Key 'x' is not in struct\n    full_key: trainer.x")


@pytest.mark.parametrize("part", ["compose", "validate_config"])
def test_overrides_that_verl_refuses_are_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verl_modules(monkeypatch)
    assert trainer.compose_config(["a=b"]) == ["a=b"]
    verl_modules(monkeypatch, **{part: refuse})
    with pytest.raises(AgentflyError) as caught:
        trainer.compose_config(["+trainer.x=1"])
    assert caught.value.message == (
        "spec.overrides: verl refuses its configuration: Key 'x' is not in struct full_key: trainer.x"
    )


def check(make_config: MakeConfig, tmp_path: Path, **changes: object) -> tuple[int, str]:
    """The exit code of a check, and the failure that it keeps."""
    (tmp_path / "agent.py").write_text(AGENT)
    config = make_config(base_dir=tmp_path, tasks_path=tmp_path / "tasks.jsonl", **changes)
    path = tmp_path / "run.json"
    path.write_text(config.model_dump_json())
    code = trainer.main(["--config", str(path), "--check"])
    kept = read_failure(config.run_dir, config.attempt)
    return code, kept[1] if kept is not None else ""


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    verl_modules(monkeypatch)
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')


@pytest.mark.usefixtures("checked")
def test_a_run_that_can_be_made_passes_its_check(make_config: MakeConfig, tmp_path: Path) -> None:
    assert check(make_config, tmp_path) == (0, "")
    assert make_config().tasks_file.read_text() == '{"n": 1}\n'


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent_entrypoint": "agent.py:nothing"}, "spec.agent: agent.py:nothing is no agentfly.Agent"),
        ({"agent_entrypoint": "other.py:agent"}, "other.py"),
        ({"agent_entrypoint": "agent.py:needy"}, "parser: vllm:hermes needs vLLM, which is not in this env"),
        (
            {"strategy": Strategy(type="Step", prompt_builder="agent.py:nothing")},
            "spec.rollout.strategy.promptBuilder: agent.py:nothing is of type",
        ),
    ],
)
def test_a_check_says_what_is_wrong(
    make_config: MakeConfig, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    code, why = check(make_config, tmp_path, **changes)
    assert code == 87
    assert said in why


@pytest.mark.usefixtures("checked")
def test_a_check_reads_tasks_and_overrides(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    assert check(make_config, tmp_path)[1].startswith("tasks: ")
    verl_modules(monkeypatch, compose=refuse)
    assert check(make_config, tmp_path)[1].startswith("spec.overrides: ")


def drifted(config: TrainerConfig) -> None:
    """One rollout of step 1, most of it drifted."""
    config.outcomes_dir.mkdir(parents=True)
    record = {
        "step": 1,
        "rollout": "r",
        "outcome": "scored",
        "reason": "",
        "stop": "",
        "reward": 1.0,
        "turns": 1,
        "tool_calls": 0,
    }
    record |= {"sampled_tokens": 5, "tokens": 10, "drifted_tokens": 9, "forks": 0}
    (config.outcomes_dir / "attempt-1-worker-1.jsonl").write_text(json.dumps(record) + "\n")


def failed(config: TrainerConfig) -> None:
    """One rollout of step 1, which failed."""
    config.outcomes_dir.mkdir(parents=True)
    record = {
        "step": 1,
        "rollout": "r",
        "outcome": "failed",
        "reason": "Infra",
        "stop": "",
        "reward": None,
        "turns": 0,
        "tool_calls": 0,
    }
    record |= {"sampled_tokens": 0, "tokens": 0, "drifted_tokens": 0, "forks": 0}
    (config.outcomes_dir / "attempt-1-worker-1.jsonl").write_text(json.dumps(record) + "\n")


class Ended(BaseException):
    """What os._exit does to a thread."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def fake(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", fake)
    monkeypatch.setattr(trainer, "_POLL_S", 0.02)
    return codes


def watch(config: TrainerConfig) -> threading.Thread:
    def body() -> None:
        try:
            trainer._watch(config, trainer.MetricsFollower(config))
        except Ended:
            return

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_the_watchdog_counts_from_the_first_step_and_ends_a_run_that_stalls(
    make_config: MakeConfig, exits: list[int]
) -> None:
    config = make_config(stall_timeout_s=0.3)
    trainer_dir = config.verl_metrics_file.parent
    trainer_dir.mkdir(parents=True)
    thread = watch(config)
    time.sleep(0.5)
    assert exits == []
    step(config, 1)
    began = time.monotonic()
    thread.join(5)
    assert exits == [86]
    assert time.monotonic() - began >= 0.3


def test_too_much_drift_ends_the_process(make_config: MakeConfig, exits: list[int]) -> None:
    config = make_config(max_drift_fraction=0.1)
    config.verl_metrics_file.parent.mkdir(parents=True)
    drifted(config)
    step(config, 1)
    watch(config).join(5)
    assert exits == [87]
    failure = read_failure(config.run_dir, 1)
    assert failure is not None
    assert failure[0] == Reason.DriftExceeded


def test_too_many_failed_rollouts_end_the_process(make_config: MakeConfig, exits: list[int]) -> None:
    config = make_config(failure_budget=0.1)
    config.verl_metrics_file.parent.mkdir(parents=True)
    failed(config)
    step(config, 1)
    watch(config).join(5)
    assert exits == [1]


def test_an_attempt_ends_when_a_later_one_has_begun(make_config: MakeConfig, exits: list[int]) -> None:
    config = make_config()
    config.verl_metrics_file.parent.mkdir(parents=True)
    begin_attempt(config.run_dir, 1)
    thread = watch(config)
    thread.join(0.2)
    assert exits == []
    begin_attempt(config.run_dir, 2)
    thread.join(5)
    assert exits == [1]


def test_a_watchdog_that_breaks_ends_the_process_with_a_trace(
    make_config: MakeConfig, exits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    config.verl_metrics_file.parent.mkdir(parents=True)
    config.verl_metrics_file.write_text("no JSON\n")
    watch(config).join(5)
    assert exits == [1]
    assert caplog.records[-1].exc_info is not None
