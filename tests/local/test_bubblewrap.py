"""The runner of sandboxes: starts, resets, stops, and what is left afterwards."""

import asyncio
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.runners.sandboxd.cgroups import Cgroups
from agentfly.resources.spec import ContainerSpec, ModelServiceSpec
from tests.local.boxes import TOKEN, box
from tests.local.machine import footprint

LIMITED = not Cgroups.find().missing


@pytest.fixture
def spare(run_dir: Path, sandboxd: Path) -> BubblewrapRunner:
    """A runner that has started nothing yet."""
    return BubblewrapRunner(run_dir.with_name("spare"), sandboxd)


def test_check_leaves_nothing_and_is_remembered(spare: BubblewrapRunner, run_dir: Path) -> None:
    before = footprint(run_dir)
    assert spare.check() is None
    assert footprint(run_dir) == before
    spare._sandboxd = Path("/gone since")
    assert spare.check() is None


# 1. Start.


async def test_started_member_answers(runner: BubblewrapRunner) -> None:
    member = await runner.start(ContainerSpec(), "m-1")
    try:
        assert (member.id, member.incarnation) == ("m-1", 1)
        assert member.address.startswith("unix:///")
        assert (await runner.probe(member)).alive
    finally:
        await runner.stop(member)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ContainerSpec(image="/nowhere"), "image: /nowhere"),
        (ContainerSpec(workdir="/proc/x"), "workdir: /proc/x"),
        (ContainerSpec(workdir="/tmp/x"), "workdir: /tmp/x"),
        (ContainerSpec(workdir="/.agentfly"), "workdir: /.agentfly"),
        (ContainerSpec(env={"A": "x" * 70_000}), "m-1"),
        (ModelServiceSpec(model="m", max_model_len=1), "kind: model-service"),
    ],
)
async def test_failed_start_leaves_nothing(
    spare: BubblewrapRunner, run_dir: Path, spec: ContainerSpec, words: str
) -> None:
    before = footprint(run_dir)
    with pytest.raises(StartFailed, match=words):
        await spare.start(spec, "m-1")
    await spare.close()
    assert footprint(run_dir) == before


async def test_start_tells_what_bubblewrap_said(runner: BubblewrapRunner, run_dir: Path) -> None:
    broken = BubblewrapRunner(run_dir.with_name("broken"), Path("/no/sandboxd"))
    assert "sandboxd: /no/sandboxd" in (broken.check() or "")
    with pytest.raises(StartFailed) as caught:
        await broken.start(ContainerSpec(), "m-1")
    assert "/no/sandboxd" in caught.value.reason
    await broken.close()


