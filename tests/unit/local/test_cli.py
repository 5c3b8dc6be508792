"""What the command line makes of what a runner does; the runner itself is replaced."""

import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agentfly import cli
from agentfly.api import RolloutJob, RolloutJobStatus
from agentfly.api.reasons import Reason
from agentfly.api.reasons import RolloutJobPhase as Phase
from agentfly.errors import AgentflyError
from agentfly.local import environments, preflight, rollouts
from agentfly.local.rundir import FolderRefused
from agentfly.roles.status import JobSeen, rollout_status
from agentfly.roles.worker import told_file, trajectories_file

SPEC = {"agent": {"entrypoint": "a.py:a"}, "tasks": {"path": "t"}, "model": {"path": "m"}}
JOB = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": SPEC})


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    work = types.SimpleNamespace(run=JOB, pools=(), base_dir=tmp_path, unnamed=("shell",))
    monkeypatch.setattr(preflight, "rollout_job", lambda *_, here: work)

    def start(result: RolloutJobStatus | Exception, finished_before: bool = False, *more: str) -> int:
        class Runner:
            def __init__(self, *given: object) -> None:
                start.elsewhere = given[-1]  # type: ignore[attr-defined]
                self.finished_before = finished_before

            def stop(self) -> None: ...

            async def run(self) -> RolloutJobStatus:
                if isinstance(result, Exception):
                    raise result
                return result

        monkeypatch.setattr(rollouts, "RolloutRunner", Runner)
        return cli.main(["rollout", "-f", "x.yaml", "--runs", str(tmp_path), *more])

    return start


def failed(reason: Reason, message: str) -> RolloutJobStatus:
    return rollout_status(JOB, JobSeen(Phase.Failed, reason=reason, message=message), datetime.now(UTC))


@pytest.mark.parametrize(("error", "code"), [(AgentflyError, 1), (FolderRefused, 2)])
def test_what_fails_after_its_begin_is_no_wrong_input(
    error: type[AgentflyError], code: int, rollout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(error("pool x: broke", hints=["mend it"])) == code
    assert capsys.readouterr().err == "pool x: broke\n  hint: mend it\n"


SUCCEEDED = rollout_status(JOB, JobSeen(Phase.Succeeded), datetime(2026, 11, 30, tzinfo=UTC))
BROKER = "http://agentfly-broker.team.svc:7080"


def test_a_job_is_here_unless_a_broker_is_named(
    rollout: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AGENTFLY_BROKER", "AGENTFLY_INFERENCE_URLS"):
        monkeypatch.delenv(name, raising=False)
    assert rollout(SUCCEEDED) == 0
    assert rollout.elsewhere is None
    assert rollout(SUCCEEDED, False, "--broker", BROKER, "--policy", "http://a", "--policy", "judge") == 0
    assert rollout.elsewhere == rollouts.Elsewhere(BROKER, ("http://a", "judge"))
    monkeypatch.setenv("AGENTFLY_BROKER", BROKER)
    monkeypatch.setenv("AGENTFLY_INFERENCE_URLS", "http://b,http://c")
    assert rollout(SUCCEEDED) == 0
    assert rollout.elsewhere == rollouts.Elsewhere(BROKER, ("http://b", "http://c"))
    capsys.readouterr()
    monkeypatch.delenv("AGENTFLY_INFERENCE_URLS")
    assert rollout(SUCCEEDED) == 2
    assert "--policy: nobody serves the policy" in capsys.readouterr().err
    monkeypatch.delenv("AGENTFLY_BROKER")
    assert rollout(SUCCEEDED, False, "--policy", "judge") == 2
    assert "--policy: judge is for a job at a broker" in capsys.readouterr().err


def test_an_environment_that_cannot_be_built_is_no_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(name: str, accelerator: str) -> Path:
        raise AgentflyError("environment: no")

    monkeypatch.setattr(environments, "build", build)
    assert cli.main(["env", "trainer"]) == 1
    assert capsys.readouterr().err == "environment: no\n"


def test_a_job_that_was_finished_before_says_how_and_what_to_do(
    rollout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(failed(Reason.AttemptFailed, "worker: exit code 1: oh"), finished_before=True) == 1
    assert capsys.readouterr().err == (
        "run j: was finished before, and nothing was started: worker: exit code 1: oh\n"
        "  hint: give a new run a name of its own: --name NAME\n"
        f"  hint: or start over: rm -r {tmp_path / 'j'}\n"
    )


def test_what_has_no_reward_is_told_before_the_last_line(
    rollout: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, file = told_file(tmp_path / "j"), trajectories_file(tmp_path / "j")
    file.parent.mkdir(parents=True)
    file.write_text("")
    told.write_text("failed 1 (PoolNotFound): pool shell: does not exist\n")
    assert rollout(SUCCEEDED) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "failed 1 (PoolNotFound): pool shell: does not exist",
        "  hint: add shell to spec.pools",
        f"trajectories: {file}",
        "j: Succeeded",
    ]


def test_a_job_that_fails_now_says_nothing_of_before(
    rollout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(failed(Reason.AttemptFailed, "oh")) == 1
    assert capsys.readouterr().err == ""
