"""The client of sandboxd against a daemon that is told what to answer."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agentfly.sandbox import (
    Endpoint,
    ExecResult,
    ResetReport,
    SandboxAdmin,
    SandboxClient,
    SandboxError,
    SandboxLeaseLost,
    SandboxUnreachable,
    client,
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ENDED = {
    "exitCode": 0,
    "signal": None,
    "stdout": "out\n",
    "stderr": "",
    "stdoutTruncated": False,
    "stderrTruncated": False,
    "timedOut": False,
    "oom": False,
    "wallSeconds": 0.5,
    "cpuSeconds": 0.25,
}


class Daemon:
    """Answers every request with ``handler`` and keeps what came."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.requests: list[tuple[str, str, str | None, bytes]] = []
        self.keys: list[str | None] = []
        self.handler: Handler = self.ended

    async def ended(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(ENDED)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, request.headers.get("Authorization"), body))
        self.keys.append(request.headers.get("Idempotency-Key"))
        return await self.handler(request)

    def says(self, status: int, body: object) -> None:
        async def handler(_: web.Request) -> web.StreamResponse:
            if isinstance(body, bytes):
                return web.Response(status=status, body=body)
            return web.json_response(body, status=status)

        self.handler = handler


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path / "s")
    app = web.Application(client_max_size=70 << 20)
    app.router.add_route("*", "/{path:.*}", daemon.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    yield daemon
    await runner.cleanup()


def refusal(code: str) -> dict[str, object]:
    return {"error": {"code": code, "message": "field: is wrong"}}


async def test_shell_line_and_arguments_travel_apart(daemon: Daemon) -> None:
    async with SandboxClient(daemon.address, "secret") as sandbox:
        result = await sandbox.exec(
            "ls | wc", env={"A": "1"}, cwd="/tmp", stdin="x", user="dev", timeout=7, output_limit=9
        )
        await sandbox.exec(["ls", "-l"])
    assert result == ExecResult(0, None, "out\n", "", False, False, False, False, 0.5, 0.25)
    assert daemon.requests[0][:3] == ("POST", "/exec", "Bearer secret")
    assert daemon.requests[0][3] == (
        b'{"command": "ls | wc", "stdin": "x", "timeoutSeconds": 7, "outputLimitBytes": 9, '
        b'"env": {"A": "1"}, "cwd": "/tmp", "user": "dev"}'
    )
    assert daemon.requests[1][3] == (
        b'{"argv": ["ls", "-l"], "stdin": "", "timeoutSeconds": 30.0, "outputLimitBytes": 65536}'
    )


async def test_files_travel_as_bytes(daemon: Daemon) -> None:
    data = bytes(range(256)) * 10_000
    async with SandboxClient(daemon.address, "t") as sandbox:
        daemon.says(200, {"bytes": len(data)})
        await sandbox.write_file("/a b/ü", data, 0o750)
        daemon.says(200, data)
        assert await sandbox.read_file("/x") == data
    assert daemon.requests[0][:2] == ("PUT", "/files?path=/a+b/%C3%BC&mode=0750")
    assert daemon.requests[0][3] == data
    assert daemon.requests[1][:2] == ("GET", "/files?path=/x")


async def test_owner_leases_and_resets(daemon: Daemon) -> None:
    async with SandboxAdmin(daemon.address, "admin") as sandbox:
        daemon.says(200, {"state": "leased"})
        await sandbox.lease("rollout-1", 2, "token", 30)
        daemon.says(200, {"clean": True, "method": "paths", "milliseconds": 12.5})
        assert await sandbox.reset() == ResetReport(True, None, "paths", 0.0125)
        daemon.says(200, {"clean": False, "reason": "upper: /x was written"})
        assert await sandbox.reset() == ResetReport(False, "upper: /x was written")
    assert (
        daemon.requests[0][3] == b'{"owner": "rollout-1", "attempt": 2, "token": "token", "ttlSeconds": 30}'
    )
    assert {request[2] for request in daemon.requests} == {"Bearer admin"}


async def test_health_is_read(daemon: Daemon) -> None:
    daemon.says(
        200,
        {
            "state": "leased",
            "incarnation": 3,
            "leases": 4,
            "owner": "o",
            "expiresInSeconds": 1.5,
            "idleSeconds": 0.5,
            "version": "v",
        },
    )
    async with SandboxClient(daemon.address, "t") as sandbox:
        health = await sandbox.health()
    assert (health.state, health.incarnation, health.leases, health.owner) == ("leased", 3, 4, "o")
    assert (health.expires_in_s, health.idle_s, health.version) == (1.5, 0.5, "v")


# 1. Every request has a deadline.


async def test_silence_ends_at_the_deadline(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(client, "MARGIN_S", 0.05)
    daemon.handler = silent
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxUnreachable, match=r"POST /exec had no answer in 0\.1 s"):
            await sandbox.exec("true", timeout=0.05)


# 2. Typed errors.


async def test_no_daemon_is_unreachable(tmp_path: Path) -> None:
    for address in (f"unix://{tmp_path}/none", "http://127.0.0.1:1"):
        async with SandboxClient(address, "t") as sandbox:
            with pytest.raises(SandboxUnreachable, match="failed"):
                await sandbox.exec("true")


async def test_cut_connection_is_unreachable(daemon: Daemon) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    daemon.handler = cut
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxUnreachable):
            await sandbox.exec("true")


