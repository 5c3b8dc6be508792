"""The engine over real sandboxes: what its fakes cannot show."""

import asyncio
import sys
from pathlib import Path

import pytest

from agentfly.local import look
from agentfly.local.paths import run_dir as local_run_dir
from agentfly.local.plane import data_plane
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.runners.bubblewrap.runner import BubblewrapRunner
from agentfly.resources.spec import ContainerSpec, PoolSpec

DIRTY = "echo x > /etc/x"  # nothing of the root may stay: this is found by every reset


def pool(**fields: object) -> PoolSpec:
    return PoolSpec.model_validate({"name": "shell", "resource": ContainerSpec(), **fields})


async def quarantined(engine: ResourceEngine) -> dict[str, str]:
    async with asyncio.timeout(20):
        while not (found := engine.pool_status()["shell"].quarantined):  # noqa: ASYNC110 -- it tells nobody
            await asyncio.sleep(0.01)
    return found


async def test_sandbox_that_is_not_pristine_is_kept_for_a_look_and_given_to_nobody(runner: BubblewrapRunner):
    async with ResourceEngine([runner], [pool(max=2, quarantine=1)]) as engine:
        first = await engine.acquire("shell", "a", deadline=20)
        assert (await first.sandbox.exec(DIRTY)).exit_code == 0
        await first.release()
        ((member, found),) = (await quarantined(engine)).items()
        assert member == first.info.member_id
        assert "etc/x" in found
        second = await engine.acquire("shell", "b", deadline=20)
        assert second.info.member_id != member
        await second.release()


async def test_without_a_quarantine_it_is_replaced(runner: BubblewrapRunner):
    async with ResourceEngine([runner], [pool(max=1)]) as engine:
        first = await engine.acquire("shell", "a", deadline=20)
        await first.sandbox.exec(DIRTY)
        await first.release()
        second = await engine.acquire("shell", "b", deadline=20)
        assert (await second.sandbox.exec("cat /etc/x")).exit_code == 1
        assert engine.pool_status()["shell"].quarantined == {}
        await second.release()


async def test_running_data_plane_is_found_and_no_longer_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = Path(sys.executable)
    async with data_plane([], logs_in=tmp_path, inference_python=python, start_timeout_s=1) as plane:
        assert look.listening(local_run_dir()) == [plane.broker]
    assert look.listening(local_run_dir()) == []
