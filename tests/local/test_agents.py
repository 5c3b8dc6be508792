"""An example's agent in a real sandbox, without a policy of its own: by chat, by a job, and in a loop.

The API is a server of this test that says what it is told; everything else is real.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentfly import read_trajectories
from agentfly.local.pools import local_pools
from agentfly.refs import load
from agentfly.rollout import Scored, TrajectoryList, rollout
from tests.unit.rollout.talkers import says, talking

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
CODE = "I compute.\n```python\nopen('answer.txt', 'w').write(str(sum(n * n for n in range(101))))\n```"


async def test_calculate_is_judged_in_the_sandbox_that_it_worked_in() -> None:
    agent, tasks = load("calculate.py:agent", AGENTS), list(load("calculate.py:tasks", AGENTS)(seed=0))
    played = TrajectoryList()
    api, manifest = talking(says(CODE), says("done")), AGENTS / "shell.yaml"
    async with api as (model, asked), local_pools(manifest) as pools:
        await rollout(agent, tasks[:1], model=model, resources=pools, group_size=1, sink=played)
        status = await pools.status()
    (trajectory,) = played
    assert trajectory.tool_calls[0].exit_code == 0, asked
    assert trajectory.metrics["reward/right"] == 1.0
    assert isinstance(trajectory.outcome, Scored)
    assert 1.0 < trajectory.outcome.reward < 1.1
    assert (status["shell"].leased, status["shell"].acquires) == (0, 1)


async def agentfly(*arguments: str, cwd: Path) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentfly.cli", *arguments),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 100)
    return process.returncode, out.decode(), err.decode()


async def test_command_talks_to_an_agent_with_a_pool() -> None:
    task = json.dumps({"question": "squares to 100?", "answer": 338350})
    async with talking(says(CODE), says("I wrote it down")) as (model, asked):
        api = ["--url", model.base_url, "--model", "m"]
        code, out, err = await agentfly(
            "chat", "calculate.py:agent", *api, "-f", "shell.yaml", "--task", task, cwd=AGENTS
        )
    assert (code, err) == (0, "")
    assert "observation: Output:" in out
    assert out.splitlines()[-2] == "assistant: I wrote it down"
    assert "2 turns, 1 calls, reward 1.0" in out.splitlines()[-1]
    assert asked[0]["messages"][0]["role"] == "system"


JOB = """\
---
apiVersion: agentfly.dev/v1alpha1
kind: RolloutJob
metadata: {name: calculate}
spec:
  agent: {entrypoint: "%(agents)s/calculate.py:agent"}
  tasks: {entrypoint: "%(agents)s/calculate.py:tasks"}
  limit: 2
  pools: [shell]
  model: {path: .}
  rollout: {groupSize: 2, maxTurns: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pool = (AGENTS / "shell.yaml").read_text()
    (tmp_path / "job.yaml").write_text(pool + JOB % {"agents": AGENTS})
    return tmp_path


async def test_job_is_played_by_an_api_and_goes_on_where_it_was(folder: Path) -> None:
    async with talking(says(CODE)) as (model, asked):
        command = ["rollout", "-f", "job.yaml", "--url", model.base_url, "--model"]
        code, out, err = await agentfly(*command, "m", cwd=folder)
        assert (code, err) == (0, ""), out
        assert "calculate: Succeeded rollouts=4 scored=4 masked=0 failed=0 reward=0.5" in out
        played = list(read_trajectories(folder / "runs/calculate/trajectories/rollouts.jsonl"))
        assert sorted(one.metrics["reward/right"] for one in played) == [0, 0, 1, 1]
        assert [one.rows for one in played] == [[]] * 4
        assert len(asked) == 4
        again = await agentfly(*command, "m", cwd=folder)
        assert (again[0], len(asked)) == (0, 4)
        code, _, err = await agentfly(*command, "other", cwd=folder)
        assert (code, "other" in err) == (2, True)


async def test_job_that_fails_says_why_and_goes_on_when_its_api_does(folder: Path) -> None:
    broken = says(None, ("python", "{}"), tokens=1)
    del broken["choices"]
    async with talking(broken) as (model, _):
        command = ["rollout", "-f", "job.yaml", "--url", model.base_url, "--model", "m"]
        code, out, err = await agentfly(*command, cwd=folder)
    assert (code, "ModelUnavailable" in err, "calculate: Failed" in out) == (1, True, True)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [([], "--url: names an API and no model"), (["--model", "m", "--policy", "x"], "--policy: x and an API")],
)
async def test_wrong_input_starts_nothing(folder: Path, arguments: list[str], problem: str) -> None:
    command = ["rollout", "-f", "job.yaml", "--url", "http://127.0.0.1:9/v1", *arguments]
    code, _, err = await agentfly(*command, cwd=folder)
    assert (code, problem in err) == (2, True)
    assert not (folder / "runs").exists()