async def test_lost_lease_has_its_own_type(daemon: Daemon) -> None:
    daemon.says(410, refusal("LeaseLost"))
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxLeaseLost, match=r"field: is wrong \(410 LeaseLost\)"):
            await sandbox.exec("true")


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "BadRequest"), (401, "Unauthorized"), (404, "NotFound"), (409, "Busy"), (413, "TooLarge")],
)
async def test_refusal_keeps_its_code(daemon: Daemon, status: int, code: str) -> None:
    daemon.says(status, refusal(code))
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxError, match="field: is wrong") as caught:
            await sandbox.read_file("/x")
    assert (caught.value.code, caught.value.address) == (code, daemon.address)
    assert caught.value.message == f"sandbox: field: is wrong ({status} {code})"  # and not where it is


async def test_answer_of_a_stranger_is_quoted(daemon: Daemon) -> None:
    daemon.says(502, b"<html>bad gateway")
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxError, match="<html>bad gateway") as caught:
            await sandbox.exec("true")
    assert caught.value.code == "Unknown"


# 3. Cancelling closes the connection.


async def test_cancel_reaches_the_daemon(daemon: Daemon) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            gone.set()  # aiohttp cancels the handler of a client that has gone
        return web.Response()

    daemon.handler = slow
    async with SandboxClient(daemon.address, "t") as sandbox:
        call = asyncio.create_task(sandbox.exec("sleep 60", timeout=60))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(5):
            await gone.wait()


# 4. Repeated once, under its key.


async def test_lost_answer_is_asked_for_again(daemon: Daemon) -> None:
    async def lost(request: web.Request) -> web.StreamResponse:
        daemon.handler = daemon.ended
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with SandboxClient(daemon.address, "t") as sandbox:
        daemon.handler = lost
        assert (await sandbox.exec("one")).stdout == "out\n"
        daemon.handler = lost
        await sandbox.write_file("/x", bytes(200_000))
        daemon.handler = lost
        assert await sandbox.read_file("/x")
    first, again, put, put_again, get, get_again = daemon.keys
    assert first
    assert put
    assert (again, put_again, get, get_again) == (first, put, None, None)
    assert put != first
    assert daemon.requests[2] == daemon.requests[3]


async def test_lease_is_asked_for_again_over_a_new_connection(daemon: Daemon) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        daemon.says(200, {})
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    daemon.handler = cut
    async with SandboxAdmin(daemon.address, "admin") as admin:
        await admin.lease("owner", 1, "token", 30.0)
    assert len(daemon.requests) == 2
    assert daemon.requests[0] == daemon.requests[1]


async def test_request_is_sent_twice_at_most(daemon: Daemon) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    daemon.handler = cut
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxUnreachable):
            await sandbox.exec("true")
    assert len(daemon.requests) == 2
    async with SandboxAdmin(daemon.address, "t") as admin:
        with pytest.raises(SandboxUnreachable):
            await admin.reset()
    assert len(daemon.requests) == 4  # of a clean sandbox a reset is clean


async def test_each_command_has_its_own_key(daemon: Daemon) -> None:
    async with SandboxClient(daemon.address, "t") as sandbox:
        for _ in range(3):
            await sandbox.exec("true")
    assert len({key for key in daemon.keys if key}) == 3


@pytest.mark.parametrize("code", ["Cancelled", "Forgotten"])
async def test_command_without_an_answer_is_unreachable(daemon: Daemon, code: str) -> None:
    daemon.says(409, refusal(code))
    async with SandboxClient(daemon.address, "t") as sandbox:
        with pytest.raises(SandboxUnreachable, match=code):
            await sandbox.exec("true")


# 5. One session.


async def test_connection_is_kept_alive_and_closed_twice(daemon: Daemon) -> None:
    peers: set[int] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        peers.add(id(request.transport))
        return web.json_response(ENDED)

    daemon.handler = handler
    sandbox = SandboxClient(daemon.address, "t")
    for _ in range(5):
        await sandbox.exec("true")
    await sandbox.close()
    await sandbox.close()
    assert len(peers) == 1


