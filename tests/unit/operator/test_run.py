"""A training run in a cluster: its phases, its attempts, and what is made for it."""

from dataclasses import replace
from datetime import timedelta

import pytest

from agentfly.api import TrainingRunStatus
from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason
from agentfly_operator.plan.invalid import invalid_status
from agentfly_operator.plan.run import plan_run
from agentfly_operator.plan.run_seen import PrepareOf, RunObserved
from agentfly_operator.plan.run_steps import (
    AskSuspend,
    MakeAttempt,
    MakePolicy,
    MakePrepare,
    Remove,
)
from tests.unit.operator.make import NOW
from tests.unit.operator.run_world import World, saved

# The way of a run that goes well -----------------------------------------------------------------------


def test_a_run_is_prepared_then_served_then_trained_and_then_all_of_it_goes() -> None:
    world = World()
    assert [*world.turn().steps] == [MakePrepare()]
    assert world.phase == "Starting"
    assert world.condition(Type.Reconciling)[:2] == ("True", "Preparing")
    assert world.run.status.roles["prepare"].ready == 0
    assert not world.plan().steps
    world.prepare = replace(world.prepare, complete=True)
    assert [*world.turn().steps] == [MakePolicy()]
    assert (world.phase, world.run.status.attempt) == ("Starting", 0)
    world.settle()
    assert world.run.status.attempt == 1
    assert set(world.pods) == {"first-trainer-1-0"}
    world.starts()
    world.steps(1)
    assert world.phase == "Running"
    assert world.run.status.start_time == NOW
    assert world.run.status.progress is not None
    world.wait(600)
    world.exits(0)
    assert world.phase == "Succeeded"
    assert world.run.status.active_seconds == 600
    assert world.run.status.completion_time == world.now
    world.vanish()
    assert world.pods == {}
    assert world.others == {}
    assert not world.pool.exists
    assert not world.prepare.exists
    assert world.told == [
        EventReason.Preparing,
        EventReason.AttemptStarted,
        EventReason.TrainingStarted,
        EventReason.Succeeded,
    ]


def test_the_roles_say_how_many_answer_and_why_not_all() -> None:
    world = World(nodes=2, spec={"inference": {"replicas": 2}})
    world.prepared()
    assert world.run.status.roles["trainer"].to_json() == {
        "desired": 2,
        "ready": 0,
        "reason": "pod first-trainer-1-0: Pending",
    }
    world.pool = replace(world.pool, reason="WarmingUp", message="0 of 2 members serve")
    world.change(1, waiting="InsufficientGpu: 0/3 nodes are available")
    world.change(0, ready=True, phase="Running")
    roles = world.run.status.roles
    assert (roles["trainer"].ready, roles["trainer"].reason) == (
        1,
        "pod first-trainer-1-1: InsufficientGpu: 0/3 nodes are available",
    )
    assert roles["inference"].reason == "WarmingUp: 0 of 2 members serve"
    assert world.condition(Type.RolesReady)[2] == roles["trainer"].reason


# Rule 1: a finished run stays finished -----------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 87])
def test_nothing_is_made_for_a_finished_run_whatever_is_asked(code: int) -> None:
    world = World()
    world.trains()
    world.exits(code)
    finished = world.run.status
    world.vanish()
    world.set(suspend=True)
    assert world.run.status.phase == finished.phase
    world.set(suspend=False)
    world.missing = ("Secret gone",)
    world.wait(3600)
    assert world.run.status.model_copy(update={"observed_generation": 1}) == finished.model_copy(
        update={
            "conditions": tuple(
                each.model_copy(update={"observed_generation": 3}) for each in finished.conditions
            )
        }
    )
    assert world.run.status.observed_generation == 3
    assert world.plan().steps == ()
    assert world.plan().wake_at is None


def test_a_run_that_is_being_deleted_gets_nothing() -> None:
    world = World()
    meta = world.run.metadata.model_copy(update={"deletion_timestamp": NOW})
    plan = plan_run(world.run.model_copy(update={"metadata": meta}), RunObserved(), NOW)
    assert (plan.status, plan.steps) == (None, ())


# Rule 2: an attempt is numbered before it is made ------------------------------------------------------


def test_pods_are_made_only_for_an_attempt_that_is_stored() -> None:
    world = World()
    world.settle()
    world.prepare = replace(world.prepare, complete=True)
    world.turn()
    plan = world.plan()
    assert plan.status is not None
    assert plan.status.attempt == 1
    assert MakeAttempt(1) not in plan.steps
    assert plan.wake_at == NOW + timedelta(seconds=1)
    world.write(plan)
    assert world.plan().steps == (MakeAttempt(1),)


