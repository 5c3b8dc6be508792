"""A training run in a queue of Kueue; the numbers are the guarantees of `plan.queue` and of its steps."""

from dataclasses import replace
from typing import Any

import pytest

from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason
from agentfly_operator.plan.queue_seen import WorkloadOf
from agentfly_operator.plan.queue_steps import (
    FinishWorkload,
    GiveBack,
    MakeWorkload,
    SwitchWorkload,
    TellReady,
)
from agentfly_operator.plan.run_steps import AskSuspend, MakePolicy, MakePrepare, Remove
from tests.unit.operator.run_world import World


def queued(**more: Any) -> World:
    """A run whose Workload waits."""
    world = World(queue="team-a", **more)
    world.settle()
    return world


def training(**more: Any) -> World:
    """One that was admitted and makes steps."""
    world = queued(**more)
    world.admits()
    world.trains(3, 2)
    assert world.phase == "Running"
    return world


def stops(world: World) -> None:
    """Its head writes a checkpoint and ends, as it was asked to."""
    assert world.pod().asked
    world.exits(85, report=world.report(4, 4, phase="Ended", exit_code=85, suspended=True))


def told_kueue(world: World) -> list[Any]:
    """The steps that Kueue hears of."""
    kinds = (MakeWorkload, SwitchWorkload, TellReady, GiveBack, FinishWorkload)
    return [step for step in world.plan().steps if isinstance(step, kinds)]


# 1. a queue is never got round -----------------------------------------------------------------------


def test_a_run_in_a_queue_has_nothing_before_it_is_admitted() -> None:
    world = World(queue="team-a")
    assert [*world.turn().steps] == [MakeWorkload()]
    world.settle()
    assert (world.phase, world.prepare.exists, world.pool.exists, world.pods) == ("Queued", False, False, {})
    world.changes(pending="couldn't assign flavors: 8 more needed")
    world.settle()
    status, reason, text = world.condition(Type.Admitted)
    assert (status, reason, text) == ("False", "Queued", "couldn't assign flavors: 8 more needed")
    assert world.condition(Type.Reconciling)[0] == world.condition(Type.Stalled)[0] == "False"
    assert world.told == [EventReason.Queued]
    world.admits()
    assert (world.phase, world.prepare.exists) == ("Starting", True)
    assert world.condition(Type.Admitted)[:2] == ("True", "Admitted")
    assert world.told[:2] == [EventReason.Queued, EventReason.Admitted]


def test_without_kueue_a_run_waits_and_goes_on_when_it_is_there() -> None:
    world = World(queue="team-a")
    world.kueue = replace(world.kueue, served=False, absent="it is not installed")
    world.settle()
    status, reason, text = world.condition(Type.Stalled)
    assert (status, reason) == ("True", "KueueMissing")
    assert "asks for the queue team-a, and Kueue is not there: it is not installed" in text
    assert world.told == [EventReason.KueueMissing]
    assert world.plan().steps == ()
    assert world.plan().wake_at is not None
    world.kueue = replace(world.kueue, served=True, absent="")
    world.settle()
    assert (world.phase, world.kueue.workload is None) == ("Queued", False)
    assert world.condition(Type.Stalled)[0] == "False"


@pytest.mark.parametrize("missing", ["LocalQueue team-a", "WorkloadPriorityClass high"])
def test_what_its_labels_name_and_is_not_there_is_named(missing: str) -> None:
    world = World(queue="team-a")
    world.kueue = replace(world.kueue, missing=(missing,))
    world.settle()
    assert world.condition(Type.Stalled) == ("True", "MissingObject", f"not there: {missing}")
    assert world.kueue.workload is None
    world.kueue = replace(world.kueue, missing=())
    world.settle()
    assert (world.phase, world.kueue.workload is None) == ("Queued", False)


def test_a_run_that_cannot_tell_where_its_quota_is_does_not_start() -> None:
    world = queued()
    world.kueue = replace(world.kueue, refused="ResourceFlavor a cannot be read: 403")
    world.admits()
    assert world.condition(Type.Stalled) == ("True", "StartFailed", "ResourceFlavor a cannot be read: 403")
    assert not world.prepare.exists
    world.kueue = replace(world.kueue, refused="")
    world.settle()
    assert world.prepare.exists


def test_a_run_that_is_in_no_queue_does_not_ask_for_kueue() -> None:
    world = World()
    world.prepared()
    assert world.run.status.attempt == 1
    assert not [each for each in world.run.status.conditions if each.type == Type.Admitted]


def test_children_that_kueue_holds_are_named_with_the_cure() -> None:
    world = queued()
    world.admits()
    world.kueue = replace(world.kueue, taken=("Job first-prepare",))
    world.settle()
    status, reason, text = world.condition(Type.Stalled)
    assert (status, reason) == ("True", "QuotaModeConflict")
    assert "Job first-prepare" in text
    assert "externalFrameworks: [TrainingRun.v1alpha1.agentfly.dev]" in text
    world.kueue = replace(world.kueue, taken=())
    world.prepared()
    assert world.run.status.attempt == 1
    world.kueue = replace(world.kueue, taken=("Pod first-trainer-1-0",))
    world.settle()
    assert world.condition(Type.Stalled)[1] == "QuotaModeConflict"
    world.kueue = replace(world.kueue, taken=())
    world.starts()
    world.steps(1)
    assert (world.phase, world.condition(Type.Stalled)[0]) == ("Running", "False")


