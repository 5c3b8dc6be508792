"""What a vLLM server is started with. No server is started here; see tests/local/test_vllm.py."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from agentfly.resources.errors import LeaseLost, StartFailed
from agentfly.resources.runners import guard, model_service
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.guard import find_bubblewrap, guarded
from agentfly.resources.runners.model_service import (
    ModelServiceRunner,
    free_port,
    model_config,
    serve_command,
    serve_environment,
)
from agentfly.resources.runners.vllm import kv_cache_bytes
from agentfly.resources.spec import ModelServiceSpec

SPEC = ModelServiceSpec(model="/models/m", max_model_len=512, max_num_seqs=64, args=("--seed", "1"))
CONFIG = {"num_attention_heads": 16, "hidden_size": 1024, "num_key_value_heads": 8, "num_hidden_layers": 28}


def pairs(command: list[str]) -> dict[str, str]:
    return {
        flag: value for flag, value in zip(command, [*command[1:], ""], strict=True) if flag.startswith("--")
    }


def test_a_server_listens_on_the_loopback_and_speaks_ids() -> None:
    command = serve_command(Path("/env/bin/python"), SPEC, 8123, CONFIG)
    assert command[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m"]
    flags = pairs(command)
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", "8123")
    assert (flags["--served-model-name"], flags["--max-model-len"], flags["--max-num-seqs"]) == (
        "policy",
        "512",
        "64",
    )
    assert "--enable-scale-out" in flags


def test_log_probabilities_are_those_of_the_distribution_that_was_drawn_from() -> None:
    flags = pairs(serve_command(Path("p"), SPEC, 1, CONFIG))
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--generation-config"] == "vllm"


def test_the_users_arguments_come_last() -> None:
    assert serve_command(Path("p"), SPEC, 1, CONFIG)[-2:] == ["--seed", "1"]


def test_on_gpus_nothing_of_the_cpu_is_left() -> None:
    spec = SPEC.model_copy(update={"gpus": 8, "tensor_parallel": 4, "pipeline_parallel": 2})
    flags = pairs(serve_command(Path("p"), spec, 1, CONFIG))
    assert flags["--tensor-parallel-size"] == "4"
    assert flags["--pipeline-parallel-size"] == "2"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(flags)
    assert "TORCHDYNAMO_DISABLE" not in serve_environment(spec, {})


def test_the_cache_holds_all_sequences_at_full_length() -> None:
    # keys and values of 28 layers, 8 heads of 64 numbers of 4 bytes, for 64 sequences of 512 tokens
    assert kv_cache_bytes(CONFIG, SPEC) == 2 * 28 * 8 * 64 * 4 * 512 * 64
    assert kv_cache_bytes({"text_config": CONFIG}, SPEC) == kv_cache_bytes(CONFIG, SPEC)


def test_the_cache_has_a_floor_and_a_ceiling() -> None:
    small = {"num_attention_heads": 2, "hidden_size": 64, "num_key_value_heads": 1, "num_hidden_layers": 2}
    assert kv_cache_bytes(small, SPEC) == 64 << 20
    assert kv_cache_bytes({**CONFIG, "head_dim": 512}, SPEC) == 4 << 30
    assert kv_cache_bytes({}, SPEC) == 64 << 20


def test_a_model_that_is_not_a_directory_leaves_the_cache_to_vllm(tmp_path: Path) -> None:
    assert model_config("org/name") is None
    assert "--kv-cache-memory-bytes" not in pairs(serve_command(Path("p"), SPEC, 1, None))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert model_config(str(tmp_path)) == CONFIG


def test_the_servers_python_is_not_led_astray_and_stays_offline_for_a_local_model(tmp_path: Path) -> None:
    base = {
        "PYTHONPATH": "x",
        "PYTHONHOME": "y",
        "VIRTUAL_ENV": "z",
        "PATH": "/bin",
        "VLLM_CPU_KVCACHE_SPACE": "4",
    }
    spec = SPEC.model_copy(update={"model": str(tmp_path)})
    assert serve_environment(spec, base) == {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_RPC_BASE_PATH": "/dev/shm",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert "HF_HUB_OFFLINE" not in serve_environment(SPEC.model_copy(update={"model": "org/name"}), base)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_a_guard_puts_the_command_into_a_process_namespace_that_dies_with_its_owner() -> None:
    command = guarded(["sh", "-c", "exit 3"])
    assert command[0] == str(find_bubblewrap())
    assert command[-3:] == ["sh", "-c", "exit 3"]
    assert {"--unshare-pid", "--die-with-parent", "--proc", "--tmpfs"} < set(command)


def test_a_missing_environment_is_a_reason_not_to_work(tmp_path: Path) -> None:
    reason = ModelServiceRunner(tmp_path / "python", tmp_path).check()
    assert reason is not None
    assert "agentfly env inference" in reason
    assert ModelServiceRunner(Path(sys.executable), tmp_path).check() is None


# The runner with a stand-in for vLLM: a process that listens, answers, or fails as told.

STAND_IN = """
import http.server, json, os, sys
mode, port = os.environ["MODE"], int(sys.argv[sys.argv.index("--port") + 1])
if mode == "taken" and not os.path.exists(os.environ["MARK"]):
    open(os.environ["MARK"], "w").write("x"); sys.exit("OSError: [Errno 98] Address already in use")
