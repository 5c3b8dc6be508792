"""An engine that ends and leaves its members to the next one."""

import asyncio

import pytest

from agentfly.resources.engine import DETACH_S, ResourceEngine
from agentfly.resources.errors import Infra, ResourceError
from agentfly.resources.spec import ContainerSpec, InProcessSpec, PoolSpec
from tests.unit.resources.harness import FakeRunner, virtual


class MortalRunner(FakeRunner):
    """Its members end with its process."""

    find = None  # type: ignore[assignment]


def pool(**fields: object) -> PoolSpec:
    return PoolSpec.model_validate({"name": "shell", "resource": ContainerSpec(), "max": 4, **fields})


async def ended(engine: ResourceEngine) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await engine.detach()
    assert loop.time() - began <= DETACH_S


@virtual
async def test_members_and_leases_stay_as_they_are() -> None:
    runner = FakeRunner()
    engine = ResourceEngine([runner], [pool(min=3)])
    lease = await engine.acquire("shell", "a")
    await asyncio.sleep(1)
    existing, holders = set(runner.existing), dict(runner.holders)
    assert len(existing) == 3
    await ended(engine)
    await asyncio.sleep(1000)
    assert (runner.existing, runner.holders) == (existing, holders)
    assert (runner.stops, runner.resets) == (0, 0)
    with pytest.raises(ResourceError, match="is closed"):
        await engine.acquire("shell", "b")
    await engine.detach()
    del lease


@pytest.mark.parametrize("kind", [FakeRunner, MortalRunner])
@virtual
async def test_whoever_waits_is_told_and_what_is_begun_is_cut_off(kind: type[FakeRunner]) -> None:
    runner = kind(start_s=600)
    engine = ResourceEngine([runner], [pool(max=1)])
    waiting = asyncio.create_task(engine.acquire("shell", "a"))
    await asyncio.sleep(1)
    await ended(engine)
    with pytest.raises(Infra, match="another one may follow"):
        await waiting
    # A start that is cut short leaves its member to the next engine, if that can find it; else nothing.
    assert len(runner.existing) == (kind is FakeRunner)


@virtual
async def test_reset_that_goes_on_is_left_to_the_next_engine() -> None:
    runner = FakeRunner()
    runner.reset_s = 50
    engine = ResourceEngine([runner], [pool(max=1)])
    lease = await engine.acquire("shell", "a")
    await lease.release()
    await asyncio.sleep(1)
    assert runner.busy
    await ended(engine)
    assert (len(runner.existing), runner.busy) == (1, set())


@virtual
async def test_members_that_nobody_could_find_again_are_stopped() -> None:
    sandboxes, games = FakeRunner(), MortalRunner("in-process")
    game = pool(name="game", resource=InProcessSpec(entrypoint="games:make"), min=2)
    engine = ResourceEngine([sandboxes, games], [pool(min=1), game])
    held = await engine.acquire("game", "a")
    await asyncio.sleep(1)
    assert (len(sandboxes.existing), len(games.existing)) == (1, 2)
    await ended(engine)
    assert (len(sandboxes.existing), len(games.existing)) == (1, 0)
    del held
