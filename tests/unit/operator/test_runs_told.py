"""What passes over one TrainingRun tell in its status, and when they write it."""

from collections.abc import AsyncIterator

import pytest

from agentfly.errors import AgentflyError
from agentfly.kube import (
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RESOURCE_POOLS,
    SECRETS,
    TRAINING_RUNS,
    KubeError,
    Resource,
)
from agentfly.roles.launch import Report
from agentfly_operator.cluster import absent as absent_module
from agentfly_operator.cluster import passes as module
from agentfly_operator.cluster import works as works_module
from tests.unit.operator.pass_world import Obj, OneRun, ended


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OneRun]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    made = OneRun()
    yield made
    await made.heads.close()


async def test_what_is_missing_is_named_and_waited_for(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_module, "MISSING_S", 0.0)
    claim = world.kube.objects.pop(("persistentvolumeclaims", "team", "runs"))
    world.create(pools=["shell"])
    after = await world.look(3)
    assert world.status["phase"] == "Pending"
    told = world.condition("Stalled")
    assert told.startswith("True MissingObject")
    assert "PersistentVolumeClaim runs" in told
    assert "ResourcePool shell" in told
    assert after is not None
    assert after <= 5.0
    assert world.kube.names(JOBS) == set()
    world.kube.put(PERSISTENT_VOLUME_CLAIMS, claim)
    world.kube.put(RESOURCE_POOLS, {"metadata": {"name": "shell", "namespace": "team"}})
    await world.look(3)
    assert world.condition("Stalled").startswith("False")
    assert world.kube.names(JOBS) == {"first-prepare"}


async def test_a_secret_that_is_missing_is_named_and_waited_for(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_module, "MISSING_S", 0.0)
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    world.create(trainer={"pod": {"env": env}})
    await world.look(3)
    assert world.condition("Stalled").startswith("True MissingObject: not there: Secret hub")
    world.kube.put(SECRETS, {"metadata": {"name": "hub", "namespace": "team"}})
    await world.look(3)
    assert world.condition("Stalled").startswith("False")


