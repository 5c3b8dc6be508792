"""``agentfly rollout --url``: what the terminal says of a job that an API plays."""

from pathlib import Path
from typing import Any

import pytest

from agentfly.cli import main
from agentfly.local import pools
from agentfly.resources.engine import ResourceEngine
from tests.unit.local.test_chat import url

__all__ = ["url"]

AGENT = """
from agentfly import Agent, Context, reward

@reward
async def lost(ctx: Context) -> float:
    await ctx.acquire("shell")
    return 1.0

@reward
def unsure(ctx: Context) -> float | None:
    return None

asking = Agent(prompt="do {what}", reward=lost)
unjudged = Agent(prompt="do {what}", reward=unsure)
"""
JOB = """\
apiVersion: agentfly.dev/v1alpha1
kind: ResourcePool
metadata: {name: shell}
spec: {type: Container, container: {image: host}, capacity: {max: 1}}
---
apiVersion: agentfly.dev/v1alpha1
kind: RolloutJob
metadata: {name: j}
spec:
  agent: {entrypoint: "agent.py:asking"}
  tasks: {path: tasks.jsonl}
  rollout: {groupSize: 1}
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Any:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "tasks.jsonl").write_text('{"what": "tea"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    # Without sandboxes no daemon of theirs is needed, which unit tests do not build.
    monkeypatch.setattr(pools, "running", lambda named: ResourceEngine({}))
    return lambda *more: main(["rollout", "-f", "job.yaml", "--url", url, "--model", "m", *more])


def test_why_a_job_failed_is_said_with_the_remedy_and_the_place(
    play: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play() == 1
    said = capsys.readouterr()
    assert said.err == (
        "spec.runPolicy.failureBudget: 1 of 1 rollouts failed (PoolNotFound 1), over the budget of 0.1\n"
        "  hint: mend the first PoolNotFound: pool shell: does not exist; hint: pools that do: none\n"
        "  hint: or raise spec.runPolicy.failureBudget (in a script, failure_budget); "
        "what failed is played again by the same command\n"
    )
    assert said.out.splitlines()[-4:] == [
        "failed 1 (PoolNotFound): pool shell: does not exist; hint: pools that do: none",
        "  hint: add shell to spec.pools",
        f"trajectories: {tmp_path / 'runs/j/trajectories/rollouts.jsonl'}",
        "j: Failed rollouts=1 scored=0 masked=0 failed=1",
    ]


def test_unscored_rollouts_name_the_reward_and_a_job_that_was_finished_says_so(
    play: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unjudged = ("--set", "agent.entrypoint=agent.py:unjudged")
    for number in range(2):
        assert play(*unjudged) == 0
        said = capsys.readouterr()
        assert "masked 1 (unscored): reward unsure returned None" in said.out.splitlines()
        finished = "run j: was finished before, and nothing was started: every rollout has an outcome\n"
        assert said.err.startswith(finished) == (number == 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["--url", "localhost:1/v1"], "--url: localhost:1"), (["--key-env", "NOT_SET"], "--key-env: NOT_SET")],
)
def test_wrong_api_starts_nothing(
    play: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert play(*arguments) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
