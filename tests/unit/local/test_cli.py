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

SPEC = {"agent": {"entrypoint": "a.py:a"}, "tasks": {"path": "t"}, "model": {"path": "m"}}
JOB = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": SPEC})


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    work = types.SimpleNamespace(run=JOB, pools=(), base_dir=tmp_path)
    monkeypatch.setattr(preflight, "rollout_job", lambda *_: work)

    def start(result: RolloutJobStatus | Exception, finished_before: bool = False) -> int:
        class Runner:
            def __init__(self, *_: object) -> None:
                self.finished_before = finished_before

            def stop(self) -> None: ...

            async def run(self) -> RolloutJobStatus:
                if isinstance(result, Exception):
                    raise result
                return result

        monkeypatch.setattr(rollouts, "RolloutRunner", Runner)
        return cli.main(["rollout", "-f", "x.yaml", "--runs", str(tmp_path)])

    return start


def failed(reason: Reason, message: str) -> RolloutJobStatus:
    return rollout_status(JOB, JobSeen(Phase.Failed, reason=reason, message=message), datetime.now(UTC))


@pytest.mark.parametrize(("error", "code"), [(AgentflyError, 1), (FolderRefused, 2)])
def test_what_fails_after_its_begin_is_no_wrong_input(
    error: type[AgentflyError], code: int, rollout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(error("pool x: broke", hints=["mend it"])) == code
    assert capsys.readouterr().err == "pool x: broke\n  hint: mend it\n"


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
        "run j: was finished before: worker: exit code 1: oh\n"
        "  hint: give a new run a name of its own: --name NAME\n"
        f"  hint: or start over: rm -r {tmp_path / 'j'}\n"
    )


def test_a_job_that_fails_now_says_nothing_of_before(
    rollout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollout(failed(Reason.AttemptFailed, "oh")) == 1
    assert capsys.readouterr().err == ""
