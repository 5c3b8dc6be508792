"""What a later broker finds of sandboxes that are pods: guarantee 4 of `runner`."""

import asyncio
import json
import threading

import pytest

from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.runners.base import Finder
from agentfly.resources.runners.kubernetes import Signer, lives
from agentfly.resources.runners.kubernetes import runner as module
from agentfly.resources.spec import ResetSpec
from tests.unit.kube.object_server import until
from tests.unit.resources.runners.kubernetes.cluster import NAME, TTL, sandbox, world


@pytest.fixture
async def cluster(monkeypatch):
    async with world(monkeypatch) as made:
        yield made


@pytest.fixture
async def runner(cluster):
    return await cluster.runner()


async def test_later_broker_finds_members_as_they_are(cluster, runner):
    assert isinstance(runner, Finder)
    spec = sandbox(cpu=0.5, env={"A": "$(B) ü"})
    free, leased, dirty = await asyncio.gather(
        *(runner.start(each, f"pool-0a1b-{n}") for n, each in enumerate([spec, sandbox(), sandbox()]))  # type: ignore[attr-defined]
    )
    await runner.lease(leased, "owner", 3, "t", TTL, json.dumps({"a": "note"}))  # type: ignore[attr-defined]
    await runner.lease(dirty, "owner", 3, "t", 0.01)  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)
    await runner.close()  # type: ignore[attr-defined]

    later = await cluster.runner()
    found = {each.member.id: each for each in await later.find()}
    assert set(found) == {free.id, leased.id, dirty.id}
    assert found[free.id].state == "free"
    assert found[free.id].member.spec == spec
    assert found[free.id].member.spec.identity() == spec.identity()
    assert found[free.id].pool == "pool"
    assert found[leased.id].state == "leased"
    assert json.loads(found[leased.id].note) == {"a": "note"}
    assert 0 < found[leased.id].ttl_left_s <= TTL
    assert (found[dirty.id].state, found[dirty.id].ttl_left_s) == ("dirty", 0.0)
    await later.lease(found[leased.id].member, "owner", 3, "t", TTL)  # the renewal that its holder asks for
    again = await later.reset(found[dirty.id].member)
    assert again.incarnation == 2
    assert await later.find() == []  # they are its own now
    for each in found.values():
        await later.stop(each.member)
    assert cluster.pods() == set()


async def test_what_nobody_holds_is_found_by_one_request_and_without_a_signature(cluster, runner):
    names = [f"pool-0a1b-{n}" for n in range(5)]
    members = await asyncio.gather(*(runner.start(sandbox(), name) for name in names))
    await runner.lease(members[4], "owner", 0, "t", TTL, "note")
    await runner.close()
    cluster.daemons.asked.clear()
    later = await cluster.runner()
    found = await later.find()
    assert sorted(each.state for each in found) == ["free"] * 4 + ["leased"]
    assert sorted(cluster.daemons.asked) == [("GET", "/healthz", False)] * 5 + [("GET", "/lease", True)]


async def test_daemon_that_says_falsely_that_it_is_ours_is_never_had(cluster, runner):
    """What it says is believed until its first lease: without the token it cannot take that."""
    await runner.start(sandbox(), NAME)
    await runner.close()
    daemon = cluster.daemons.of(NAME)
    daemon.says_key = daemon.config["adminKey"]
    daemon.config["adminKey"] = Signer(b"x" * 32).public_key
    later = await cluster.runner()
    [found] = await later.find()
    assert found.state == "free"
    with pytest.raises(LeaseLost, match="Unauthorized"):
        await later.lease(found.member, "owner", 0, "t", TTL)
    assert not (await later.probe(found.member)).alive


async def test_daemon_that_does_not_say_whose_it_is_shows_it_by_taking_the_token(cluster, runner):
    await runner.start(sandbox(), NAME)
    await runner.close()
    cluster.daemons.of(NAME).says_key = ""
    cluster.daemons.asked.clear()
    later = await cluster.runner()
    [found] = await later.find()
    assert found.state == "free"
    assert cluster.daemons.asked == [("GET", "/healthz", False), ("GET", "/lease", True)]


async def test_pod_that_dies_while_its_daemon_is_asked_is_of_no_use(cluster, runner, monkeypatch):
    monkeypatch.setattr("agentfly.sandbox.meeting.SHORT_S", 0.5)
    await runner.start(sandbox(), NAME)
    await runner.close()
    cluster.daemons.of(NAME).mute = True
    later = await cluster.runner()
    finding = asyncio.create_task(later.find())
    await asyncio.sleep(0.1)
    cluster.server.fail(NAME, reason="Evicted", message="memory")
    assert await finding == []
    await until(lambda: cluster.pods() == set())


async def test_finding_ends_with_whoever_waits_for_it(cluster, runner):
    await runner.start(sandbox(), NAME)
    await runner.close()
    cluster.daemons.of(NAME).mute = True
    later = await cluster.runner()
    finding = asyncio.create_task(later.find())
    await until(lambda: [each for each in threading.enumerate() if "asyncio" in each.name])
    finding.cancel()
    await asyncio.wait({finding})
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 3)


