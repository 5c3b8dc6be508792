"""Head and node of an attempt on this machine, with the Ray that trainer pods have."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentfly.broker.access import TOKEN_FILE
from agentfly.local import environments
from agentfly.resources.runners.guard import find_bubblewrap
from agentfly.roles.launch import Report, TrainerLaunch
from tests.unit.launch.attempts import broker, config_of, launch_of, until

pytestmark = pytest.mark.timeout(600)

STARTS_S = 240.0  # two times Ray, on a machine that is busy
HEAD_IP, NODE_IP = "127.0.0.2", "127.0.0.3"
MARK = "AGENTFLY_TEST_LAUNCH"

# In the place of python3 -m agentfly.launch.head: its trainer is another program, its ports are free ones.
HEAD = """
import json, sys
from pathlib import Path
from agentfly.launch.head import Programs, attempt
from agentfly.launch.pod import main_process
from agentfly.launch.ray import Place, head_command
from agentfly.roles.launch import TrainerLaunch

launch, last_word, port, state_port, temp_dir, trainer = sys.argv[1:]
def work(launch):
    place = Place(launch.pods[0], "127.0.0.2", 0, 2**28, port=int(port), temp_dir=Path(temp_dir))
    programs = Programs(head_command(place), trainer=(sys.executable, trainer))
    return attempt(launch, programs, place, int(state_port))
sys.exit(main_process("head", TrainerLaunch, work, ["--launch", launch], Path(last_word)))
"""
NODE = """
import sys
from pathlib import Path
from agentfly.launch.node import join
from agentfly.launch.pod import main_process
from agentfly.launch.ray import Place
from agentfly.roles.launch import TrainerLaunch

launch, last_word, port = sys.argv[1:]
def work(launch):
    return join(launch, Place(launch.pods[1], "127.0.0.3", 0, 2**28, port=int(port)))
sys.exit(main_process("node", TrainerLaunch, work, ["--launch", launch], Path(last_word)))
"""
TRAINER = """
import json, os, sys, time
from pathlib import Path
import ray

config = json.loads(Path(sys.argv[2]).read_text())
run = Path(config["run_dir"])
ray.init(address="auto", logging_level="ERROR", runtime_env={"env_vars": {"AS_VERL": "does"}})

@ray.remote(num_cpus=0)
def where():
    return ray.util.get_node_ip_address()

nodes = [node for node in ray.nodes() if node["Alive"]]
pods = sorted(name for node in nodes for name in node["Resources"] if name.startswith("pod:"))
ran = {pod: ray.get(where.options(resources={pod: 0.01}).remote(), timeout=60) for pod in pods}
head = ray.get(where.options(resources={"trainer_head": 0.01}).remote(), timeout=60)
found = {"pods": pods, "ran": ran, "head": head, "gpus": ray.cluster_resources()["GPU"]}
(run / "found.json").write_text(json.dumps(found))
with (run / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"step": 1, "attempt": config["attempt"], "time": time.time()}) + "\\n")
end = time.monotonic() + 200
while not (run / "control" / "suspend").exists():
    if time.monotonic() > end:
        sys.exit(1)
    time.sleep(0.1)
(run / "control" / "suspended").write_text("1")
sys.exit(85)
"""

FIRST = """
import asyncio, os, signal, time, agentfly.launch
os.kill(1, signal.SIGTERM)
from agentfly.launch.pod import stop_asked
time.sleep(0.1)
async def main():
    with stop_asked() as asked:
        async with asyncio.timeout(10):
            await asked.wait()
