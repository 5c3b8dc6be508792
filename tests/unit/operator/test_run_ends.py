"""How attempts end, and what follows."""

from dataclasses import replace
from datetime import timedelta

import pytest

from agentfly.api.reasons import ConditionType as Type
from agentfly.api.reasons import EventReason
from agentfly.api.trainingrun import Failure
from tests.unit.operator.run_world import World, saved


def running(nodes: int = 1, step: int = 3, checkpoint: int | None = None, **policy: int) -> World:
    world = World(nodes=nodes, policy=policy)
    world.trains(step, checkpoint)
    assert world.phase == "Running"
    return world


def failure(world: World) -> Failure:
    found = world.run.status.last_failure
    assert found is not None
    return found


# 1. The head's exit is the attempt's -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words", "reason", "phase"),
    [
        (1, {"message": "ValueError: no"}, "AttemptFailed", "Restarting"),
        (86, {"message": "no step"}, "NoProgress", "Restarting"),
        (87, {"message": "overrides: no such key"}, "InvalidSpec", "Failed"),
        (137, {"reason": "OOMKilled"}, "OutOfMemory", "Restarting"),
        (137, {}, "Interrupted", "Restarting"),
        (137, {"deleting": True}, "Interrupted", "Restarting"),
        (137, {"reason": "Evicted", "message": "low on memory"}, "Interrupted", "Restarting"),
        (143, {}, "Interrupted", "Restarting"),
        (None, {"reason": "Evicted", "message": "low on memory"}, "Interrupted", "Restarting"),
    ],
)
def test_the_exit_of_the_head_says_why(code: int, words: dict[str, object], reason: str, phase: str) -> None:
    world = running()
    world.change(phase="Failed", exit_code=code, finished=world.now, **words)
    found = failure(world)
    assert (found.reason, world.phase) == (reason, phase)
    assert (found.attempt, found.pod_name, found.node_name) == (1, "first-trainer-1-0", "node-0")
    assert found.exit_code == code
    assert str(words.get("message", "")) in found.message


def test_what_a_report_gives_as_the_reason_is_the_reason() -> None:
    world = running()
    told = {"reason": "FailureBudgetExceeded", "message": "9 of 16 rollouts failed", "phase": "Ended"}
    world.exits(87, report=world.report(3, **told))
    assert (world.phase, failure(world).reason) == ("Failed", "FailureBudgetExceeded")
    assert failure(world).message == "pod first-trainer-1-0: exit code 87: 9 of 16 rollouts failed"
    assert world.notes[-1] == failure(world).message


def test_an_exit_code_of_0_without_a_word_is_no_success() -> None:
    world = running(step=3)
    world.change(phase="Succeeded", exit_code=0, finished=world.now, reason="Completed")
    assert (world.phase, failure(world).reason, failure(world).exit_code) == ("Restarting", "Interrupted", 0)
    other = running(step=3)
    other.exits(0, report=other.report(3))  # its last word is that it makes steps
    assert (other.phase, failure(other).reason) == ("Restarting", "Interrupted")
    last = running(step=3)
    last.head_says = last.report(100, phase="Ended", exit_code=0)
    last.change(phase="Succeeded", exit_code=0, finished=last.now)
    assert last.phase == "Succeeded"


def test_a_head_that_is_done_has_succeeded_though_a_worker_failed() -> None:
    world = running(nodes=2)
    world.exits(1, 1)
    world.exits(0)
    assert (world.phase, world.run.status.last_failure) == ("Succeeded", None)


def test_what_the_head_said_last_counts_after_its_pod_is_gone() -> None:
    world = running(step=3)
    world.head_says = world.report(4, 4, phase="Ended", suspended=True, exit_code=85)
    world.pods = {}
    world.settle()
    assert (world.phase, world.run.status.last_failure) == ("Restarting", None)
    lost = running(step=3)
    lost.pods = {}
    lost.settle()
    assert failure(lost).reason == "PodLost"


def test_what_the_head_of_another_attempt_said_is_not_heard() -> None:
    world = running(step=3)
    old = world.head_says
    world.exits(1)
    world.vanish()
    world.wait(60)
    assert world.run.status.attempt == 2
    world.head_says = old
    world.starts()
    assert world.phase == "Starting"