async def test_a_name_that_another_has_is_told_and_nothing_is_overwritten(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    theirs = world.kube.put(JOBS, {"metadata": {"name": "first-prepare", "namespace": "team"}})
    world.create()
    await world.look(4)
    assert "Job first-prepare exists and belongs to somebody else" in world.condition("Stalled")
    assert world.live(JOBS, "first-prepare") == theirs
    del world.kube.objects["jobs", "team", "first-prepare"]
    await world.look(4)
    assert world.condition("Stalled").startswith("False")
    assert world.kube.names(JOBS) == {"first-prepare"}


async def test_what_the_api_server_refuses_is_told_until_it_would_be_accepted(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 0.0)
    world.kube.refuses["create", "jobs"] = KubeError("exceeded quota: jobs", status=403)
    world.create()
    await world.look(4)
    assert "exceeded quota: jobs" in world.condition("Stalled")
    writes = world.kube.writes().count(("apply", "trainingruns", "first"))
    await world.look(4)
    assert world.kube.writes().count(("apply", "trainingruns", "first")) == writes
    world.kube.refuses.clear()
    await world.look(4)
    assert world.condition("Stalled").startswith("False")
    assert world.kube.names(JOBS) == {"first-prepare"}


async def test_a_status_is_written_over_what_was_read_and_over_nothing_else(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    get = world.kube.get

    async def stale(resource: Resource, name: str, namespace: str = "") -> Obj:
        found = await get(resource, name, namespace)
        if resource is TRAINING_RUNS:
            world.live(TRAINING_RUNS, "first")["metadata"]["resourceVersion"] = "changed"
        return found

    monkeypatch.setattr(world.kube, "get", stale)
    assert await world.look() == module.AGAIN_S
    assert world.status == {}
    monkeypatch.setattr(world.kube, "get", get)
    await world.look()
    assert world.status["phase"] in ("Pending", "Starting")


async def test_a_status_has_no_map_that_is_empty(world: OneRun) -> None:
    # The API server makes null of a map that an apply empties, and refuses it then.
    world.create()
    await world.look(2)
    assert "pools" not in world.status
    assert "roles" in world.status
    world.live(TRAINING_RUNS, "first")["spec"]["suspend"] = True
    await world.look(3)
    assert "roles" not in world.status
    writes = len(world.kube.writes())
    await world.look(3)
    assert len(world.kube.writes()) == writes


async def test_progress_alone_is_written_seldom_and_the_rest_at_once(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    await world.to_pods()
    world.pods(podIP="127.0.0.1", conditions=[{"type": "Ready", "status": "True"}])
    said = Report(attempt=1, phase="Running", step_time=1.0)
    monkeypatch.setattr(world.heads, "report", lambda *_: said)
    await world.until("Running")

    def writes() -> int:
        return world.kube.writes().count(("apply", "trainingruns", "first"))

    await world.look(3)
    before = writes()
    for step in range(5):
        progress = {"step": step, "totalSteps": 100}
        said = Report.model_validate(
            {"attempt": 1, "phase": "Running", "step_time": 2.0 + step, "progress": progress}
        )
        await world.look()
    assert writes() == before
    monkeypatch.setattr(works_module, "PROGRESS_S", 0.0)
    await world.look()
    assert writes() == before + 1
    assert world.status["progress"]["step"] == 4
    monkeypatch.setattr(works_module, "PROGRESS_S", 30.0)
    world.live(TRAINING_RUNS, "first")["spec"]["suspend"] = True
    await world.look(2)
    assert world.status["phase"] == "Suspending"
    await world.look(3)
    asked = [call for call in world.kube.calls if call[0] == "patch"]
    assert asked == [("patch", "pods", "first-trainer-1-0")]


async def test_a_status_is_written_at_most_once_a_second(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "STATUS_S", 30.0)
    world.create()
    await world.look()
    first = dict(world.status)
    world.live(TRAINING_RUNS, "first")["spec"]["suspend"] = True
    after = await world.look()
    assert world.status == first
    assert after is not None
    assert 0 < after <= 30.0


async def test_a_spec_that_is_not_understood_is_told(world: OneRun) -> None:
    world.create(steps=0)
    await world.look(2)
    assert world.condition("Stalled").startswith("True InvalidSpec: spec.steps: ")
    assert world.kube.names(JOBS) == set()
    writes = len(world.kube.writes())
    await world.look(3)
    assert len(world.kube.writes()) == writes


async def test_a_status_with_fields_of_a_newer_release_is_read_and_the_run_stays_finished(
    world: OneRun,
) -> None:
    world.create()
    await world.to_pods()
    world.pods(**ended(Report(attempt=1, phase="Ended", exit_code=0)))
    await world.until("Succeeded")
    await world.look(3)
    world.status["lastFailure"] = {"attempt": 1, "reason": "PodLost", "message": "x", "newer": 1}
    world.status["lastFailure"]["time"] = world.status["completionTime"]
    world.status["newer"] = {"x": 1}
    world.status["conditions"][0]["newer"] = True
    await world.look(3)
    assert (world.status["phase"], world.status["attempt"]) == ("Succeeded", 1)
    assert world.status["lastFailure"]["reason"] == "PodLost"
    assert world.kube.names(PODS) == set()


async def test_a_status_that_cannot_be_read_is_never_written_over(world: OneRun) -> None:
    world.create()
    await world.to_pods()
    world.status["phase"] = "Dreaming"
    live, writes = dict(world.status), world.kube.writes()
    for steps in (10, 0):  # whether the spec can be read or not
        world.live(TRAINING_RUNS, "first")["spec"]["steps"] = steps
        with pytest.raises(AgentflyError, match=r"TrainingRun team/first: status\.phase: "):
            await world.look()
    assert (world.status, world.kube.writes()) == (live, writes)


async def test_a_spec_that_is_not_understood_leaves_what_the_status_remembers(world: OneRun) -> None:
    world.create()
    await world.to_pods()
    before = dict(world.status)
    world.live(TRAINING_RUNS, "first")["spec"]["steps"] = 0
    world.status["newer"] = 1
    await world.look(2)
    assert world.condition("Stalled").startswith("True InvalidSpec: spec.steps: ")
    assert {**world.status, "conditions": 0} == {**before, "conditions": 0}
    told = [each for (plural, *_), each in world.kube.objects.items() if plural == "events"]
    assert [each["reason"] for each in told].count("InvalidSpec") == 1


async def test_what_was_refused_for_an_older_spec_is_forgotten(
    world: OneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works_module, "MISSING_S", 600.0)
    world.kube.refuses["create", "jobs"] = KubeError("exceeded quota: jobs", status=403)
    world.create()
    await world.look(4)
    assert "exceeded quota: jobs" in world.condition("Stalled")
    world.kube.refuses.clear()
    await world.look(2)
    assert world.kube.names(JOBS) == set()  # not tried again yet
    live = world.live(TRAINING_RUNS, "first")
    live["metadata"]["generation"] = 2
    await world.look(2)
    assert world.condition("Stalled").startswith("False")
    assert world.kube.names(JOBS) == {"first-prepare"}
