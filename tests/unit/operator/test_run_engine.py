"""Runs whose pods KubeRay makes: who is chosen, what is said, which pods count, how attempts end."""

from dataclasses import replace
from datetime import timedelta

import pytest

from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason
from agentfly_operator.names import CLUSTER_NAME_MAX, cluster_name
from agentfly_operator.plan.queue_seen import QueueSeen
from agentfly_operator.plan.run_engine import FALLBACK
from agentfly_operator.plan.run_seen import PolicyOf
from agentfly_operator.plan.run_steps import AskSuspend, MakeAttempt, Remove
from tests.unit.operator.run_world import NAME, World

MISSING = (
    "spec.trainer.engine is KubeRay, and CRD rayclusters.ray.io is not there: install KubeRay 1.5 or newer, "
    "or set spec.trainer.engine to Native"
)
CLUSTER = "first-trainer-1"


def running(nodes: int = 2, step: int = 3, checkpoint: int | None = None, **policy: int) -> World:
    """A run of which KubeRay's pods have made a step."""
    world = World(nodes=nodes, engine="KubeRay", kuberay=True, policy=policy)
    world.trains(step, checkpoint)
    assert world.phase == "Running"
    return world


def engine(world: World) -> tuple[str, str]:
    found = world.run.status.engine
    assert found is not None
    return found.kind, found.message


def lost(world: World) -> tuple[str, str | None, str]:
    found = world.run.status.last_failure
    assert found is not None
    return found.reason, found.pod_name, found.message


# Which definitions there are, and what follows ------------------------------------------------------------

KUEUE, KUBERAY, LWS = "workloads.kueue.x-k8s.io", "rayclusters.ray.io", "leaderworkersets"
DEFINED = [
    {name for name, there in zip((KUEUE, KUBERAY, LWS), bits, strict=True) if there}
    for bits in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1))
]
BY_NAME = "spec.trainer.engine asks for it"
INSTALLED = "KubeRay is installed: rayclusters.ray.io is defined"
ALONE = "one pod needs no RayCluster"
# engine and nodes of the run -> what it gets without KubeRay, and with it: the engine, and why
ENGINES = {
    ("Auto", 1): (("Native", ALONE), ("Native", ALONE)),
    ("Auto", 2): (("Native", FALLBACK), ("KubeRay", INSTALLED)),
    ("Native", 1): (("Native", BY_NAME), ("Native", BY_NAME)),
    ("Native", 2): (("Native", BY_NAME), ("Native", BY_NAME)),
    ("KubeRay", 1): (None, ("KubeRay", BY_NAME)),
    ("KubeRay", 2): (None, ("KubeRay", BY_NAME)),
}


@pytest.mark.parametrize("defined", DEFINED, ids=lambda defined: "+".join(sorted(defined)) or "none")
@pytest.mark.parametrize(("asked", "nodes"), ENGINES)
def test_what_a_run_gets_where_some_kinds_are_defined(asked: str, nodes: int, defined: set[str]) -> None:
    world = World(nodes=nodes, engine=asked, kuberay=KUBERAY in defined)
    wanted = ENGINES[asked, nodes][world.kuberay]
    if wanted is None:
        world.settle()
        assert world.condition(Type.Stalled) == ("True", "KubeRayMissing", MISSING)
        assert world.condition(Type.Reconciling)[0] == "False"
        assert (world.phase, world.run.status.engine, world.prepare.exists) == ("Pending", None, False)
        assert world.told == [EventReason.KubeRayMissing]
        return
    world.prepared()
    assert engine(world) == wanted
    assert world.condition(Type.Stalled)[0] == "False"
    assert bool(world.clusters) == (wanted[0] == "KubeRay")
    assert len(world.pods) == nodes
    assert (EventReason.EngineFallback in world.told) == (wanted[1] == FALLBACK)
    world.starts()
    world.steps(1)
    assert (world.phase, engine(world)) == ("Running", wanted)


