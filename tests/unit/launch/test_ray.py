"""Ray's command lines, what of them is missing, and what else is said and asked of a pod."""

from pathlib import Path

import aiohttp
import pytest

from agentfly.broker.access import TOKEN_FILE
from agentfly.launch.asked import asks
from agentfly.launch.attempt import resolved
from agentfly.launch.joined import missing, missing_of
from agentfly.launch.ray import Place, authentication, head_command, node_command
from agentfly.launch.state import State, serving
from agentfly.roles.launch import Report
from tests.unit.launch.attempts import config_of

GIB = 2**30
# ray.py, 1. Every pod is a node of Ray with a resource of its own name.


def test_the_command_of_a_head():
    command = head_command(Place("run-trainer-1-0", "10.0.0.5", 0, GIB))
    assert command[1:] == [
        *("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--head", "--port=6379", "--include-dashboard=false"),
        *("--node-ip-address=10.0.0.5", "--num-cpus=16", "--num-gpus=1", "--object-store-memory=200000000"),
        '--resources={"pod:run-trainer-1-0": 1, "trainer_head": 1}',
    ]


def test_the_command_of_another_pod():
    command = node_command(Place("run-trainer-1-1", "10.0.0.6", 8, 64 * GIB), "head.run.ns.svc")
    assert command[1:] == [
        *("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--address=head.run.ns.svc:6379", "--node-ip-address=10.0.0.6"),
        *("--num-cpus=16", "--num-gpus=8", f"--object-store-memory={32 * GIB}"),
        '--resources={"pod:run-trainer-1-1": 1}',
    ]


# 3. Who joins must have the key of the run.


def test_all_pods_of_a_run_have_one_key_and_other_runs_have_others(tmp_path):
    token = tmp_path / "token"
    token.write_text("open-sesame\n")
    base = {TOKEN_FILE: str(token)}
    keys = []
    for run in ("a", "a", "b"):
        found = authentication(config_of(tmp_path / run), base, tmp_path)
        file = Path(found["RAY_AUTH_TOKEN_PATH"])
        assert found["RAY_AUTH_MODE"] == "token"
        assert file.stat().st_mode & 0o777 == 0o600
        keys.append(file.read_text())
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) == 64
    assert all("open-sesame" not in key for key in keys)
    token.write_text("another")
    file = Path(authentication(config_of(tmp_path / "a"), base, tmp_path)["RAY_AUTH_TOKEN_PATH"])
    assert file.read_text() != keys[0]


def test_without_a_token_there_is_no_key(tmp_path):
    assert authentication(config_of(tmp_path), {}, tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


# 4. The object store leaves half of /dev/shm to others; it is never smaller than Ray accepts.


@pytest.mark.parametrize(
    ("gpus", "shm_bytes", "store"),
    [
        (0, 64 * 2**20, 80 * 2**20),
        (0, 300_000_000, 150_000_000),
        (0, GIB, 200_000_000),
        (4, 64 * 2**20, 80 * 2**20),
        (4, GIB, GIB // 2),
    ],
)
def test_the_size_of_the_object_store(gpus, shm_bytes, store):
    assert f"--object-store-memory={store}" in head_command(Place("p", "10.0.0.5", gpus, shm_bytes))


# joined.py


def record(*resources: str, alive: bool = True) -> dict:
    return {"Alive": alive, "Resources": dict.fromkeys(resources, 1.0)}


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([], ["a", "b"]),
        ([record("CPU", "pod:a")], ["b"]),
        ([record("pod:b"), record("pod:a", "trainer_head")], []),
        ([record("pod:a"), record("pod:b", alive=False)], ["b"]),
        ([record("pod:a"), record("pod:b", alive=False), record("pod:b")], []),
        ([record("pod:ab"), record("pod:b")], ["a"]),
    ],
)
def test_pods_without_a_living_node_are_missing(nodes, left):
    assert missing(["a", "b"], nodes) == left


@pytest.mark.parametrize(
    ("nodes", "left"),
    [
        ([], ["3 of 3 pods"]),
        ([record("CPU", "pod:a"), record("CPU"), record("pod:b", alive=False)], ["2 of 3 pods"]),
        ([record("pod:a"), record("pod:b"), record("pod:c", "trainer_head")], []),
        ([record("pod:a"), record("pod:b"), record("pod:c"), record("pod:d")], []),
    ],
)
def test_pods_of_unknown_names_are_counted(nodes, left):
    assert missing_of(3, nodes) == left


# asked.py


@pytest.mark.parametrize(
    ("content", "asked"),
    [(b"true", True), (b"true\n", True), (b"", False), (b"false", False), (b"TRUE", False), (b"\xff", False)],
)
def test_only_true_asks(tmp_path, content, asked):
    (tmp_path / "suspend").write_bytes(content)
    assert asks(tmp_path / "suspend") is asked


def test_a_file_that_is_not_there_asks_for_nothing(tmp_path):
    assert not asks(tmp_path / "suspend")


# state.py


async def test_the_newest_report_is_what_is_answered_and_nothing_else():
    state = State(Report(attempt=1, message="first"))
    async with (
        serving(state, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        for message in ("first", "second"):
            report = state.update(message=message)
            async with session.get("/state") as response:
                assert response.content_type == "application/json"
                assert Report.read(await response.text()) == report
        for method, path in (("GET", "/"), ("GET", "/metrics"), ("POST", "/state")):
            async with session.request(method, path) as response:
                assert response.status in (404, 405)


# attempt.py


def test_paths_of_the_image_do_not_depend_on_where_a_process_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"base_dir": "examples", "tasks_path": "examples/t.jsonl", "tasks_entrypoint": None}
    config = resolved(config_of(tmp_path, **changes, model_path="models/m"))
    assert (config.base_dir, config.tasks_path) == (tmp_path / "examples", tmp_path / "examples/t.jsonl")
    assert config.model_path == tmp_path / "models/m"
    assert resolved(config_of(tmp_path)).tasks_path is None