# 2. Other pods -----------------------------------------------------------------------------------------


def test_a_head_has_a_minute_to_end_by_itself_after_a_worker() -> None:
    world = running(nodes=2)
    world.exits(1, 1, message="NCCL error")
    assert world.plan().wake_at == world.now + timedelta(seconds=60)
    world.wait(59)
    assert world.phase == "Running"
    world.wait(1)
    assert world.phase == "Restarting"
    found = failure(world)
    assert (found.reason, found.pod_name, found.node_name) == ("AttemptFailed", "first-trainer-1-1", "node-1")
    assert found.message == "pod first-trainer-1-1: exit code 1: NCCL error"
    assert world.pod(0).deleting


def test_a_worker_that_is_gone_ends_the_attempt() -> None:
    world = running(nodes=2)
    del world.pods["first-trainer-1-1"]
    world.settle()
    assert (failure(world).reason, failure(world).pod_name) == ("PodLost", "first-trainer-1-1")


def test_a_head_on_its_way_out_is_waited_for() -> None:
    world = running(nodes=2)
    world.change(0, deleting=True)
    del world.pods["first-trainer-1-1"]
    world.settle()
    assert world.phase == "Running"
    world.exits(85)
    assert (world.phase, world.run.status.last_failure) == ("Restarting", None)


def test_the_pod_that_failed_first_is_named() -> None:
    world = running(nodes=4)
    early = world.now - timedelta(seconds=5)
    worker = world.pod(2)
    ended = replace(worker, phase="Failed", exit_code=137, reason="OOMKilled", finished=early)
    world.pods[worker.name] = ended
    world.exits(1, message="RayActorError: an actor died")
    found = failure(world)
    assert (found.reason, found.pod_name, found.exit_code) == ("OutOfMemory", "first-trainer-1-2", 137)


# 3. Ends that somebody asked for -----------------------------------------------------------------------


def test_a_deleted_head_saves_and_the_run_goes_on_at_once() -> None:
    world = running(step=3)
    world.change(deleting=True)
    assert world.phase == "Running"
    world.exits(85, report=world.report(4, 4, phase="Ended", suspended=True, exit_code=85))
    world.vanish()
    world.wait(5)
    status = world.run.status
    assert (world.phase, status.attempt, status.failures, status.restarts) == ("Starting", 2, 0, 0)
    assert (status.last_failure, status.resumed_step) == (None, 4)


def test_the_head_is_asked_for_a_checkpoint_when_another_pod_has_to_go() -> None:
    world = running(nodes=2)
    world.change(1, deleting=True)
    assert world.phase == "Running"
    assert world.pod(0).asked
    world.exits(85)
    assert (world.phase, world.run.status.failures) == ("Restarting", 0)


def test_an_attempt_that_is_disturbed_before_its_first_step_is_no_failure() -> None:
    world = World(nodes=2)
    world.prepared()
    world.starts()
    world.change(1, deleting=True)
    status = world.run.status
    assert (world.phase, status.failures, status.last_failure) == ("Restarting", 0, None)
    assert world.pod(0).deleting


def test_who_says_without_a_cause_that_it_was_asked_is_not_started_in_a_circle() -> None:
    world = running(step=3)
    world.exits(85)
    assert world.run.status.restart_time == world.now + timedelta(seconds=10)
    saving = running(step=3)
    saving.exits(85, report=saving.report(4, 4, phase="Ended", suspended=True, exit_code=85))
    assert saving.run.status.restart_time == saving.now


# 4, 5. Deadlines ---------------------------------------------------------------------------------------