@pytest.mark.parametrize("defined", DEFINED, ids=lambda defined: "+".join(sorted(defined)) or "none")
@pytest.mark.parametrize(("asked", "nodes"), ENGINES)
def test_what_a_run_in_a_queue_gets_where_some_kinds_are_defined(
    asked: str, nodes: int, defined: set[str]
) -> None:
    world = World(nodes=nodes, engine=asked, kuberay=KUBERAY in defined, queue="team-a")
    world.kueue = QueueSeen(served=KUEUE in defined, absent="" if KUEUE in defined else "it is not served")
    wanted = ENGINES[asked, nodes][world.kuberay]
    world.settle()
    assert (world.prepare.exists, world.pool.exists, world.pods, world.clusters) == (False, False, {}, {})
    if wanted is None or KUEUE not in defined:
        reason = "KubeRayMissing" if wanted is None else "KueueMissing"
        assert world.condition(Type.Stalled)[:2] == ("True", reason)
        assert (world.phase, world.kueue.workload) == ("Pending", None)
        return
    assert (world.phase, world.run.status.engine) == ("Queued", None)
    assert world.condition(Type.Stalled)[0] == "False"
    world.admits()
    world.prepared()
    assert engine(world) == wanted
    assert bool(world.clusters) == (wanted[0] == "KubeRay")
    assert len(world.pods) == nodes
    world.starts()
    world.steps(1)
    assert (world.phase, engine(world)) == ("Running", wanted)
    assert world.of_kueue.may_run


def test_quota_is_returned_when_no_ray_cluster_is_left_either() -> None:
    world = World(nodes=2, engine="KubeRay", kuberay=True, queue="team-a")
    world.settle()
    world.admits()
    world.trains(3, 2)
    world.evicts()
    assert world.pod().asked
    world.exits(85, report=world.report(4, 4, phase="Ended", exit_code=85, suspended=True))
    for pod in [*world.pods.values()]:
        world.goes(pod)
    world.pool = PolicyOf()
    world.kueue = replace(world.kueue, servers=0)
    world.kuberay_works = False  # its cluster is still on its way out
    world.wait(60)
    assert (world.pods, len(world.clusters)) == ({}, 1)
    assert world.of_kueue.reserved
    world.kuberay_works = True
    world.vanish()
    assert world.clusters == {}
    assert not world.of_kueue.reserved
    world.admits()
    world.trains(5)
    assert (world.phase, world.run.status.attempt, world.run.status.failures) == ("Running", 2, 0)


# 1. What a run asks for by name


def test_a_run_that_waits_for_kuberay_goes_on_when_it_is_there() -> None:
    world = World(nodes=2, engine="KubeRay")
    world.settle()
    plan = world.plan()
    assert plan.steps == ()
    assert plan.wake_at == world.now + timedelta(seconds=5)
    world.kuberay = True
    world.prepared()
    assert (world.phase, engine(world)) == ("Starting", ("KubeRay", BY_NAME))
    assert world.condition(Type.Stalled)[0] == "False"


def test_a_later_attempt_says_how_to_do_without_kuberay() -> None:
    world = running()
    world.exits(1)
    world.vanish()
    world.kuberay = False
    world.wait(60)
    assert world.condition(Type.Stalled)[2] == f"{MISSING}, while the run is suspended"
    world.set(suspend=True)
    world.vanish()
    world.set(suspend=False, trainer={"nodes": 2, "engine": "Native"})
    world.wait(60)
    assert (world.run.status.attempt, engine(world)[0], len(world.pods)) == (2, "Native", 2)


# 3. Chosen for each attempt


def test_an_attempt_keeps_its_engine_and_the_next_one_is_chosen_anew() -> None:
    world = World(nodes=2)
    world.trains(1)
    world.kuberay = True
    world.steps(2)
    assert engine(world) == ("Native", FALLBACK)
    world.exits(1)
    world.vanish()
    world.wait(60)
    assert (world.run.status.attempt, engine(world)) == (2, ("KubeRay", INSTALLED))
    assert world.told.count(EventReason.EngineFallback) == 1


