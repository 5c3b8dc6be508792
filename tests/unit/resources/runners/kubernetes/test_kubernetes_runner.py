"""Sandboxes as pods on a cluster in miniature: starts, leases, resets, stops, and how many on one node."""

import asyncio

import pytest

from agentfly.resources.errors import Infra, LeaseLost, StartFailed
from agentfly.resources.runners.base import Unclean
from agentfly.resources.runners.kubernetes import lives
from agentfly.resources.runners.kubernetes import runner as module
from agentfly.resources.spec import ModelServiceSpec, ResetSpec
from tests.unit.kube.object_server import until
from tests.unit.resources.runner_contract import RunnerContract
from tests.unit.resources.runners.kubernetes.cluster import NAME, TTL, sandbox, world


@pytest.fixture
async def cluster(monkeypatch):
    async with world(monkeypatch) as made:
        yield made


@pytest.fixture
async def runner(cluster):
    return await cluster.runner()


class TestContract(RunnerContract):
    @pytest.fixture
    async def runner(self, cluster):
        self.cluster = cluster
        return await cluster.runner()

    @pytest.fixture
    def spec(self):
        return sandbox()

    def left(self, runner):
        return self.cluster.pods() | set(self.cluster.daemons.living)


# Starts.


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("no-such", "ErrImagePull: image no-such: rpc error: not found: no-such:latest"),
        ("crashes", "CrashLoop: container sandbox ended with 1: sandboxd: pid: must be 1"),
    ],
)
async def test_pod_that_cannot_run_fails_with_its_reason_and_is_gone(cluster, runner, image, reason):
    with pytest.raises(StartFailed, match=f"member {NAME}") as caught:
        await runner.start(sandbox(image), NAME)
    assert caught.value.reason == reason
    assert cluster.pods() == set()


async def test_pod_without_a_node_is_kept_until_there_is_one(cluster, runner):
    start = asyncio.create_task(runner.start(sandbox("held"), NAME))
    await asyncio.sleep(0.2)
    assert not start.done()
    assert cluster.pods() == {NAME}
    pod = cluster.server.objects[NAME]
    pod["spec"]["containers"][0]["image"] = "fine"  # room turned up
    cluster.server.schedule(pod)
    member = await asyncio.wait_for(start, 5)
    assert [method for method, _ in cluster.server.requests].count("POST") == 1
    await runner.stop(member)


async def test_deadline_of_a_start_says_what_it_waited_for(cluster):
    runner = await cluster.runner()
    runner._lives._start_s = 0.2
    with pytest.raises(StartFailed) as caught:
        await runner.start(sandbox("held"), NAME)
    assert caught.value.reason == (
        "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu. (after 0.2 s)"
    )
    assert cluster.pods() == set()


async def test_nothing_is_asked_of_the_api_server_while_one_waits(cluster, runner):
    member = await runner.start(sandbox("slow"), NAME)
    asked = [
        method for method, path in cluster.server.requests if not path.endswith("/pods") or method == "POST"
    ]
    assert asked == ["POST"]
    await runner.stop(member)