if mode == "broken":
    print("lots of text"); sys.exit("ValueError: no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        with open(os.environ["MARK"] + ".seen", "a") as seen: seen.write(self.command + self.path + "\\n")
        refuse = mode == "unready" or (mode == "dirty" and self.path == "/reset_prefix_cache")
        self.send_response(503 if refuse else 200)
        self.send_header("content-length", "0"); self.end_headers()
    do_GET = do_POST = answer
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelServiceRunner:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    monkeypatch.setattr(
        model_service,
        "start_guarded",
        lambda argv, **options: guard.start_guarded([sys.executable, str(script), *argv], **options),
    )
    return ModelServiceRunner(Path(sys.executable), tmp_path, start_timeout_s=10)


async def test_a_server_inherits_everything_but_the_keys_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    async def refuse(argv: object, *, env: dict[str, str], **options: object) -> None:
        given.update(env)
        raise OSError("enough is known")

    monkeypatch.setattr(model_service, "start_guarded", refuse)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    runner = ModelServiceRunner(Path(sys.executable), tmp_path, hidden={"JUDGE_KEY"})
    with pytest.raises(OSError, match="enough is known"):
        await runner.start(SPEC, "policy-0")
    assert "JUDGE_KEY" not in given
    assert given["HF_HOME"] == "/models"


async def start(runner: ModelServiceRunner, mode: str, monkeypatch: pytest.MonkeyPatch) -> Member:
    monkeypatch.setenv("MODE", mode)
    return await runner.start(SPEC, "policy-0")


async def test_a_member_has_answered_a_real_request_before_it_is_handed_out(
    runner: ModelServiceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await start(runner, "good", monkeypatch)
    try:
        assert (tmp_path / "mark.seen").read_text().splitlines()[-1] == "POST/inference/v1/generate"
        assert member.address.startswith("http://127.0.0.1:")
        assert member.incarnation == 1
        assert (await runner.probe(member)).alive
        await runner.lease(member, "o", 0, "t", 30)
    finally:
        await runner.stop(member)
    await runner.stop(member)
    assert not (await runner.probe(member)).alive
    with pytest.raises(LeaseLost, match="policy-0: the server exited with"):
        await runner.lease(member, "o", 0, "t", 30)


async def test_a_taken_port_costs_another_try(
    runner: ModelServiceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await start(runner, "taken", monkeypatch)
    await runner.stop(member)


async def test_a_start_that_fails_says_why_in_one_line_and_gives_the_end_of_the_log(
    runner: ModelServiceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartFailed) as caught:
        await start(runner, "broken", monkeypatch)
    assert caught.value.reason == "exited with 1 before it was ready: ValueError: no such model"
    assert "lots of text" in caught.value.hints[1]
    assert str(tmp_path / "logs" / "policy-0.log") in caught.value.hints[0]


async def test_a_server_that_does_not_get_ready_is_stopped_in_time(
    runner: ModelServiceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    launch = runner._launch

    async def spy(*args: object) -> object:
        started.append(await launch(*args))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(runner, "_launch", spy)
    monkeypatch.setattr(runner, "_start_timeout_s", 1.0)
    with pytest.raises(StartFailed, match="not ready within 1 s"):
        await start(runner, "unready", monkeypatch)
    assert [server.process.returncode for server in started] == [-9]


async def test_a_cancelled_start_leaves_no_process(
    runner: ModelServiceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = asyncio.create_task(start(runner, "unready", monkeypatch))
    seen = tmp_path / "mark.seen"
    while not seen.exists():  # noqa: ASYNC110 - written by another process
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    running = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    script = str(tmp_path / "stand_in.py")
    assert not [
        path for path in running if path.exists() and script in path.read_bytes().decode(errors="replace")
    ]


async def test_a_reset_aborts_and_drops_prefixes_and_is_a_new_incarnation(
    runner: ModelServiceRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await start(runner, "good", monkeypatch)
    try:
        again = await runner.reset(member)
        assert again is not None
        assert again.incarnation == 2
        assert (tmp_path / "mark.seen").read_text().splitlines()[-2:] == [
            "POST/abort_requests",
            "POST/reset_prefix_cache",
        ]
    finally:
        await runner.stop(member)
    assert await runner.reset(member) is None


async def test_a_server_that_refuses_a_reset_is_condemned(
    runner: ModelServiceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await start(runner, "dirty", monkeypatch)
    try:
        assert await runner.reset(member) is None
    finally:
        await runner.stop(member)
