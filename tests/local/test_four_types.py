"""All four types of resources in one `agentfly rollout`, by the command line alone.

Real are the policy's vLLM, the worker, sandboxes, objects in this process and apart, and the gateway; the API
behind the gateway is a server of this test. The model service is one too, behind the runner's own start: a
second vLLM would double the time, and its runner is tested with a real one in ``training/test_vllm.py``.

Guarantees under test:
1. An agent gets each type by ``ctx.acquire``, and what it gets is what the pool's spec says.
2. A second holder finds nothing of the first.
3. While it runs, ``agentfly pools``, ``agentfly leases`` and ``/metrics`` say what is so.
4. The API sees its key and never a lease's token; whoever holds a lease, and whoever looks, never the key.
5. However many types a job has, nothing of it is left at the end.
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from agentfly.local import environments
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from tests.local.machine import groups
from tests.local.openai_server import OpenAIServer
from tests.local.test_run import assert_gone

HERE = Path(__file__).parent
START_S, HELD_S, END_S = 300, 60, 60
pytestmark = pytest.mark.timeout(500)

POOL = """\
apiVersion: agentfly.dev/v1alpha1
kind: ResourcePool
metadata: {name: %s}
spec:
  type: %s
  %s
  capacity: {%s}
---
"""
JOB = """\
apiVersion: agentfly.dev/v1alpha1
kind: RolloutJob
metadata: {name: four}
spec:
  agent: {entrypoint: "agent.py:agent"}
  tasks: {path: tasks.jsonl}
  pools: [shell, game, apart, judge, critic]
  model: {path: model}
  rollout:
    groupSize: 2
    maxTurns: 1
    maxTokensPerTurn: 4
    maxPromptTokens: 64
    maxContextTokens: 128
    timeouts: {callSeconds: 60, turnSeconds: 60, rolloutSeconds: 180}
  inference: {maxNumSeqs: 4, dtype: float32, args: [--load-format, dummy]}
"""
SHAPE = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 1024, "tie_word_embeddings": True, "eos_token_id": 258},
}
TOKENS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}
TOKENIZER = """\
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
made.save(sys.argv[1])
"""
GAMES = """\
import os


class Game:
    def __init__(self, size):
        self.board = ["."] * size

    def move(self, place):
        self.board[place] = "x"

    def look(self):
        return {"board": "".join(self.board), "pid": os.getpid(), "key": "JUDGE_KEY" in os.environ}

    def reset(self):
        self.board = ["."] * len(self.board)

    def fingerprint(self):
        return self.board
"""
AGENT = """\
import asyncio
import json
import os
from pathlib import Path

import aiohttp

from agentfly import Agent, Context, reward


async def ask(url: str, key: str) -> int:
    body = {"messages": [{"role": "user", "content": "a number"}]}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session:
        async with session.post(f"{url}/chat/completions", json=body) as response:
            return int((await response.json())["choices"][0]["message"]["content"])


async def setup(ctx: Context, number: int) -> None:
    shell = await ctx.acquire("shell")
    await shell.sandbox.exec(f"echo {number} >> number")
    for name in ("game", "apart"):
        await (await ctx.acquire(name)).instance.call("move", number)
    for name in ("judge", "critic"):
        await ctx.acquire(name)


@reward
async def graded(ctx: Context, number: int) -> float:
    while not Path("go").exists():
        await asyncio.sleep(0.05)
    shell, judge, critic = [await ctx.acquire(name) for name in ("shell", "judge", "critic")]
    seen = {name: await (await ctx.acquire(name)).instance.call("look") for name in ("game", "apart")}
    seen |= {"number": number, "shell": (await shell.sandbox.exec("cat number")).stdout}
    seen |= {"key": "JUDGE_KEY" in os.environ, "token": judge.info.token}
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\\n")
    grade = await ask(judge.base_url, judge.info.token)
    return number + 10 * grade + 100 * await ask(f"{critic.base_url}/v1", "none")


agent = Agent(prompt="say {number}", setup=setup, tools=[], reward=graded)
"""


@dataclass(frozen=True)
class World:
    """The folder of the manifest, a cache for this job alone, and the API with its key."""

    here: Path
    cache: Path
    api: OpenAIServer

    def variables(self) -> dict[str, str]:
        return {**os.environ, "XDG_CACHE_HOME": str(self.cache)}

    def agentfly(self, *arguments: str) -> str:
        """What a command of somebody who looks on prints."""
        command = [sys.executable, "-m", "agentfly.cli", *arguments]
        done = subprocess.run(
            command, env=self.variables(), capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache whose inference environment is the real one, but for a server of the critic's model."""
    real = environments.build("inference")
    path = Path(tempfile.mkdtemp(prefix="af-"))  # short: it will hold sockets
    python = path / "agentfly" / "env" / real.parents[1].name / "bin" / "python"
    python.parent.mkdir(parents=True)
    stand_in = f'"{sys.executable}" "{HERE / "openai_server.py"}"'
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *" serve {tmp_path / "critic"} "*) exec {stand_in} "$@";; esac\n'
        f'exec "{real}" "$@"\n'
    )
    python.chmod(0o755)
    yield path
    shutil.rmtree(path)