assert os.getpid() == 1
asyncio.run(main())
"""


@pytest.fixture
def python() -> Path:
    return environments.build("trainer")


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """Ray's; its sockets need a short name."""
    path = Path(tempfile.mkdtemp(prefix="l", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def mark(monkeypatch, tmp_path) -> str:
    """A variable by which everything that a test starts is known."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")  # a minute in a pod
    monkeypatch.setenv("PYTHONPATH", str(environments.agentfly_path()))
    (tmp_path / "token").write_text("open-sesame")  # as trainer pods have it
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    return f"{MARK}={value}"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def marked(mark: str) -> list[str]:
    """The commands of all living processes with this variable, but for the test's own."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark.encode() in environment and path.name != str(os.getpid()):
            found.append(f"{path.name} {command}")
    return found


@dataclass
class Pod:
    """A process in the place of a pod."""

    process: asyncio.subprocess.Process
    last_word: Path

    async def ends(self) -> tuple[int, Report]:
        async with asyncio.timeout(STARTS_S):
            code = await self.process.wait()
        report = Report.read(self.last_word.read_text())
        assert report is not None
        return code, report


@asynccontextmanager
async def pod(python: Path, code: str, last_word: Path, *arguments: str) -> AsyncIterator[Pod]:
    launch = last_word.parent / "launch.json"
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", code, str(launch), str(last_word), *arguments, start_new_session=True
    )
    try:
        yield Pod(process, last_word)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(STARTS_S):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)


def write_launch(folder: Path, address: str, barrier_s: float) -> TrainerLaunch:
    config = config_of(folder, nodes=2)
    config.run_dir.mkdir()
    launch = launch_of(config, address, head=HEAD_IP, barrier_s=barrier_s)
    (folder / "launch.json").write_text(launch.model_dump_json())
    (folder / "trainer.py").write_text(TRAINER)
    return launch


async def stranger(python: Path, address: str) -> str:
    """What somebody is told who comes to the run's Ray with another key."""
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-c", f"import ray; ray.init(address={address!r}); print('is in')"),
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(STARTS_S):
            return (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()


async def test_head_and_node_train_are_suspended_and_leave_nothing(python, temp_dir, mark, tmp_path):
    port, state_port = free_port(HEAD_IP), free_port(HEAD_IP)
    async with broker() as (_, address):
        launch = write_launch(tmp_path, address, STARTS_S)
        run = launch.trainer.run_dir
        head_arguments = (str(port), str(state_port), str(temp_dir), str(tmp_path / "trainer.py"))
        # The node is there first: it waits for the head.
        async with (
            pod(python, NODE, tmp_path / "node", str(port)) as node,
            pod(python, HEAD, tmp_path / "head", *head_arguments) as head,
        ):
            async with asyncio.timeout(STARTS_S):
                while not (run / "found.json").exists():
                    assert head.process.returncode is None
                    assert node.process.returncode is None
                    await asyncio.sleep(0.2)
            assert "InvalidAuthToken" in await stranger(python, f"{HEAD_IP}:{port}")
            node.process.send_signal(signal.SIGTERM)  # all pods are deleted at once
            head.process.send_signal(signal.SIGTERM)
            code, report = await head.ends()
            assert (code, report.exit_code, report.suspended) == (85, 85, True)
            assert report.progress is not None
            assert report.progress.step == 1
            code, report = await node.ends()
            assert code in (0, 1)  # whoever sees it first: it itself, or its Ray
    pods = [f"pod:{name}" for name in launch.pods]
    assert json.loads((run / "found.json").read_text()) == {
        "pods": pods,
        "ran": dict(zip(pods, (HEAD_IP, NODE_IP), strict=True)),
        "head": HEAD_IP,
        "gpus": 2.0,
    }
    await until(lambda: not marked(mark))


async def test_a_pod_that_does_not_come_is_named_and_nothing_is_left(python, temp_dir, mark, tmp_path):
    async with broker() as (_, address):
        launch = write_launch(tmp_path, address, 30.0)
        arguments = (free_port(HEAD_IP), free_port(HEAD_IP), temp_dir, tmp_path / "trainer.py")
        async with pod(python, HEAD, tmp_path / "head", *map(str, arguments)) as head:
            code, report = await head.ends()
    assert (code, report.reason) == (1, "StartFailed")
    assert report.message == f"pod {launch.pods[1]}: did not join Ray within 30 s"
    await until(lambda: not marked(mark))


def test_the_first_process_of_a_container_hears_of_a_stop_while_it_starts():
    command = [find_bubblewrap(), "--dev-bind", "/", "/", "--unshare-pid", "--as-pid-1", "--proc", "/proc"]
    done = subprocess.run(
        [*command, sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
