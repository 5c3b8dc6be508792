"""The operator against a real API server, as a process with the rights that the manifests give it."""

import asyncio
import base64
import json
import time

from agentfly.kube import (
    PODS,
    RESOURCE_POOLS,
    Kube,
    Resource,
)
from tests.cluster.cluster import Cluster
from tests.cluster.fake_kubelet import FakeKubelet
from tests.integration.operator.world import (
    AGENT,
    FakeBroker,
    OperatorProcess,
    becomes,
    complete,
    condition,
    made,
    member,
    pool,
    until,
)

EVENTS = Resource("events.k8s.io", "v1", "events")


# What a namespace gets


async def test_a_pool_gets_a_broker_with_all_it_needs_and_a_status(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    created = await kube.create(RESOURCE_POOLS, pool(space, capacity={"min": 2, "max": 8}))
    objects = await complete(kube, space)
    await becomes(kube, space, "Ready", "True MinAvailable")
    for (kind, name), obj in objects.items():
        owners = [(each["uid"], each.get("controller")) for each in obj["metadata"]["ownerReferences"]]
        assert owners == [(created["metadata"]["uid"], name == "agentfly-pool-shell" or None)], (kind, name)
    token = base64.b64decode(objects["Secret", "agentfly-broker-client"]["data"]["client-token"]).decode()
    assert broker.token == token
    assert len(token) >= 32
    assert len(base64.b64decode(objects["Secret", "agentfly-broker"]["data"]["signing-key"])) == 32
    status = (await kube.get(RESOURCE_POOLS, "shell", space))["status"]
    assert status["observedGeneration"] == 1
    assert status["members"]["free"] == 2
    assert status["members"]["leased"] == 1
    # Nothing of the secrets is anywhere else.
    key = objects["Secret", "agentfly-broker"]["data"]["signing-key"]
    text = running.log.read_text() + json.dumps(status) + (await running.page("/metrics"))[1]
    assert token not in text
    assert key not in text


async def test_it_never_touches_what_people_wrote(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    before = await kube.create(RESOURCE_POOLS, pool(space))
    await becomes(kube, space, "Ready", "True MinAvailable")
    after = await kube.get(RESOURCE_POOLS, "shell", space)
    assert after["spec"] == before["spec"]
    for obj in (before, after):
        for moving in ("resourceVersion", "managedFields"):
            obj["metadata"].pop(moving)
    assert after["metadata"] == before["metadata"]


async def test_kubectl_shows_it(
    kube: Kube, control_plane: Cluster, space: str, running: OperatorProcess
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    await becomes(kube, space, "Ready", "True MinAvailable")
    header, line = control_plane.kubectl("get", "rpool", "-n", space).splitlines()
    assert header.split() == [
        "NAME",
        "TYPE",
        "READY",
        "FREE",
        "LEASED",
        "STARTING",
        "QUEUED",
        "MAX",
        "REASON",
        "AGE",
    ]
    assert line.split()[:9] == ["shell", "Container", "3", "2", "1", "0", "0", "8", "MinAvailable"]

    async def described() -> str:
        text = control_plane.kubectl("describe", "rpool", "shell", "-n", space)
        return text if "PoolReady" in text else ""

    text = await until(described)
    assert "Normal" in text
    assert "3 members: 2 free, 1 leased" in text


# GitOps


async def test_ten_re_applies_and_a_quiet_minute_change_nothing(
    kube: Kube, control_plane: Cluster, space: str, running: OperatorProcess
) -> None:
    manifest = json.dumps(pool(space))
    control_plane.kubectl("apply", "--server-side", "--field-manager=git", "-f", "-", stdin=manifest)
    await complete(kube, space)
    await becomes(kube, space, "Ready", "True MinAvailable")
    await asyncio.sleep(2.5)

    async def versions() -> dict[tuple[str, str], str]:
        objects = {
            **await made(kube, space),
            ("ResourcePool", "shell"): await kube.get(RESOURCE_POOLS, "shell", space),
        }
        # The Deployment's status is its controller's.
        return {
            ref: obj["metadata"]["resourceVersion"] for ref, obj in objects.items() if ref[0] != "Deployment"
        }

    before = await versions()
    with control_plane.audit() as audit:
        for _ in range(10):
            control_plane.kubectl("apply", "--server-side", "--field-manager=git", "-f", "-", stdin=manifest)
        await asyncio.sleep(12)
    assert await versions() == before
    writes = {what: count for what, count in audit.writes(agent=AGENT).items() if "leases" not in what[1]}
    assert writes == {}


async def test_other_managers_keep_what_is_theirs_and_nobody_fights(
    kube: Kube, control_plane: Cluster, space: str, running: OperatorProcess
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    await complete(kube, space)
    await becomes(kube, space, "Ready", "True MinAvailable")
    await asyncio.sleep(2.5)
    theirs = {
        "type": "TheirsReady", "status": "True", "reason": "Seen", "message": "",
        "lastTransitionTime": "2026-11-30T12:00:00Z",
    }  # fmt: skip
    status = {**pool(space), "status": {"conditions": [theirs]}}
    del status["spec"]
    with control_plane.audit() as audit:
        control_plane.kubectl("label", "rpool", "shell", "-n", space, "team=blue")
        control_plane.kubectl("annotate", "deployment", "agentfly-broker", "-n", space, "theirs=x")
        control_plane.kubectl(
            "apply", "--server-side", "--field-manager=them", "--subresource=status", "-f", "-",
            stdin=json.dumps(status),
        )  # fmt: skip
        await asyncio.sleep(3)
    writes = {what: count for what, count in audit.writes(agent=AGENT).items() if "leases" not in what[1]}
    assert writes == {}
    assert await condition(kube, space, "TheirsReady") == "True Seen"
    assert await condition(kube, space, "Ready") == "True MinAvailable"
    assert (await kube.get(RESOURCE_POOLS, "shell", space))["metadata"]["labels"] == {"team": "blue"}


# Status


async def test_a_status_is_written_at_most_once_a_second_and_only_on_change(
    kube: Kube, control_plane: Cluster, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    obj = await kube.create(RESOURCE_POOLS, pool(space))
    await becomes(kube, space, "Ready", "True MinAvailable")
    await asyncio.sleep(2.5)
    with control_plane.audit() as audit:
        began = time.monotonic()
        for number in range(40):
            broker.serves("shell", ready=number % 7, leased=number)
            await kube.create(PODS, member(obj, number, schedulerName="none"))
            await asyncio.sleep(0.1)
        took = time.monotonic() - began
    writes = audit.writes(agent=AGENT).get(("patch", "resourcepools/status"), 0)
    assert 1 <= writes <= took + 1
    await asyncio.sleep(1.5)  # the last answer of the broker, and the last pods, are told
    settled = broker.questions
    with control_plane.audit() as quiet:
        await asyncio.sleep(5)
    assert quiet.writes(agent=AGENT).get(("patch", "resourcepools/status"), 0) <= 1
    assert broker.questions > settled
    latest = await kube.get(RESOURCE_POOLS, "shell", space)
    assert latest["status"]["members"]["leased"] == 39


async def test_a_change_of_spec_shows_soon_and_not_before_the_broker_can_know_it(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space))
    await becomes(kube, space, "Reconciling", "False AllReady")
    await kube.patch(RESOURCE_POOLS, "shell", {"spec": {"capacity": {"min": 6}}}, space)
    await becomes(kube, space, "Reconciling", "True Provisioning", 3)
    await becomes(kube, space, "Reconciling", "True WarmingUp", 6)
    broker.serves("shell", ready=6)
    await becomes(kube, space, "Reconciling", "False AllReady", 12)
    assert (await kube.get(RESOURCE_POOLS, "shell", space))["status"]["observedGeneration"] == 2


async def test_a_spec_that_a_cluster_cannot_serve_is_stalled(
    kube: Kube, space: str, running: OperatorProcess
) -> None:
    await kube.create(RESOURCE_POOLS, pool(space, container={"image": "host"}))
    await becomes(kube, space, "Stalled", "True InvalidSpec")
    assert await condition(kube, space, "Reconciling") == "False InvalidSpec"

    async def told() -> bool:
        events = await kube.list(EVENTS, space)
        return [each["type"] for each in events if each["reason"] == "InvalidSpec"] == ["Warning"]

    await until(told)


async def test_why_members_do_not_start_is_told_by_their_pods(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess, fake_kubelet: FakeKubelet
) -> None:
    broker.serves("shell", starting=1)
    obj = await kube.create(RESOURCE_POOLS, pool(space, capacity={"min": 1, "max": 8}))
    await becomes(kube, space, "Ready", "False WarmingUp")
    fake_kubelet.fail("ImagePullBackOff", "manifest unknown", **{"agentfly.dev/pool": "shell"})
    await kube.create(PODS, member(obj, 0))
    await becomes(kube, space, "ImagePullFailing", "True ImagePullFailed")
    await becomes(kube, space, "Ready", "False NoCapacity")
    await kube.delete(PODS, "shell-0000-0", space, grace_s=0)
    await becomes(kube, space, "ImagePullFailing", "False AsExpected")
    fake_kubelet.clear()
    greedy = {"containers": [{"name": "s", "image": "b", "resources": {"requests": {"cpu": "999k"}}}]}
    await kube.create(PODS, member(obj, 1, **greedy))
    await becomes(kube, space, "Unschedulable", "True InsufficientCpu")


async def test_a_broker_that_falls_silent_is_told_and_its_pods_are_counted(
    kube: Kube, space: str, broker: FakeBroker, running: OperatorProcess, fake_kubelet: FakeKubelet
) -> None:
    obj = await kube.create(RESOURCE_POOLS, pool(space))
    await becomes(kube, space, "Ready", "True MinAvailable")
    for number in range(2):
        await kube.create(PODS, member(obj, number))
    broker.silent = True
    await becomes(kube, space, "Ready", "Unknown BrokerUnavailable", 20)

    async def counted() -> bool:
        members = (await kube.get(RESOURCE_POOLS, "shell", space))["status"]["members"]
        return (members["total"], members["ready"], members["free"]) == (2, 2, 0)

    await until(counted)
    broker.silent = False
    await becomes(kube, space, "Ready", "True MinAvailable", 10)
