"""The operator over an API server that answers 409, 410, 429 and 500, and under a clock that jumps.

It may end, as a leader must that could not renew; its Deployment starts it again then, as is done here. After
each fault the status is true within 30 s, and what a new pool needs is there.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentfly.kube import LEASES, NETWORK_POLICIES, RESOURCE_POOLS, SECRETS, Kube
from tests.integration.false_clock import FalseClock
from tests.integration.faulty_api import FAULTS, Fault, FaultyApi
from tests.integration.operator.world import (
    SYSTEM,
    FakeBroker,
    OperatorProcess,
    becomes,
    complete,
    find,
    operator,
    pool,
    until,
)

FAULT_S = 4.0
TRUE_S = 30.0


class Kept:
    """An operator that is started again whenever it ends, as the kubelet does."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.process: OperatorProcess | None = None


@contextlib.asynccontextmanager
async def kept_up(kubeconfig: Path, folder: Path, url: str, space: str, **env: str) -> AsyncIterator[Kept]:
    kept = Kept()

    async def run() -> None:
        while True:
            with operator(kubeconfig, folder, url, namespaces=(space,), env=env) as kept.process:
                kept.ends.append(await asyncio.to_thread(kept.process.process.wait))
            await asyncio.sleep(1.0)

    task = asyncio.create_task(run())
    try:
        yield kept
    finally:
        task.cancel()
        await asyncio.wait({task})


async def members(kube: Kube, space: str) -> dict[str, Any]:
    status = (await kube.get(RESOURCE_POOLS, "shell", space)).get("status", {})
    return {key: status.get("members", {}).get(key) for key in ("free", "leased", "total")}


async def true(kube: Kube, space: str, within_s: float, **counts: int) -> None:
    """Wait until the status has these counts."""
    last: dict[str, Any] = {}

    async def so() -> bool:
        nonlocal last
        last = await members(kube, space)
        return last == counts

    await until(so, within_s, lambda: f"{last} and not {counts}")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_status_is_true_soon_after_the_api_server_refused(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker, fault: Fault
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    async with (
        FaultyApi(installed, tmp_path) as api,
        kept_up(api.kubeconfig, tmp_path, broker.url, space) as kept,
    ):
        await becomes(kube, space, "Ready", "True MinAvailable", TRUE_S)
        secret = (await complete(kube, space))["Secret", "agentfly-broker"]
        await true(kube, space, TRUE_S, free=2, leased=1, total=3)
        api.begin(fault)
        began = time.monotonic()
        broker.serves("shell", ready=4, leased=3)
        broker.serves("other", ready=1)
        other = await kube.create(RESOURCE_POOLS, pool(space, "other"))
        while time.monotonic() < began + FAULT_S:
            broker.serves("shell", ready=4 + int(time.monotonic() - began), leased=3)
            await asyncio.sleep(0.5)
        assert sum(api.given.values()) > 2, api.given
        api.end()
        broker.serves("shell", ready=1, leased=7)
        await true(kube, space, TRUE_S, free=1, leased=7, total=8)
        await becomes(kube, space, "Ready", "True MinAvailable", TRUE_S)

        async def both_own_it() -> dict[tuple[str, str], Any] | None:
            found = await complete(kube, space)
            owners = found["Deployment", "agentfly-broker"]["metadata"]["ownerReferences"]
            policy = await find(kube, NETWORK_POLICIES, "agentfly-pool-other", space)
            owned = other["metadata"]["uid"] in {each["uid"] for each in owners}
            return found if owned and policy is not None else None

        after = await until(both_own_it, TRUE_S)
        # Its key is what holders' leases are proven with: no refusal makes it another one.
        assert after["Secret", "agentfly-broker"]["data"] == secret["data"]
        assert (await kube.get(SECRETS, "agentfly-broker", space))["metadata"]["uid"] == secret["metadata"][
            "uid"
        ]
        assert set(kept.ends) <= {1}


@pytest.mark.parametrize("jump_s", [3600, -3600])
async def test_status_is_true_whatever_the_clock_says(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker, jump_s: int
) -> None:
    clock = FalseClock(tmp_path)
    await kube.create(RESOURCE_POOLS, pool(space))
    async with kept_up(installed, tmp_path, broker.url, space, **clock.env) as kept:
        await becomes(kube, space, "Ready", "True MinAvailable", TRUE_S)
        await true(kube, space, TRUE_S, free=2, leased=1, total=3)
        clock.jump(jump_s)
        broker.serves("shell", ready=1, leased=7)
        await true(kube, space, TRUE_S, free=1, leased=7, total=8)
        broker.serves("shell", ready=0, leased=7, reason="Starting", min=2, max=8, starting=1)
        await true(kube, space, TRUE_S, free=0, leased=7, total=8)
        broker.serves("shell", ready=1, leased=7)
        await true(kube, space, TRUE_S, free=1, leased=7, total=8)
        lease = await kube.get(LEASES, "agentfly-operator", SYSTEM)
        assert abs(clock.off_by(lease["spec"]["renewTime"]) - jump_s) < 60
        clock.jump(0)
        broker.serves("shell", ready=2, leased=6)
        await true(kube, space, TRUE_S, free=2, leased=6, total=8)
        assert kept.ends == []
