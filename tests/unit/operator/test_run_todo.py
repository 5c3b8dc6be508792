"""What is removed and made again for a training run, and what is said of it."""

from dataclasses import replace

from agentfly.api.reasons import ConditionType as Type
from agentfly_operator.plan.run_steps import AskSuspend, MakeNetwork, Remove
from tests.unit.operator.run_world import World


def test_pods_of_an_attempt_that_ended_have_little_time_left() -> None:
    world = World(nodes=2)
    world.trains()
    world.exits(1)
    ended = [world.pods[name] for name in sorted(world.pods)]
    assert all(pod.deleting for pod in ended)
    world.pods = {pod.name: replace(pod, deleting=False) for pod in ended}
    assert set(world.plan().steps) == {Remove("Pod", pod.name, pod.uid, 30) for pod in ended}


def test_a_pod_that_does_not_go_away_is_named_with_its_node() -> None:
    world = World(nodes=2)
    world.trains()
    world.exits(1)
    world.wait(89)
    assert world.condition(Type.Reconciling)[2] == "the pods of the last attempt are being removed"
    text = "pod first-trainer-1-0 on node node-0 does not go away; is the node there?"
    world.wait(1)
    assert world.condition(Type.Reconciling)[2] == text
    world.set(suspend=True)
    assert (world.phase, world.condition(Type.Reconciling)[2]) == ("Suspending", text)


def test_the_policys_pool_goes_after_the_last_pod() -> None:
    world = World()
    world.trains()
    world.exits(0)
    assert (world.phase, world.pool.deleting, world.pod().deleting) == ("Succeeded", False, True)
    world.vanish()
    assert not world.pool.exists


def test_what_pods_find_each_other_by_is_made_again() -> None:
    world = World(nodes=2)
    world.trains()
    for kind in ("Service", "NetworkPolicy"):
        gone = world.others.pop((kind, "first-trainer"))
        assert world.plan().steps == (MakeNetwork(),)
        world.settle()
        assert world.others[kind, "first-trainer"].uid != gone.uid
    del world.others["ConfigMap", "first-launch-1"]  # the pods have read it
    assert world.plan().steps == ()
    world.change(1, deleting=True)
    del world.others["Service", "first-trainer"]
    world.pods[world.pod().name] = replace(world.pod(), asked=False)
    assert [type(step) for step in world.plan().steps] == [AskSuspend, MakeNetwork]


def test_what_goes_by_itself_is_waited_for_with_a_word() -> None:
    world = World()
    world.leaving = "Job first-prepare of an older owner is still being removed"
    world.turn()
    assert world.plan().steps == ()  # the world has made it
    assert world.condition(Type.Reconciling) == ("True", "Preparing", world.leaving)
    assert world.condition(Type.Stalled)[0] == "False"