def test_a_pod_that_does_not_start_is_named_with_what_it_waits_for() -> None:
    world = World(nodes=2, policy={"startupDeadlineSeconds": 600})
    world.prepared()
    world.change(0, phase="Running", ready=True, node="node-0")
    world.change(1, waiting="ImagePullFailed: trainer:dev: not found")
    assert world.plan().wake_at == world.run.status.attempt_time + timedelta(seconds=600)  # type: ignore[operator]
    world.wait(600)
    found = failure(world)
    assert (found.reason, found.pod_name, found.exit_code) == (
        "StartupDeadlineExceeded",
        "first-trainer-1-1",
        None,
    )
    assert found.message == (
        "no step within spec.runPolicy.startupDeadlineSeconds (600): pod first-trainer-1-1: "
        "ImagePullFailed: trainer:dev: not found"
    )


def test_the_time_to_the_first_step_counts_anew_when_the_last_pod_runs() -> None:
    world = World(nodes=2, policy={"startupDeadlineSeconds": 600})
    world.prepared()
    begun = world.now
    world.wait(500)
    world.change(0, phase="Running", started=begun)
    assert world.plan().wake_at == begun + timedelta(seconds=600)
    world.change(1, phase="Running", started=world.now)
    assert world.plan().wake_at == world.now + timedelta(seconds=600)
    world.wait(599)
    assert world.phase == "Starting"
    world.wait(1)
    assert failure(world).reason == "StartupDeadlineExceeded"
    ahead = World(policy={"startupDeadlineSeconds": 600})
    ahead.prepared()
    ahead.change(0, phase="Running", started=ahead.now + timedelta(hours=3))  # another clock
    assert ahead.plan().wake_at == ahead.now + timedelta(seconds=600)


def test_a_start_that_only_the_head_can_explain_is_explained_by_it() -> None:
    world = World(policy={"startupDeadlineSeconds": 600})
    world.prepared()
    world.starts()
    world.head_says = world.report(0, phase="Starting", step_time=None, message="waits for 2 servers")
    world.wait(600)
    assert failure(world).message.endswith("pod first-trainer-1-0: waits for 2 servers")


def test_a_pod_that_could_not_be_made_is_named() -> None:
    world = World(nodes=2, policy={"startupDeadlineSeconds": 600})
    world.settle()
    world.prepare = replace(world.prepare, complete=True)
    world.turn()
    world.write(world.plan())
    world.now += timedelta(seconds=600)
    world.write(world.plan())
    assert failure(world).message.endswith("pod first-trainer-1-0 could not be made")


def test_a_run_without_steps_has_stalled() -> None:
    world = running(stallTimeoutSeconds=1300)
    world.now += timedelta(seconds=1000)
    world.steps(4)
    assert world.run.status.step_time == world.now
    world.wait(1299)
    assert world.phase == "Running"
    world.wait(1)
    assert (failure(world).reason, world.phase) == ("NoProgress", "Restarting")


def test_a_step_alone_is_no_reason_to_look_again() -> None:
    world = running(stallTimeoutSeconds=1300)
    world.now += timedelta(seconds=100)
    world.head_says = world.report(4)
    plan = world.plan()
    assert plan.status != world.run.status
    assert plan.wake_at == world.now + timedelta(seconds=1300)


def test_a_step_of_a_clock_that_is_ahead_was_made_now() -> None:
    world = running()
    world.steps(4, at=world.now + timedelta(hours=3))
    assert world.run.status.step_time == world.now


def test_time_that_ended_attempts_ran_counts_and_suspended_time_does_not() -> None:
    world = running(activeDeadlineSeconds=1000)
    world.wait(600)
    world.steps(4)
    world.set(suspend=True)
    world.exits(85)
    world.vanish()
    assert world.run.status.active_seconds == 600
    world.wait(5000)
    world.set(suspend=False)
    world.trains(5)
    world.wait(399)
    assert world.phase == "Running"
    assert world.plan().wake_at == world.now + timedelta(seconds=1)
    world.wait(1)
    assert (world.phase, failure(world).reason) == ("Failed", "DeadlineExceeded")


def test_the_time_of_a_head_that_ended_unseen_ends_with_it() -> None:
    world = running()
    world.now += timedelta(seconds=900)
    world.exits(1, finished=world.now - timedelta(seconds=300))
    assert world.run.status.active_seconds == 600


# 6. An operator that was away --------------------------------------------------------------------------