def test_pods_that_were_never_made_are_made_and_one_that_was_is_lost() -> None:
    world = World(nodes=2)
    world.prepared()
    assert "trainer" in world.run.status.roles
    partly = World(nodes=2)
    partly.settle()
    partly.prepare = replace(partly.prepare, complete=True)
    partly.turn()
    partly.write(partly.plan())
    partly.carry_out(MakeAttempt(1))
    del partly.pods["first-trainer-1-1"]
    assert partly.plan().steps == (MakeAttempt(1),)
    del world.pods["first-trainer-1-1"]
    world.settle()
    failure = world.run.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.pod_name) == ("PodLost", "first-trainer-1-1")


def test_the_next_attempt_waits_until_all_pods_of_the_last_are_gone() -> None:
    world = World(nodes=2)
    world.trains()
    world.exits(1)
    assert world.phase == "Restarting"
    world.wait(100)
    assert world.run.status.attempt == 1
    assert all(pod.deleting for pod in world.pods.values())
    world.vanish()
    assert world.run.status.attempt == 2
    assert {pod.attempt for pod in world.pods.values()} == {2}
    assert ("ConfigMap", "first-launch-1") not in world.others


def test_pods_that_were_just_made_and_are_not_seen_yet_are_not_met_by_those_of_another_attempt() -> None:
    world = World()
    world.settle()
    world.prepare = replace(world.prepare, complete=True)
    world.turn()
    world.write(world.plan())
    assert world.plan().steps == (MakeAttempt(1),)
    world.set(suspend=True)
    world.pods = {}  # they exist, and nobody sees them
    world.vanish()
    assert world.phase == "Suspended"
    world.set(suspend=False)
    world.wait(4)
    assert (world.phase, world.run.status.attempt) == ("Restarting", 1)
    world.wait(1)
    assert world.run.status.attempt == 2


def test_one_plan_goes_as_far_as_nothing_has_to_happen() -> None:
    world = World()
    world.prepared()
    world.pods = {}
    world.run = world.run.model_copy(update={"spec": world.run.spec.model_copy(update={"suspend": True})})
    plan = world.plan()
    assert plan.status is not None
    assert plan.status.phase == "Suspended"
    assert [event.reason for event in plan.events] == [EventReason.AttemptFailed, EventReason.Suspended]
    assert plan.status.last_failure is not None
    assert plan.status.last_failure.reason == "PodLost"
    world.write(plan)
    assert world.plan().status == plan.status


# Rules 3 and 4: suspension -----------------------------------------------------------------------------


def test_a_run_that_is_made_suspended_starts_nothing() -> None:
    world = World(spec={"suspend": True})
    assert world.turn().steps == ()
    assert world.phase == "Suspended"
    assert world.condition(Type.Suspended)[2] == "on request, without a checkpoint: it had no step to save"
    world.set(suspend=False)
    assert world.prepare.exists
    assert world.told == [EventReason.Suspended, EventReason.Resumed, EventReason.Preparing]


def test_a_run_is_suspended_while_it_prepares_and_prepares_again_when_it_goes_on() -> None:
    world = World()
    world.settle()
    world.set(suspend=True)
    assert (world.phase, world.prepare.exists) == ("Suspended", False)
    world.wait(60)
    assert (world.phase, world.pool.exists) == ("Suspended", False)
    world.set(suspend=False)
    assert (world.phase, world.prepare.exists) == ("Starting", True)
    world.prepared()
    world.set(suspend=True)
    world.vanish()
    assert (world.phase, world.prepare.exists) == ("Suspended", True)  # what is complete stays


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    world = World()
    world.prepared()
    world.starts()
    world.set(suspend=True)
    assert (world.phase, world.pod().deleting, world.pod().asked) == ("Suspending", True, False)
    world.vanish()
    status = world.run.status
    assert (world.phase, status.failures, status.last_failure, status.restarts) == ("Suspended", 0, None, 0)
    assert not world.pool.exists
    world.set(suspend=False)
    world.wait(5)
    assert world.run.status.attempt == 2


def test_a_running_head_is_asked_saves_and_ends() -> None:
    world = World(nodes=2)
    world.trains(7)
    world.set(suspend=True)
    head = world.pod()
    assert (world.phase, head.asked, head.deleting) == ("Suspending", True, False)
    assert world.pool.exists
    assert not world.pool.deleting
    world.exits(85, report=world.report(8, 8, phase="Ended", suspended=True, exit_code=85))
    assert world.phase == "Suspending"
    assert world.pods
    assert not world.pool.deleting  # a pod that is left may still ask the servers
    world.vanish()
    status = world.run.status
    assert (world.phase, status.failures, status.last_failure) == ("Suspended", 0, None)
    assert status.checkpoint == saved(8)
    assert status.roles == {}
    assert world.condition(Type.Suspended) == ("True", "SuspendedByUser", "on request, with a checkpoint")
    world.wait(86400)
    assert world.phase == "Suspended"
    assert status.active_seconds == world.run.status.active_seconds


