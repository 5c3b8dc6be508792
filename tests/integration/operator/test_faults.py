"""The operator under faults: killed, doubled, cut off, and with everything taken away around it."""

import asyncio
import contextlib
import logging
import signal
import time
from pathlib import Path

import pytest
import yaml

from agentfly.api import crd
from agentfly.kube import CRDS, LEASES, NAMESPACES, PODS, RESOURCE_POOLS, SECRETS, Kube
from agentfly.kube.client import Propagation
from tests.cluster.cluster import Cluster
from tests.integration.operator.world import (
    AGENT,
    SYSTEM,
    Cuttable,
    FakeBroker,
    OperatorProcess,
    becomes,
    complete,
    find,
    gone,
    made,
    member,
    operator,
    pool,
    until,
)

MANY = 10_000


async def lead(kube: Kube) -> str:
    """Who holds the Lease."""
    lease = await find(kube, LEASES, "agentfly-operator", SYSTEM)
    return str((lease or {}).get("spec", {}).get("holderIdentity", ""))


# Killed and doubled


async def test_a_killed_operator_is_followed_by_one_that_finds_all_as_it_was(
    kube: Kube, control_plane: Cluster, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as first:
        await becomes(kube, space, "Ready", "True MinAvailable")
        await complete(kube, space)
        await asyncio.sleep(2.5)
        before = await kube.get(RESOURCE_POOLS, "shell", space)
        first.kill()
    with (
        control_plane.audit() as audit,
        operator(installed, tmp_path, broker.url, namespaces=(space,)) as second,
    ):
        await second.ready()
        asked = broker.questions
        await until(lambda: asyncio.sleep(0, broker.questions > asked + 1))
        await asyncio.sleep(1)
        assert await second.figure('agentfly_operator_objects{kind="ResourcePool"}') == 1
        assert second.stop() == 0
    assert await kube.get(RESOURCE_POOLS, "shell", space) == before
    writes = {what: count for what, count in audit.writes(agent=AGENT).items() if "leases" not in what[1]}
    assert writes == {}


async def test_changes_while_no_operator_was_there_are_made_up_for(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as first:
        objects = await complete(kube, space)
        first.kill()
    broker.serves("other", ready=1)
    await kube.create(RESOURCE_POOLS, pool(space, "other"))
    await kube.delete(RESOURCE_POOLS, "shell", space)
    with operator(installed, tmp_path, broker.url, namespaces=(space,)):

        async def handed_over() -> bool:
            secret = await find(kube, SECRETS, "agentfly-broker", space)
            owners = [each["name"] for each in (secret or {}).get("metadata", {}).get("ownerReferences", ())]
            return owners == ["other"] and ("Deployment", "agentfly-broker") in await made(kube, space)

        await until(handed_over)
    after = await made(kube, space)
    # The last pool of old and the first of new were never both away for the collector: it may have collected.
    old, new = objects["Secret", "agentfly-broker"], after["Secret", "agentfly-broker"]
    assert (old["data"] == new["data"]) == (old["metadata"]["uid"] == new["metadata"]["uid"])


async def test_deleted_client_token_is_another_that_nodes_will_bring_to_pods(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    with operator(installed, tmp_path, broker.url, namespaces=(space,)):
        before = await complete(kube, space)
        await kube.delete(SECRETS, "agentfly-broker-client", space)

        async def anew() -> bool:
            secret = await find(kube, SECRETS, "agentfly-broker-client", space)
            return secret is not None and not secret.get("immutable")

        await until(anew)
        after = await complete(kube, space)
    token, key = ("Secret", "agentfly-broker-client"), ("Secret", "agentfly-broker")
    assert after[token]["data"] != before[token]["data"]
    assert after[key]["data"] == before[key]["data"]
    assert after[key]["immutable"]
    deployment = ("Deployment", "agentfly-broker")
    assert after[deployment]["metadata"]["generation"] == before[deployment]["metadata"]["generation"]


async def test_of_two_operators_one_leads_and_the_other_follows_at_once_when_it_ends(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    with (
        operator(installed, tmp_path, broker.url, namespaces=(space,), name="op-a") as first,
        contextlib.ExitStack() as later,
    ):
        await first.leads()
        second = later.enter_context(
            operator(installed, tmp_path, broker.url, namespaces=(space,), name="op-b")
        )
        await second.ready()
        assert await lead(kube) == "op-a"
        assert (
            await first.figure("agentfly_operator_leader"),
            await second.figure("agentfly_operator_leader"),
        ) == (1, 0)
        began = time.monotonic()
        assert first.stop() == 0
        await until(lambda: asyncio.sleep(0, second.process.poll() is None))

        async def took_over() -> bool:
            return await lead(kube) == "op-b"

        await until(took_over, 10)
        assert time.monotonic() - began < 10
        await becomes(kube, space, "Ready", "True MinAvailable")
        assert second.stop() == 0


async def test_a_leader_that_was_stopped_for_a_while_ends_without_a_write(
    kube: Kube, control_plane: Cluster, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    with (
        operator(installed, tmp_path, broker.url, namespaces=(space,), name="op-a") as first,
        operator(installed, tmp_path, broker.url, namespaces=(space,), name="op-b") as second,
    ):
        await first.ready()
        await second.ready()
        leader, other = (first, second) if await lead(kube) == "op-a" else (second, first)
        await becomes(kube, space, "Ready", "True MinAvailable")
        leader.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()

        async def taken() -> bool:
            return await other.figure("agentfly_operator_leader") == 1

        await until(taken, 30)
        assert time.monotonic() - began >= 10
        broker.serves("shell", ready=5)
        leader.process.send_signal(signal.SIGCONT)
        assert leader.process.wait(15) == 1
        assert "lease" in leader.log.read_text()
        assert other.stop() == 0


# Deletion

PROPAGATIONS: tuple[Propagation, ...] = ("Background", "Foreground", "Orphan")


@pytest.mark.parametrize("propagation", PROPAGATIONS)
@pytest.mark.parametrize("up", [True, False], ids=["operator up", "operator down"])
async def test_deleting_the_last_pool_ends_with_nothing_of_ours(
    kube: Kube,
    control_plane: Cluster,
    installed: Path,
    tmp_path: Path,
    space: str,
    broker: FakeBroker,
    propagation: Propagation,
    up: bool,
) -> None:
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
        obj = await kube.create(RESOURCE_POOLS, pool(space))
        objects = await complete(kube, space)
        await kube.create(PODS, member(obj, 0, schedulerName="none"))
        if not up:
            process.kill()
        await kube.delete(RESOURCE_POOLS, "shell", space, propagation=propagation)

        async def pool_gone() -> bool:
            return await find(kube, RESOURCE_POOLS, "shell", space) is None

        await until(pool_gone, 45)
        if propagation != "Orphan":
            await gone(kube, space)
            await until(lambda: absent(kube, space), 45)
            return
        # That is what was asked for: they stay as they are, for the next pool to take over, or for a person.
        await asyncio.sleep(3)
        left = await made(kube, space)
        assert left.keys() == objects.keys()
        assert not any(each["metadata"].get("ownerReferences") for each in left.values())
        assert await find(kube, PODS, "shell-0000-0", space) is not None
        if up:
            again = await kube.create(RESOURCE_POOLS, pool(space))

            async def adopted() -> bool:
                found = await made(kube, space)
                uids = {
                    owner["uid"]
                    for each in found.values()
                    for owner in each["metadata"].get("ownerReferences", ())
                }
                return uids == {again["metadata"]["uid"]} and found.keys() == objects.keys()

            await until(adopted)
            kept = (await made(kube, space))["Secret", "agentfly-broker"]
            assert kept["data"] == objects["Secret", "agentfly-broker"]["data"]


async def absent(kube: Kube, space: str) -> bool:
    return await find(kube, PODS, "shell-0000-0", space) is None


@pytest.mark.parametrize("up", [True, False], ids=["operator up", "operator down"])
async def test_deleting_the_namespace_ends(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker, up: bool
) -> None:
    with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
        await kube.create(RESOURCE_POOLS, pool(space))
        await complete(kube, space)
        if not up:
            process.kill()
        await kube.delete(NAMESPACES, space)

        async def namespace_gone() -> bool:
            return await find(kube, NAMESPACES, space) is None

        await until(namespace_gone, 60)


async def test_a_pool_that_waits_for_its_deletion_gets_nothing_new(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    await complete(kube, space)
    held = {"metadata": {"finalizers": ["example.com/theirs"]}}
    await kube.patch(RESOURCE_POOLS, "shell", held, space)
    await kube.delete(RESOURCE_POOLS, "shell", space)
    for name in ("agentfly-broker", "agentfly-broker-client"):
        await kube.delete(SECRETS, name, space)
    await asyncio.sleep(4)
    assert not [ref for ref in await made(kube, space) if ref[0] == "Secret"]
    await kube.patch(RESOURCE_POOLS, "shell", {"metadata": {"finalizers": None}}, space)
    await gone(kube, space)


async def test_deleting_one_of_two_pools_leaves_the_other_served(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    broker.serves("other", ready=1)
    await kube.create(RESOURCE_POOLS, pool(space))
    other = await kube.create(RESOURCE_POOLS, pool(space, "other"))
    before = await complete(kube, space)
    await kube.delete(RESOURCE_POOLS, "shell", space, propagation="Foreground")

    async def handed_over() -> bool:
        found = await made(kube, space)
        owners = {
            owner["uid"] for each in found.values() for owner in each["metadata"].get("ownerReferences", ())
        }
        return owners == {other["metadata"]["uid"]} and ("NetworkPolicy", "agentfly-pool-shell") not in found

    await until(handed_over, 45)
    after = await made(kube, space)
    assert before.keys() - after.keys() == {("NetworkPolicy", "agentfly-pool-shell")}
    assert all(before[ref]["metadata"]["uid"] == after[ref]["metadata"]["uid"] for ref in after)


async def test_the_kind_itself_may_go_and_come_again(
    kube: Kube, control_plane: Cluster, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    kind = next(each for each in crd.KINDS if each.name == "ResourcePool")
    definition = "resourcepools.agentfly.dev"
    try:
        with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
            await kube.create(RESOURCE_POOLS, pool(space))
            await complete(kube, space)
            await kube.delete(CRDS, definition)

            async def undefined() -> bool:
                return await find(kube, CRDS, definition) is None

            await until(undefined, 45)
            await gone(kube, space, 90)
            # It notices at its next survey and ends; its Deployment starts the next one, which waits.
            assert process.process.wait(60) == 1
        with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
            await until(
                lambda: asyncio.sleep(0, "is not defined in this cluster yet" in process.log.read_text()), 30
            )
            control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(crd.crd(kind)))
            control_plane.kubectl("wait", "--for=condition=Established", "crd", definition)
            await kube.create(RESOURCE_POOLS, pool(space))
            await complete(kube, space)
            await becomes(kube, space, "Ready", "True MinAvailable")
    finally:
        control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(crd.crd(kind)))


# Cut off


async def test_what_went_while_it_was_cut_off_is_gone_for_it_too(
    kube: Kube, installed: Path, tmp_path: Path, space: str, broker: FakeBroker
) -> None:
    obj = await kube.create(RESOURCE_POOLS, pool(space))
    await kube.create(RESOURCE_POOLS, pool(space, "doomed"))
    for number in range(6):
        await kube.create(PODS, member(obj, number, schedulerName="none"))
    async with Cuttable(installed, tmp_path) as way:
        with operator(way.kubeconfig, tmp_path, broker.url, namespaces=(space,)) as process:
            await process.leads()
            await becomes(kube, space, "Ready", "True MinAvailable")
            await until(lambda: shows(process, "agentfly_operator_member_pods", 6))
            way.cut()
            for number in range(4):
                await kube.delete(PODS, f"shell-0000-{number}", space, grace_s=0)
            await kube.delete(RESOURCE_POOLS, "doomed", space)
            # Shorter than the Lease lasts: longer, and the operator would rightly end.
            await asyncio.sleep(2)
            way.mend()
            await until(lambda: shows(process, "agentfly_operator_member_pods", 2), 60)
            await until(lambda: shows(process, 'agentfly_operator_objects{kind="ResourcePool"}', 1), 60)
            broker.serves("shell", ready=7)

            async def seven() -> bool:
                return bool(
                    (await kube.get(RESOURCE_POOLS, "shell", space))["status"]["members"]["free"] == 7
                )

            await until(seven, 30)
            assert process.process.poll() is None


async def shows(process: OperatorProcess, name: str, want: float) -> bool:
    return await process.figure(name) == want


# At scale


@pytest.mark.timeout(300)  # ten thousand creations, whatever else the machine does
async def test_with_ten_thousand_pods_it_starts_within_five_cpu_seconds_and_200_mb(
    kube: Kube,
    installed: Path,
    tmp_path: Path,
    space: str,
    broker: FakeBroker,
) -> None:
    obj = await kube.create(RESOURCE_POOLS, pool(space))
    try:
        for start in range(0, MANY, 500):
            await asyncio.gather(
                *(kube.create(PODS, member(obj, n, schedulerName="none")) for n in range(start, start + 500))
            )
        with operator(installed, tmp_path, broker.url, namespaces=(space,)) as process:
            await process.ready(60)
            await until(lambda: shows(process, "agentfly_operator_member_pods", MANY), 60)
            await becomes(kube, space, "Ready", "True MinAvailable", 30)
            await asyncio.sleep(1)
            used = process.cpu_s(), process.peak_mb()
            assert used[0] < 5, used
            assert used[1] < 200, used
            logging.getLogger(__name__).info("%d pods: %.1f CPU s, %.0f MB", MANY, *used)
    finally:
        await kube.request("DELETE", PODS.path(space), deadline_s=120, body={"gracePeriodSeconds": 0})
