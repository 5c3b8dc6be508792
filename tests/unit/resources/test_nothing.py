"""Rollouts that were given no resources."""

import pytest

from agentfly.resources.errors import PoolNotFound
from agentfly.resources.lease import Request
from agentfly.resources.nothing import NoPools
from agentfly.resources.spec import ContainerSpec


async def test_acquire_says_how_to_have_pools() -> None:
    with pytest.raises(PoolNotFound, match="pool shell: is not here") as error:
        await NoPools().acquire("shell", "me")
    assert "local_pools" in error.value.hints[0]
    with pytest.raises(PoolNotFound, match="pool container: is not here"):
        await NoPools().acquire_many([Request(ContainerSpec(image="host"))], "me")


async def test_the_rest_is_as_of_an_engine_without_pools() -> None:
    nothing = NoPools()
    await nothing.release("lease")
    await nothing.release_owner("me")
    assert await nothing.acquire_many([], "me") == []
    assert await nothing.heartbeat(["lease"]) == {"lease": False}
    assert await nothing.status() == {}
    for failing in (nothing.reset("lease"), nothing.demand("shell", [], "me")):
        with pytest.raises(PoolNotFound):
            await failing
