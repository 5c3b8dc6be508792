"""Passes over one RolloutJob against an API server in memory; decisions are tested elsewhere."""

import pytest

from agentfly.errors import AgentflyError
from agentfly.kube import (
    CONFIG_MAPS,
    JOBS,
    PODS,
    RESOURCE_POOLS,
    ROLLOUT_JOBS,
    KubeError,
    Resource,
)
from agentfly_operator.cluster import passes as module
from agentfly_operator.cluster import works as works_module
from tests.unit.operator.pass_world import DONE, Obj, OneJob


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> OneJob:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    return OneJob()


async def test_a_job_from_its_beginning_to_its_end(world: OneJob) -> None:
    world.create()
    await world.look(2)
    assert (world.status["phase"], world.kube.names(JOBS)) == ("Starting", {"first-prepare"})
    assert world.kube.names(RESOURCE_POOLS) == set()
    world.prepared()
    await world.look(3)
    assert (world.status["shards"]["total"], world.status["tasks"]["total"]) == (3, 10)
    assert world.kube.names(RESOURCE_POOLS) == {"first-policy"}
    assert world.kube.names(JOBS) == {"first-prepare"}
    # No pod runs before there is what says whom it may reach.
    calls = world.kube.writes()
    walls = calls.index(("create", "networkpolicies", "first-roles"))
    assert walls < calls.index(("create", "jobs", "first-prepare"))
    world.served()
    await world.look(3)
    assert world.kube.names(JOBS) == {"first-prepare", "first-workers"}
    spec = world.live(JOBS, "first-workers")["spec"]
    assert (spec["completions"], spec["parallelism"]) == (3, 2)
    assert "first-launch" in world.kube.names(CONFIG_MAPS)
    for index in range(3):
        world.finished(index, scored=4 if index < 2 else 2)
    world.live(JOBS, "first-workers")["status"] = {"completedIndexes": "0-2", **DONE}
    await world.look(4)
    assert world.status["phase"] == "Succeeded"
    assert (world.status["tasks"]["scored"], world.status["shards"]["counted"]) == (10, "0-2")
    assert b'agentfly_rolloutjob_rollouts{name="first",namespace="team",outcome="scored"} 10.0' in (
        world.metrics.text()
    )
    # Nothing of it is left but what it did not make; its pods go with their Jobs.
    assert {key for key in world.kube.objects if key[0] not in ("events", "pods")} == {
        ("rolloutjobs", "team", "first"),
        ("configmaps", "team", "quickstart"),
        ("persistentvolumeclaims", "team", "runs"),
    }
    assert await world.look() == module.QUIET_S
    before = len(world.kube.calls)
    await world.look()
    assert world.kube.calls[before:] == [("get", "rolloutjobs", "first")]


async def test_quiet_job_costs_one_request_a_pass_and_no_write(world: OneJob) -> None:
    world.create()
    await world.to_workers()
    await world.look(2)
    before = len(world.kube.calls)
    await world.look(5)
    assert set(world.kube.calls[before:]) == {("get", "rolloutjobs", "first")}


@pytest.mark.parametrize("passes", range(1, 10))
async def test_an_operator_that_remembers_nothing_goes_on_where_another_was(
    world: OneJob, passes: int
) -> None:
    world.create()
    done = 0
    for number in range(16):
        await world.look()
        if number == passes:
            world.begin()
        if "first-prepare" in world.kube.names(JOBS) and "prepare" not in world.kube.names(PODS):
            world.prepared()
        if world.kube.names(RESOURCE_POOLS):
            world.served()
        if "first-workers" in world.kube.names(JOBS) and done < 3:
            world.finished(done)
            done += 1
            told = {1: "0", 2: "0,1", 3: "0-2"}[done]
            world.live(JOBS, "first-workers")["status"] = {"completedIndexes": told}
    assert world.status["phase"] == "Succeeded"
    assert world.status["tasks"]["scored"] == 12
    made = [call for call in world.kube.calls if call[0] == "create" and call[1] != "events"]
    assert len(made) == len(set(made))


