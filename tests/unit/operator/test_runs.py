"""Passes over one TrainingRun against an API server in memory; decisions are tested elsewhere."""

from collections.abc import AsyncIterator

import pytest

from agentfly.kube import (
    JOBS,
    PODS,
    RESOURCE_POOLS,
    SERVICES,
    TRAINING_RUNS,
    KubeError,
)
from agentfly.roles.launch import Report
from agentfly_operator.cluster import passes as module
from agentfly_operator.cluster import works as works_module
from tests.unit.operator.pass_world import OneRun, ended


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OneRun]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    made = OneRun()
    yield made
    await made.heads.close()


async def test_a_run_from_its_beginning_to_its_end(world: OneRun) -> None:
    world.create()
    await world.look(2)
    assert (world.status["phase"], world.kube.names(JOBS)) == ("Starting", {"first-prepare"})
    assert world.kube.names(RESOURCE_POOLS) == set()
    world.prepared()
    await world.look(2)
    assert world.kube.names(RESOURCE_POOLS) == {"first-policy"}
    world.served()
    await world.to_pods()
    assert world.kube.names(PODS) == {"first-trainer-1-0"}
    assert world.kube.names(SERVICES) == {"first-trainer"}
    calls = world.kube.writes()
    # No pod runs before there is what says whom it may reach.
    walls = calls.index(("create", "networkpolicies", "first-roles"))
    assert walls < calls.index(("create", "jobs", "first-prepare"))
    # The attempt was stored before anything of it was made.
    made = calls.index(("create", "configmaps", "first-launch-1"))
    assert world.status["attempt"] == 1
    assert ("apply", "trainingruns", "first") in calls[:made]
    world.pods(**ended(Report(attempt=1, phase="Ended", exit_code=0)))
    await world.until("Succeeded")
    await world.look(3)
    assert {key for key in world.kube.objects if key[0] != "events"} == {
        ("trainingruns", "team", "first"),
        ("configmaps", "team", "quickstart"),
        ("persistentvolumeclaims", "team", "runs"),
    }
    assert await world.look() == module.QUIET_S
    before = len(world.kube.calls)
    await world.look()
    assert world.kube.calls[before:] == [("get", "trainingruns", "first")]


async def test_what_was_made_is_neither_made_again_nor_lost_before_a_watch_shows_it(world: OneRun) -> None:
    world.create(trainer={"nodes": 2})
    await world.to_pods()
    await world.look(5, shown=False)
    made = [call for call in world.kube.calls if call[:2] == ("create", "pods")]
    assert sorted(made) == [("create", "pods", f"first-trainer-1-{index}") for index in range(2)]
    assert world.status["phase"] == "Starting"
    assert "lastFailure" not in world.status


@pytest.mark.parametrize("passes", range(1, 12))
async def test_an_operator_that_remembers_nothing_goes_on_where_another_was(
    world: OneRun, passes: int
) -> None:
    world.create(trainer={"nodes": 2})
    for _ in range(passes):
        await world.look()
        if world.kube.names(JOBS):
            world.prepared()
        if world.kube.names(RESOURCE_POOLS):
            world.served()
    await world.heads.close()
    world.begin()
    await world.look(12 - passes + 2)
    assert world.kube.names(PODS) == {"first-trainer-1-0", "first-trainer-1-1"}
    made = [call for call in world.kube.calls if call[0] == "create" and call[1] != "events"]
    assert len(made) == len(set(made))
    assert world.status["attempt"] == 1


async def test_a_run_that_is_being_deleted_gets_nothing_and_one_that_is_gone_ends(world: OneRun) -> None:
    world.create()
    await world.look(2)
    assert world.metrics.text().count(b'name="first"')
    world.live(TRAINING_RUNS, "first")["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    world.prepared()
    before = world.kube.writes()
    assert await world.look(3) == module.RESYNC_S
    assert world.kube.writes() == before
    del world.kube.objects["trainingruns", "team", "first"]
    assert await world.look() is None
    assert b'name="first"' not in world.metrics.text()


async def test_a_quiet_run_costs_one_request_a_pass(world: OneRun) -> None:
    world.create()
    await world.to_pods()
    world.pods(conditions=[{"type": "Ready", "status": "True"}])
    await world.look(4)
    before = len(world.kube.calls)
    await world.look(10)
    assert world.kube.calls[before:] == [("get", "trainingruns", "first")] * 10


async def test_what_is_left_of_a_run_of_this_name_is_waited_for(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    owner = {"kind": "TrainingRun", "name": "first", "uid": "the-run-before", "controller": True}
    meta = {"name": "first-prepare", "namespace": "team", "ownerReferences": [owner]}
    world.kube.put(JOBS, {"metadata": meta})
    world.create()
    await world.look(3)
    assert world.condition("Stalled").startswith("False")
    told = "Job first-prepare of an older owner is still being removed"
    assert world.condition("Reconciling").endswith(told)
    assert await world.look() == module.MISSING_S  # not in a circle
    del world.kube.objects["jobs", "team", "first-prepare"]
    await world.look()
    assert world.live(JOBS, "first-prepare")["metadata"]["ownerReferences"] != [owner]
    await world.look(3)
    assert not world.condition("Reconciling").endswith(told)


async def test_of_an_attempt_only_what_is_not_seen_is_made(world: OneRun) -> None:
    world.create(trainer={"nodes": 2})
    refused = KubeError("exceeded quota: pods", status=403)
    world.kube.refuses["create", "pods"] = refused
    with pytest.raises(AssertionError):
        await world.to_pods()
    assert world.status["attempt"] == 1
    before = len(world.kube.calls)
    await world.look(3)
    made = {call for call in world.kube.calls[before:] if call[0] == "create"}
    assert made <= {("create", "pods", "first-trainer-1-0")}


async def test_what_pods_find_each_other_by_is_made_again(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    await world.to_pods()
    world.pods()
    await world.look(3)
    monkeypatch.setattr(works_module, "OTHERS_S", 0.0)
    del world.kube.objects["services", "team", "first-trainer"]
    before = len(world.kube.writes())
    world.looks._memories.clear()  # nothing is known of it: all is asked for
    await world.look(3)
    assert world.kube.names(SERVICES) == {"first-trainer"}
    made = [call for call in world.kube.writes()[before:] if call[0] == "create"]
    assert ("create", "services", "first-trainer") in made
    assert not [call for call in made if call[1] in ("pods", "configmaps")]


async def test_pods_of_an_attempt_that_ended_get_a_short_grace(world: OneRun) -> None:
    world.create()
    await world.to_pods()
    world.pods(**ended(Report(attempt=1, phase="Ended", exit_code=1)))
    await world.until("Restarting")
    await world.look(2)
    assert world.kube.propagations["pods", "first-trainer-1-0"] == "Background"
    assert world.kube.graces["pods", "first-trainer-1-0"] == 30