def test_the_head_is_asked_only_once_the_request_is_stored() -> None:
    world = World()
    world.trains()
    world.run = world.run.model_copy(update={"spec": world.run.spec.model_copy(update={"suspend": True})})
    plan = world.plan()
    assert plan.steps == ()
    world.write(plan)
    assert world.plan().steps == (AskSuspend(world.pod().name, world.pod().uid),)


def test_a_checkpoint_that_does_not_come_in_time_is_not_waited_for() -> None:
    world = World(policy={"stallTimeoutSeconds": 1300})
    world.trains(20, 20)
    world.set(suspend=True)
    world.wait(1299)
    assert world.phase == "Suspending"
    assert not world.pod().deleting
    assert world.plan().wake_at == world.now + timedelta(seconds=1)
    world.wait(1)
    assert world.pod().deleting
    world.vanish()
    status = world.run.status
    assert (world.phase, status.failures) == ("Suspended", 0)
    assert status.last_failure is not None
    assert status.last_failure.reason == "SaveFailed"
    assert world.condition(Type.Checkpointed)[:2] == ("True", "Saved")


def test_what_is_taken_back_while_it_saves_is_done_when_it_has_stopped() -> None:
    world = World()
    world.trains(3)
    world.set(suspend=True)
    world.set(suspend=False)
    assert world.phase == "Suspending"
    world.exits(85, report=world.report(4, 4, phase="Ended", suspended=True, exit_code=85))
    assert world.phase == "Restarting"
    assert not world.pool.deleting
    world.vanish()
    world.wait(5)
    status = world.run.status
    assert (world.phase, status.attempt, status.restarts, status.resumed_step) == ("Starting", 2, 0, 4)


def test_a_run_is_suspended_between_attempts_too() -> None:
    world = World()
    world.trains()
    world.exits(1)
    world.set(suspend=True)
    assert world.phase == "Suspending"
    world.vanish()
    assert (world.phase, world.run.status.failures) == ("Suspended", 1)
    world.set(suspend=False)
    world.wait(10)
    assert world.run.status.attempt == 2


def test_a_suspended_run_goes_on_with_other_nodes() -> None:
    world = World()
    world.trains(8, 8)
    world.set(suspend=True)
    world.exits(85)
    world.vanish()
    world.set(trainer={"nodes": 2})
    world.set(suspend=False)
    world.wait(5)
    assert set(world.pods) == {"first-trainer-2-0", "first-trainer-2-1"}
    assert world.run.status.resumed_step == 8


# What only a person can mend ---------------------------------------------------------------------------


def test_what_is_missing_is_named_and_waited_for() -> None:
    world = World()
    world.missing = ("PersistentVolumeClaim runs", "ResourcePool tools")
    plan = world.turn()
    assert plan.steps == ()
    assert world.phase == "Pending"
    text = "not there: PersistentVolumeClaim runs, ResourcePool tools"
    assert world.condition(Type.Stalled) == ("True", "MissingObject", text)
    assert world.condition(Type.Reconciling)[0] == "False"
    assert world.told == [EventReason.MissingObject]
    assert world.plan().wake_at == NOW + timedelta(seconds=5 if world.plan().status else 1)
    world.missing = ()
    world.settle()
    assert world.condition(Type.Stalled)[0] == "False"
    assert world.prepare.exists


def test_a_run_without_storage_is_told_how_to_get_it() -> None:
    world = World(spec={"storage": None})
    world.settle()
    status, reason, text = world.condition(Type.Stalled)
    assert (status, reason) == ("True", "MissingObject")
    assert "spec.storage.claim" in text


def test_a_run_in_an_attempt_is_not_disturbed_by_what_goes_missing() -> None:
    world = World()
    world.trains()
    world.missing = ("Secret tokens",)
    world.conflicts = ("Service first-trainer is somebody else's",)
    world.settle()
    assert world.phase == "Running"
    world.exits(1)
    world.vanish()
    world.wait(60)
    assert (world.phase, world.run.status.attempt) == ("Pending", 1)
    world.missing = ()
    world.settle()
    assert world.condition(Type.Stalled)[1] == "NameTaken"
    world.conflicts = ()
    world.settle()
    assert world.run.status.attempt == 2