def test_the_engine_is_stored_before_anything_is_made_by_it() -> None:
    world = World(nodes=2, kuberay=True)
    world.settle()
    world.prepare = replace(world.prepare, complete=True)
    seen = []
    for _ in range(8):
        stored = world.run.status.engine
        plan = world.turn()
        seen += [(stored, step) for step in plan.steps if isinstance(step, MakeAttempt)]
    assert seen
    assert all(stored is not None and step.kuberay for stored, step in seen)


@pytest.mark.parametrize(("asked", "then"), [("Auto", "Native"), ("KubeRay", None)])
@pytest.mark.parametrize("works", [True, False])
def test_an_attempt_whose_engine_went_before_its_pods_were_there_is_none(
    asked: str, then: str | None, works: bool
) -> None:
    world = World(nodes=2, engine=asked, kuberay=True)
    world.prepared()
    assert engine(world)[0] == "KubeRay"
    world.kuberay_works = works
    world.clusters = {}
    for pod in [pod for pod in world.pods.values() if pod.index != 0 or not works]:
        world.goes(pod)
    status = world.run.status
    world.run = world.run.model_copy(update={"status": status.model_copy(update={"roles": {}})})
    world.kuberay = False
    assert not [step for step in world.plan().steps if isinstance(step, MakeAttempt)]
    world.settle()
    world.vanish()
    world.wait(60)
    if then is None:
        assert (world.phase, world.condition(Type.Stalled)[1]) == ("Pending", "KubeRayMissing")
    else:
        assert (world.phase, engine(world)) == ("Starting", ("Native", FALLBACK))
    assert (world.run.status.failures, world.run.status.last_failure) == (0, None)


def test_an_attempt_from_before_there_were_engines_has_plain_pods() -> None:
    world = World(nodes=2)
    world.trains(1)
    status = world.run.status.model_copy(update={"engine": None})
    world.run = world.run.model_copy(update={"status": status})
    world.settle()
    assert world.phase == "Running"
    world.exits(1, 1)
    world.wait(61)
    assert lost(world)[:2] == ("AttemptFailed", "first-trainer-1-1")


# 4. Why a RayCluster has no pods


def test_a_cluster_without_pods_says_why_and_the_deadline_names_it() -> None:
    world = World(nodes=2, engine="KubeRay", kuberay=True, policy={"startupDeadlineSeconds": 100})
    world.kuberay_works = False
    world.prepared()
    unseen = f"RayCluster {CLUSTER}: KubeRay has not seen it; does it run, and watch this namespace?"
    assert world.condition(Type.Reconciling)[2] == unseen
    failing = "RayCluster first-trainer-1: FailedCreateHeadPod: exceeded quota: gpus"
    trouble = failing.partition(": ")[2]
    world.clusters[CLUSTER] = replace(world.clusters[CLUSTER], taken=True, trouble=trouble)
    world.settle()
    assert world.condition(Type.Reconciling)[2] == failing
    world.wait(100)
    reason, pod, text = lost(world)
    assert (reason, pod) == ("StartupDeadlineExceeded", f"{CLUSTER}-head")
    assert text.endswith(failing)


def test_pods_that_wait_are_named() -> None:
    world = World(nodes=2, engine="KubeRay", kuberay=True)
    world.prepared()
    other = world.pod(1)
    world.change(phase="Running", ready=True)
    world.change(1, waiting="InsufficientGpu: 0/1 nodes")
    assert world.condition(Type.Reconciling)[2] == f"pod {other.name}: InsufficientGpu: 0/1 nodes"
    assert world.run.status.roles["trainer"].ready == 1


# Which pods count: members --------------------------------------------------------------------------------


def test_a_head_that_ended_well_ended_the_attempt_whoever_takes_its_place() -> None:
    world = running()
    head = world.pod()
    world.exits(0)
    assert world.phase == "Succeeded"
    assert head.name not in world.pods
    world.vanish()
    assert (world.pods, world.clusters, world.others) == ({}, {}, {})