async def test_cancelled_start_leaves_nothing(spare: BubblewrapRunner, run_dir: Path) -> None:
    await spare.stop(await spare.start(ContainerSpec(), "warm"))
    await spare.close()
    before = footprint(run_dir)
    chance = random.Random(7)
    finished = 0
    for _ in range(40):
        start = asyncio.create_task(spare.start(ContainerSpec(), "m-1"))
        await asyncio.sleep(chance.uniform(0, 0.03))
        start.cancel()
        (ended,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(ended, BaseException):
            finished += 1
            await spare.stop(ended)
        else:
            assert isinstance(ended, asyncio.CancelledError)
    await spare.close()
    assert finished < 40
    assert footprint(run_dir) == before


async def test_second_cancel_does_not_cut_the_clean_up_short(spare: BubblewrapRunner, run_dir: Path) -> None:
    await spare.close()
    before = footprint(run_dir)
    for pause in (0.001, 0.004, 0.008, 0.012):
        start = asyncio.create_task(spare.start(ContainerSpec(), "m-1"))
        await asyncio.sleep(pause)
        start.cancel()
        await asyncio.sleep(0)
        start.cancel()
        (ended,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(ended, BaseException):
            await spare.stop(ended)
    await spare.close()
    assert footprint(run_dir) == before


async def test_many_start_and_stop_side_by_side(spare: BubblewrapRunner, run_dir: Path) -> None:
    before = footprint(run_dir)
    members = await asyncio.gather(*(spare.start(ContainerSpec(), f"m-{n}") for n in range(24)))
    assert len({member.address for member in members}) == 24
    assert all(found.alive for found in await asyncio.gather(*(spare.probe(m) for m in members)))
    await asyncio.gather(*(spare.stop(member) for member in members))
    await spare.close()
    assert footprint(run_dir) == before


async def test_first_command_of_a_sandbox_is_answered(runner: BubblewrapRunner) -> None:
    for _ in range(30):  # its end once came before the daemon listened for ends
        async with box(runner) as made, asyncio.timeout(5):
            assert await made.sh("echo first") == "first\n"


# 2. Reset.


async def test_clean_reset_keeps_the_sandbox(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        await made.sh("echo x > /tmp/x; echo y > /workspace/y")
        first = await made.sh("readlink /proc/self/ns/pid")
        await made.next_lease()
        assert made.member.incarnation == 2
        assert await made.sh("readlink /proc/self/ns/pid; ls -A /tmp /workspace") == (
            f"{first}/tmp:\n\n/workspace:\n"
        )
        assert (await made.admin.health()).incarnation == 2


async def test_unclean_reset_starts_afresh_under_the_same_id(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        await made.sh("echo x > /etc/x")
        token = made.member.admin_token
        await made.next_lease()
        assert (made.member.id, made.member.incarnation) == ("m-0", 2)
        assert made.member.admin_token != token, "that of another daemon"
        assert (await made.client.exec("cat /etc/x")).exit_code == 1
        assert (await made.admin.health()).incarnation == 2


async def test_dead_sandbox_is_replaced_by_a_reset(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        made.member.handle.process._bwrap.kill()  # type: ignore[attr-defined]
        await _kill_daemon(made.member)
        assert not (await runner.probe(made.member)).alive
        with pytest.raises(Infra, match="the sandbox died"):
            await runner.lease(made.member, "first", 0, TOKEN, 30)
        await made.next_lease()
        assert await made.sh("echo alive") == "alive\n"


async def test_reset_that_cannot_start_afresh_condemns(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        await made.sh("echo x > /etc/x")
        working, runner._bwrap = runner._bwrap, Path("/bin/false")
        try:
            assert await runner.reset(made.member) is None
        finally:
            runner._bwrap = working


# Leases.


async def test_other_owner_gets_lease_lost(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        with pytest.raises(LeaseLost) as caught:
            await runner.lease(made.member, "other", 0, "t", 30)
        assert caught.value.incarnation == 1
        await runner.lease(made.member, "first", 0, TOKEN, 30)


# 3. Stop.


async def test_stop_twice_and_at_once(runner: BubblewrapRunner) -> None:
    member = await runner.start(ContainerSpec(), "m-1")
    await asyncio.gather(runner.stop(member), runner.stop(member))
    await runner.stop(member)
    assert not (await runner.probe(member)).alive


async def test_stop_is_quick_with_a_command_running(runner: BubblewrapRunner) -> None:
    async with box(runner) as made:
        call = asyncio.create_task(made.client.exec("trap '' TERM INT; sleep 60", timeout=90))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await runner.stop(made.member)
        assert time.monotonic() - began < 2
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], Exception)


async def test_deep_and_closed_trees_are_deleted(spare: BubblewrapRunner, run_dir: Path) -> None:
    before = footprint(run_dir)
    async with box(spare) as made:
        await made.sh(
            "python3 -c \"import os\nos.chdir('/etc')\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\""
        )
        await made.sh("mkdir -p /etc/closed/in && touch /etc/closed/in/x && chmod 000 /etc/closed")
    await spare.close()
    assert footprint(run_dir) == before


# 5. Limits.


@pytest.mark.skipif(not LIMITED, reason="no control group can be written here")
async def test_limits_of_the_spec_are_the_kernels(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(cpu=0.5, memory_mb=128, disk_mb=32, pids=32)) as made:
        group = made.member.handle.group  # type: ignore[attr-defined]
        values = {
            (path / file).name: (path / file).read_text().strip()
            for path in group.paths
            for file in ("memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max")
            if (path / file).exists()
        }
        assert str((128 + 32) << 20) in values.values()
        assert values["pids.max"] == str(32 + 20)
        assert {"50000", "50000 100000"} & set(values.values())
        result = await made.client.exec("i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done")
        assert result.cpu_s / result.wall_s < 0.75
    assert runner.notes() == ()


# The specification's fields.


async def test_image_folder_is_the_root(runner: BubblewrapRunner, tmp_path: Path) -> None:
    image = tmp_path / "image"
    linked = (await asyncio.to_thread(subprocess.check_output, ["ldd", "/bin/sh"])).decode()
    for file in ("/bin/sh", *(word for word in linked.split() if word.startswith("/"))):
        (image / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, image / file[1:])
    (image / "work").mkdir()
    (image / "work/file").write_text("of the image")
    async with box(runner, ContainerSpec(image=str(image), workdir="/work")) as made:
        assert await made.sh("read line < file || true; echo $line") == "of the image\n"
        await made.sh("echo changed > file")
        await made.next_lease()
        assert await made.sh("read line < file || true; echo $line") == "of the image\n"
    assert (image / "work/file").read_text() == "of the image"


async def test_environment_of_the_spec_reaches_commands(runner: BubblewrapRunner) -> None:
    async with box(runner, ContainerSpec(env={"TASK": "7", "HOME": "/workspace"})) as made:
        assert await made.sh("echo $TASK $HOME; cd; pwd") == "7 /workspace\n/workspace\n"


async def test_workdir_may_be_anywhere(runner: BubblewrapRunner) -> None:
    for workdir in ("/srv/task", "/root", "/usr/share/doc", "/etc"):
        async with box(runner, ContainerSpec(workdir=workdir)) as made:
            assert await made.sh("pwd") == f"{workdir}\n"
            assert (await made.admin.reset()).clean


async def test_network_only_when_asked_for(runner: BubblewrapRunner) -> None:
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    line = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
    try:
        async with box(runner, ContainerSpec(network=True)) as made:
            assert (await made.client.exec(["python3", "-c", line])).stdout == "connected\n"
        async with box(runner) as made:
            refused = await made.client.exec(["python3", "-c", line])
            assert "ConnectionRefusedError" in refused.stderr
            assert await made.sh("cat /proc/net/dev | grep -c :") == "1\n"
    finally:
        listener.close()
        await listener.wait_closed()


def test_runner_outlives_an_event_loop(spare: BubblewrapRunner) -> None:
    member = asyncio.run(spare.start(ContainerSpec(), "m-1"))
    assert asyncio.run(spare.probe(member)).alive
    asyncio.run(spare.stop(member))
    asyncio.run(spare.close())


async def _kill_daemon(member: object) -> None:
    process = member.handle.process  # type: ignore[attr-defined]
    os.kill(await process.daemon_pid(), 9)
    async with asyncio.timeout(3):
        await process.died()