async def test_counts_that_could_not_be_written_are_added_once(
    world: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    await world.to_workers()
    world.finished(0)
    get = world.kube.get

    async def stale(resource: Resource, name: str, namespace: str = "") -> Obj:
        found = await get(resource, name, namespace)
        if resource is ROLLOUT_JOBS:
            world.live(ROLLOUT_JOBS, "first")["metadata"]["resourceVersion"] += "0"
        return found

    monkeypatch.setattr(world.kube, "get", stale)
    assert await world.look() == module.AGAIN_S
    assert world.status["tasks"]["scored"] == 0
    monkeypatch.setattr(world.kube, "get", get)
    await world.look(3)
    assert (world.status["tasks"]["scored"], world.status["reward"]["mean"]) == (4, "0.5")


async def test_number_of_workers_and_suspension_reach_the_job(world: OneJob) -> None:
    world.create()
    await world.to_workers()
    spec = world.live(ROLLOUT_JOBS, "first")["spec"]
    spec["workers"] = {"count": 5, "tasksPerShard": 2}
    await world.look(2)
    assert world.live(JOBS, "first-workers")["spec"]["parallelism"] == 5
    world.pod("first-workers", "live", 0, None)
    await world.look(2)
    assert world.status["workers"] == 1
    spec["suspend"] = True
    await world.look(3)
    assert world.live(JOBS, "first-workers")["spec"]["suspend"] is True
    assert world.kube.names(RESOURCE_POOLS) == {"first-policy"}
    del world.kube.objects["pods", "team", "live"]
    await world.look(3)
    assert (world.status["phase"], world.kube.names(RESOURCE_POOLS)) == ("Suspended", set())
    spec["suspend"] = False
    await world.look(2)
    world.served()
    await world.look(3)
    assert world.live(JOBS, "first-workers")["spec"]["suspend"] is False
    assert world.status["phase"] == "Running"


async def test_a_job_that_is_being_deleted_gets_nothing_and_one_that_is_gone_ends(world: OneJob) -> None:
    world.create()
    await world.look(2)
    world.live(ROLLOUT_JOBS, "first")["metadata"]["deletionTimestamp"] = "2026-11-30T12:00:00Z"
    world.prepared()
    before = world.kube.writes()
    assert await world.look(3) == module.RESYNC_S
    assert world.kube.writes() == before
    del world.kube.objects["rolloutjobs", "team", "first"]
    assert await world.look() is None


async def test_a_name_that_another_has_is_told_and_nothing_is_overwritten(
    world: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    theirs = world.kube.put(JOBS, {"metadata": {"name": "first-prepare", "namespace": "team"}})
    world.create()
    await world.look(4)
    stalled = next(each for each in world.status["conditions"] if each["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NameTaken")
    assert world.live(JOBS, "first-prepare") == theirs
    del world.kube.objects["jobs", "team", "first-prepare"]
    await world.look(4)
    assert world.kube.names(JOBS) == {"first-prepare"}
    assert world.status["phase"] == "Starting"


def stalled(world: OneJob) -> tuple[str, str, str]:
    found = next(each for each in world.status["conditions"] if each["type"] == "Stalled")
    return found["status"], found["reason"], found["message"]


async def test_a_quota_is_told_as_what_it_is(world: OneJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    world.kube.refuses["create", "jobs"] = KubeError("exceeded quota: jobs", status=403)
    world.create()
    await world.look(4)
    assert stalled(world)[:2] == ("True", "StartFailed")
    assert "exceeded quota: jobs" in stalled(world)[2]
    world.kube.refuses.clear()
    await world.look(4)
    assert (stalled(world)[0], world.kube.names(JOBS)) == ("False", {"first-prepare"})


async def test_a_spec_that_is_not_understood_is_told_in_status_and_event(world: OneJob) -> None:
    world.create(workers={"count": -1})
    await world.look(3)
    assert stalled(world)[:2] == ("True", "InvalidSpec")
    assert stalled(world)[2].startswith("spec.workers.count: ")
    assert (world.status["phase"], world.kube.names(JOBS)) == ("Pending", set())
    told = [each for (plural, *_), each in world.kube.objects.items() if plural == "events"]
    assert [(each["type"], each["reason"]) for each in told] == [("Warning", "InvalidSpec")]


async def test_a_status_that_cannot_be_read_is_never_written_over(world: OneJob) -> None:
    world.create()
    await world.to_workers()
    world.status["shards"]["newer"] = 1
    await world.look(2)
    assert world.status["phase"] == "Running"
    world.status["phase"] = "Dreaming"
    before = world.kube.writes()
    with pytest.raises(AgentflyError, match=r"RolloutJob team/first: status\.phase: "):
        await world.look()
    assert world.kube.writes() == before


async def test_what_is_left_of_a_job_of_this_name_is_waited_for(
    world: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    owner = {"kind": "RolloutJob", "name": "first", "uid": "the-job-before", "controller": True}
    meta = {"name": "first-prepare", "namespace": "team", "ownerReferences": [owner]}
    world.kube.put(JOBS, {"metadata": meta})
    world.create()
    await world.look(3)
    told = next(each for each in world.status["conditions"] if each["type"] == "Reconciling")
    assert (told["status"], told["message"]) == (
        "True",
        "Job first-prepare of an older owner is still being removed",
    )
    assert stalled(world)[0] == "False"
    assert await world.look() == module.MISSING_S  # not in a circle
    del world.kube.objects["jobs", "team", "first-prepare"]
    await world.look(2)
    assert world.live(JOBS, "first-prepare")["metadata"]["ownerReferences"] != [owner]


async def test_what_was_refused_for_an_older_spec_is_forgotten(
    world: OneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 600.0)
    world.kube.refuses["create", "jobs"] = KubeError("exceeded quota: jobs", status=403)
    world.create()
    await world.look(4)
    world.kube.refuses.clear()
    await world.look(2)
    assert (stalled(world)[0], world.kube.names(JOBS)) == ("True", set())
    world.live(ROLLOUT_JOBS, "first")["metadata"]["generation"] = 2
    await world.look(2)
    assert (stalled(world)[0], world.kube.names(JOBS)) == ("False", {"first-prepare"})
