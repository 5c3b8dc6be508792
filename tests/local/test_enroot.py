"""The contract of every runner, held by enroot where it is installed: no registry of packages has it."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.resources.runners.container.enroot import EnrootRunner
from agentfly.resources.runners.sandboxd.owner_dir import LOCK
from agentfly.resources.spec import ContainerSpec
from agentfly.sandbox import SandboxClient
from tests.local.machine import descendants, groups
from tests.unit.resources.runner_contract import TTL, RunnerContract

SHARED = {"dev", "roots", "trash", LOCK}


@pytest.fixture(scope="module")
def runner(run_dir: Path, sandboxd: Path) -> Iterator[EnrootRunner]:
    if shutil.which("enroot") is None:
        pytest.skip("enroot is not installed here: only its command lines are tested (tests/unit)")
    runner = EnrootRunner(run_dir.with_name("e"), sandboxd)
    if (reason := runner.check()) is not None:
        pytest.skip(f"enroot does not run here: {reason}")
    yield runner
    asyncio.run(runner.close())
    assert not run_dir.with_name("e").exists()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with a shell of its own libraries, and one file to change."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("enroot: busybox is not installed (busybox-static)")
    root = tmp_path_factory.mktemp("image")
    (root / "bin").mkdir()
    for name in ("busybox", "sh", "cat", "ls", "mkdir", "chmod", "dd", "seq", "sleep"):
        shutil.copy(busybox, root / "bin" / name)
    (root / "etc").mkdir()
    (root / "etc/environment").write_text("FROM_IMAGE=yes\n")
    return root


class TestEnroot(RunnerContract):
    @pytest.fixture
    def spec(self, image: Path) -> ContainerSpec:
        return ContainerSpec(runtime="enroot", image=f"dir:{image}", memory_mb=64, pids=16)

    @pytest.fixture(autouse=True)
    def _folder(self, run_dir: Path) -> None:
        self.folder = run_dir.with_name("e")

    def left(self, runner: Any) -> set[str]:
        homes = {path.name for path in self.folder.iterdir()} - SHARED
        return (
            homes | groups(os.getpid()) | {name for name in descendants() if name in ("unshare", "sandboxd")}
        )

    async def test_what_was_written_is_gone_and_limits_hold(self, runner: Any, spec: ContainerSpec) -> None:
        member = await self.started(runner, spec)
        try:
            await runner.lease(member, "first", 0, "token", TTL)
            async with SandboxClient(member.address, "token") as client:
                assert (await client.exec("echo $FROM_IMAGE; echo x > /tmp/x")).stdout == "yes\n"
                for refused in ("chmod 600 /dev/null", "chmod 600 /proc/meminfo", "echo x > /dev/x"):
                    assert (await client.exec(refused)).exit_code != 0
                assert "can't fork" in (await client.exec("for i in $(seq 80); do sleep 5 & done")).stderr
                assert (await client.exec("dd if=/dev/zero of=/dev/null bs=200M count=1")).oom
            clean = await runner.reset(member)
            assert clean.handle is member.handle
            await runner.lease(clean, "second", 0, "token", TTL)
            async with SandboxClient(clean.address, "token") as client:
                assert (await client.exec("ls /tmp; echo canary > /etc/environment")).stdout == ""
            member = await runner.reset(clean)
            assert member.handle is not clean.handle
            await runner.lease(member, "third", 0, "token", TTL)
            async with SandboxClient(member.address, "token") as client:
                assert (await client.exec("cat /etc/environment")).stdout == "FROM_IMAGE=yes\n"
        finally:
            await runner.stop(member)
        assert self.left(runner) == set()
