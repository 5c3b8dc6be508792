"""The handle of a long command against a daemon that is told what to answer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agentfly.sandbox import ExecResult, Job, Piece, SandboxClient, SandboxError, SandboxLeaseLost
from tests.unit.sandbox.test_client import ENDED, refusal

RUNNING = {**ENDED, "stdout": "", "id": "1-1", "running": True, "stdoutOffset": 0, "stderrOffset": 0}
OVER = {**RUNNING, "running": False}


class Daemon:
    """Gives the answers of a script, one after the other, and keeps the requests. The last one stays."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.script: list[tuple[int, dict[str, object]]] = [(200, RUNNING)]
        self.requests: list[str] = []
        self.bodies: list[bytes] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        self.bodies.append(await request.read())
        status, body = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return web.json_response(body, status=status)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(f"unix://{tmp_path}/s")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", daemon.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    yield daemon
    await runner.cleanup()


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(daemon.address, "t") as client:
        yield client
        daemon.script = [(200, OVER)]


async def started(client: SandboxClient, daemon: Daemon, *script: tuple[int, dict[str, object]]) -> Job:
    job = await client.start("make")
    daemon.script = list(script) or daemon.script
    daemon.requests.clear()
    return job


async def test_start_asks_not_to_wait(client: SandboxClient, daemon: Daemon) -> None:
    job = await client.start(["make", "-j"], timeout=9, output_limit=5, user="1:2")
    assert job.id == "1-1"
    assert daemon.requests == ["POST /exec"]
    assert daemon.bodies == [
        b'{"argv": ["make", "-j"], "stdin": "", "timeoutSeconds": 9, "outputLimitBytes": 5, '
        b'"user": "1:2", "waitSeconds": 0}'
    ]


async def test_wait_polls_until_the_end(client: SandboxClient, daemon: Daemon) -> None:
    job = await started(client, daemon, (200, RUNNING), (200, RUNNING), (200, {**OVER, "stdout": "all"}))
    assert await job.poll() is None
    assert await job.wait() == ExecResult(0, None, "all", "", False, False, False, False, 0.5, 0.25)
    assert daemon.requests == ["GET /exec/1-1?wait=0", "GET /exec/1-1?wait=20", "GET /exec/1-1?wait=20"]
    assert job.over


# 1. Output in order.


async def test_output_is_asked_for_from_where_it_ended(client: SandboxClient, daemon: Daemon) -> None:
    job = await started(
        client,
        daemon,
        (200, {**RUNNING, "stdout": "ä", "stdoutOffset": 2}),
        (200, {**RUNNING, "stdoutOffset": 2}),
        (200, {**OVER, "stdout": "b", "stderr": "c", "stdoutOffset": 3, "stderrOffset": 1}),
    )
    pieces = [piece async for piece in job.output()]
    assert pieces == [Piece("stdout", "ä"), Piece("stdout", "b"), Piece("stderr", "c")]
    assert daemon.requests == [
        "GET /exec/1-1?wait=20&stdout=0&stderr=0",
        "GET /exec/1-1?wait=20&stdout=2&stderr=0",
        "GET /exec/1-1?wait=20&stdout=2&stderr=0",
    ]


# 2. Leaving cancels.


async def test_leaving_the_block_cancels(client: SandboxClient, daemon: Daemon) -> None:
    for error in (None, ValueError, asyncio.CancelledError):
        try:
            async with await started(client, daemon):
                if error:
                    raise error
        except (ValueError, asyncio.CancelledError):
            pass
        assert daemon.requests == ["DELETE /exec/1-1"]


async def test_closing_the_client_cancels_what_has_not_ended(client: SandboxClient, daemon: Daemon) -> None:
    ended = await client.start("a")
    daemon.script = [(200, OVER)]
    await ended.wait()
    daemon.script = [(200, {**RUNNING, "id": "1-2"})]
    await client.start("b")
    daemon.requests.clear()
    await client.close()
    assert daemon.requests == ["DELETE /exec/1-2"]


async def test_cancel_is_idempotent_and_content_with_its_absence(
    client: SandboxClient, daemon: Daemon
) -> None:
    job = await started(client, daemon, (404, refusal("NotFound")))
    await job.cancel()
    await job.cancel()
    assert daemon.requests == ["DELETE /exec/1-1"]


async def test_cancel_that_was_refused_is_told_and_leaving_is_quiet(
    client: SandboxClient, daemon: Daemon
) -> None:
    job = await started(client, daemon, (409, refusal("Busy")))
    with pytest.raises(SandboxError, match="Busy"):
        await job.cancel()
    assert not job.over
    daemon.script = [(410, refusal("LeaseLost"))]
    with pytest.raises(SandboxLeaseLost):
        await job.cancel()
    async with job:
        pass


# 3. A result is kept.


async def test_result_needs_no_sandbox_twice(client: SandboxClient, daemon: Daemon) -> None:
    job = await started(client, daemon, (200, OVER))
    result = await job.wait()
    assert await job.poll() is result
    assert await job.wait() is result
    await job.cancel()
    assert daemon.requests == ["GET /exec/1-1?wait=20"]
