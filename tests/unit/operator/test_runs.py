"""Passes over one TrainingRun against an API server in memory; decisions are tested elsewhere."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from agentfly.errors import AgentflyError
from agentfly.kube import (
    CONFIG_MAPS,
    JOBS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    RAY_CLUSTERS,
    RESOURCE_POOLS,
    SECRETS,
    SERVICES,
    TRAINING_RUNS,
    Kube,
    KubeError,
    Resource,
)
from agentfly.roles.launch import Report
from agentfly_operator.cluster import absent as absent_module
from agentfly_operator.cluster import passes as module
from agentfly_operator.cluster import works as works_module
from agentfly_operator.cluster.absent import Absent
from agentfly_operator.cluster.children import Children, _projection
from agentfly_operator.cluster.events import Events
from agentfly_operator.cluster.hand import Hand
from agentfly_operator.cluster.heads import Heads
from agentfly_operator.cluster.metrics import Metrics
from agentfly_operator.cluster.passes import Means
from agentfly_operator.cluster.runs import Runs
from tests.unit.operator.fake_kube import FakeKube
from tests.unit.operator.kueue import Kueue
from tests.unit.operator.make import CONFIG
from tests.unit.operator.make_work import META, SPEC

Obj = dict[str, Any]
KEY = ("team", "first")
FOLLOWED: dict[str, Resource] = {
    "Pod": PODS,
    "Job": JOBS,
    "ResourcePool": RESOURCE_POOLS,
    "RayCluster": RAY_CLUSTERS,
}


class World:
    """One run, its API server, and watches that show what the test wants."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.defined: set[Resource] = set()
        self.begin()
        self.kube.put(PERSISTENT_VOLUME_CLAIMS, {"metadata": {"name": "runs", "namespace": "team"}})
        self.kube.put(CONFIG_MAPS, {"metadata": {"name": "quickstart", "namespace": "team"}})

    def begin(self) -> None:
        """An operator that remembers nothing."""
        kube, self.metrics = cast(Kube, self.kube), Metrics()
        self.children = Children(kube, (), lambda _: None)
        self.heads = Heads(lambda _: None, self.metrics, port=1)
        hand = Hand(kube, self.children, self.metrics, lambda: True)
        absent, events = Absent(kube, self.children), Events(kube, "operator-0", self.metrics)
        self.kueue = Kueue(self.kube, hand, self.children, absent)
        means = Means(kube, hand, self.children, absent, self.kueue.queues, events, CONFIG)
        self.runs = Runs(means, self.metrics.runs, self.heads, self.defined.__contains__)
        self.shown: dict[str, tuple[str, Obj]] = {}

    def create(self, **spec: Any) -> None:
        meta = {**META, "generation": 1}
        whole = {"kind": "TrainingRun", "metadata": meta, "spec": {**SPEC, **spec}, "status": {}}
        self.kube.put(TRAINING_RUNS, whole)

    def show(self) -> None:
        """The watches catch up."""
        there: dict[str, tuple[str, Obj]] = {}
        for kind, resource in FOLLOWED.items():
            for (plural, _, _), obj in self.kube.objects.items():
                if plural == resource.plural:
                    there[obj["metadata"]["uid"]] = kind, _projection(kind)(obj)
        for uid, (_, obj) in self.shown.items():
            if uid not in there:
                self.children.heard("DELETED", obj)
        for _, obj in there.values():
            self.children.heard("MODIFIED", obj)
        self.shown = there

    async def look(self, times: int = 1, *, shown: bool = True) -> float | None:
        after = None
        for _ in range(times):
            if shown:
                self.show()
            after = await self.runs.run(KEY)
        return after

    async def until(self, phase: str, passes: int = 12) -> None:
        for _ in range(passes):
            if self.status.get("phase") == phase:
                return
            await self.look()
        assert self.status.get("phase") == phase

    def live(self, resource: Resource, name: str) -> Obj:
        return self.kube.objects[resource.plural, "team", name]

    @property
    def status(self) -> Obj:
        return cast(Obj, self.live(TRAINING_RUNS, "first")["status"])

    def condition(self, kind: str) -> str:
        found = [each for each in self.status["conditions"] if each["type"] == kind]
        return f"{found[0]['status']} {found[0]['reason']}: {found[0]['message']}"

    def prepared(self) -> None:
        done = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.live(JOBS, "first-prepare")["status"] = done

    def served(self) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "MinAvailable", "message": ""}
        pool = {"members": {"ready": 1}, "conditions": [ready]}
        self.live(RESOURCE_POOLS, "first-policy")["status"] = pool

    def pods(self, **status: Any) -> None:
        for name in self.kube.names(PODS):
            self.live(PODS, name)["status"] = {"phase": "Running", **status}

    async def to_pods(self) -> None:
        """As far as the first attempt's pods."""
        await self.look(3)
        self.prepared()
        await self.look(3)
        self.served()
        for _ in range(6):
            await self.look()
            if self.kube.names(PODS):
                return
        raise AssertionError(self.status)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    made = World()
    yield made
    await made.heads.close()