def make_model(folder: Path) -> None:
    """A model without weights, one token for each byte: the server makes weights up."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    command = [environments.build("inference"), "-c", TOKENIZER, folder / "tokenizer.json"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)


@pytest.fixture
def world(tmp_path: Path, cache: Path) -> Iterator[World]:
    make_model(tmp_path / "model")
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text("{}")
    (tmp_path / "games.py").write_text(GAMES)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"number": 1}\n{"number": 3}\n')
    api = OpenAIServer("7", key=f"sk-{secrets.token_hex(16)}")
    game = 'inProcess: {entrypoint: "games.py:Game", kwargs: {size: 5}, isolated: %s}'
    url = f"http://127.0.0.1:{api.server_port}/v1"
    external = f"externalAPI: {{baseUrl: '{url}', model: large, credentials: [{{env: JUDGE_KEY}}]}}"
    service = "modelService: {model: ./critic, maxModelLen: 64}"
    pools = [
        ("shell", "Container", "container: {memory: 96Mi}", "max: 2"),
        ("game", "InProcess", game % "false", "max: 2"),
        ("apart", "InProcess", game % "true", "max: 2"),
        ("judge", "ExternalAPI", f"scope: Global\n  {external}", "max: 1"),
        ("critic", "ModelService", f"scope: Global\n  {service}", "min: 1, max: 1"),
    ]
    (tmp_path / "four.yaml").write_text("".join(POOL % pool for pool in pools) + JOB)
    thread = threading.Thread(target=api.serve_forever)
    thread.start()
    yield World(tmp_path, cache, api)
    api.shutdown()
    thread.join()
    api.server_close()


def held(world: World, job: subprocess.Popen) -> tuple[str, list[dict]]:
    """The broker and its leases, when two rollouts hold a member of every pool."""
    deadline = time.monotonic() + START_S
    running = world.here / "runs" / "four" / "report.json"
    while not running.exists():
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < deadline, f"no rollout began in {START_S} s"
        time.sleep(0.2)
    deadline = time.monotonic() + HELD_S
    while True:
        [plane] = json.loads(world.agentfly("leases", "-o", "json"))
        if len(plane["leases"]) == 11:
            return plane["broker"], plane["leases"]
        assert time.monotonic() < deadline, plane


async def metrics(broker: str) -> str:
    connector = aiohttp.UnixConnector(broker.removeprefix("unix://"))
    async with aiohttp.ClientSession(connector=connector) as session:
        return await (await session.get("http://broker/metrics")).text()


def commands(word: str) -> list[str]:
    """The command lines on this machine that have this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_one_job_uses_all_four_types(world: World) -> None:
    key = str(world.api.key)
    job = subprocess.Popen(
        [sys.executable, "-m", "agentfly.cli", "rollout", "-f", "four.yaml"],
        cwd=world.here,
        env={**world.variables(), "JUDGE_KEY": key, "PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        # 3. what those who look on are told
        broker, leases = held(world, job)
        told = [json.dumps(leases)]
        names = [lease["pool"] for lease in leases]
        assert sorted(names) == sorted([*["shell", "game", "apart", "judge", "critic"] * 2, "four-policy"])
        members = {name: {each["member_id"] for each in leases if each["pool"] == name} for name in names}
        assert {name: len(found) for name, found in members.items()} == {
            **{"shell": 2, "game": 2, "apart": 2},
            **{"judge": 1, "critic": 1, "four-policy": 1},
        }
        assert {each["share"] for each in leases if each["pool"] != "four-policy"} == {"four"}
        told.append(world.agentfly("pools"))
        rows = {cells[0]: cells[:8] for cells in map(str.split, told[-1].splitlines())}
        assert rows["shell"] == ["shell", "container", "2", "0", "2", "0", "2", "2"]
        assert rows["judge"] == ["judge", "external-api", "1", "0", "1", "0", "0", "1"]
        told.append(asyncio.run(metrics(broker)))
        for pool, count in (("shell", 2), ("game", 2), ("apart", 2), ("judge", 1), ("critic", 1)):
            assert f'agentfly_pool_members{{pool="{pool}",state="leased"}} {count}.0\n' in told[-1]
        assert 'agentfly_pool_queued{pool="shell"} 2.0\n' in told[-1]
        assert commands(key) == []
        groups_of_job = groups(job.pid) if Cgroups.find().bases else None
        assert groups_of_job is None or len(groups_of_job) >= 2

        (world.here / "go").touch()
        output, _ = job.communicate(timeout=END_S)
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)
    assert job.returncode == 0, output
    told.append(output)
    assert output.splitlines()[-1].startswith("four: Succeeded rollouts=4 scored=4 masked=0 failed=0"), output

    # 1., 2. what the agent got
    run = world.here / "runs" / "four"
    seen = [json.loads(line) for line in (world.here / "seen.jsonl").read_text().splitlines()]
    assert sorted(each["number"] for each in seen) == [1, 1, 3, 3]
    for each in seen:
        board = ".x..." if each["number"] == 1 else "...x."
        assert each["shell"] == f"{each['number']}\n"
        assert (each["game"]["board"], each["game"]["pid"]) == (board, job.pid)
        assert (each["apart"]["board"], each["apart"]["key"], each["key"]) == (board, False, False)
    assert job.pid not in {each["apart"]["pid"] for each in seen}
    lines = (run / "trajectories" / "rollouts.jsonl").read_text().splitlines()
    rewards = sorted(json.loads(line)["outcome"]["reward"] for line in lines)
    assert rewards == [571, 571, 573, 573]

    # 4. key and tokens
    asked = [(path, body["model"]) for path, _, body in world.api.asked]
    assert asked == [("/v1/chat/completions", "large")] * 4
    for _, headers, body in world.api.asked:
        assert f"Bearer {key}" in headers
        assert not any(each["token"] in headers + json.dumps(body) for each in seen)
    files = [path for root in (run, world.cache) for path in root.rglob("*") if path.is_file()]
    assert [path for path in files if key.encode() in path.read_bytes()] == []
    assert not any(key in text for text in told)
    assert not any(each["token"] in text for each in seen for text in told)

    # 5. nothing is left
    assert_gone(world.here, world.cache, job.pid)
    assert groups(job.pid) == set()
