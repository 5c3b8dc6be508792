"""A trainer pod beside the head. Numbers are those of node.py."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentfly.launch import node
from agentfly.launch.attempt import log_file
from agentfly.launch.node import Node
from agentfly.launch.ray import Place
from agentfly.roles.launch import Report
from agentfly.roles.life import begin_attempt, close_attempt
from tests.unit.launch.attempts import DEADLINE, SLEEP, config_of, gone, launch_of, until

POD = "run-trainer-2-1"


class Head:
    """What listens in the place of the head's Ray."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_server(lambda _, writer: writer.close(), "localhost", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def go(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()


@asynccontextmanager
async def head() -> AsyncIterator[Head]:
    found = Head()
    await found.listen()
    try:
        yield found
    finally:
        await found.go()


@asynccontextmanager
async def joining(
    folder: Path, port: int, ray: tuple[str, ...], barrier_s: float = DEADLINE
) -> AsyncIterator[tuple["asyncio.Task[Report]", asyncio.Event]]:
    """A node that has been started, and what asks it to end."""
    config, stop = config_of(folder), asyncio.Event()
    config.run_dir.mkdir(exist_ok=True)
    launch = launch_of(config, "http://127.0.0.1:1", barrier_s=barrier_s)
    place = Place(POD, "127.0.0.1", 0, 2**30, port=port)
    task = asyncio.create_task(Node(launch, place, ray, stop).run())
    try:
        yield task, stop
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=DEADLINE)


async def ends(task: "asyncio.Task[Report]") -> Report:
    async with asyncio.timeout(DEADLINE):
        return await task


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(node, "TICK_S", 0.05)


def counting(folder: Path, then: str) -> tuple[str, ...]:
    """Ray that leaves a line in the file `starts` for each of its starts."""
    return ("sh", "-c", f"echo $$ >> {folder}/starts; {then}")


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().split()) if file.exists() else 0


# 1. It joins as soon as the head's Ray answers, and tries again until the time for that is over.


async def test_it_joins_as_soon_as_the_head_answers(tmp_path):
    async with head() as found:
        await found.go()  # the port is known now, and nobody listens there
        async with joining(tmp_path, found.port, counting(tmp_path, "exec sleep 600")):
            await asyncio.sleep(0.3)
            assert not (tmp_path / "starts").exists()
            await found.listen()
            await until((tmp_path / "starts").exists)


async def test_a_head_that_never_answers_is_named(tmp_path):
    async with head() as found:
        await found.go()
        async with joining(tmp_path, found.port, SLEEP, barrier_s=0.2) as (task, _):
            report = await ends(task)
    assert (report.attempt, report.phase, report.exit_code) == (2, "Ended", 1)
    assert report.message == "no Ray at localhost before this pod had joined"


async def test_it_tries_again_while_the_head_answers(tmp_path):
    ray = counting(tmp_path, f"[ $(wc -l < {tmp_path}/starts) -lt 3 ] && exit 1; exec sleep 600")
    async with head() as found, joining(tmp_path, found.port, ray) as (task, _):
        await until(lambda: starts(tmp_path) == 3)
        assert not task.done()


async def test_it_does_not_try_for_ever(tmp_path):
    ray = counting(tmp_path, "echo 'ConnectionError: who are you'; exit 1")
    async with head() as found, joining(tmp_path, found.port, ray, barrier_s=0.3) as (task, _):
        report = await ends(task)
    assert (report.exit_code, report.reason) == (1, "AttemptFailed")
    log = log_file(config_of(tmp_path), f"ray-{POD}")
    assert report.message == (f"Ray: ended with exit code 1: ConnectionError: who are you; read {log}")


# 2. It ends when Ray does, which is when the head has gone.


async def test_it_ends_with_ray_when_the_head_has_gone(tmp_path):
    ray = counting(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 1")
    async with head() as found, joining(tmp_path, found.port, ray) as (task, _):
        await until((tmp_path / "starts").exists)
        await found.go()
        (tmp_path / "go").touch()
        report = await ends(task)
    assert report.exit_code == 1
    assert report.message.startswith("Ray: ended with exit code 1")
    assert starts(tmp_path) == 1


# 3. Asked to end, it keeps Ray until the head has gone; at most the grace of the pod.


async def test_asked_to_end_it_keeps_ray_until_the_head_has_gone(tmp_path):
    ray = counting(tmp_path, "exec sleep 600")
    async with head() as found, joining(tmp_path, found.port, ray) as (task, stop):
        await until((tmp_path / "starts").exists)
        stop.set()
        await asyncio.sleep(0.5)
        assert not task.done()
        assert not gone(tmp_path / "starts")
        await found.go()
        report = await ends(task)
    assert (report.exit_code, report.message) == (0, "the head has gone")
    assert gone(tmp_path / "starts")


async def test_a_head_that_misses_a_look_has_not_gone(tmp_path, monkeypatch):
    answers = iter([True, False, False, True, False, False, True])
    seen = asyncio.Event()

    async def looked(_: Node) -> bool:
        answer = next(answers, None)
        if answer is None:
            seen.set()
        return answer is not False

    monkeypatch.setattr(Node, "_head_answers", looked)
    async with joining(tmp_path, 1, SLEEP) as (task, stop):
        await until(log_file(config_of(tmp_path), f"ray-{POD}").exists)
        stop.set()
        async with asyncio.timeout(DEADLINE):
            await seen.wait()
        assert not task.done()


async def test_it_does_not_outstay_the_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "GRACE_S", 0.2)
    async with (
        head() as found,
        joining(tmp_path, found.port, counting(tmp_path, "exec sleep 600")) as (
            task,
            stop,
        ),
    ):
        await until((tmp_path / "starts").exists)
        stop.set()
        assert (await ends(task)).exit_code == 0
    assert gone(tmp_path / "starts")


async def test_asked_to_end_before_it_has_joined_it_ends_at_once(tmp_path):
    async with head() as found:
        await found.go()
        async with joining(tmp_path, found.port, SLEEP) as (task, stop):
            stop.set()
            report = await ends(task)
    assert (report.exit_code, report.message) == (1, "asked to end before this pod had joined")


# 5. It does not join an attempt that has begun without it.


async def test_a_pod_that_comes_too_late_does_not_join(tmp_path):
    config = config_of(tmp_path)
    begin_attempt(config.run_dir, 2)
    close_attempt(config.run_dir, 2)
    async with head() as found, joining(tmp_path, found.port, counting(tmp_path, "exec sleep 600")) as it:
        report = await ends(it[0])
    assert report.exit_code == 1
    assert report.message == "the attempt has begun without this pod, which came too late"
    assert starts(tmp_path) == 0
