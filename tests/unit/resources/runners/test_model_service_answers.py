"""What the runner of model services makes of a server's answers. The server is a stand-in in this process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agentfly.resources.errors import StartFailed
from agentfly.resources.runners import guard, model_service, vllm
from agentfly.resources.runners.base import Member
from agentfly.resources.runners.model_service import ModelServiceRunner
from agentfly.resources.spec import ModelServiceSpec

SPEC = ModelServiceSpec(model="m", max_model_len=512)


class Server:
    """Answers like vLLM: cached prefixes are not dropped while a request holds a part of the cache."""

    def __init__(self) -> None:
        self.running = 0
        self.steps = 0  # how many more answers an aborted request holds its part of the cache
        self.first_answer = 200
        self.seen: list[str] = []
        self.port = model_service.free_port()

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.path)
        if request.path == "/inference/v1/generate":
            return web.json_response({"detail": "no such model"}, status=self.first_answer)
        if request.path == "/abort_requests":
            self.running = 0
        if request.path == "/reset_prefix_cache":
            self.steps -= 1
            return web.json_response({"success": not self.running and self.steps < 0})
        return web.json_response({})

    @property
    def member(self) -> Member:
        handle = model_service._Server(process=None, log=Path("/dev/null"))  # type: ignore[arg-type]
        return Member("policy-0", SPEC, 1, f"http://127.0.0.1:{self.port}", handle=handle)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    stand_in = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stand_in.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", stand_in.port).start()
    yield stand_in
    await runner.cleanup()


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelServiceRunner:
    monkeypatch.setattr(
        model_service, "start_guarded", lambda _, **options: guard.start_guarded(["sleep", "60"], **options)
    )
    monkeypatch.setattr(model_service, "_POLL_S", 0.01)
    monkeypatch.setattr(vllm, "_POLL_S", 0.01)
    monkeypatch.setattr(vllm, "CLEAR_S", 0.5)
    return ModelServiceRunner(Path(sys.executable), tmp_path)


async def test_server_that_refuses_its_first_request_is_quoted(
    runner: ModelServiceRunner, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_service, "free_port", lambda: server.port)
    server.first_answer = 404
    killed: list[int | None] = []
    kill = model_service.end_guard

    async def spy(process: asyncio.subprocess.Process) -> None:
        await kill(process)
        killed.append(process.returncode)

    monkeypatch.setattr(model_service, "end_guard", spy)
    with pytest.raises(StartFailed) as failed:
        await runner.start(SPEC, "policy-0")
    assert failed.value.reason == "answered 404 to its first request: (no output)"
    assert killed == [-9]


async def test_reset_is_done_when_the_server_says_that_nothing_runs(
    runner: ModelServiceRunner, server: Server
) -> None:
    server.running, server.steps = 3, 2
    again = await runner.reset(server.member)
    assert again is not None
    assert (again.incarnation, server.running) == (2, 0)
    assert server.seen == ["/abort_requests", "/reset_prefix_cache"] * 3


async def test_server_in_which_something_goes_on_running_is_condemned(
    runner: ModelServiceRunner, server: Server
) -> None:
    server.steps = 10**9
    assert await runner.reset(server.member) is None