# 6. Files of any size.


async def test_file_too_large_for_memory_is_refused_here(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MEMORY_BYTES", 10)
    async with SandboxClient(daemon.address, "t") as sandbox:
        daemon.says(200, bytes(11))
        with pytest.raises(SandboxError, match=r"11 bytes for /x, .* more than 10") as caught:
            await sandbox.write_file("/x", bytes(11))
        assert (caught.value.code, daemon.requests) == ("TooLarge", [])
        with pytest.raises(SandboxError, match="11 bytes is more than 10"):
            await sandbox.read_file("/x")
        daemon.says(200, bytes(10))
        assert await sandbox.read_file("/x") == bytes(10)


async def test_local_files_travel_both_ways(daemon: Daemon, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    (tmp_path / "from").write_bytes(data)
    (tmp_path / "to").write_bytes(b"old")
    async with SandboxClient(daemon.address, "t") as sandbox:
        daemon.says(200, {"bytes": len(data)})
        await sandbox.upload(tmp_path / "from", "/a b", 0o700)
        assert daemon.requests[0][1:] == ("/files?path=/a+b&mode=0700", "Bearer t", data)
        daemon.says(200, data)
        await sandbox.download("/x", tmp_path / "to")
    assert (tmp_path / "to").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["from", "s", "to"]


async def test_half_a_download_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await answer.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return answer

    (tmp_path / "old").write_bytes(b"old")
    async with SandboxClient(daemon.address, "t") as sandbox:
        daemon.handler = half
        for name in ("old", "new"):
            with pytest.raises(SandboxUnreachable):
                await sandbox.download("/x", tmp_path / name)
        daemon.says(404, refusal("NotFound"))
        with pytest.raises(SandboxError, match="field: is wrong"):
            await sandbox.download("/x", tmp_path / "old")
        with pytest.raises(FileNotFoundError):
            await sandbox.download("/x", tmp_path / "none" / "x")
    assert (tmp_path / "old").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["old", "s"]


async def test_file_that_shrinks_on_its_way_is_no_success(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    with (tmp_path / "x").open("rb") as file:
        pieces = client._pieces(file, 2000)
        assert len(await anext(pieces)) == 1000
        with pytest.raises(ConnectionError, match="became shorter"):
            await anext(pieces)


# Values.


def test_addresses_are_sockets_or_urls() -> None:
    assert Endpoint("unix:///run/s").socket_path == "/run/s"
    assert Endpoint("http://10.0.0.1:7070/").socket_path is None
    assert Endpoint("http://10.0.0.1:7070/").base_url == "http://10.0.0.1:7070"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "out"),
        ({"stderr": "err\n"}, "out\nerr"),
        ({"stdout": "", "stderr": "err"}, "err"),
        ({"stdoutTruncated": True}, "out\n[stdout: the rest was dropped]"),
        ({"stdout": "out", "stdoutTruncated": True}, "out\n[stdout: the rest was dropped]"),
        ({"stdout": "a\n\n", "stdoutTruncated": True}, "a\n\n[stdout: the rest was dropped]"),
        ({"stdout": "", "stdoutTruncated": True}, "[stdout: the rest was dropped]"),
        ({"stderr": "e", "stderrTruncated": True}, "out\ne\n[stderr: the rest was dropped]"),
    ],
)
def test_text_joins_both_streams_and_marks_cuts(changed: dict[str, object], text: str) -> None:
    assert ExecResult.parse({**ENDED, **changed}).text == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"timedOut": True, "exitCode": 137, "signal": 9}, "out\n[killed: timed out]"),
        ({"timedOut": True, "stdout": ""}, "[killed: timed out]"),
        ({"timedOut": True, "oom": True, "signal": 9}, "out\n[killed: timed out]"),
        ({"oom": True, "exitCode": 137, "signal": 9}, "out\n[killed: out of memory]"),
        ({"oom": True, "exitCode": 137}, "out\n[killed: out of memory]"),
        ({"oom": True, "exitCode": 134, "signal": 6}, "out\n[killed: out of memory]"),
        ({"oom": True, "exitCode": 1}, "out"),
        ({"exitCode": 137, "signal": 9}, "out"),
        (
            {"stdout": "", "stderr": "err\n", "stderrTruncated": True, "timedOut": True},
            "err\n[stderr: the rest was dropped]\n[killed: timed out]",
        ),
    ],
)
def test_last_line_of_text_says_that_time_or_memory_ran_out(changed: dict[str, object], text: str) -> None:
    assert ExecResult.parse({**ENDED, **changed}).text == text
