"""What members have in common is kept once."""

from agentfly.resources.runners.kubernetes.identity import annotations, labels, recall
from agentfly.resources.spec import ContainerSpec

SPEC = ContainerSpec(runtime="kubernetes", env={"A": "b"})


def test_members_of_one_spec_share_it():
    pods = [
        {
            "metadata": {
                "name": f"p-0a1b-{number}",
                "labels": labels("p", SPEC),
                "annotations": annotations(SPEC, f"start-{number}"),
            }
        }
        for number in range(2)
    ]
    first, second = (recall(pod).spec for pod in pods)
    assert first == SPEC
    assert first is second
