import pytest

from agentfly.resources.runners.kubernetes.facts import Failed, OnItsWay, Ready, look, refusal


def pod(status, **meta):
    return {"metadata": meta, "status": status}


def container(state=None, last=None, name="sandbox"):
    return {"name": name, "image": "img:1", "state": state or {}, "lastState": last or {}}


def waiting(reason, message=""):
    return container({"waiting": {"reason": reason, "message": message}})


def ended(code, message="", reason="Error"):
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


READY = {"phase": "Running", "podIP": "10.1.2.3", "conditions": [{"type": "Ready", "status": "True"}]}
HELD = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient cpu.",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Failed("Deleted: the pod is gone")),
        (pod(READY), Ready("10.1.2.3")),
        (pod({**READY, "podIP": ""}), OnItsWay("Running: the pod is not ready")),
        (pod({"phase": "Running", "podIP": "x"}), OnItsWay("Running: the pod is not ready")),
        (pod({}), OnItsWay("Pending: the pod is not ready")),
        (
            pod({"phase": "Pending", "conditions": [HELD]}),
            OnItsWay("Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."),
        ),
        (
            pod({"phase": "Pending", "containerStatuses": [waiting("ContainerCreating")]}),
            OnItsWay("ContainerCreating: container sandbox of image img:1"),
        ),
        (
            pod({"phase": "Pending", "containerStatuses": [waiting("ErrImagePull", "not found")]}),
            Failed("ErrImagePull: image img:1: not found"),
        ),
        (
            pod(
                {"phase": "Pending", "initContainerStatuses": [waiting("ImagePullBackOff", "Back-off\nwhy")]}
            ),
            Failed("ImagePullBackOff: image img:1: why"),
        ),
        (
            pod({"containerStatuses": [waiting("CreateContainerConfigError", 'secret "x" not found')]}),
            Failed('CreateContainerConfigError: container sandbox: secret "x" not found'),
        ),
        (
            pod({"containerStatuses": [waiting("InvalidImageName")]}),
            Failed("InvalidImageName: image img:1: no reason was given"),
        ),
        (
            pod({"phase": "Failed", "containerStatuses": [container(ended(3, "one\ntwo\n\n"))]}),
            Failed("CrashLoop: container sandbox ended with 3: two"),
        ),
        (
            pod({"phase": "Failed", "containerStatuses": [container(ended(137, "", "OOMKilled"))]}),
            Failed("OOMKilled: container sandbox ended with 137"),
        ),
        (
            pod({"containerStatuses": [container({"running": {}}, ended(2, "bad flag"))]}),
            Failed("CrashLoop: container sandbox ended with 2: bad flag"),
        ),
        (
            pod(
                {"phase": "Pending", "initContainerStatuses": [container(ended(0), name="agentfly-install")]}
            ),
            OnItsWay("Pending: the pod is not ready"),
        ),
        (
            pod(
                {
                    "phase": "Failed",
                    "reason": "Evicted",
                    "message": "The node was low on resource: memory.",
                    "containerStatuses": [container(ended(137))],
                }
            ),
            Failed("Evicted: The node was low on resource: memory."),
        ),
        (pod({"phase": "Failed", "reason": "NodeLost"}), Failed("NodeLost: the pod was ended")),
        (pod({"phase": "Failed"}), Failed("Failed: the pod has ended")),
        (pod({"phase": "Succeeded"}), Failed("Succeeded: the pod has ended")),
        (pod(READY, deletionTimestamp="2026"), Failed("Deleted: somebody deletes the pod")),
        (
            pod({**READY, "reason": "Preempted"}, deletionTimestamp="2026"),
            Failed("Deleted: Preempted"),
        ),
    ],
)
def test_what_a_pod_is(given, expected):
    assert look(given) == expected


def test_last_words_are_bounded():
    found = look(pod({"phase": "Failed", "containerStatuses": [container(ended(1, "x" * 9000))]}))
    assert len(found.why) < 400


def test_a_refusal_by_pod_security_says_what_to_set() -> None:
    message = (
        'POST /pods: pods "shell-1" is forbidden: violates PodSecurity "restricted:latest": '
        "runAsNonRoot != true (pod or container must set it)"
    )
    assert refusal("Forbidden", message) == (
        "PodSecurity: the namespace enforces restricted: set security.podSecurity: Restricted "
        "(runAsNonRoot != true (pod or container must set it))"
    )


def test_another_refusal_is_told_as_it_is() -> None:
    assert refusal("Forbidden", "exceeded quota: team") == "Forbidden: exceeded quota: team"


def test_of_a_long_message_both_ends_are_told() -> None:
    long = "failed to pull and unpack image x: " + "layers, " * 100 + "no such host"
    told = look(pod({"phase": "Pending", "containerStatuses": [waiting("ErrImagePull", long)]}))
    assert isinstance(told, Failed)
    assert told.why.startswith("ErrImagePull: image img:1: failed to pull and unpack image x: ")
    assert told.why.endswith("no such host")
    assert len(told.why) < 350
