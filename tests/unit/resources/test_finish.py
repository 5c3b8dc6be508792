"""Section numbers are the guarantees of finish.py."""

import asyncio

import pytest

from agentfly.resources.errors import Infra
from agentfly.resources.finish import finished
from tests.unit.resources.harness import virtual


async def slow(error: Exception | None = None) -> str:
    await asyncio.sleep(3)
    if error is not None:
        raise error
    return "done"


# 1. To the end, then the cancellation.


@virtual
async def test_work_that_nobody_disturbs_gives_its_result_or_its_error():
    assert await finished(slow()) == "done"
    with pytest.raises(Infra, match="gone"):
        await finished(slow(Infra("gone")))


@virtual
async def test_work_ends_however_often_its_caller_is_cancelled():
    caller = asyncio.create_task(finished(slow()))
    for _ in range(4):
        await asyncio.sleep(0.5)
        caller.cancel()
    await asyncio.sleep(0.5)
    assert not caller.done()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert asyncio.get_running_loop().time() == pytest.approx(3)


# 2. An error beside a cancellation.


@virtual
async def test_error_that_the_cancellation_hides_is_logged(caplog):
    caller = asyncio.create_task(finished(slow(Infra("member m1: not stopped"))))
    await asyncio.sleep(1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert "member m1: not stopped" in caplog.text