def test_what_the_api_server_refuses_is_told_in_its_words() -> None:
    world = World()
    world.refused = "Job first-prepare cannot be made: exceeded quota: gpus"
    world.settle()
    assert world.condition(Type.Stalled) == ("True", "StartFailed", world.refused)
    assert world.told == [EventReason.StartFailed]
    world.refused = ""
    world.prepared()
    world.pods, world.refused = {}, "Pod first-trainer-1-0 cannot be made: exceeded quota: gpus"
    status = world.run.status
    world.run = world.run.model_copy(
        update={"status": status.model_copy(update={"roles": {"inference": status.roles["inference"]}})}
    )
    plan = world.plan()
    world.write(plan)
    assert plan.steps == (MakeAttempt(1),)
    assert world.condition(Type.Reconciling)[2] == world.refused
    world.now += timedelta(seconds=1800)
    world.write(world.plan())
    failure = world.run.status.last_failure
    assert failure is not None
    assert failure.message.endswith(world.refused)


@pytest.mark.parametrize(
    ("override", "stalled"),
    [
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=2", True),
        ("+actor_rollout_ref.actor.fsdp_config.fsdp_size=-1", False),
        ("actor_rollout_ref.actor.strategy=megatron", True),
        ("actor_rollout_ref.actor.strategy=fsdp2", False),
        ("trainer.test_freq=2", False),
    ],
)
def test_a_checkpoint_that_cannot_be_cut_stops_a_run_before_it_has_pods(override: str, stalled: bool) -> None:
    world = World(spec={"overrides": [override]})
    world.trains(8, 8)
    world.set(suspend=True)
    world.exits(85)
    world.vanish()
    world.set(trainer={"nodes": 2}, suspend=False)
    world.wait(5)
    assert (world.condition(Type.Stalled)[1] == "CheckpointWorldSizeMismatch") == stalled
    assert bool(world.pods) != stalled


@pytest.mark.parametrize(("code", "reason"), [(87, "InvalidSpec"), (1, "StartFailed")])
def test_a_failed_preparation_fails_the_run(code: int, reason: str) -> None:
    world = World()
    world.settle()
    report = world.report(0, phase="Ended", exit_code=code, message="tasks.jsonl: line 3 is no JSON")
    world.prepare = PrepareOf(True, failed=True, name="first-prepare", uid="p", report=report)
    world.settle()
    text = "the preparation failed: tasks.jsonl: line 3 is no JSON"
    assert world.condition(Type.Failed) == ("True", reason, text)
    assert not world.prepare.exists
    assert world.told[-2:] == [EventReason.AttemptFailed, EventReason.Failed]


def test_a_spec_that_cannot_be_read_is_told_and_a_finished_run_stays() -> None:
    told = invalid_status(4, "spec.steps: 0 is less than 1", TrainingRunStatus(), NOW)
    conditions = {each.type: (each.status, each.reason, each.message) for each in told.conditions}
    assert conditions["Stalled"] == ("True", "InvalidSpec", "spec.steps: 0 is less than 1")
    assert conditions["Reconciling"][0] == "False"
    assert (told.phase, told.observed_generation) == ("Pending", 4)
    assert invalid_status(4, "spec.steps: 0 is less than 1", told, NOW + timedelta(9)) == told
    world = World()
    world.trains()
    world.exits(0)
    finished = invalid_status(9, "bad", world.run.status, NOW)
    assert finished.phase == "Succeeded"


# The policy's pool -------------------------------------------------------------------------------------


def test_the_policys_pool_is_made_again_and_an_old_one_is_not_used() -> None:
    world = World()
    world.trains(8, 8)
    world.set(suspend=True)
    world.exits(85)
    world.pods = {}
    world.settle()
    assert world.phase == "Suspended"
    assert world.pool.deleting
    world.wait(60)
    world.set(suspend=False)
    assert (world.phase, world.run.status.attempt) == ("Restarting", 1)
    world.vanish()
    assert (world.phase, world.run.status.attempt, world.pool.deleting) == ("Starting", 2, False)


def test_pods_that_appear_late_are_removed() -> None:
    world = World()
    world.trains()
    world.exits(85)
    late = replace(world.pod(), uid="late", deleting=False, index=1, name="first-trainer-1-1")
    world.vanish()
    world.wait(30)
    world.pods[late.name] = late
    assert Remove("Pod", late.name, "late", 30) in world.plan().steps


# A trainer that serves the policy ------------------------------------------------------------------------

COLOCATED = {"trainer": {"gpusPerNode": 8}, "inference": {"mode": "Colocated", "gpus": 2}}


def test_a_run_whose_trainer_serves_the_policy_has_no_servers_and_waits_for_none() -> None:
    world = World(spec=COLOCATED)
    world.turn()
    world.prepare = replace(world.prepare, complete=True)
    world.settle()
    assert (world.run.status.attempt, set(world.pods)) == (1, {"first-trainer-1-0"})
    assert not world.pool.exists
    world.starts()
    world.steps(1)
    assert (world.phase, set(world.run.status.roles)) == ("Running", {"trainer"})
    world.exits(1)
    world.vanish()
    world.wait(30)
    assert (world.run.status.attempt, world.pool.exists) == (2, False)