async def test_own_members_are_not_found_nor_those_that_are_starting(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    start = asyncio.create_task(runner.start(sandbox("held"), "pool-0a1b-1"))
    await until(lambda: "pool-0a1b-1" in cluster.pods())
    await asyncio.sleep(0.05)
    assert await runner.find() == []
    assert cluster.pods() == {NAME, "pool-0a1b-1"}
    start.cancel()
    await asyncio.wait({start})
    await runner.stop(member)


async def test_later_broker_waits_for_what_starts_and_for_what_is_silent(cluster, runner, monkeypatch):
    monkeypatch.setattr("agentfly.sandbox.meeting.SHORT_S", 0.3)
    silent = await runner.start(sandbox(), NAME)
    await runner.lease(silent, "owner", 3, "t", TTL, "note")
    start = asyncio.create_task(runner.start(sandbox("held"), "pool-0a1b-1"))
    await until(lambda: "pool-0a1b-1" in cluster.pods())
    runner.leave()
    start.cancel()
    await asyncio.wait({start})
    await runner.close()
    cluster.daemons.of(NAME).mute = True

    later = await cluster.runner()
    found = {each.member.id: each for each in await later.find()}
    assert {name: each.state for name, each in found.items()} == {NAME: "unknown", "pool-0a1b-1": "unknown"}
    assert await later.find() == []
    assert cluster.pods() == set(found)
    waits = [asyncio.create_task(later.resume(each, TTL)) for each in found.values()]
    await asyncio.sleep(0.1)
    assert not any(each.done() for each in waits)
    cluster.daemons.of(NAME).mute = False
    pod = cluster.server.objects["pool-0a1b-1"]
    pod["spec"]["containers"][0]["image"] = "fine"
    cluster.server.schedule(pod)
    heard = {each.member.id: each for each in await asyncio.wait_for(asyncio.gather(*waits), 10)}
    assert (heard[NAME].state, heard[NAME].note) == ("leased", "note")
    assert heard["pool-0a1b-1"].state == "free"
    await later.lease(heard[NAME].member, "owner", 3, "t", TTL)
    await later.lease(heard["pool-0a1b-1"].member, "o", 0, "u", TTL)
    for each in heard.values():
        await later.stop(each.member)
    assert cluster.pods() == set()


@pytest.mark.parametrize("why", ["NotReady: no answer in 0.4 s", "Evicted: memory"])
async def test_what_is_waited_for_in_vain_says_why_and_can_be_stopped(cluster, runner, monkeypatch, why):
    monkeypatch.setattr("agentfly.sandbox.meeting.SHORT_S", 0.2)
    monkeypatch.setattr(module, "READY_S", 0.3)
    await runner.start(sandbox(reset=ResetSpec(timeout_s=0.1)), NAME)
    await runner.close()
    cluster.daemons.of(NAME).mute = True
    later = await cluster.runner()
    [found] = await later.find()
    if why.startswith("Evicted"):
        cluster.server.fail(NAME, reason="Evicted", message="memory")
    with pytest.raises(StartFailed) as caught:
        await later.resume(found, 0.0)
    assert caught.value.reason == why
    await later.stop(found.member)
    assert cluster.pods() == set()


@pytest.mark.parametrize(
    "what", ["another key", "another member", "another life", "no spec", "another pool", "failed"]
)
async def test_what_is_of_no_use_is_removed(cluster, runner, monkeypatch, what):
    member = await runner.start(sandbox(), NAME)
    pod, daemon = cluster.server.objects[NAME], cluster.daemons.of(NAME)
    match what:
        case "another key":
            daemon.config["adminKey"] = Signer(b"x" * 32).public_key
        case "another member":
            daemon.config["member"] = "pool-0a1b-9"
        case "another life":  # said to be ours and held, and takes no token of ours
            await runner.lease(member, "owner", 0, "t", TTL)
            daemon.says_key = daemon.config["adminKey"]
            daemon.config["adminKey"] = Signer(b"x" * 32).public_key
        case "no spec":
            pod["metadata"]["annotations"]["agentfly.dev/spec-json"] = '{"kind": "container", "cpu": -1}'
        case "another pool":
            pod["metadata"]["labels"]["agentfly.dev/pool"] = "other"
        case "failed":
            cluster.server.fail(NAME)
    cluster.server.change(pod)
    await runner.close()
    later = await cluster.runner()
    assert await later.find() == []
    await until(lambda: cluster.pods() == set())


async def test_finding_without_a_list_is_an_error(cluster, monkeypatch):
    runner = await cluster.runner()

    async def unsynced(timeout=30):
        raise lives.KubeError("kubernetes: pods could not be listed")

    monkeypatch.setattr(runner._lives._cluster.pods, "synced", unsynced)
    with pytest.raises(Infra, match="could not be listed"):
        await runner.find()


async def test_closed_runner_leaves_members_and_no_connection(cluster, runner):
    await asyncio.gather(*(runner.start(sandbox(), f"pool-0a1b-{n}") for n in range(3)))
    await runner.close()
    assert len(cluster.pods()) == 3
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("keep ")]


@pytest.mark.parametrize("what", ["is deleted", "is of another pool of this name", "its pool is gone"])
async def test_pod_that_goes_anyway_is_neither_found_nor_touched(cluster, runner, what):
    await runner.start(sandbox(), NAME)
    await runner.close()
    pod = cluster.server.objects[NAME]
    match what:
        case "is deleted":
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        case "is of another pool of this name":
            cluster.owner = cluster.owner | {"uid": "of a new one"}
        case "its pool is gone":
            cluster.owner = None
    cluster.server.change(pod)
    later = await cluster.runner()
    before = [each for each in cluster.server.requests if each[0] == "DELETE"]
    assert await later.find() == []
    await asyncio.sleep(0.05)
    assert [each for each in cluster.server.requests if each[0] == "DELETE"] == before
