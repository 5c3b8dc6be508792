"""Long commands, lost answers and large files, asked of the real daemon in a real sandbox."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import Job, SandboxClient, SandboxError, SandboxLeaseLost
from tests.local.boxes import TOKEN, Box, box


@pytest.fixture
async def leased(runner: BubblewrapRunner) -> AsyncIterator[Box]:
    async with box(runner) as made:
        yield made


# Long commands.


async def test_output_comes_while_the_command_runs_and_is_whole_at_the_end(leased: Box) -> None:
    line = "for i in 1 2 3; do echo $i; until test -e /tmp/$i; do sleep 0.01; done; done; echo ende\u0301 >&2"
    async with await leased.client.start(line) as job:
        pieces: dict[str, str] = {"stdout": "", "stderr": ""}
        async for piece in job.output():
            pieces[piece.stream] += piece.text
            if piece.stream == "stdout":
                await leased.sh(f"touch /tmp/{pieces['stdout'].split()[-1]}")  # it would wait for ever
        result = await job.wait()
    assert pieces == {"stdout": "1\n2\n3\n", "stderr": "ende\u0301\n"}
    assert (result.stdout, result.stderr, result.exit_code) == ("1\n2\n3\n", "ende\u0301\n", 0)


async def test_stream_is_cut_at_the_output_limit(leased: Box) -> None:
    async with await leased.client.start("yes | head -c 5000000; exit 3", output_limit=100_000) as job:
        length = 0
        async for piece in job.output():
            length += len(piece.text)
        result = await job.wait()
    assert (length, len(result.stdout), result.stdout_truncated) == (100_000, 100_000, True)
    assert result.exit_code == 3


async def test_leaving_kills_the_whole_group(leased: Box) -> None:
    async with await leased.client.start("sleep 71 & (sleep 71 & sleep 71); wait") as job:
        await leased.sh("until test $(pgrep -xc sleep) = 3; do sleep 0.02; done", timeout=5)
        assert await job.poll() is None
    await leased.sh("while pgrep -x sleep; do sleep 0.02; done", timeout=5)
    with pytest.raises(SandboxError, match="no command"):
        await job.poll()


async def test_timeout_of_a_long_command_is_a_result(leased: Box) -> None:
    result = await (await leased.client.start("echo begun; sleep 72", timeout=0.2)).wait()
    assert (result.timed_out, result.signal, result.stdout) == (True, 9, "begun\n")


async def test_reset_ends_and_forgets_long_commands(leased: Box) -> None:
    job = await leased.client.start("sleep 73")
    waiting = asyncio.create_task(job.wait())
    await asyncio.sleep(0.05)
    assert (await leased.admin.reset()).clean
    with pytest.raises(SandboxLeaseLost):
        await waiting
    await leased.admin.lease("next", 0, "next-token", 60)
    async with SandboxClient(leased.member.address, "next-token") as client:
        with pytest.raises(SandboxError, match="no command"):
            await Job(client, job.id).poll()
        assert (await client.exec("pgrep -x sleep")).exit_code == 1


# Lost answers.


@contextlib.asynccontextmanager
async def cutting(leased: Box, answers_lost: int) -> AsyncIterator[SandboxClient]:
    """A client whose way loses the first answers: the request arrives, and then the connection breaks."""
    way = leased.member.address.removeprefix("unix://")
    lost, serving = 0, set[Any]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lost
        serving.add(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_unix_connection(way)
        inward = asyncio.create_task(_copy(reader, far_writer))
        try:
            answer = await far_reader.read(1 << 16)
            if lost < answers_lost:
                lost += 1
                return
            writer.write(answer)
            outward = asyncio.create_task(_copy(far_reader, writer))
            await asyncio.wait({inward, outward}, return_when=asyncio.FIRST_COMPLETED)
            outward.cancel()
        finally:
            inward.cancel()
            for end in (far_writer, writer):
                end.close()
                await end.wait_closed()

    socket = f"{way}-cut"
    server = await asyncio.start_unix_server(serve, socket)
    try:
        async with SandboxClient(f"unix://{socket}", TOKEN) as client:
            yield client
    finally:
        server.close()
        _, stuck = await asyncio.wait(serving, timeout=5)
        os.unlink(socket)
        assert not stuck


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def test_command_whose_answer_was_lost_is_not_run_again(leased: Box) -> None:
    ways: list[Callable[[SandboxClient], Awaitable[object]]] = [
        lambda client: client.exec("echo once | tee -a /tmp/proof"),
        lambda client: client.start("echo once >> /tmp/proof; sleep 60"),
    ]
    for way in ways:
        await leased.sh("rm -f /tmp/proof")
        async with cutting(leased, answers_lost=1) as client:
            await way(client)
            line = "until test -s /tmp/proof; do sleep 0.01; done; sleep 0.1; cat /tmp/proof"
            assert await leased.sh(line, timeout=5) == "once\n"


# Users.


async def test_other_user_is_refused_by_name(leased: Box) -> None:
    with pytest.raises(SandboxError, match=r'user: "nobody" is refused: .* single user id'):
        await leased.client.exec("id", user="nobody")


# Memory.


async def peak_mb(leased: Box) -> int:
    status = await leased.sh("cat /proc/1/status")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) >> 10


async def test_many_large_bodies_leave_the_daemon_small(leased: Box) -> None:
    calls = [leased.client.exec("cat | wc -c", stdin="x" * 7_000_000) for _ in range(24)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in ended if isinstance(error, SandboxError)]
    assert {error.code for error in refused} <= {"Busy"}
    assert [result.stdout for result in ended if not isinstance(result, BaseException)] == ["7000000\n"] * (
        24 - len(refused)
    )
    assert len(refused) <= 8
    assert await peak_mb(leased) < 150


async def test_large_file_travels_both_ways_in_bounded_memory(
    runner: BubblewrapRunner, tmp_path: Path
) -> None:
    size = 150_000_000
    (tmp_path / "from").touch()
    os.truncate(tmp_path / "from", size)
    async with box(runner, ContainerSpec(memory_mb=1024)) as leased:
        before = await peak_mb(leased)
        await leased.client.upload(tmp_path / "from", "/workspace/deep/er/big", 0o640)
        assert await leased.sh("stat -c '%s %a' deep/er/big; ls -A deep/er") == f"{size} 640\nbig\n"
        await leased.client.download("/workspace/deep/er/big", tmp_path / "to")
        assert (tmp_path / "to").stat().st_size == size
        assert await peak_mb(leased) - before < 20


async def test_upload_onto_a_full_disk_leaves_nothing(leased: Box, tmp_path: Path) -> None:
    (tmp_path / "big").touch()
    os.truncate(tmp_path / "big", 100_000_000)
    await leased.client.write_file("/dev/shm/x", b"old")
    began = time.monotonic()
    with pytest.raises(SandboxError, match="no space left"):
        await leased.client.upload(tmp_path / "big", "/dev/shm/x")
    assert time.monotonic() - began < 10
    assert await leased.sh("ls -A /dev/shm; cat /dev/shm/x") == "x\nold"