@pytest.mark.parametrize("words", [{"reason": "OOMKilled"}, {"message": "ValueError: no"}])
def test_a_failed_head_has_its_last_words_though_kuberay_removed_it(words: dict[str, str]) -> None:
    world = running()
    head = world.pod()
    ended = replace(head, phase="Failed", ready=False, exit_code=137, finished=world.now, **words)
    world.pods[head.name] = ended
    world.kuberay_acts()  # before anybody looks
    assert world.pod().uid != head.uid
    world.settle()
    reason, pod, _ = lost(world)
    assert (reason, pod) == ("OutOfMemory" if "reason" in words else "Interrupted", head.name)
    assert world.phase == "Restarting"


def test_a_head_that_was_taken_away_is_lost_and_no_other_goes_on_for_it() -> None:
    world = running()
    head = world.pod()
    world.goes(head)
    world.kuberay_acts()
    world.change(phase="Running", ready=True, ip="10.0.0.9", started=world.now)
    reason, pod, text = lost(world)
    assert (reason, pod) == ("PodLost", head.name)
    assert text == f"pod {head.name} is gone: somebody deleted it, or its node is gone too"
    assert all(cluster.deleting for cluster in world.clusters.values())
    world.vanish()
    world.wait(60)
    assert world.run.status.attempt == 2
    assert world.pod().attempt == 2


@pytest.mark.parametrize(
    ("last", "phase"),
    [({"exit_code": 0}, "Succeeded"), ({"exit_code": 1, "reason": "PodLost"}, "Restarting")],
)
def test_an_operator_that_knows_nothing_waits_for_what_the_next_head_repeats(
    last: dict[str, object], phase: str
) -> None:
    world = running(step=100)
    world.goes(world.pod())
    world.forgets()
    world.kuberay_acts()
    world.settle()
    assert world.phase == "Running"
    assert world.plan().wake_at is not None
    world.change(phase="Running", ready=True, started=world.now)
    assert world.phase == "Running"
    world.exits(int(str(last["exit_code"])), report=world.report(100, phase="Ended", **last))
    assert world.phase == phase
    assert world.run.status.attempt == 1


def test_a_head_that_repeats_nothing_in_time_is_not_waited_for() -> None:
    world = running()
    world.goes(world.pod())
    world.forgets()
    world.kuberay_acts()
    world.wait(59)
    assert world.phase == "Running"
    assert world.plan().wake_at == world.now + timedelta(seconds=1)
    world.wait(1)
    assert (world.phase, lost(world)[:2]) == ("Restarting", ("PodLost", f"{CLUSTER}-head"))


def test_a_head_that_never_ran_may_be_replaced() -> None:
    world = World(nodes=2, engine="KubeRay", kuberay=True)
    world.prepared()
    world.goes(world.pod())
    world.kuberay_acts()
    world.settle()
    world.starts()
    world.steps(1)
    assert (world.phase, world.run.status.attempt) == ("Running", 1)


def test_another_pod_that_is_gone_ends_the_attempt_though_kuberay_replaced_it() -> None:
    world = running(nodes=4)
    other = world.pod(1)
    world.goes(other)
    world.kuberay_acts()
    assert len(world.pods) == 4
    world.settle()
    assert lost(world)[:2] == ("PodLost", other.name)


def test_another_pod_that_failed_is_named_after_its_grace() -> None:
    world = running(nodes=4)
    other = world.pod(2)
    world.exits(137, 2, reason="OOMKilled")
    assert other.name not in world.pods
    assert (world.phase, len(world.pods)) == ("Running", 4)
    assert AskSuspend not in [
        type(step) for step in world.plan().steps
    ]  # KubeRay removed it, and nobody asked
    world.wait(60)
    assert (world.phase, lost(world)[:2]) == ("Restarting", ("OutOfMemory", other.name))


def test_a_pod_that_failed_before_the_first_step_is_a_failure_and_no_wish() -> None:
    world = World(nodes=2, engine="KubeRay", kuberay=True)
    world.prepared()
    world.starts()
    other = world.pod(1)
    world.pods[other.name] = replace(
        other, phase="Failed", ready=False, exit_code=1, finished=world.now, deleting=True
    )
    world.settle()
    assert world.phase == "Starting"
    world.wait(60)
    assert (world.phase, lost(world)[1]) == ("Restarting", other.name)
    assert world.run.status.failures == 1


