"""Broker and operator over an API server that answers 409, 410, 429 and 500, and under clocks that jump.

After each fault: no live lease is lost, no incarnation of a member is handed out twice, there were never more
pods than max, none is left that the broker does not know, and within 30 s what is told is true again.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.broker.client import BrokerClient
from agentfly.kube import PODS, Informer
from agentfly.resources.runners.kubernetes import MEMBER_LABELS
from tests.integration.brokers import Rig, events_in, pool, rig
from tests.integration.false_clock import FalseClock
from tests.integration.faulty_api import FAULTS, Fault, FaultyApi

pytestmark = pytest.mark.timeout(180)
MIN, MAX = 3, 5
FAULT_S = 5.0
TRUE_S = 30.0
TTL_S = 60
BRIEF_S = 6


class Crowd:
    """Holders that come and go, and two that stay."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client
        self.kept: list[Any] = []
        self.grants: list[tuple[str, int]] = []
        self.lost: list[str] = []
        self._stopping = False

    async def settle(self) -> None:
        for owner in ("kept-0", "kept-1"):
            self.kept.append(await self._acquire(owner))

    async def _acquire(self, owner: str) -> Any:
        lease = await self._client.acquire("shell", owner, deadline=90.0)
        self.grants.append((lease.info.member_id, lease.info.incarnation))
        return lease

    async def rounds(self, name: str) -> None:
        number = 0
        while not self._stopping:
            number += 1
            async with await self._acquire(f"{name}-{number}") as lease:
                await asyncio.sleep(0.2)
                if lease.lost:
                    self.lost.append(lease.info.owner)

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        self._stopping = False
        tasks = [asyncio.create_task(self.rounds(f"come-{number}")) for number in range(2)]
        try:
            yield
            self._stopping = True
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
        finally:
            for task in tasks:
                task.cancel()


class Members:
    """The member pods of a namespace as they are at any moment."""

    def __init__(self, made: Rig) -> None:
        self._pods = Informer(made.kube, PODS, made.namespace, f"{MEMBER_LABELS},agentfly.dev/pool=shell")
        self.most = 0

    async def __aenter__(self) -> "Members":
        self._pods.subscribe(lambda kind, pod: self._count())
        await self._pods.__aenter__()
        await self._pods.synced(10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pods.__aexit__(None, None, None)

    def alive(self) -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in self._pods.items.values()
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def _count(self) -> None:
        self.most = max(self.most, len(self.alive()))


async def true_again(made: Rig, crowd: Crowd, members: Members, within_s: float) -> None:
    """Wait until the broker's counts are those of pods and leases, and the pool is whole."""

    async def true() -> bool:
        now = await made.pool()
        still = (now.get("starting"), now.get("resetting"), now.get("stopping"), now.get("queued"))
        whole = now.get("ready", 0) + now.get("leased", 0)
        return (
            still == (0, 0, 0, 0)
            and now["leased"] == len(crowd.kept)
            and whole == len(members.alive()) >= MIN
            and not now["quarantined"]
        )

    await made.until(f"the truth: {members.alive()}", true, within_s)


async def check(made: Rig, crowd: Crowd, members: Members, ended: float) -> None:
    await true_again(made, crowd, members, TRUE_S + ended - time.monotonic())
    for lease in crowd.kept:
        assert not lease.lost
        assert made.daemons.of(lease.info.member_id).owner == lease.info.owner
        assert lease.info.member_id in members.alive()
    assert len(set(crowd.grants)) == len(crowd.grants), "a sandbox was handed out twice"
    assert (crowd.lost, members.most <= MAX) == ([], True), members.most


def made_pool() -> dict[str, Any]:
    return pool(capacity={"min": MIN, "max": MAX}, lease={"ttlSeconds": TTL_S})


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_broker_while_the_api_server_refuses(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path, fault: Fault
) -> None:
    async with (
        rig(control_plane, tmp_path, made_pool()) as made,
        FaultyApi(control_plane.kubeconfig, tmp_path) as api,
    ):
        made.cluster = SimpleNamespace(kubeconfig=api.kubeconfig)
        await made.start()
        await made.counts(ready=MIN)
        async with Members(made) as members, made.client() as client:
            crowd = Crowd(client)
            await crowd.settle()
            held = {lease.info.member_id for lease in crowd.kept}
            async with crowd.busy():
                api.begin(fault)
                end = time.monotonic() + FAULT_S
                while time.monotonic() < end:
                    # Members that nobody holds for long end, so that there is much to ask the API server.
                    victim = next((name for name in members.alive() if name not in held), None)
                    if victim is not None:
                        made.daemons.of(victim).residue = "left behind"
                    await asyncio.sleep(0.5)
                api.end()
                ended = time.monotonic()
                grants = len(crowd.grants)
                await made.until("the load goes on", lambda: _more(crowd, grants + 2), TRUE_S)
            assert sum(api.given.values()) > 2, api.given
            await check(made, crowd, members, ended)


async def _more(crowd: Crowd, count: int) -> bool:
    return len(crowd.grants) > count


# Clocks


@pytest.mark.parametrize("jump_s", [3600, -3600])
async def test_broker_whose_clock_jumps(
    control_plane: Any, fake_kubelet: Any, tmp_path: Path, jump_s: int
) -> None:
    """Leases last by a clock that cannot be set: none ends early, and one whose holder died ends in time."""
    clock = FalseClock(tmp_path)
    brief = pool("brief", capacity={"min": 1, "max": 1}, lease={"ttlSeconds": BRIEF_S})
    async with rig(control_plane, tmp_path, made_pool(), brief) as made:
        made.env |= clock.env
        await made.start()
        await made.counts(ready=MIN)
        await made.counts("brief", ready=1)
        async with Members(made) as members, made.client() as client:
            crowd = Crowd(client)
            await crowd.settle()
            dead = made.client()
            await dead.acquire("brief", "dead", deadline=10.0)
            began = time.monotonic()
            await dead._holdings.close()  # it is not released, only never renewed again
            async with crowd.busy():
                await asyncio.sleep(1.0)
                clock.jump(jump_s)
                left = {lease.owner: lease.expires_in_s for lease in await client.leases()}
                assert {"dead", "kept-0", "kept-1"} <= set(left)
                assert all(0 < each <= TTL_S for each in left.values()), left
                await made.until("the dead one's lease ends", lambda: _ended(client, "dead"), BRIEF_S + 10.0)
                assert time.monotonic() - began > BRIEF_S - 1
            await check(made, crowd, members, time.monotonic())
            await dead.close()
            await made.end(signal.SIGKILL)  # the next one begins at yet another time than leases began at
            clock.jump(0)
            await made.start()
            await check(made, crowd, members, time.monotonic())
            false = [clock.off_by(line["time"]) - jump_s for line in events_in(made.log)]
            assert min(abs(each) for each in false) < 120


async def _ended(client: BrokerClient, owner: str) -> bool:
    return owner not in {lease.owner for lease in await client.leases()}