def test_a_head_that_had_no_time_to_answer_is_not_overdue() -> None:
    world = running(stallTimeoutSeconds=1300)
    world.head_says, world.heard = None, False
    world.wait(9999)
    assert world.phase == "Running"
    assert world.plan().wake_at == world.now + timedelta(seconds=5)
    world.heard = True
    world.steps(50)
    assert world.phase == "Running"
    world.wait(1300)
    assert world.phase == "Restarting"


# 6. A head that cannot be reached ----------------------------------------------------------------------


def test_a_head_that_cannot_be_reached_is_told_and_not_taken_for_stalled() -> None:
    world = running(stallTimeoutSeconds=1300)
    world.silent = True
    world.wait(1300)
    text = "pod first-trainer-1-0: the operator cannot reach 10.0.0.0:7090"
    trainer = world.run.status.roles["trainer"]
    assert (world.phase, trainer.ready, trainer.reason) == ("Running", 0, text)
    assert world.condition(Type.RolesReady)[2] == text
    assert world.plan().wake_at == world.now + timedelta(seconds=5)
    world.exits(86)  # the trainer itself finds that it hangs
    assert failure(world).reason == "NoProgress"


def test_a_head_that_can_do_nothing_any_more_ends_all_the_same() -> None:
    world = running(stallTimeoutSeconds=1300)
    world.silent = True
    world.wait(2599)
    assert world.phase == "Running"
    world.wait(1)
    assert (world.phase, failure(world).reason) == ("Restarting", "NoProgress")
    assert failure(world).pod_name == "first-trainer-1-0"
    assert failure(world).message.endswith("the operator cannot reach 10.0.0.0:7090")


def test_a_start_that_cannot_be_watched_has_two_deadlines_too() -> None:
    world = World(policy={"startupDeadlineSeconds": 600})
    world.prepared()
    world.starts()
    world.silent = True
    world.wait(1199)
    assert world.phase == "Starting"
    world.wait(1)
    assert failure(world).reason == "StartupDeadlineExceeded"
    assert failure(world).message.endswith("the operator cannot reach 10.0.0.0:7090")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [({"activeDeadlineSeconds": 1000}, "DeadlineExceeded"), ({"stallTimeoutSeconds": 1300}, "SaveFailed")],
)
def test_silence_puts_off_no_other_deadline(policy: dict[str, int], reason: str) -> None:
    world = running(**policy)
    world.silent = True
    if reason == "SaveFailed":
        world.set(suspend=True)
    world.wait(1300)
    assert failure(world).reason == reason


# Rules 6 and 7: what counts, and the pause -------------------------------------------------------------


def test_only_attempts_without_a_new_checkpoint_count_and_the_pause_grows() -> None:
    world = running(backoffLimit=2)
    pauses = []
    for attempt in (1, 2):
        assert world.run.status.attempt == attempt
        world.exits(1)
        assert world.run.status.restart_time is not None
        pauses.append((world.run.status.restart_time - world.now).total_seconds())
        world.trains(3)
    assert pauses == [10, 20]
    assert (world.run.status.failures, world.run.status.restarts) == (2, 2)
    world.steps(8, 8)
    world.exits(1)
    status = world.run.status
    assert (world.phase, status.failures, status.restarts) == ("Restarting", 2, 3)
    assert status.restart_time == world.now + timedelta(seconds=10)
    world.trains(9)
    assert world.run.status.resumed_step == 8
    assert world.run.status.checkpoint == saved(8)
    world.exits(1, message="again")
    assert (world.phase, world.run.status.failures) == ("Failed", 3)
    assert world.told.count(EventReason.AttemptFailed) == 4
    reasons = {each.type: each.reason for each in world.run.status.conditions}
    assert reasons["Failed"] == "BackoffLimitExceeded"


def test_the_pause_is_kept() -> None:
    world = running()
    world.exits(1)
    world.vanish()
    assert world.plan().wake_at == world.now + timedelta(seconds=5)
    world.wait(9)
    assert world.run.status.attempt == 1
    assert world.plan().wake_at == world.now + timedelta(seconds=1)
    world.wait(1)
    assert world.run.status.attempt == 2
