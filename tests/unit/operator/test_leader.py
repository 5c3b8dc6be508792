"""The leader's Lease, between processes that share nothing but an API server."""

import asyncio
import copy
from typing import Any

import pytest

from agentfly.kube import Conflict, KubeError, NotFound, Unreachable
from agentfly_operator.cluster import leader as module
from agentfly_operator.cluster.leader import LeaderLease


class Server:
    """An API server with one Lease; `down` refuses everything."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.writes = 0

    async def request(self, method: str, path: str, *, body: Any = None, deadline_s: float) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self.down:
            raise Unreachable("down")
        if method == "GET":
            if self.lease is None:
                raise NotFound("none", status=404)
            return copy.deepcopy(self.lease)
        if method == "POST" and self.lease is not None:
            raise Conflict("exists", status=409)
        if method == "PUT":
            assert self.lease is not None
            if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
                raise Conflict("changed", status=409)
        self.version += 1
        self.writes += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**body, "metadata": metadata}
        return copy.deepcopy(self.lease)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.001)


def lease(server: Server, identity: str) -> LeaderLease:
    return LeaderLease(server, "agentfly-system", identity)  # type: ignore[arg-type]


async def attempt(one: LeaderLease) -> bool:
    return await one._try()


# 1. taking


async def test_the_first_takes_it_and_a_second_does_not(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    assert await attempt(first)
    assert not await attempt(second)
    assert (first.is_held(), second.is_held()) == (True, False)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "a"


async def test_it_is_taken_only_after_its_whole_duration_by_the_takers_own_clock(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    assert await attempt(first)
    assert not await attempt(second)
    clock.now += 14.9
    assert not await attempt(second)
    clock.now += 0.2
    assert await attempt(second)
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_a_renewal_begins_the_duration_anew(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    await attempt(first)
    await attempt(second)
    clock.now += 9
    assert await attempt(first)
    assert not await attempt(second)
    clock.now += 9
    assert not await attempt(second)


async def test_times_in_the_lease_are_not_believed(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    await attempt(first)
    assert server.lease is not None
    server.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    assert not await attempt(second)


# 2. at once


async def test_of_two_that_try_at_once_one_succeeds(clock: Clock) -> None:
    server = Server()
    both = [lease(server, "a"), lease(server, "b")]
    assert sorted(await asyncio.gather(*(attempt(one) for one in both))) == [False, True]


# 3. losing


async def test_it_is_not_held_any_more_before_another_may_take_it(clock: Clock) -> None:
    server = Server()
    first = lease(server, "a")
    await attempt(first)
    server.down = True
    clock.now += 9.9
    assert first.is_held()
    clock.now += 0.2
    assert not first.is_held()
    assert module.RENEW_WITHIN_S < module.DURATION_S


async def test_a_lost_answer_is_no_loss(clock: Clock) -> None:
    server = Server()
    first = lease(server, "a")
    await attempt(first)
    server.down = True
    assert not await attempt(first)
    server.down = False
    assert server.lease is not None
    server.lease["metadata"]["resourceVersion"] = "later"  # the write was carried out after all
    assert not await attempt(first)
    assert await attempt(first)
    assert first.is_held()


async def test_holding_ends_when_another_has_it(clock: Clock, quick: None) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    await attempt(first)
    await attempt(second)
    clock.now += 16
    assert await attempt(second)
    async with asyncio.timeout(5):
        await first.hold()
    assert not first.is_held()
    assert second.is_held()


# 4. giving back


async def test_who_ends_in_order_lets_the_next_begin_at_once(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    await attempt(first)
    await attempt(second)
    await first.release()
    assert not first.is_held()
    assert await attempt(second)


async def test_who_does_not_hold_it_gives_nothing_back(clock: Clock) -> None:
    server = Server()
    first, second = lease(server, "a"), lease(server, "b")
    await attempt(first)
    await attempt(second)
    writes = server.writes
    await second.release()
    assert server.writes == writes


async def test_a_server_that_is_down_is_asked_again(clock: Clock, quick: None) -> None:
    server = Server()
    server.down = True
    first = lease(server, "a")
    waiting = asyncio.create_task(first.acquire())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    server.down = False
    async with asyncio.timeout(5):
        await waiting
    assert first.is_held()


def test_errors_of_the_client_are_those_that_are_caught() -> None:
    assert issubclass(Unreachable, KubeError)
    assert issubclass(Conflict, KubeError)