# 2. stopped by its queue as by a person --------------------------------------------------------------


def test_an_evicted_run_writes_a_checkpoint_gives_all_back_and_then_its_quota_and_goes_on() -> None:
    world = training()
    world.evicts()
    assert world.phase == "Suspending"
    text = "Kueue evicts it (Preempted): Preempted for a better one: after this step, with a checkpoint"
    assert world.condition(Type.Reconciling) == ("True", "Suspending", text)
    assert world.condition(Type.Admitted)[:2] == ("False", "Evicted")
    assert told_kueue(world) == []
    stops(world)
    assert world.of_kueue.reserved  # its pods are still there
    world.wait(5)
    assert world.of_kueue.reserved
    world.vanish()  # pods, and then the servers
    assert (world.phase, world.pool.exists) == ("Queued", False)
    assert not world.of_kueue.reserved
    assert world.condition(Type.Admitted) == ("False", "Queued", "Preempted for a better one")
    status = world.run.status
    assert (status.attempt, status.restarts, status.failures, status.last_failure) == (1, 0, 0, None)
    world.wait(3600)
    assert (world.phase, world.run.status.attempt, world.pods) == ("Queued", 1, {})
    world.admits()
    world.wait(1)
    assert (world.phase, world.run.status.attempt) == ("Starting", 2)
    assert world.run.status.resumed_step == 4
    assert EventReason.Evicted in world.told
    assert EventReason.AttemptFailed not in world.told


def test_a_run_that_has_made_no_step_is_stopped_at_once() -> None:
    world = queued()
    world.admits()
    world.prepared()
    world.starts()
    world.evicts()
    assert all(pod.deleting for pod in world.pods.values())
    world.wait(5)
    world.vanish()
    assert (world.phase, world.of_kueue.reserved) == ("Queued", False)
    assert world.run.status.restarts == 0


def test_a_preparation_is_stopped_and_done_again() -> None:
    world = queued()
    world.admits()
    first = world.prepare.uid
    world.kueue = replace(world.kueue, preparing=1)
    world.evicts()
    assert not world.prepare.exists
    assert world.of_kueue.reserved  # its pod is still there
    world.kueue = replace(world.kueue, preparing=0)
    world.settle()
    assert not world.of_kueue.reserved
    world.admits()
    assert world.prepare.exists
    assert world.prepare.uid != first


@pytest.mark.parametrize(
    "gone", [None, WorkloadOf("first", "new"), WorkloadOf("first", "x", deleting=True, reserved=True)]
)
def test_a_run_whose_workload_somebody_removed_stops(gone: WorkloadOf | None) -> None:
    world = training()
    world.workload(gone)
    world.settle()
    assert world.phase == "Suspending"
    stops(world)
    world.vanish()
    assert not world.pods
    assert not world.pool.exists


def test_a_run_in_an_attempt_goes_on_when_kueue_goes() -> None:
    world = training()
    world.kueue = replace(world.kueue, served=False, absent="it is not installed", workload=None)
    world.settle()
    assert (world.phase, world.pod().asked) == ("Running", False)
    assert world.condition(Type.Admitted)[:2] == ("False", "KueueMissing")
    world.exits(1)
    world.vanish()
    world.wait(400)
    assert world.condition(Type.Stalled)[1] == "KueueMissing"
    assert (world.pods, world.pool.exists) == ({}, False)


def test_a_label_that_a_training_run_gets_later_puts_it_into_the_queue() -> None:
    world = World()
    world.trains(3, 2)
    world.labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    world.kueue = replace(world.kueue, served=True)
    world.set()
    assert world.phase == "Suspending"
    stops(world)
    world.vanish()
    assert (world.phase, world.pool.exists) == ("Queued", False)
    assert world.of_kueue


# 3. when quota is returned ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "returned"),
    [
        ({}, True),
        ({"servers": 1}, False),
        ({"preparing": 1}, False),
    ],
)
def test_quota_is_returned_when_nothing_is_left_that_needs_it(left: dict[str, int], returned: bool) -> None:
    world = training()
    world.evicts()
    stops(world)
    world.vanish()
    world.kueue = replace(world.kueue, **left)
    assert told_kueue(world) == []  # what was made last may not be seen yet
    wake = world.plan().wake_at
    assert wake is not None
    assert (wake - world.now).total_seconds() == 5
    world.now = wake
    assert told_kueue(world) == ([GiveBack("first", world.of_kueue.uid)] if returned else [])


def test_a_finished_run_says_so_when_its_pods_are_gone() -> None:
    for code, succeeded in ((0, True), (87, False)):
        world = training()
        world.exits(code)
        assert told_kueue(world) == []
        world.pods = {}
        world.settle()
        assert (world.pool.deleting, world.of_kueue.finished) == (True, False)
        world.pool = replace(world.pool, exists=False)
        assert told_kueue(world) == []  # the servers' pods are still there
        world.kueue = replace(world.kueue, servers=0)
        assert told_kueue(world) == [FinishWorkload("first", world.of_kueue.uid, succeeded)]
        world.settle()
        assert told_kueue(world) == []
        assert not [each for each in world.run.status.conditions if each.type == Type.Admitted]