def test_a_pod_that_came_too_late_ends_the_attempt_that_it_cannot_join() -> None:
    world = running(nodes=2)
    world.goes(world.pod(1))
    world.forgets()
    world.kuberay_acts()
    world.heard = True
    late = world.pod(1)
    world.settle()
    assert world.phase == "Running"  # nobody saw it
    world.exits(1, 1, message="the attempt has begun without this pod")
    world.wait(60)
    assert lost(world)[1] == late.name


# Suspend, removal -----------------------------------------------------------------------------------------


def test_a_suspension_asks_the_head_and_then_the_cluster_goes_before_its_pods() -> None:
    world = running(checkpoint=2)
    head = world.pod()
    world.set(suspend=True)
    assert (world.phase, world.pod().asked) == ("Suspending", True)
    world.exits(85, report=world.report(3, 3, phase="Ended", exit_code=85, suspended=True))
    cluster = world.clusters[CLUSTER]
    assert cluster.deleting
    assert head.name not in world.pods
    assert world.phase == "Suspending"
    assert all(pod.deleting and pod.grace_s == 30 for pod in world.pods.values())
    assert world.pool.exists
    world.vanish()
    assert (world.phase, world.pods, world.clusters) == ("Suspended", {}, {})
    assert not world.pool.exists
    world.set(suspend=False)
    world.wait(60)
    assert (world.run.status.attempt, list(world.clusters)) == (2, ["first-trainer-2"])


def test_no_attempt_begins_while_a_cluster_is_left() -> None:
    world = running()
    world.exits(1)
    for pod in list(world.pods.values()):
        world.goes(pod)
    world.kuberay_works = False
    world.wait(400)
    assert (world.run.status.attempt, world.phase) == (1, "Restarting")
    text = f"RayCluster {CLUSTER} does not go away; does something hold it?"
    assert world.condition(Type.Reconciling)[2] == text
    world.kuberay_works = True
    world.wait(1)
    world.settle()
    assert world.run.status.attempt == 2


def test_pods_go_where_their_kind_of_cluster_is_gone() -> None:
    world = running()
    pods = list(world.pods.values())
    world.kuberay, world.clusters = False, {}
    world.exits(1)
    assert {step for step in world.plan().steps if isinstance(step, Remove) and step.kind == "Pod"} == set()
    assert all(pod.deleting for name, pod in world.pods.items())
    assert len(world.pods) == len(pods)


def test_a_kind_that_is_taken_away_fails_nothing_by_itself() -> None:
    world = running()
    world.kuberay, world.clusters = False, {}
    world.steps(4)
    assert world.phase == "Running"
    world.exits(0)
    assert world.phase == "Succeeded"


def test_a_drained_pod_of_a_cluster_makes_the_head_save() -> None:
    world = running()
    world.change(1, deleting=True, grace_s=930)
    assert world.pod().asked
    assert world.phase == "Running"


# Names


@pytest.mark.parametrize("run", ["a", NAME, "r" * 40, f"{'r' * 39}-"[:40].rstrip("-")])
@pytest.mark.parametrize("attempt", [1, 9999, 10000, 10**9])
def test_kuberay_takes_the_name_of_every_attempt(run: str, attempt: int) -> None:
    name = cluster_name(run, attempt)
    assert len(name) <= CLUSTER_NAME_MAX
    assert name.endswith(f"-trainer-{attempt}")
    assert name == cluster_name(run, attempt)
    assert name.startswith(run) or len(run) + len(f"-trainer-{attempt}") > CLUSTER_NAME_MAX


def test_names_that_are_cut_differ_as_those_of_their_runs_do() -> None:
    assert len({cluster_name(f"{'r' * 38}{end}", 10**9) for end in ("aa", "ab", "b")}) == 3