async def test_how_a_member_will_be_reset_is_its_daemons_word(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    assert member.reset_method == "overlay"
    await runner.stop(member)


@pytest.mark.parametrize(
    ("asked", "method", "refused", "reason"),
    [
        ("auto", "overlay", {}, ""),
        ("auto", "overlay", {"overlay-shared-pid": "worse, so nobody asks"}, ""),
        ("auto", "overlay-shared-pid", {"overlay": "mount: proc"}, "overlay: mount: proc"),
        ("auto", "paths", {"overlay": "a", "scratch": "b"}, "overlay: a"),
        (
            "auto",
            "recreate",
            {"scratch": "c", "overlay-shared-pid": "b", "overlay": "a"},
            "overlay: a; overlay-shared-pid: b; scratch: c",
        ),
        ("recreate", "recreate", {"overlay": "a"}, ""),
        ("auto", "overlay-shared-pid", {"overlay": "long" * 1000}, ("overlay: " + "long" * 1000)[:1000]),
    ],
)
async def test_why_a_member_is_not_reset_in_a_better_way(cluster, runner, asked, method, refused, reason):
    cluster.daemons.resets_by = {"method": method, "refused": refused}
    member = await runner.start(sandbox(reset=ResetSpec(method=asked)), NAME)
    assert (member.reset_method, member.reset_reason) == (method, reason)
    await runner.stop(member)


async def test_daemon_that_does_not_answer_is_a_failed_start(cluster, runner, monkeypatch):
    monkeypatch.setattr(module, "READY_S", 0.3)
    with pytest.raises(StartFailed) as caught:
        await runner.start(sandbox("mute", reset=ResetSpec(timeout_s=0.1)), NAME)
    assert "0.4 s" in caught.value.reason
    assert cluster.pods() == set()


async def test_daemon_that_does_not_know_our_key_is_a_failed_start(cluster, runner):
    with pytest.raises(StartFailed, match="Unauthorized"):
        await runner.start(sandbox("stranger"), NAME)
    assert cluster.pods() == set()


async def test_pod_that_ends_before_its_daemon_answers_is_a_failed_start(cluster, runner):
    start = asyncio.create_task(runner.start(sandbox("mute"), NAME))
    await until(lambda: cluster.daemons.living)
    cluster.server.fail(NAME, reason="Evicted", message="The node was low on resource: memory.")
    with pytest.raises(StartFailed) as caught:
        await asyncio.wait_for(start, 20)
    assert caught.value.reason == "Evicted: The node was low on resource: memory."
    assert cluster.pods() == set()


async def test_pool_that_is_being_deleted_gets_no_pod(cluster, runner):
    cluster.owner = None
    with pytest.raises(StartFailed, match="PoolDeleting"):
        await runner.start(sandbox(), NAME)
    assert "POST" not in [method for method, _ in cluster.server.requests]


async def test_refusal_of_the_api_server_is_the_reason(cluster, runner):
    cluster.server.create_answers = [403]
    with pytest.raises(StartFailed) as caught:
        await runner.start(sandbox(), NAME)
    assert caught.value.reason.startswith("Forbidden: ")
    assert "exceeded quota: pods" in caught.value.reason


@pytest.mark.parametrize("fault", ["cut before", "cut after"])
async def test_creation_whose_answer_was_lost_is_one_pod(cluster, runner, fault):
    cluster.server.create_answers = [fault]
    member = await runner.start(sandbox(), NAME)
    assert cluster.pods() == {NAME}
    await runner.stop(member)
    assert cluster.pods() == set()


async def test_pod_of_somebody_else_with_this_name_is_left_alone(cluster, runner):
    other = {"metadata": {"name": NAME, "namespace": "ns"}, "spec": {"containers": [{"image": "held"}]}}
    cluster.server.add(other)
    with pytest.raises(StartFailed, match="AlreadyExists"):
        await runner.start(sandbox(), NAME)
    assert cluster.pods() == {NAME}


async def test_pod_of_a_start_that_nobody_knows_about_is_removed_when_it_is_seen(
    cluster, runner, monkeypatch
):
    monkeypatch.setattr("agentfly.kube.client.ATTEMPT_S", 0.1)
    monkeypatch.setattr("agentfly.kube.client.DEADLINE_S", 0.1)
    create = cluster.kube.request

    async def impatient(*args, **kwargs):
        return await create(*args, **({"deadline_s": 0.2} | kwargs))

    monkeypatch.setattr(cluster.kube, "request", impatient)
    cluster.server.create_answers = ["hang after", "cut before", "cut before"] + ["cut before"] * 50
    with pytest.raises(StartFailed, match="Unreachable"):
        await runner.start(sandbox(), NAME)
    await until(lambda: cluster.pods() == set())


async def test_cancelled_while_the_creation_is_on_its_way(cluster, runner):
    start = asyncio.create_task(runner.start(sandbox("held"), NAME))
    await until(lambda: ("POST", "/api/v1/namespaces/ns/pods") in cluster.server.requests)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert cluster.pods() == set()


async def test_pod_that_somebody_deletes_is_a_failed_start(cluster, runner):
    start = asyncio.create_task(runner.start(sandbox("held"), NAME))
    await until(lambda: NAME in cluster.pods())
    await asyncio.sleep(0.05)
    cluster.server.remove(NAME)
    with pytest.raises(StartFailed) as caught:
        await asyncio.wait_for(start, 5)
    assert caught.value.reason == "Deleted: the pod is gone"


async def test_pod_that_was_gone_before_anybody_saw_it(cluster, runner, monkeypatch):
    monkeypatch.setattr(lives, "SEEN_S", 0.1)
    cluster.server.cut()
    cluster.server.refusals = [503] * 10_000  # nothing is told from now on
    monkeypatch.setattr(cluster.server, "schedule", lambda pod: None)
    start = asyncio.create_task(runner.start(sandbox(), NAME))
    await until(lambda: cluster.pods() == {NAME})
    cluster.server.objects.pop(NAME)
    with pytest.raises(StartFailed, match="the pod is gone"):
        await asyncio.wait_for(start, 5)


async def test_another_kind_is_not_served(runner):
    spec = ModelServiceSpec(model="m", max_model_len=8)
    with pytest.raises(StartFailed, match="model-service"):
        await runner.start(spec, NAME)


# Leases.


async def test_lease_and_reset_ask_nothing_of_the_api_server(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    before = len(cluster.server.requests)
    for _ in range(3):
        await runner.lease(member, "owner", 0, "t", TTL, "note")
        assert (await runner.probe(member)).alive
        member = await runner.reset(member)
    assert len(cluster.server.requests) == before
    await runner.stop(member)


async def test_lease_is_lost_with_its_pod(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    await runner.lease(member, "owner", 0, "t", TTL)
    cluster.server.fail(NAME, reason="Evicted", message="DiskPressure")
    await until(lambda: runner._lives.death(member.handle.life) is not None)
    with pytest.raises(LeaseLost, match="Evicted: DiskPressure"):
        await runner.lease(member, "owner", 0, "t", TTL)
    assert not (await runner.probe(member)).alive
    await runner.stop(member)
    assert cluster.pods() == set()


async def test_lease_is_lost_with_the_daemon_that_knew_it(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    await runner.lease(member, "owner", 0, "t", TTL)
    cluster.daemons.of(NAME).boot = "another"
    with pytest.raises(LeaseLost, match="Unauthorized"):
        await runner.lease(member, "owner", 0, "t", TTL)
    assert not (await runner.probe(member)).alive
    await runner.stop(member)


async def test_daemon_that_is_silent_says_nothing_about_the_lease(cluster, runner, monkeypatch):
    monkeypatch.setattr("agentfly.sandbox.client.SHORT_S", 0.2)
    member = await runner.start(sandbox(), NAME)
    cluster.daemons.of(NAME).mute = True
    with pytest.raises(Infra, match=NAME):
        await runner.lease(member, "owner", 0, "t", TTL)
    assert (await runner.probe(member)).alive
    await runner.stop(member)


async def test_lease_that_ran_out_is_lost(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    await runner.lease(member, "owner", 0, "t", 0.05)
    await asyncio.sleep(0.1)
    with pytest.raises(LeaseLost, match="must be reset"):
        await runner.lease(member, "owner", 0, "t", 0.05)
    await runner.stop(member)


async def test_token_is_signed_for_the_name_that_the_api_server_has(cluster, runner):
    """A pod that says to be another member gets nothing that opens that one."""
    await runner.start(sandbox(), NAME)
    liar = await runner.start(sandbox(), "pool-0a1b-1")
    cluster.daemons.of("pool-0a1b-1").config["member"] = NAME
    with pytest.raises(LeaseLost, match="Unauthorized"):
        await runner.lease(liar, "owner", 0, "t", TTL)


# Resets.


async def test_reset_keeps_the_pod_where_it_was_verified(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    uid = cluster.server.objects[NAME]["metadata"]["uid"]
    again = await runner.reset(member)
    assert (again.incarnation, again.address) == (2, member.address)
    assert cluster.server.objects[NAME]["metadata"]["uid"] == uid
    await runner.stop(again)


@pytest.mark.parametrize("recreate", [True, False])
async def test_sandbox_that_cannot_be_cleaned_is_a_new_pod_of_the_next_incarnation(cluster, runner, recreate):
    spec = sandbox(reset=ResetSpec(method="recreate")) if recreate else sandbox()
    member = await runner.start(spec, NAME)
    uid = cluster.server.objects[NAME]["metadata"]["uid"]
    if not recreate:
        cluster.daemons.of(NAME).residue = "process 7 would not die"
    again = await runner.reset(member)
    assert (again.id, again.incarnation) == (NAME, 2)
    assert cluster.server.objects[NAME]["metadata"]["uid"] != uid
    third = await runner.reset(again)
    assert third.incarnation == 3
    await runner.lease(third, "owner", 0, "t", TTL)
    await runner.stop(third)
    assert cluster.pods() == set()


async def test_unclean_sandbox_that_is_to_be_kept_is_left_as_it_is(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    member.keep_unclean = True
    cluster.daemons.of(NAME).residue = "file /x was left"
    with pytest.raises(Unclean, match="file /x was left"):
        await runner.reset(member)
    assert cluster.pods() == {NAME}
    await runner.stop(member)


async def test_sandbox_that_can_neither_be_cleaned_nor_replaced_is_none(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    cluster.daemons.of(NAME).residue = "file /x was left"
    cluster.owner = None
    assert await runner.reset(member) is None
    assert cluster.pods() == set()


# Stops.


async def test_node_that_does_not_answer_loses_its_say(cluster, runner, monkeypatch):
    monkeypatch.setattr(lives, "STOP_S", 0.1)
    member = await runner.start(sandbox(), NAME)
    cluster.server.lingering = True
    await runner.stop(member)
    assert cluster.pods() == set()


async def test_stop_that_is_refused_for_now_is_an_error_and_may_be_repeated(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    cluster.server.conflicts = 1
    with pytest.raises(Infra, match="please apply your changes again"):
        await runner.stop(member)
    assert cluster.pods() == {NAME}
    await runner.stop(member)
    assert cluster.pods() == set()


async def test_stop_that_is_not_heard_is_an_error_and_may_be_repeated(cluster, runner, monkeypatch):
    member = await runner.start(sandbox(), NAME)
    monkeypatch.setattr(cluster.kube._login, "url", "http://127.0.0.1:9")
    access = cluster.kube._access
    cluster.kube._access = cluster.kube._login.read()
    request = cluster.kube.request

    async def impatient(*args, **kwargs):
        return await request(*args, **({"deadline_s": 0.1} | kwargs))

    monkeypatch.setattr(cluster.kube, "request", impatient)
    with pytest.raises(Infra, match=f"member {NAME}"):
        await runner.stop(member)
    assert cluster.pods() == {NAME}
    cluster.kube._access = access
    await runner.stop(member)
    assert cluster.pods() == set()


async def test_stop_of_a_pod_whose_name_is_anothers_now(cluster, runner):
    member = await runner.start(sandbox(), NAME)
    pod = cluster.server.objects[NAME]
    cluster.server.remove(NAME)
    cluster.server.add({"metadata": {"name": NAME, "namespace": "ns"}, "spec": pod["spec"]})
    await runner.stop(member)
    assert cluster.pods() == {NAME}


# How many on one node.


async def test_no_node_has_more_than_its_bound(cluster, runner):
    cluster.per_node = 2
    cluster.server.nodes = ["node1", "node2", "node3"]
    members = await asyncio.gather(*(runner.start(sandbox(), f"pool-0a1b-{n}") for n in range(6)))
    nodes = [cluster.server.objects[member.id]["spec"]["nodeName"] for member in members]
    assert sorted(nodes) == ["node1", "node1", "node2", "node2", "node3", "node3"]
    seventh = asyncio.create_task(runner.start(sandbox(), "pool-0a1b-7"))
    await asyncio.sleep(0.1)
    assert not seventh.done()
    await runner.stop(members[0])
    terms = cluster.server.objects["pool-0a1b-7"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert [each["values"] for each in terms[0]["matchFields"]] == [["node1"], ["node2"], ["node3"]]
    seventh.cancel()
    await asyncio.wait({seventh})
    await asyncio.gather(*(runner.stop(member) for member in members))


async def test_start_waits_where_pods_without_a_node_may_be_anywhere(cluster, runner):
    cluster.per_node = 1
    first = asyncio.create_task(runner.start(sandbox("held"), "pool-0a1b-1"))
    await until(lambda: "pool-0a1b-1" in cluster.pods())
    runner._lives._start_s = 0.2
    with pytest.raises(StartFailed, match="perNode: 1 on each node"):
        await runner.start(sandbox(), "pool-0a1b-2")
    assert cluster.pods() == {"pool-0a1b-1"}
    runner._lives._start_s = 5.0
    third = asyncio.create_task(runner.start(sandbox(), "pool-0a1b-3"))
    first.cancel()
    await asyncio.wait({first})
    member = await third
    await runner.stop(member)