# 4. who switches it on and off -----------------------------------------------------------------------


def test_a_suspended_run_gives_its_quota_back_and_is_queued_again_when_it_goes_on() -> None:
    world = training()
    world.set(suspend=True)
    assert (world.of_kueue.active, world.of_kueue.paused) == (False, True)
    world.reacts()
    stops(world)
    world.vanish()
    assert world.of_kueue.reserved
    assert world.phase == "Suspended"
    world.wait(5)
    assert not world.of_kueue.reserved
    assert world.condition(Type.Admitted)[:2] == ("False", "SuspendedByUser")
    world.set(suspend=False)
    assert (world.of_kueue.active, world.of_kueue.paused, world.phase) == (True, False, "Queued")
    world.admits()
    assert (world.phase, world.run.status.attempt) == ("Starting", 2)


def test_a_run_that_goes_on_while_it_stops_is_queued_when_its_quota_was_returned() -> None:
    world = training()
    world.set(suspend=True)
    world.reacts()
    world.set(suspend=False)
    assert not world.of_kueue.active
    stops(world)
    world.vanish()
    assert (world.of_kueue.active, world.of_kueue.reserved) == (False, True)
    world.wait(5)
    assert (world.of_kueue.active, world.of_kueue.reserved, world.phase) == (True, False, "Queued")


def test_a_run_that_is_suspended_from_the_start_is_not_queued() -> None:
    world = World(queue="team-a", spec={"suspend": True})
    world.settle()
    assert (world.phase, world.kueue.workload) == ("Suspended", None)
    world.set(suspend=False)
    assert (world.phase, world.kueue.workload is None) == ("Queued", False)


def test_what_somebody_else_switched_off_waits_for_a_person() -> None:
    world = queued()
    world.changes(
        active=False, evicted="Deactivated", why="exceeding the maximum number of re-queuing retries"
    )
    world.settle()
    status, reason, text = world.condition(Type.Stalled)
    assert (status, reason) == ("True", "Deactivated")
    assert "exceeding the maximum number of re-queuing retries" in text
    assert "spec.active to true" in text
    assert not world.of_kueue.active
    world.set(suspend=True)
    world.set(suspend=False)
    assert (world.of_kueue.active, world.phase) == (True, "Queued")


# What is asked for -----------------------------------------------------------------------------------


def test_a_run_that_asks_for_something_else_is_queued_anew() -> None:
    world = queued()
    world.admits()
    world.prepared()
    world.vanish()
    assert world.run.status.attempt == 1
    world = queued()
    world.admits()
    world.prepare = replace(world.prepare, complete=True)
    world.turn()
    first = world.of_kueue.uid
    world.kueue = replace(world.kueue, outdated=True)
    for _ in range(3):
        world.turn()
    assert world.pool.deleting
    assert world.of_kueue.uid == first
    world.pool, world.kueue = replace(world.pool, exists=False), replace(world.kueue, servers=0)
    assert Remove("Workload", "first", first) in world.plan().steps
    for step in world.plan().steps:
        world.carry_out(step)
    world.kueue = replace(world.kueue, outdated=False)
    world.settle()
    assert world.of_kueue.uid != first


def test_kueue_hears_once_that_all_pods_run_and_that_they_do_not() -> None:
    world = queued(nodes=2)
    world.admits()
    world.prepared()
    world.change(0, ready=True, phase="Running")
    assert not world.of_kueue.pods_ready
    world.change(1, ready=True, phase="Running")
    assert not world.of_kueue.pods_ready  # the servers do not answer
    world.pool = replace(world.pool, use=world.pool.use.model_copy(update={"ready": 1}))
    assert told_kueue(world) == [TellReady("first", world.of_kueue.uid, True)]
    world.settle()
    assert world.of_kueue.pods_ready
    world.steps(1)
    assert told_kueue(world) == []
    world.exits(1)
    assert not world.of_kueue.pods_ready
    assert world.of_kueue.may_run


def test_a_run_that_restarts_keeps_its_quota_and_its_servers() -> None:
    world = training()
    uid = world.pool.uid
    world.exits(1)
    world.vanish()
    assert world.phase == "Restarting"
    world.wait(400)
    assert (world.run.status.attempt, world.pool.uid) == (2, uid)
    assert world.of_kueue.may_run


def test_a_run_that_leaves_its_queue_goes_on_without_a_workload() -> None:
    world = queued()
    world.labels = {}
    world.set()
    world.kueue = replace(world.kueue, outdated=True)
    world.turn()
    assert world.kueue.workload is None
    world.kueue = replace(world.kueue, outdated=False)
    steps = [*world.plan().steps]
    assert MakePrepare() in steps
    assert not [step for step in steps if isinstance(step, (MakeWorkload, MakePolicy, AskSuspend))]
