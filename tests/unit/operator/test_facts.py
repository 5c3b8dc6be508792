"""What pods say of themselves."""

from typing import Any

import pytest

from agentfly.api.reasons import Reason
from agentfly_operator.plan.facts import PodFact, PodFacts, Trouble, fact_of, gather


def waiting(reason: str, message: str = "", image: str = "busybox", **more: Any) -> dict[str, Any]:
    container = {
        "name": "sandbox",
        "image": image,
        "state": {"waiting": {"reason": reason, "message": message}},
    }
    return {"status": {"phase": "Pending", "containerStatuses": [{**container, **more}]}}


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"status": {"phase": "Pending", "conditions": [condition]}}


READY = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
NODES = "0/3 nodes are available:"
SCHEDULER = {
    f"{NODES} 3 Insufficient cpu. preemption: {NODES} 3 No preemption victims found":
        (Reason.InsufficientCpu, f"{NODES} 3 Insufficient cpu."),
    f"{NODES} 1 Insufficient cpu, 2 Insufficient memory.": (Reason.InsufficientMemory, None),
    f"{NODES} 1 Insufficient cpu, 2 Insufficient nvidia.com/gpu.": (Reason.InsufficientGpu, None),
    f"{NODES} 3 node(s) had untolerated taint(s).": (Reason.UntoleratedTaint, None),
    f"{NODES} 3 node(s) didn't match Pod's node affinity/selector.": (Reason.NoMatchingNode, None),
    f"{NODES} 3 too many pods.": (Reason.NotScheduled, None),
    'persistentvolumeclaim "models" not found': (Reason.MissingObject, None),
}  # fmt: skip


@pytest.mark.parametrize(("text", "want"), SCHEDULER.items())
def test_the_scheduler_is_understood(text: str, want: tuple[Reason, str | None]) -> None:
    fact = fact_of(unschedulable(text))
    assert (fact.reason, fact.message) == (want[0], want[1] or text)
    assert fact.trouble == ("missing" if want[0] is Reason.MissingObject else "unschedulable")


def test_a_pod_that_starts_or_runs_has_no_trouble() -> None:
    assert fact_of(READY) == PodFact(running=True, ready=True)
    assert fact_of({"status": {"phase": "Pending"}}) == PodFact()
    assert fact_of({}) == PodFact()
    assert fact_of(waiting("ContainerCreating")) == PodFact()


# 2. texts that stay ------------------------------------------------------------------------------------


def test_both_forms_of_a_failed_pull_are_one_fact() -> None:
    error = 'failed to resolve reference "nope:1": not found'
    first = fact_of(waiting("ErrImagePull", error, "nope:1"))
    second = fact_of(
        waiting("ImagePullBackOff", f'Back-off pulling image "nope:1": ErrImagePull: {error}', "nope:1")
    )
    assert first == second
    assert first == PodFact(trouble="image", reason=Reason.ImagePullFailed, message=error, image="nope:1")


def test_a_crash_tells_how_it_ended_and_not_how_often() -> None:
    last = {"terminated": {"reason": "Error", "exitCode": 127, "message": "no such file"}}
    pod = waiting(
        "CrashLoopBackOff", "back-off 20s restarting failed container", lastState=last, restartCount=4
    )
    assert fact_of(pod).message == "Error, exit code 127: no such file"
    assert (fact_of(pod).trouble, fact_of(pod).reason) == ("crash", Reason.StartFailed)


def test_an_object_that_is_not_there_is_told() -> None:
    fact = fact_of(waiting("CreateContainerConfigError", 'secret "hub" not found'))
    assert (fact.trouble, fact.reason, fact.message) == (
        "missing",
        Reason.MissingObject,
        'secret "hub" not found',
    )


def test_an_evicted_pod_is_a_failed_start() -> None:
    fact = fact_of(
        {"status": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}}
    )
    assert (fact.trouble, fact.message) == ("crash", "Evicted: The node was low on memory")


def test_long_texts_are_cut() -> None:
    assert len(fact_of(unschedulable("x" * 5000)).message) == 400


# 3. many pods ------------------------------------------------------------------------------------------


def test_facts_are_counted_and_the_most_frequent_cause_is_quoted_in_any_order() -> None:
    pods = [READY, READY, waiting("ErrImagePull", "gone", "b:1"), waiting("ErrImagePull", "gone", "a:1"),
            waiting("ErrImagePull", "", "a:1"), waiting("ErrImagePull", "", "a:1"),
            waiting("ErrImagePull", "", "a:1"), unschedulable("Insufficient cpu")]  # fmt: skip
    facts = [fact_of(pod) for pod in pods]
    want = PodFacts(
        total=8,
        running=2,
        ready=2,
        unschedulable=Trouble(1, Reason.InsufficientCpu, "Insufficient cpu"),
        images=Trouble(5, Reason.ImagePullFailed, "gone", ("a:1", "b:1")),
    )
    assert gather(facts) == gather(reversed(facts)) == want
    assert gather([]) == PodFacts()