def ended(report: Report) -> Obj:
    terminated = {
        "exitCode": report.exit_code,
        "reason": "Completed",
        "message": report.termination_message(),
    }
    return {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": {"terminated": terminated}}],
    }


async def test_a_run_from_its_beginning_to_its_end(world: World) -> None:
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


async def test_what_was_made_is_neither_made_again_nor_lost_before_a_watch_shows_it(world: World) -> None:
    world.create(trainer={"nodes": 2})
    await world.to_pods()
    await world.look(5, shown=False)
    made = [call for call in world.kube.calls if call[:2] == ("create", "pods")]
    assert sorted(made) == [("create", "pods", f"first-trainer-1-{index}") for index in range(2)]
    assert world.status["phase"] == "Starting"
    assert "lastFailure" not in world.status


@pytest.mark.parametrize("passes", range(1, 12))
async def test_an_operator_that_remembers_nothing_goes_on_where_another_was(
    world: World, passes: int
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


async def test_a_run_that_is_being_deleted_gets_nothing_and_one_that_is_gone_ends(world: World) -> None:
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


async def test_what_is_missing_is_named_and_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    world: World, monkeypatch: pytest.MonkeyPatch
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
    world: World, monkeypatch: pytest.MonkeyPatch
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
    world: World, monkeypatch: pytest.MonkeyPatch
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
    world: World, monkeypatch: pytest.MonkeyPatch
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


async def test_a_status_has_no_map_that_is_empty(world: World) -> None:
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
    world: World, monkeypatch: pytest.MonkeyPatch
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
    world: World, monkeypatch: pytest.MonkeyPatch
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


async def test_a_spec_that_is_not_understood_is_told(world: World) -> None:
    world.create(steps=0)
    await world.look(2)
    assert world.condition("Stalled").startswith("True InvalidSpec: spec.steps: ")
    assert world.kube.names(JOBS) == set()
    writes = len(world.kube.writes())
    await world.look(3)
    assert len(world.kube.writes()) == writes


async def test_a_quiet_run_costs_one_request_a_pass(world: World) -> None:
    world.create()
    await world.to_pods()
    world.pods(conditions=[{"type": "Ready", "status": "True"}])
    await world.look(4)
    before = len(world.kube.calls)
    await world.look(10)
    assert world.kube.calls[before:] == [("get", "trainingruns", "first")] * 10


async def test_a_status_with_fields_of_a_newer_release_is_read_and_the_run_stays_finished(
    world: World,
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


async def test_a_status_that_cannot_be_read_is_never_written_over(world: World) -> None:
    world.create()
    await world.to_pods()
    world.status["phase"] = "Dreaming"
    live, writes = dict(world.status), world.kube.writes()
    for steps in (10, 0):  # whether the spec can be read or not
        world.live(TRAINING_RUNS, "first")["spec"]["steps"] = steps
        with pytest.raises(AgentflyError, match=r"TrainingRun team/first: status\.phase: "):
            await world.look()
    assert (world.status, world.kube.writes()) == (live, writes)


async def test_a_spec_that_is_not_understood_leaves_what_the_status_remembers(world: World) -> None:
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
    world: World, monkeypatch: pytest.MonkeyPatch
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


async def test_what_is_left_of_a_run_of_this_name_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
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


async def test_of_an_attempt_only_what_is_not_seen_is_made(world: World) -> None:
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
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create()
    await world.to_pods()
    world.pods()
    await world.look(3)
    monkeypatch.setattr(works_module, "OTHERS_S", 0.0)
    del world.kube.objects["services", "team", "first-trainer"]
    before = len(world.kube.writes())
    world.runs._memories.clear()  # nothing is known of it: all is asked for
    await world.look(3)
    assert world.kube.names(SERVICES) == {"first-trainer"}
    made = [call for call in world.kube.writes()[before:] if call[0] == "create"]
    assert ("create", "services", "first-trainer") in made
    assert not [call for call in made if call[1] in ("pods", "configmaps")]


async def test_pods_of_an_attempt_that_ended_get_a_short_grace(world: World) -> None:
    world.create()
    await world.to_pods()
    world.pods(**ended(Report(attempt=1, phase="Ended", exit_code=1)))
    await world.until("Restarting")
    await world.look(2)
    assert world.kube.propagations["pods", "first-trainer-1-0"] == "Background"
    assert world.kube.graces["pods", "first-trainer-1-0"] == 30


# KubeRay


class RayWorld(World):
    """With KubeRay's kinds, and somebody who makes pods of RayClusters."""

    def __init__(self) -> None:
        super().__init__()
        self.defined.add(RAY_CLUSTERS)

    def pod_of(self, name: str, uid: str, index: int | None = None, **status: Any) -> Obj:
        (cluster,) = (obj for key, obj in self.kube.objects.items() if key[0] == "rayclusters")
        group = "headGroupSpec" if index == 0 else "workerGroupSpecs"
        found = cluster["spec"][group]
        template = (found if index == 0 else found[0])["template"]
        meta = {**template["metadata"], "name": name, "namespace": "team", "uid": uid}
        owner = {"kind": "RayCluster", "name": cluster["metadata"]["name"], "uid": cluster["metadata"]["uid"]}
        meta["ownerReferences"] = [{**owner, "controller": True}]
        return self.kube.put(PODS, {"kind": "Pod", "metadata": meta, "status": status})


@pytest.fixture
async def rays(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RayWorld]:
    monkeypatch.setattr(works_module, "STATUS_S", 0.0)
    made = RayWorld()
    yield made
    await made.heads.close()


async def to_cluster(rays: RayWorld) -> None:
    with pytest.raises(AssertionError):
        await rays.to_pods()  # it makes none itself
    assert rays.kube.names(RAY_CLUSTERS) == {"first-trainer-1"}


RUNS: Obj = {"state": {"running": {"startedAt": "2026-11-30T12:00:00Z"}}, "name": "trainer"}


async def test_a_run_by_kuberay_from_its_beginning_to_its_end(rays: RayWorld) -> None:
    rays.create(trainer={"nodes": 2})
    await to_cluster(rays)
    assert rays.status["engine"]["kind"] == "KubeRay"
    assert rays.kube.names(PODS) == set()
    made = [call for call in rays.kube.writes() if call[1] == "rayclusters"]
    assert made == [("create", "rayclusters", "first-trainer-1")]
    rays.pod_of("head-a", "a", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    rays.pod_of("node-b", "b", phase="Running", containerStatuses=[RUNS])
    await rays.look(2)
    assert rays.status["engine"]["head"] == "a"
    assert rays.status["roles"]["trainer"]["desired"] == 2
    rays.live(PODS, "head-a")["status"] = ended(Report(attempt=1, phase="Ended", exit_code=0))
    rays.show()
    del rays.kube.objects["pods", "team", "head-a"]  # KubeRay
    rays.pod_of("head-c", "c", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    await rays.until("Succeeded")
    await rays.look(3)
    assert rays.kube.propagations["rayclusters", "first-trainer-1"] == "Foreground"
    assert rays.kube.names(RAY_CLUSTERS) == set()


async def test_the_head_that_ran_first_is_the_one_that_is_asked(
    rays: RayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[str] = []
    monkeypatch.setattr(rays.heads, "follow", lambda _, head: followed.append(head.name))
    rays.create(trainer={"nodes": 2})
    await to_cluster(rays)
    rays.pod_of("head-b", "b", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    rays.pod_of("node-b", "n", phase="Running", containerStatuses=[RUNS])
    await rays.look(3)
    assert set(followed) == {"head-b"}
    followed.clear()
    rays.pod_of("head-a", "a", 0, phase="Running", podIP="127.0.0.1", containerStatuses=[RUNS])
    await rays.look(2)
    del rays.kube.objects["pods", "team", "head-b"]
    await rays.look(2)
    assert set(followed) <= {"head-b"}
    assert rays.status["lastFailure"]["podName"] == "head-b"


async def test_a_cluster_that_kuberay_no_longer_knows_is_not_made(rays: RayWorld) -> None:
    rays.create(trainer={"nodes": 2, "engine": "KubeRay"})
    rays.kube.refuses["create", "rayclusters"] = KubeError("exceeded quota", status=403)
    with pytest.raises(AssertionError):
        await rays.to_pods()
    assert rays.status["attempt"] == 1
    rays.defined.clear()
    rays.kube.refuses.clear()
    rays.runs._memories.clear()
    await rays.look(4)
    assert rays.kube.names(RAY_CLUSTERS) == set()
    assert rays.condition("Stalled").startswith("True KubeRayMissing: ")
